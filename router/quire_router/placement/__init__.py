"""Which engine runs a request: a pure function of the request and a view of the fleet. Does no I/O."""
