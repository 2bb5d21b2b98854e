"""Carries out step plans with torch: tensors of a step, KV memory, swap copies, threads."""

import os

# oneDNN keeps a compiled product for every shape that it meets, a thousand by default, and steps come in many
# shapes: an engine would grow by hundreds of megabytes. Torch reads both limits when it is loaded.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")
