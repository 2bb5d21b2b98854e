"""What does not grow with an engine: admission, abort and eviction, with few and with many blocks and requests waiting.

Each figure is the time of one operation at the larger size as a multiple of that at the smaller one, a thousand times
as large. What is linear would show as a thousand.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import get_args

from quire_engine.config import Policy
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.block_table import BlockTable
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput
from quire_proto.sampling import SamplingParams

WAITING = (100, 100_000)
BLOCKS = (1_000, 1_000_000)
REPEATS = 400
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main() -> None:
    for policy in get_args(Policy):
        report(f"arrival and abort, {policy}", [abort(policy, waiting) for waiting in WAITING])
        report(f"admission, {policy}", [admission(policy, waiting) for waiting in WAITING])
    report("eviction", [eviction(blocks) for blocks in BLOCKS])


def report(name: str, microseconds: list[float]) -> None:
    small, large = microseconds
    print(f"  {name:<28} {small:7.1f} µs and {large:7.1f} µs: {large / small:.2f} times")


def median(work: Callable[[int], object], numbers: Iterable[int]) -> float:
    """Microseconds of one call."""
    return 1e6 * statistics.median(timed(work, number) for number in numbers)


def timed(work: Callable[[int], object], number: int) -> float:
    begin = time.perf_counter()
    work(number)
    return time.perf_counter() - begin


def queue(policy: Policy, waiting: int) -> Scheduler:
    """A scheduler with so many requests waiting, of which it admits one a step."""
    config = SchedulerConfig(max_num_seqs=1, max_model_len=1024, max_waiting=1 << 20, scheduling_policy=policy)
    scheduler = Scheduler(config, KVCacheManager(KVCacheConfig(16, 10_000, 0)))
    for number in range(waiting):
        scheduler.add_request(request(number))
    return scheduler


def request(number: int) -> Request:
    return Request(str(number), [number % 1000 + 1] * (20 + number % 60), PARAMS, priority=number % 7)


def abort(policy: Policy, waiting: int) -> float:
    scheduler = queue(policy, waiting)

    def come_and_go(number: int) -> None:
        scheduler.add_request(request(number))
        scheduler.abort_request(str(number))

    return median(come_and_go, range(waiting, waiting + REPEATS))


def admission(policy: Policy, waiting: int) -> float:
    """A step that admits one request, which ends with it, while another one comes."""
    scheduler = queue(policy, waiting)

    def step(number: int) -> None:
        scheduler_output = scheduler.schedule()
        scheduler.update_from_output(scheduler_output, ModelOutput([5] * scheduler_output.total_num_draws))
        scheduler.add_request(request(number))

    return median(step, range(waiting, waiting + REPEATS))


def eviction(blocks: int) -> float:
    """A prompt of four blocks in a pool that is full of what others left, all of it named."""
    memory = KVCacheManager(KVCacheConfig(16, blocks + 1, 0))

    def fill(number: int) -> None:
        table, tokens = BlockTable(b""), [number] * 64
        memory.allocate_slots(
            table, memory.attach_cached_blocks(table, memory.get_cached_blocks(table, tokens)), len(tokens)
        )
        memory.cache_full_blocks(table, tokens, len(tokens))
        memory.free(table)

    for number in range(blocks // 4 + 1):
        fill(number)
    return median(fill, range(blocks, blocks + REPEATS))


if __name__ == "__main__":
    main()
