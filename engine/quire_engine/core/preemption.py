"""Preemption: how a victim is taken off the device, what is copied for that ahead of need, and how long it is away.

Who gives way is decided where memory runs out: the running sequence with the least precedence, the last one that was
admitted (or, with priorities, the least important). A block that nobody holds any more is another matter: of those, the
pools give up the least recently used.
"""

from collections import abc
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from quire_engine.core.absence import Absence, PreemptionMode, PreemptionReason, SwapCost, TimeAway
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.request import Sequence, SequenceEvent, SequenceGroup, SequenceStatus
from quire_engine.core.request_queue import AdmittedQueue
from quire_engine.core.step import SchedulerOutput
from quire_engine.core.step_time_model import StepTimeModel, StepWork
from quire_engine.core.worker_rows import WorkerRows

if TYPE_CHECKING:
    from quire_engine.config import PreemptionPolicy
    from quire_engine.core.config import SchedulerConfig

_NANOSECONDS = 1_000_000_000
MAX_BYTES_BESIDE = 1 << 40  # the rate is infinite where there is nothing to copy to
SWAP_AHEAD_STEPS = 1  # by which copies are ready before they are needed

_preemption_key = attrgetter("preemption_key")


def choose_preemption_mode(
    policy: "PreemptionPolicy", cost: SwapCost, rates: Rates, *, host_has_room: bool, may_swap: bool
) -> tuple[PreemptionMode, PreemptionReason]:
    """How a victim with this cost is preempted, and why: as ``policy`` says, or with auto the cheaper way in seconds.
    ``host_has_room``: for its blocks. ``may_swap``: one more sequence may be swapped. Whatever cannot be swapped is
    recomputed.
    """
    if policy == "recompute":
        return PreemptionMode.RECOMPUTE, PreemptionReason.CONFIGURED
    if policy == "auto" and not cost.uncached_tokens:
        return PreemptionMode.RECOMPUTE, PreemptionReason.CHEAPER
    if not host_has_room:
        return PreemptionMode.RECOMPUTE, PreemptionReason.HOST_FULL
    if not may_swap:
        return PreemptionMode.RECOMPUTE, PreemptionReason.TOO_MANY_SWAPPED
    if policy == "swap":
        return PreemptionMode.SWAP, PreemptionReason.CONFIGURED
    swap = cost.bytes_to_move / rates.bytes_per_second
    recompute = cost.uncached_tokens / rates.tokens_per_second
    return (PreemptionMode.SWAP if swap <= recompute else PreemptionMode.RECOMPUTE), PreemptionReason.CHEAPER


def copy_beside(
    scheduler_output: SchedulerOutput,
    running: abc.Sequence[Sequence],
    memory: KVCacheManager,
    rates: Rates,
    model: StepTimeModel | None,
    *,
    swap_ahead_part: float,
) -> None:
    """Has so many blocks copied to the host as are copied while the step computes: what would be preempted next, as
    ``swap_ahead`` says, and then what further tiers store. To be called when all else of the step is scheduled.
    """
    swaps_ahead = swap_ahead_part and scheduler_output.rows
    stores = memory.tiers.is_busy
    if not (swaps_ahead or stores):
        return
    limit = num_blocks_beside(scheduler_output, memory.block_bytes, rates, model)
    if swaps_ahead:
        limit -= swap_ahead(running, memory, part=swap_ahead_part, limit=limit)
    if stores:
        memory.begin_stores(limit)


def num_blocks_beside(
    scheduler_output: SchedulerOutput, block_bytes: int, rates: Rates, model: StepTimeModel | None
) -> int:
    """Blocks that are copied to the host, at the measured rate, in no longer than the step computes, but at least one.
    How long that is ``model`` says, or, without one, the rate of prompts.
    """
    if model is None:
        seconds = scheduler_output.num_tokens / rates.tokens_per_second
    else:
        seconds = model.predict(StepWork.of(scheduler_output))
    return max(1, int(min(seconds * rates.bytes_per_second, MAX_BYTES_BESIDE) / block_bytes))


