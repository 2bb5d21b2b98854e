"""Quire's engine: runs one model with paged KV memory and continuous batching.

The pure core (``request``, ``kv``, ``scheduling``, ``core``) imports neither torch nor grpc; ``executor``,
``models``, ``attention`` and ``sampling`` are the only rooms that know torch, and ``service`` the only one that knows
grpc.
"""
