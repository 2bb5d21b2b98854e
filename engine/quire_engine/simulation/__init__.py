"""A whole engine on virtual time: request traces, the real core on a latency model, and the resulting figures."""