def swap_ahead(running: abc.Sequence[Sequence], memory: KVCacheManager, *, part: float, limit: int) -> int:
    """When more than ``part`` of the device blocks is held, copies full blocks of those that would be preempted next to
    the host, so that a preemption finds them there. A step copies at most ``limit``, and none of a sequence whose turn
    comes so late that later steps suffice. Returns how many are copied.
    """
    pool = memory.device_pool
    if pool.num_free >= pool.num_blocks - int(part * pool.num_blocks):
        return 0
    left = limit
    free = pool.num_free
    for sequence in reversed(running):
        table = sequence.table
        steps_to_copy = 1 + (table.num_cached_blocks - table.num_swapped_ahead) // limit
        is_early = free >= _num_blocks_taken_in(steps_to_copy + SWAP_AHEAD_STEPS, running, memory)
        if is_early or not left or not memory.can_swap_out(table, sequence.num_scheduled_tokens):
            break
        left -= memory.swap_ahead(table, left)
        free += table.num_held_blocks
    return limit - left


def _num_blocks_taken_in(steps: int, running: abc.Sequence[Sequence], memory: KVCacheManager) -> int:
    """Blocks that the running sequences may take in so many steps: for what is left of their prompts, and a token a
    step.
    """
    return sum(memory.capacity.max_blocks(each.num_tokens + steps) - each.table.num_held_blocks for each in running)


