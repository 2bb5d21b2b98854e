"""Block copies on a stream of their own: whatever the device does first, what is computed and copied is the same, and
each of the two waits is needed for that.
"""

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.attention.base import LayerAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.core.block_pool import BlockCopies, BlockCopy
from quire_engine.core.executor import CopyError
from quire_engine.worker.kv_cache import CudaSwapStream, KVCache, StepEvent
from quire_engine.worker.memory import CacheSizes

from tests.support.fake_streams import FakeDevice
from tests.support.swap_streams import SwapStreamWithout, Wait

LAYOUT = BlockLayout.of([LayerAttention(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)], 1, torch.float32)
BLOCK_BYTES = 2 * 4
DEVICE, HOST = 5, 3
CPU = torch.device("cpu")


@dataclass
class Step:
    """Copies, then a forward pass that reads some blocks and writes others, each with a number of its own. What is
    copied ahead is copied beside it, from blocks that it does not write.
    """

    copies: BlockCopies = field(default_factory=BlockCopies)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        ahead = self.copies.blocks_to_swap_ahead
        ahead[:] = [copy for copy in ahead if copy.source not in self.writes]


def copies(sources: int, targets: int) -> st.SearchStrategy[list[BlockCopy]]:
    return st.lists(st.builds(BlockCopy, st.integers(0, sources - 1), st.integers(0, targets - 1)), max_size=3)


blocks = st.lists(st.integers(0, DEVICE - 1), max_size=3)
steps = st.lists(
    st.builds(
        Step,
        st.builds(
            BlockCopies,
            copies(DEVICE, HOST),
            copies(DEVICE, DEVICE),
            copies(HOST, DEVICE),
            copies(DEVICE, HOST),
        ),
        blocks,
        blocks,
    ),
    max_size=5,
)

Outcome = tuple[list[float], list[float], list[float]]


def outcome_in_order(plan: list[Step]) -> Outcome:
    """What the blocks of both pools hold at the end, and what was read, if everything happens at once."""
    device, host, read = [0.0] * DEVICE, [0.0] * HOST, []
    for number, step in enumerate(plan):
        for sources, targets, moves in (
            (device, host, step.copies.blocks_to_swap_out),
            (device, device, step.copies.blocks_to_copy),
            (host, device, step.copies.blocks_to_swap_in),
            (device, host, step.copies.blocks_to_swap_ahead),
        ):
            for copy in moves:
                targets[copy.target] = sources[copy.source]
        read += [device[block] for block in step.reads]
        for place, block in enumerate(step.writes):
            device[block] = 10.0 * (number + 1) + place
    return device, host, read


def outcome_on(seed: int, plan: list[Step], left_out: Wait | None = None) -> Outcome:
    """The same on a device with streams."""
    fake, read = FakeDevice(seed), []
    with pytest.MonkeyPatch.context() as patch, fake:
        fake.install(patch)
        order = SwapStreamWithout(CPU, left_out)
        cache = KVCache(LAYOUT, CacheSizes(DEVICE * BLOCK_BYTES, HOST * BLOCK_BYTES), CPU, swap_stream=order)

        def forward(number: int, step: Step) -> None:
            read.extend(cache.blocks[block].flatten()[0].item() for block in step.reads)
            for place, block in enumerate(step.writes):
                cache.blocks[block] = 10.0 * (number + 1) + place

        for number, step in enumerate(plan):
            if not step.copies.is_empty:
                cache.copy(step.copies)
            fake.launch(lambda number=number, step=step: forward(number, step))
            order.record_compute()
            fake.launch(lambda: None)  # the draws, which copies need not wait for
        fake.run()
        return (*((pool[:, 0].tolist()) for pool in (cache.blocks, cache._host_blocks)), read)


@given(st.integers(0, 1 << 30), steps)
def test_whatever_the_device_does_first_the_outcome_is_the_same(seed: int, plan: list[Step]) -> None:
    assert outcome_on(seed, plan) == outcome_in_order(plan)


