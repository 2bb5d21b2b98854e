"""The inputs of a step made from lists, one chunk after the other: the reference for ``prepare_inputs``."""

import math
from collections.abc import Sequence

from quire_engine.attention.base import AttentionBatch
from quire_engine.core.block_pool import KVCacheGroup
from quire_engine.worker.input_batch import WINDOW_ALIGNMENT

from tests.support.steps import KnownChunk


def token_ids(chunks: Sequence[KnownChunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def positions(chunks: Sequence[KnownChunk]) -> list[int]:
    return [position for chunk in chunks for position in range(chunk.start, chunk.end)]


def attention_batch(
    chunks: Sequence[KnownChunk], number: int, group: KVCacheGroup, block_size: int
) -> dict[str, list[int]]:
    """The fields of the group's ``AttentionBatch``."""
    batch: dict[str, list[int]] = {name: [] for name in AttentionBatch.__dataclass_fields__}
    batch["query_indptr"], batch["page_indptr"] = [0], [0]
    for chunk in chunks:
        skipped = 0
        if group.window is not None:
            alignment = math.lcm(WINDOW_ALIGNMENT, block_size)
            skipped = max(chunk.start + 1 - group.window, 0) // alignment * alignment
        context = chunk.end - skipped
        pages = chunk.tables[number][skipped // block_size : -(-chunk.end // block_size)]
        batch["query_indptr"].append(batch["query_indptr"][-1] + len(chunk.token_ids))
        batch["page_indptr"].append(batch["page_indptr"][-1] + len(pages))
        batch["page_ids"] += pages
        batch["last_page_len"].append((context - 1) % block_size + 1)
        batch["context_lens"].append(context)
        batch["positions"] += range(chunk.start - skipped, chunk.end - skipped)
    return batch
