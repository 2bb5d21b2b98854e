"""A disk of a stated speed: what it takes, who waits for it, and when it pays."""

from dataclasses import replace

import pytest
from quire_engine.core.block_pool import BlockCopies, KVCacheConfig, Transfer
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_transfer.connector import TransferFailure
from quire_engine.core.kv_transfer.transfer import DISK
from quire_engine.core.step import SchedulerOutput
from quire_engine.simulation.report import make_report
from quire_engine.simulation.simulated_disk import SimulatedDisk
from quire_engine.simulation.simulated_executor import LatencyModel, SimulatedExecutor
from quire_engine.simulation.simulator import Simulation, SimulationRecorder, VirtualClock
from quire_engine.simulation.trace import Arrival

# A step takes a second for 100 tokens or fewer, and a block of 16 tokens takes 10 ms on disk.
LATENCY = LatencyModel(100, 1.0, 0.0, 0.0, 0.0, 0.0, 1e12, disk_bytes_per_second=1e5)
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=600)
# The device has room for one prompt of 32 blocks, and the host for two.
CAPACITY = KVCacheConfig(block_size=16, device_blocks=41, host_blocks=70, block_bytes=1000)
PROMPT, WHOLE_BLOCKS = 512, 31


def transfers(first: int, count: int) -> BlockCopies:
    stores = [Transfer(number, DISK, False, number, number, bytes(16)) for number in range(first, first + count)]
    return BlockCopies(transfers=stores)


def test_blocks_follow_each_other_in_the_order_of_their_transfers() -> None:
    disk = SimulatedDisk(2.0)
    assert disk.seconds_to_next(0.0) == float("inf")
    disk.submit(transfers(1, 2), 10.0)
    disk.submit(transfers(3, 1), 11.0)
    assert disk.seconds_to_next(11.0) == 1.0
    assert not disk.take(11.9)
    assert [result.transfer_id for result in disk.take(12.0)] == [1]
    assert [result.transfer_id for result in disk.take(16.0)] == [2, 3]
    disk.submit(transfers(4, 1), 20.0)
    assert disk.seconds_to_next(21.0) == 1.0
    assert [(result.transfer_id, result.seconds) for result in disk.take(23.0)] == [(4, 2.0)]


def test_an_executor_waits_for_a_transfer_and_no_longer_than_it_may() -> None:
    clock = VirtualClock()
    executor = SimulatedExecutor(CAPACITY, LATENCY, sleep=clock.sleep, clock=lambda: clock.seconds)
    executor.execute_model(SchedulerOutput(1, copies=transfers(1, 2)))
    assert not executor.take_transfers(0.004)
    assert clock.seconds == pytest.approx(0.004)
    assert [result.transfer_id for result in executor.take_transfers(1.0)] == [1]
    assert clock.seconds == pytest.approx(0.010)
    assert not executor.take_transfers(0.0)
    assert clock.seconds == pytest.approx(0.010)
    assert [result.transfer_id for result in executor.take_transfers(1.0)] == [2]


def run(latency: LatencyModel = LATENCY, num_disk_blocks: int = 1000) -> SimulationRecorder:
    """Five prompts twice each, and then the first one again, which neither the device nor the host has any more."""
    rows = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0]
    arrivals = [Arrival(100.0 * at, PROMPT, 2, (row,), PROMPT) for at, row in enumerate(rows)]
    return Simulation(LIMITS, CAPACITY, latency, num_disk_blocks=num_disk_blocks).run(arrivals)


def last_ttft(recorder: SimulationRecorder) -> float:
    last = list(recorder.requests.values())[-1]
    assert last.first_token is not None
    return last.first_token - last.arrived


def test_a_prefix_that_is_on_disk_takes_its_blocks_there_instead_of_its_tokens() -> None:
    recorder = run()
    assert last_ttft(recorder) == pytest.approx(WHOLE_BLOCKS * 0.01 + 1.0)
    report = make_report(recorder)
    assert report.hit_rate_disk == pytest.approx(WHOLE_BLOCKS * 16 / (11 * PROMPT))
    assert (report.disk_blocks_stored, report.disk_blocks_loaded) == (5 * WHOLE_BLOCKS, WHOLE_BLOCKS)
    assert report.hit_rate_device + report.hit_rate_host == pytest.approx(5 * WHOLE_BLOCKS * 16 / (11 * PROMPT))


@pytest.mark.parametrize(("speed", "slots"), [(1e5, 0), (1e3, 1000), (1e5, 2)], ids=["none", "slow", "small"])
def test_without_a_disk_that_is_fast_and_large_enough_tokens_are_computed(speed: float, slots: int) -> None:
    recorder = run(replace(LATENCY, disk_bytes_per_second=speed), slots)
    assert last_ttft(recorder) == pytest.approx(6.0), "a prompt of 512 tokens is not computed in six steps"
    assert make_report(recorder).hit_rate_disk == 0


def test_a_disk_that_stalls_in_virtual_time_is_turned_off() -> None:
    recorder = run(replace(LATENCY, disk_bytes_per_second=1000 / 11))
    assert recorder.scheduler.stats.disk_failures == {TransferFailure.STALLED: 1}
    assert make_report(recorder).completed == 11
