"""Tenants, rate limits and the fair queue. Does no I/O but for limits that all routers share."""
