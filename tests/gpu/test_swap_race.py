"""Block copies on their own stream see what was computed before them, and are seen by what is computed after them; each
wait that is left out shows at once.
"""

from collections.abc import Iterator

import pytest
import torch
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.worker.kv_cache import KVCache
from quire_engine.worker.memory import CacheSizes

from tests.support.swap_streams import SwapStreamWithout, Wait

pytestmark = pytest.mark.gpu
NEEDS_FLASHINFER = False
# Of 2 MiB, as those of a model of 8 B parameters: copying all of them takes milliseconds.
LAYOUT = BlockLayout.of(
    [LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)] * 32, 16, torch.bfloat16
)
BLOCK_BYTES, BLOCKS = 2 << 20, 100
OUT = BlockCopies([BlockCopy(1 + block, block) for block in range(BLOCKS - 1)])
INTO = BlockCopies(blocks_to_swap_in=[BlockCopy(block, 1 + block) for block in range(BLOCKS - 1)])
AHEAD = BlockCopies(blocks_to_swap_ahead=OUT.blocks_to_swap_out)


class Pool:
    """The cache, and the work that the compute stream does with it."""

    def __init__(self, device: torch.device, left_out: Wait | None) -> None:
        pools = CacheSizes(BLOCKS * BLOCK_BYTES, BLOCKS * BLOCK_BYTES)
        self.swap_stream = SwapStreamWithout(device, left_out)
        self.cache = KVCache(LAYOUT, pools, device, swap_stream=self.swap_stream)
        self._factor = torch.randn(4096, 4096, device=device)
        torch.cuda.synchronize()

    def be_busy(self) -> None:
        """Tens of milliseconds of computing."""
        for _ in range(40):
            self._factor = torch.nn.functional.normalize(self._factor @ self._factor)

    def fill(self, number: float) -> None:
        """Writes all device blocks, as the forward pass does."""
        self.cache.blocks.fill_(number)
        self.swap_stream.record_compute()

    def read(self) -> torch.Tensor:
        """A number of each device block but the null page, as it is now on the compute stream."""
        read = self.cache.blocks[1:, -1].clone()
        self.swap_stream.record_compute()
        return read

    def on_host(self) -> torch.Tensor:
        torch.cuda.synchronize()
        return self.cache._host_blocks[: BLOCKS - 1, 0]


def copies_out_wait_for_what_was_computed(pool: Pool) -> bool:
    pool.be_busy()
    pool.fill(1)
    pool.cache.copy(OUT)
    return bool((pool.on_host() == 1).all())


def copies_in_wait_for_what_still_reads(pool: Pool) -> bool:
    pool.cache._host_blocks.fill_(2)
    pool.fill(1)
    torch.cuda.synchronize()
    pool.be_busy()
    read = pool.read()
    pool.cache.copy(INTO)
    return bool((read == 1).all()) and bool((pool.read() == 2).all())


def what_is_computed_waits_for_copies_in(pool: Pool) -> bool:
    pool.cache._host_blocks.fill_(2)
    pool.fill(1)
    torch.cuda.synchronize()
    pool.cache.copy(INTO)
    return bool((pool.read() == 2).all())


def what_is_overwritten_was_copied_out(pool: Pool) -> bool:
    pool.fill(1)
    torch.cuda.synchronize()
    pool.cache.copy(OUT)
    pool.fill(3)
    return bool((pool.on_host() == 1).all())


def what_is_overwritten_in_the_next_step_was_copied_ahead(pool: Pool) -> bool:
    pool.fill(1)
    torch.cuda.synchronize()
    pool.cache.copy(AHEAD)
    pool.read()
    pool.fill(3)
    return bool((pool.on_host() == 1).all())


PROGRAMS = {
    copies_out_wait_for_what_was_computed: Wait.COPIES_FOR_COMPUTE,
    copies_in_wait_for_what_still_reads: Wait.COPIES_FOR_COMPUTE,
    what_is_computed_waits_for_copies_in: Wait.COMPUTE_FOR_COPIES,
    what_is_overwritten_was_copied_out: Wait.COMPUTE_FOR_COPIES,
    what_is_overwritten_in_the_next_step_was_copied_ahead: Wait.COMPUTE_FOR_COPIES,
}


@pytest.fixture(params=PROGRAMS, ids=lambda program: program.__name__)
def program(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
def pools(gpu: torch.device) -> Iterator[object]:
    made: list[Pool] = []

    def make(left_out: Wait | None) -> Pool:
        made.append(Pool(gpu, left_out))
        return made[-1]

    yield make
    for pool in made:
        pool.cache.close()


def test_copies_and_computing_keep_their_order(pools, program) -> None:
    pool = pools(None)
    assert all(program(pool) for _ in range(5))


def test_the_control_shows_that_each_wait_is_needed(pools, program) -> None:
    pool = pools(PROGRAMS[program])
    assert not all(program(pool) for _ in range(5))


def test_a_chain_of_copies_keeps_its_order(pools) -> None:
    """Out of a block, then into it, from what another block has just left on the host."""
    pool = pools(None)
    for block in range(BLOCKS):
        pool.cache.blocks[block].fill_(block)
    pool.swap_stream.record_compute()
    pool.cache.copy(
        BlockCopies([BlockCopy(5, 0), BlockCopy(6, 1)], [BlockCopy(7, 5), BlockCopy(5, 6)], [BlockCopy(0, 7)])
    )
    torch.cuda.synchronize()
    assert pool.cache.blocks[5:8, 0].tolist() == [7, 7, 5]
    assert pool.on_host()[:2].tolist() == [5, 6]