OUT = BlockCopies([BlockCopy(1, 0)])
INTO = BlockCopies(blocks_to_swap_in=[BlockCopy(0, 2)])
SWAPS = {
    "out": [Step(writes=[1]), Step(OUT, writes=[1])],
    "in": [Step(writes=[1]), Step(OUT), Step(reads=[2]), Step(INTO, reads=[2])],
}


@pytest.mark.parametrize("left_out", Wait)
@pytest.mark.parametrize("direction", SWAPS)
def test_each_wait_is_needed_in_both_directions(direction: str, left_out: Wait) -> None:
    plan, seeds = SWAPS[direction], range(60)
    assert all(outcome_on(seed, plan) == outcome_in_order(plan) for seed in seeds)
    assert any(outcome_on(seed, plan, left_out) != outcome_in_order(plan) for seed in seeds)


AHEAD = BlockCopies(blocks_to_swap_ahead=[BlockCopy(1, 0)])


@pytest.mark.parametrize("left_out", Wait)
def test_a_step_waits_for_what_was_copied_ahead_beside_the_one_before_though_it_copies_nothing(left_out: Wait) -> None:
    plan, seeds = [Step(writes=[1]), Step(AHEAD), Step(writes=[1])], range(60)
    assert all(outcome_on(seed, plan) == outcome_in_order(plan) for seed in seeds)
    assert any(outcome_on(seed, plan, left_out) != outcome_in_order(plan) for seed in seeds)


def test_copies_ahead_run_beside_the_forward_pass() -> None:
    orders = set()
    for seed in range(60):
        fake, done = FakeDevice(seed), []
        with pytest.MonkeyPatch.context() as patch:
            fake.install(patch)
            order = CudaSwapStream(CPU)
            with order.swap_region():
                pass
            with order.ahead_region():
                fake.launch(lambda: done.append("copy"))  # noqa: B023 - run before the next seed
            fake.launch(lambda: done.append("forward"))  # noqa: B023
            order.record_compute()
            fake.launch(lambda: done.append("draw"))  # noqa: B023
            fake.run()
        orders.add(tuple(done))
    assert orders == {("copy", "forward", "draw"), ("forward", "copy", "draw")}


def test_copies_run_beside_the_draws_but_not_beside_the_forward_pass() -> None:
    """The draws of a step are launched before the copies of the next one, and need not be done for them."""
    late = 0
    for seed in range(60):
        fake, done = FakeDevice(seed), []
        with pytest.MonkeyPatch.context() as patch:
            fake.install(patch)
            order = CudaSwapStream(CPU)
            fake.launch(lambda: done.append("forward"))  # noqa: B023 - run before the next seed
            order.record_compute()
            fake.launch(lambda: done.append("draw"))  # noqa: B023
            with order.swap_region():
                fake.launch(lambda: done.append("copy"))  # noqa: B023
            fake.launch(lambda: done.append("next"))  # noqa: B023
            fake.run()
        assert done.index("forward") < done.index("copy") < done.index("next")
        late += done.index("draw") > done.index("copy")
    assert 0 < late < 60


def test_a_mark_waits_for_what_was_launched_before_it_and_for_nothing_else() -> None:
    fake, done = FakeDevice(3), []
    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        fake.launch(lambda: done.append(1))
        place = StepEvent(torch.device("cuda"))
        fake.launch(lambda: done.append(2))
        place.wait()
        assert done == [1]
        fake.run()
    assert done == [1, 2]


def test_on_the_cpu_nothing_is_ordered() -> None:
    assert KVCache(LAYOUT, CacheSizes(DEVICE * BLOCK_BYTES, 0), CPU).swap_stream is None


@pytest.mark.parametrize("seed", range(20))
def test_work_after_failed_copies_waits_for_the_launched_ones(seed: int) -> None:
    fake, done = FakeDevice(seed), []
    with pytest.MonkeyPatch.context() as patch, fake:
        fake.install(patch)
        order = CudaSwapStream(CPU)
        with suppress(CopyError), order.swap_region():
            fake.launch(lambda: done.append("copied"))
            raise CopyError("no such block")
        fake.launch(lambda: done.append("computed"))
        fake.run()
    assert done == ["copied", "computed"]
