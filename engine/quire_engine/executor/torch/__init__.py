"""Carries out step plans with torch: tensors of a step, KV memory, swap copies, threads."""

import os


def limit_onednn_caches() -> None:
    """Bounds what oneDNN keeps, in a process that is the engine's own. Call it before torch is imported, which reads
    both limits then.

    oneDNN keeps a compiled product for every shape that it meets, a thousand by default, and steps come in many shapes:
    an engine would grow by hundreds of megabytes.
    """
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, "128")
