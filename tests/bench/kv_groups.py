"""How many tokens fit into KV memory where layers with a window give up what it has left, and where they keep it.

    python -m tests.bench.kv_groups

Nothing is measured: shapes are those of published models, in bfloat16, with blocks of 16 tokens and steps of 2,048.
"""

from dataclasses import replace

import torch
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import KVCacheConfig, KVCacheGroup

GIB = 1 << 30
BLOCK_SIZE, STEP_TOKENS, MAX_MODEL_LEN = 16, 2048, 131072
# Layers that see all tokens, layers with a window, that window, KV heads, their size, and GiB of KV memory.
SHAPES = {
    "Gemma 3 4B": (5, 29, 1024, 4, 256, 8),
    "Gemma 3 27B": (10, 52, 1024, 16, 128, 20),
    "Gemma 2 9B": (21, 21, 4096, 8, 256, 20),
    "gpt-oss-20b": (12, 12, 128, 8, 64, 20),
    "Mistral 7B v0.1": (0, 32, 4096, 8, 128, 8),
}
LENGTHS = (1_000, 8_000, 32_000)


def capacity(name: str, *, frees: bool) -> KVCacheConfig:
    """The blocks of a model's shape."""
    full, local, window, heads, size, gib = SHAPES[name]
    layer = LayerAttention(num_heads=heads, num_kv_heads=heads, head_dim=size, scale=1.0)
    layers = [replace(layer, window=window)] * local + [layer] * full
    longest = MAX_MODEL_LEN if frees else None
    layout = BlockLayout.of(layers, BLOCK_SIZE, torch.bfloat16, max_model_len=longest)
    groups = tuple(KVCacheGroup(each) for each in layout.windows)
    return KVCacheConfig(BLOCK_SIZE, gib * GIB // layout.block_bytes, 0, layout.block_bytes, groups, STEP_TOKENS)


def sequences_that_fit(config: KVCacheConfig, length: int) -> int:
    """Sequences of so many tokens that decode together: a step computes a token of each."""
    return (config.device_blocks - 1) // replace(config, max_step_tokens=1).max_blocks(length)


def main() -> None:
    """Prints the table."""
    print("| model, KV memory | groups | longest sequence alone | " + " | ".join(f"of {n:,}" for n in LENGTHS) + " |")
    print("|---|---|---|" + "---|" * len(LENGTHS))
    for name, (*_, gib) in SHAPES.items():
        before, after = capacity(name, frees=False), capacity(name, frees=True)
        alone = [min(config.usable_tokens, MAX_MODEL_LEN) for config in (before, after)]
        cells = [f"{alone[0]:,} → {alone[1]:,}"]
        cells += [f"{sequences_that_fit(before, n):,} → {sequences_that_fit(after, n):,}" for n in LENGTHS]
        print(f"| {name}, {gib} GiB | {len(after.groups)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
