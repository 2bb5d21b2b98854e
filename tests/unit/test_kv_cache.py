"""Block copies happen one after the other, in the order of their list, within a pool as between the pools."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.executor.base import CopyError
from quire_engine.executor.torch.kv_cache import KvCache
from quire_engine.executor.torch.sizing import Pools
from quire_engine.kv.copy import BlockCopy
from quire_engine.models.base import AttentionLayout

LAYOUT = AttentionLayout(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0)
BLOCK_BYTES = 2 * 2 * 1 * 4 * 2 * 4
DEVICE, HOST = 7, 5
MOVES = ("copy_out", "copy_within", "copy_in")


def numbered() -> KvCache:
    """A cache whose device block ``i`` is full of ``i``, and host block ``i`` of ``100 + i``."""
    cache = KvCache(LAYOUT, 4, Pools(DEVICE * BLOCK_BYTES, HOST * BLOCK_BYTES), torch.float32, torch.device("cpu"))
    for pool, first in ((cache.device, 0), (cache._host, 100)):
        pool.copy_(torch.arange(first, first + len(pool)).view(-1, 1, 1, 1, 1, 1).expand(pool.shape))
    return cache


def contents(pool: torch.Tensor) -> list[float]:
    """The number that each block is full of."""
    assert torch.equal(pool, pool[:, :1, :1, :1, :1, :1].expand(pool.shape))
    return pool[:, 0, 0, 0, 0, 0].tolist()


def copies(sources: int, targets: int) -> st.SearchStrategy[list[BlockCopy]]:
    return st.lists(st.builds(BlockCopy, st.integers(0, sources - 1), st.integers(0, targets - 1)), max_size=12)


@given(copies(DEVICE, HOST), copies(DEVICE, DEVICE), copies(HOST, DEVICE))
def test_a_block_may_be_the_target_of_one_copy_and_the_source_of_a_later_one(
    out: list[BlockCopy], within: list[BlockCopy], into: list[BlockCopy]
) -> None:
    cache = numbered()
    device, host = list(range(DEVICE)), [100 + number for number in range(HOST)]
    for move, plan in zip(MOVES, (out, within, into), strict=True):
        getattr(cache, move)(plan)
    for sources, targets, plan in ((device, host, out), (device, device, within), (host, device, into)):
        for copy in plan:
            targets[copy.target] = sources[copy.source]
    assert contents(cache.device) == device
    assert contents(cache._host) == host


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("copy", [BlockCopy(-1, 0), BlockCopy(0, -1), BlockCopy(DEVICE, 0), BlockCopy(0, DEVICE)])
def test_a_copy_of_no_block_changes_nothing_and_is_an_error(move: str, copy: BlockCopy) -> None:
    cache = numbered()
    with pytest.raises(CopyError):
        getattr(cache, move)([copy])
    assert contents(cache.device) == list(range(DEVICE))
    assert contents(cache._host) == [100 + number for number in range(HOST)]