class Absences:
    """Times how long preempted sequences are away: from the preemption until a swap brings back what was computed, or
    until a step computes the first token that was not; or until the sequence ends. One that is preempted again on its
    way back is away all the time. ``ended`` are those that nobody took yet.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.ended: list[TimeAway] = []

    def begin(self, sequence: Sequence, mode: PreemptionMode) -> None:
        """A running sequence is preempted; or what was swapped out cannot be used. Its counts of tokens are those that
        it had.
        """
        absence = sequence.absence
        if absence is None:
            sequence.absence = Absence(self._clock(), mode, sequence.num_scheduled_tokens)
            return
        absence.num_computed_tokens = max(absence.num_computed_tokens, sequence.num_scheduled_tokens)
        if mode is PreemptionMode.RECOMPUTE:
            absence.mode = mode

    def on_swapped_in(self, sequence: Sequence) -> float:
        """Ends it if what the swap brings back is all that was computed. Returns the seconds; 0 if it goes on."""
        absence = sequence.absence
        is_back = absence is not None and sequence.num_computed_tokens >= absence.num_computed_tokens
        return self.end(sequence) if is_back else 0.0

    def on_computed(self, sequence: Sequence) -> float:
        """Ends it if the sequence has computed more than before, or all that is known. Returns the seconds; 0 if it
        goes on.
        """
        absence, computed = sequence.absence, sequence.num_computed_tokens
        is_back = absence is not None and (computed > absence.num_computed_tokens or computed >= sequence.num_tokens)
        return self.end(sequence) if is_back else 0.0

    def end(self, sequence: Sequence) -> float:
        """Ends it, if there is one, and adds its seconds to the sequence's timings. Returns them."""
        absence, sequence.absence = sequence.absence, None
        if absence is None:
            return 0.0
        seconds = (self._clock() - absence.since) / _NANOSECONDS
        sequence.timings.away_seconds += seconds
        self.ended.append(TimeAway(absence.mode, seconds))
        return seconds

    def take(self) -> list[TimeAway]:
        """Those that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended


def running_beams(group: SequenceGroup) -> list[Sequence]:
    """The beams of a search that run, by precedence."""
    beams = [beam for beam in group.sequences.values() if beam.status is SequenceStatus.RUNNING]
    return sorted(beams, key=_preemption_key)


def preempted_with(victim: Sequence) -> list[Sequence]:
    """The sequences preempted with ``victim``, the least precedence first: beams can only go on together."""
    return [victim] if victim.group.beam_search is None else running_beams(victim.group)[::-1]


class Preemptor:
    """Takes running sequences off the device and brings them back, with their events and counts. ``swapped`` are those
    whose blocks are on the host, ``preempted`` those that are computed again. ``absences``: of both.
    """

    def __init__(
        self,
        config: "SchedulerConfig",
        running: AdmittedQueue,
        rows: WorkerRows,
        kv_cache_manager: KVCacheManager,
        *,
        rates: Rates,
        stats: SchedulerStats,
        clock: Callable[[], int],
    ) -> None:
        self.swapped = AdmittedQueue()
        self.preempted = AdmittedQueue()
        self.absences = Absences(clock)
        self._config = config
        self._running = running
        self._rows = rows
        self._kv_cache_manager = kv_cache_manager
        self._rates = rates
        self._stats = stats
        self._clock = clock

    def preempt(self, victim: Sequence) -> None:
        """Takes a running sequence off the device, by swap or by recompute."""
        self._running.remove(victim)
        self._rows.release(victim)
        victim.timings.num_preemptions += 1
        pooler = self._config.pooler_config
        if victim.request.pooling is not None and pooler is not None and pooler.skip_reading_prefix_cache:
            # What the worker has pooled so far goes with its row.
            mode, reason = PreemptionMode.RECOMPUTE, PreemptionReason.LOST
        else:
            mode, reason = choose_preemption_mode(
                self._config.preemption_mode,
                self._kv_cache_manager.swap_cost(victim.table, victim.num_scheduled_tokens),
                self._rates,
                host_has_room=self._kv_cache_manager.can_swap_out(victim.table, victim.num_scheduled_tokens),
                may_swap=len(self.swapped) < self._config.max_swapped,
            )
        self._stats.preemptions[mode, reason] += 1
        if mode is PreemptionMode.SWAP:
            self._swap_out(victim, reason)
        else:
            self._recompute(victim, reason)

    def next(self) -> Sequence | None:
        """The one that comes back next: nothing passes another, whether swapped or not."""
        heads = [queue.first() for queue in (self.swapped, self.preempted) if queue]
        return min(heads, key=_preemption_key) if heads else None

    def invalidate_kv(self, sequence: Sequence) -> None:
        """What was computed for a preempted sequence cannot be used: all of it is computed again."""
        if sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)
            self._recompute(sequence, PreemptionReason.LOST)

    def swap_in(self, sequence: Sequence) -> None:
        """Brings the blocks of a swapped sequence back to the device, where there is room for them."""
        self.swapped.remove(sequence)
        blocks = self._kv_cache_manager.swap_in(sequence.table)
        self._stats.blocks_swapped_in += blocks
        self._record(sequence, "swap_in", blocks, away_seconds=self.absences.on_swapped_in(sequence))

    def on_computed(self, sequence: Sequence) -> None:
        """Records that a preempted sequence is back where it was, if it is."""
        if away_seconds := self.absences.on_computed(sequence):
            self._record(sequence, "recomputed", 0, away_seconds=away_seconds)

    def _swap_out(self, victim: Sequence, reason: PreemptionReason) -> None:
        self.absences.begin(victim, PreemptionMode.SWAP)
        # Its blocks are copied after the step in flight, so with what that computes for it.
        victim.num_computed_tokens = victim.num_scheduled_tokens
        blocks = self._kv_cache_manager.swap_out(victim.table, victim.num_computed_tokens)
        self._stats.blocks_swapped_out += blocks
        self._stats.blocks_used_ahead = self._kv_cache_manager.host.num_used_ahead
        victim.status = SequenceStatus.SWAPPED
        self.swapped.push(victim)
        self._record(victim, "swap_out", blocks, reason)

    def _recompute(self, victim: Sequence, reason: PreemptionReason) -> None:
        self.absences.begin(victim, PreemptionMode.RECOMPUTE)
        self._kv_cache_manager.free(victim.table)
        victim.num_computed_tokens = victim.num_scheduled_tokens = 0
        victim.status = SequenceStatus.PREEMPTED
        self.preempted.push(victim)
        self._record(victim, "recompute", 0, reason)

    def _record(self, sequence: Sequence, name: str, blocks: int, reason: str = "", away_seconds: float = 0.0) -> None:
        sequence.timings.events.append(SequenceEvent(name, self._clock(), blocks, reason, away_seconds))
