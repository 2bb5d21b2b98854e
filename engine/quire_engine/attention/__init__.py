"""Attention over the paged KV memory: one interface in ``base``, one module a backend."""
