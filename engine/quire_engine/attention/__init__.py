"""Attention over the paged KV cache: one interface in ``base``, one module per backend."""
