"""A whole engine on virtual time: traces, the drive of the real core, and what it measures."""
