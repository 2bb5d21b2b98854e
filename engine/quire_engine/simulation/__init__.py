"""A whole engine on virtual time: traces, the real core on a latency model, and what it measures."""
