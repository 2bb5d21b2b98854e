"""What KV memory in int8 holds, and what reading it costs: `python -m tests.bench.kv_cache_dtype`.

Tokens in a GiB, and one layer's attention of a decode step, in both dtypes in turns: 32 sequences of one token each, in
the shape of Qwen3-0.6B (16 heads, 8 KV heads of 128) and of the 135 M model (9 heads, 3 KV heads of 64), medians.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from quire_engine.attention.base import AttentionBatch, AttentionShape
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_rows import encode_rows, row_size

SEQUENCES, BLOCK_SIZE, ROUNDS = 32, 16, 21
SHAPES = {
    "Qwen3-0.6B": (AttentionShape(16, 8, 128, BLOCK_SIZE, 128**-0.5), 28),
    "135 M": (AttentionShape(9, 3, 64, BLOCK_SIZE, 0.125), 30),
}
CONTEXTS = (256, 1024, 4096)
DTYPES = (torch.bfloat16, torch.int8)


@torch.inference_mode()
def main() -> None:
    print("| shape | context | bfloat16 | int8 | ratio | tokens in a GiB, bfloat16 | int8 |")
    print("|---|---|---|---|---|---|---|")
    for name, (shape, layers) in SHAPES.items():
        room = [(1 << 30) // (layers * 2 * shape.num_kv_heads * row_bytes(shape, dtype)) for dtype in DTYPES]
        for context in CONTEXTS:
            steps = [decode(shape, context, dtype) for dtype in DTYPES]
            taken: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for seconds, step in zip(taken, steps, strict=True):
                    seconds.append(timed(step))
            plain, int8 = (1000 * median(seconds) for seconds in taken)
            print(
                f"| {name} | {context} | {plain:.2f} ms | {int8:.2f} ms | {plain / int8:.2f} | {room[0]} | {room[1]} |"
            )


def row_bytes(shape: AttentionShape, dtype: torch.dtype) -> int:
    return row_size(shape.head_dim, dtype) * dtype.itemsize


def decode(shape: AttentionShape, context: int, dtype: torch.dtype) -> Callable[[], object]:
    """The attention of one layer for the last token of each sequence, on scattered pages of ``dtype``."""
    noise = torch.Generator().manual_seed(0)
    pages = -(-context // BLOCK_SIZE)
    ids = torch.randperm(SEQUENCES * pages, generator=noise).int()
    rows = torch.randn(SEQUENCES * pages, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, generator=noise)
    kv = encode_rows(rows.bfloat16(), dtype)
    backend = CpuAttention(shape, use_kernel=True)
    backend.prepare(
        AttentionBatch(
            query_indptr=torch.arange(SEQUENCES + 1).int(),
            page_indptr=(torch.arange(SEQUENCES + 1) * pages).int(),
            page_ids=ids,
            last_page_len=torch.full((SEQUENCES,), (context - 1) % BLOCK_SIZE + 1).int(),
            context_lens=torch.full((SEQUENCES,), context).int(),
            positions=torch.full((SEQUENCES,), context - 1).int(),
        )
    )
    query = torch.randn(SEQUENCES, shape.num_heads, shape.head_dim, generator=noise).bfloat16()
    key, value = (torch.randn(SEQUENCES, shape.num_kv_heads, shape.head_dim, generator=noise).bfloat16() for _ in "kv")
    return lambda: backend.forward(query, key, value, kv, None)


def timed(step: Callable[[], object]) -> float:
    begin = perf_counter()
    step()
    return perf_counter() - begin


if __name__ == "__main__":
    main()
