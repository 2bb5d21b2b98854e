"""Quire's router: takes REST and gRPC requests, chooses an engine for each, and streams the answer back.

Rooms: ``api`` (what clients see), ``text`` (templates, tokens, stop strings), ``placement`` (which engine), ``fleet``
(links to the engines), ``journal`` (request state), and ``lifecycle``, the story of one request through all of them.
The router never imports torch.
"""
