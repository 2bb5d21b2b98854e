"""Block copies happen one after the other, in the order of their list, within a pool as between the pools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.core.executor import CopyError
from quire_engine.errors import ModelError
from quire_engine.worker import kv_cache
from quire_engine.worker.kv_cache import KVCache
from quire_engine.worker.memory import CacheSizes
from torch.overrides import TorchFunctionMode

LAYOUT = BlockLayout.of([LayerAttention(num_heads=2, num_kv_heads=1, head_dim=2, scale=1.0)] * 2, 4, torch.float32)
BLOCK_BYTES = 2 * 2 * 1 * 4 * 2 * 4
DEVICE, HOST = 7, 5
MOVES = ("blocks_to_swap_out", "blocks_to_copy", "blocks_to_swap_in")


def numbered() -> KVCache:
    """A cache whose device block ``i`` is full of ``i``, and host block ``i`` of ``100 + i``."""
    cache = KVCache(LAYOUT, CacheSizes(DEVICE * BLOCK_BYTES, HOST * BLOCK_BYTES), torch.device("cpu"))
    for pool, first in ((cache.blocks, 0), (cache._host_blocks, 100)):
        pool.copy_(torch.arange(first, first + len(pool))[:, None].expand(pool.shape))
    return cache


def contents(pool: torch.Tensor) -> list[float]:
    """The number that each block is full of."""
    assert torch.equal(pool, pool[:, :1].expand(pool.shape))
    return pool[:, 0].tolist()


def copies(sources: int, targets: int) -> st.SearchStrategy[list[BlockCopy]]:
    return st.lists(st.builds(BlockCopy, st.integers(0, sources - 1), st.integers(0, targets - 1)), max_size=12)


def neighbours(sources: int, targets: int) -> st.SearchStrategy[list[BlockCopy]]:
    """Lists in which runs of neighbouring blocks are frequent, overlapping ones too."""

    def run(source: int, target: int, length: int) -> list[BlockCopy]:
        count = min(length, sources - source, targets - target)
        return [BlockCopy(source + step, target + step) for step in range(count)]

    runs = st.builds(run, st.integers(0, sources - 1), st.integers(0, targets - 1), st.integers(1, 6))
    return st.lists(runs, max_size=4).map(lambda lists: [copy for run in lists for copy in run])


def any_copies(sources: int, targets: int) -> st.SearchStrategy[list[BlockCopy]]:
    return copies(sources, targets) | neighbours(sources, targets)


@given(any_copies(DEVICE, HOST), any_copies(DEVICE, DEVICE), any_copies(HOST, DEVICE))
def test_a_block_may_be_the_target_of_one_copy_and_the_source_of_a_later_one(
    out: list[BlockCopy], within: list[BlockCopy], into: list[BlockCopy]
) -> None:
    cache = numbered()
    device, host = list(range(DEVICE)), [100 + number for number in range(HOST)]
    cache.copy(BlockCopies(out, within, into))
    for sources, targets, plan in ((device, host, out), (device, device, within), (host, device, into)):
        for copy in plan:
            targets[copy.target] = sources[copy.source]
    assert contents(cache.blocks) == device
    assert contents(cache._host_blocks) == host


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("copy", [BlockCopy(-1, 0), BlockCopy(0, -1), BlockCopy(DEVICE, 0), BlockCopy(0, DEVICE)])
def test_a_copy_of_no_block_changes_nothing_and_is_an_error(move: str, copy: BlockCopy) -> None:
    cache = numbered()
    with pytest.raises(CopyError):
        cache.copy(BlockCopies(**{move: [BlockCopy(1, 2), copy]}))
    assert contents(cache.blocks) == list(range(DEVICE))
    assert contents(cache._host_blocks) == [100 + number for number in range(HOST)]


class Copies(TorchFunctionMode):
    """Counts the copies that torch is asked for."""

    number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.Tensor.copy_
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("move", "plan", "expected"),
    [
        ("blocks_to_swap_out", [(1, 0), (2, 1), (3, 2)], 1),
        ("blocks_to_swap_out", [(1, 0), (2, 1), (4, 2), (5, 3)], 2),
        ("blocks_to_swap_in", [(0, 4), (1, 5), (2, 3)], 2),
        ("blocks_to_swap_in", [(2, 4), (1, 3)], 2),
        ("blocks_to_copy", [(1, 4), (2, 5), (3, 6)], 1),
        ("blocks_to_copy", [(1, 2), (2, 3), (3, 4)], 3),
        ("blocks_to_copy", [(1, 3), (2, 4), (3, 5)], 2),
        ("blocks_to_copy", [(1, 1), (2, 2)], 2),
    ],
)
def test_neighbours_that_move_to_neighbours_are_one_copy(move: str, plan: list[tuple[int, int]], expected: int) -> None:
    cache = numbered()
    with Copies() as counted:
        cache.copy(BlockCopies(**{move: [BlockCopy(*pair) for pair in plan]}))
    assert counted.number == expected


GPU = torch.device("cuda", 1)


class Cudart:
    """The two calls of the CUDA runtime that pin memory, and what is pinned. Memory that the GPU may still copy from or
    to is not let go.
    """

    def __init__(self, refuses: bool = False) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = refuses
        self.is_idle = False

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU
        self.is_idle = True

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - named by CUDA
        assert flags == 0
        self.pinned[address] = size
        return 2 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - named by CUDA
        assert self.is_idle
        del self.pinned[address]
        return 0


def check(code: int) -> None:
    if code:
        raise RuntimeError("out of memory (2)\n")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cudart], KVCache]:
    """Makes the cache of a GPU whose tensors are the host's."""

    def make(cudart: Cudart) -> KVCache:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "check_error", check)
        monkeypatch.setattr(torch.cuda, "synchronize", cudart.synchronize)
        monkeypatch.setattr(kv_cache, "_lazy_zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
        monkeypatch.setattr(kv_cache, "CudaSwapStream", lambda _: None)
        pools = CacheSizes(DEVICE * BLOCK_BYTES, HOST * BLOCK_BYTES)
        return KVCache(LAYOUT, pools, GPU)

    return make


def test_on_a_gpu_the_host_pool_is_pinned_as_it_is_and_let_go_at_the_end(on_cuda: Callable[[Cudart], KVCache]) -> None:
    cudart = Cudart()
    cache = on_cuda(cudart)
    assert cudart.pinned == {cache._host_blocks.data_ptr(): HOST * BLOCK_BYTES}
    cache.close()
    assert not cudart.pinned
    cache.close()
    forgotten = on_cuda(cudart)
    assert cudart.pinned
    del forgotten
    assert not cudart.pinned, "memory that is gone stays pinned"


def test_a_host_pool_that_cannot_be_pinned_is_refused_in_one_sentence(on_cuda: Callable[[Cudart], KVCache]) -> None:
    with pytest.raises(
        ModelError, match=r"^640 bytes of host memory cannot be pinned \(out of memory \(2\)\); lower --swap-space"
    ):
        on_cuda(Cudart(refuses=True))
