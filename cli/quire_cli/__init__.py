"""The command ``quire``, for people who use Quire.

Packages: ``serve`` (``quire serve``: a router and its engines as one tree of processes), ``chat`` (``quire chat`` and
``quire complete``), ``doctor`` (``quire doctor``), ``bench`` (``quire bench serve``, which measures any
OpenAI-compatible server) and ``machine`` (what this machine has). None imports torch.
"""
