"""Quire's router: takes REST and gRPC requests, chooses an engine for each, and streams the answer back.

Packages: ``api`` (REST and gRPC), ``admission`` (tenants, limits, the queue), ``placement`` (the choice of an engine),
``engines`` (connections to them), ``journal`` (request state), and ``requests``, the path of one request through all
of these. ``docs/architecture.md`` has the whole list. The router never imports torch.
"""
