"""Who may ask, for how much, and whose turn it is. Does no I/O but for limits that all routers share."""
