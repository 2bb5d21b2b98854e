"""Preemption: how a victim is taken off the device, which blocks are copied ahead, and how long it is away.

When memory runs out, the running sequence with the lowest precedence is preempted: the last one admitted or, with
priorities, the least important. Unused blocks follow another rule: the pools evict the least recently used.
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
MAX_BYTES_BESIDE = 1 << 40  # the rate is infinite if there is nothing to copy to
SWAP_AHEAD_STEPS = 1  # how many steps early copies are ready

_preemption_key = attrgetter("preemption_key")


def choose_preemption_mode(
    policy: "PreemptionPolicy", cost: SwapCost, rates: Rates, *, host_has_room: bool, may_swap: bool
) -> tuple[PreemptionMode, PreemptionReason]:
    """Returns how a victim with this cost is preempted, and why: as ``policy`` says, or with "auto" the way that takes
    fewer seconds. ``host_has_room``: the host pool has room for its blocks. ``may_swap``: one more sequence may be
    swapped. A victim that cannot be swapped is recomputed.
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


def num_blocks_beside(
    scheduler_output: SchedulerOutput, block_bytes: int, rates: Rates, model: StepTimeModel | None
) -> int:
    """Returns how many blocks can be copied to the host, at the measured rate, while the step computes; at least 1.
    ``model`` predicts how long that is; without one, the prompt rate is used.
    """
    if model is None:
        seconds = scheduler_output.num_tokens / rates.tokens_per_second
    else:
        seconds = model.predict(StepWork.of(scheduler_output))
    return max(1, int(min(seconds * rates.bytes_per_second, MAX_BYTES_BESIDE) / block_bytes))


def swap_ahead(running: abc.Sequence[Sequence], memory: KVCacheManager, *, part: float, limit: int) -> int:
    """If more than ``part`` of the device blocks is in use, copies full blocks of the next victims to the host, so that
    a preemption finds them there. A step copies at most ``limit`` blocks. It skips a sequence if copying it in a later
    step is early enough. Returns how many blocks are copied.
    """
    pool = memory.device_pool
    if pool.num_free >= pool.num_blocks - int(part * pool.num_blocks):
        return 0
    left = limit
    free = pool.num_free
    for sequence in reversed(running):
        table = sequence.block_table
        steps_to_copy = 1 + (table.num_cached_blocks - table.num_swapped_ahead) // limit
        is_early = free >= _num_blocks_taken_in(steps_to_copy + SWAP_AHEAD_STEPS, running, memory)
        if is_early or not left or not memory.can_swap_out(table, sequence.num_scheduled_tokens):
            break
        left -= memory.swap_ahead(table, left)
        free += table.num_held_blocks
    return limit - left


def _num_blocks_taken_in(steps: int, running: abc.Sequence[Sequence], memory: KVCacheManager) -> int:
    """Returns the blocks that the running sequences may take in ``steps`` steps, for the rest of their prompts and one
    token per step.
    """
    return sum(
        memory.capacity.max_blocks(each.num_tokens + steps) - each.block_table.num_held_blocks for each in running
    )


class Absences:
    """Times how long preempted sequences are away. An absence starts with the preemption. It ends when a swap brings
    back all computed tokens, when a step computes the first new token, or when the sequence ends. A sequence that is
    preempted again before that stays away. ``ended`` are the absences that were not taken yet.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self.ended: list[TimeAway] = []

    def begin(self, sequence: Sequence, mode: PreemptionMode) -> None:
        """Starts the absence of a running sequence that is preempted, or of a swapped one whose blocks cannot be used.
        Call it before the sequence's token counts change.
        """
        absence = sequence.absence
        if absence is None:
            sequence.absence = Absence(self._clock(), mode, sequence.num_scheduled_tokens)
            return
        absence.num_computed_tokens = max(absence.num_computed_tokens, sequence.num_scheduled_tokens)
        if mode is PreemptionMode.RECOMPUTE:
            absence.mode = mode

    def on_swapped_in(self, sequence: Sequence) -> float:
        """Ends the absence if the swap brings back all computed tokens. Returns its seconds; 0 if it continues."""
        absence = sequence.absence
        is_back = absence is not None and sequence.num_computed_tokens >= absence.num_computed_tokens
        return self.end(sequence) if is_back else 0.0

    def on_computed(self, sequence: Sequence) -> float:
        """Ends the absence if the sequence has computed more than before, or all its known tokens. Returns its seconds;
        0 if it continues.
        """
        absence, computed = sequence.absence, sequence.num_computed_tokens
        is_back = absence is not None and (computed > absence.num_computed_tokens or computed >= sequence.num_tokens)
        return self.end(sequence) if is_back else 0.0

    def end(self, sequence: Sequence) -> float:
        """Ends the absence, if there is one, and adds its seconds to the sequence's timings. Returns the seconds."""
        absence, sequence.absence = sequence.absence, None
        if absence is None:
            return 0.0
        seconds = (self._clock() - absence.since) / _NANOSECONDS
        sequence.timings.away_seconds += seconds
        self.ended.append(TimeAway(absence.mode, seconds))
        return seconds

    def take(self) -> list[TimeAway]:
        """Returns the absences that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended


def running_beams(group: SequenceGroup) -> list[Sequence]:
    """Returns the running beams of a search, by precedence."""
    beams = [beam for beam in group.sequences.values() if beam.status is SequenceStatus.RUNNING]
    return sorted(beams, key=_preemption_key)


def preempted_with(victim: Sequence) -> list[Sequence]:
    """Returns the sequences to preempt together with ``victim``, lowest precedence first: the beams of a search only
    advance together.
    """
    return [victim] if victim.group.beam_search is None else running_beams(victim.group)[::-1]


class Preemptor:
    """Takes running sequences off the device and brings them back, and records the events and counts. ``swapped``
    sequences have their blocks on the host; ``preempted`` ones are recomputed. ``absences`` covers both.
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
            # The worker's partial pooling result is lost with its row.
            mode, reason = PreemptionMode.RECOMPUTE, PreemptionReason.LOST
        else:
            mode, reason = choose_preemption_mode(
                self._config.preemption_mode,
                self._kv_cache_manager.swap_cost(victim.block_table, victim.num_scheduled_tokens),
                self._rates,
                host_has_room=self._kv_cache_manager.can_swap_out(victim.block_table, victim.num_scheduled_tokens),
                may_swap=len(self.swapped) < self._config.max_swapped,
            )
        self._stats.preemptions[mode, reason] += 1
        if mode is PreemptionMode.SWAP:
            self._swap_out(victim, reason)
        else:
            self._recompute(victim, reason)

    def next(self) -> Sequence | None:
        """Returns the sequence that resumes next, swapped or not: none passes another."""
        heads = [queue.first() for queue in (self.swapped, self.preempted) if queue]
        return min(heads, key=_preemption_key) if heads else None

    def invalidate_kv(self, sequence: Sequence) -> None:
        """Discards the swapped KV blocks of a preempted sequence: all its tokens are recomputed."""
        if sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)
            self._recompute(sequence, PreemptionReason.LOST)

    def swap_in(self, sequence: Sequence) -> None:
        """Moves the blocks of a swapped sequence back to the device. The caller makes sure that there is room."""
        self.swapped.remove(sequence)
        blocks = self._kv_cache_manager.swap_in(sequence.block_table)
        self._stats.blocks_swapped_in += blocks
        self._record(sequence, "swap_in", blocks, away_seconds=self.absences.on_swapped_in(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Removes a preempted sequence that has ended from its queue."""
        (self.swapped if sequence.status is SequenceStatus.SWAPPED else self.preempted).remove(sequence)

    def copy_beside(self, scheduler_output: SchedulerOutput, model: StepTimeModel | None) -> None:
        """Copies blocks to the host while the step computes, as many as fit into that time: first blocks of the next
        victims, as ``swap_ahead`` does, then blocks that further tiers store. Call it after everything else of the step
        was scheduled.
        """
        memory, part = self._kv_cache_manager, self._config.swap_ahead
        swaps_ahead, stores = part and scheduler_output.rows, memory.tiers.is_busy
        if not (swaps_ahead or stores):
            return
        limit = num_blocks_beside(scheduler_output, memory.block_bytes, self._rates, model)
        if swaps_ahead:
            limit -= swap_ahead(self._running, memory, part=part, limit=limit)
        if stores:
            memory.begin_stores(limit)

    def on_computed(self, sequence: Sequence) -> None:
        """Records if a preempted sequence has caught up."""
        if away_seconds := self.absences.on_computed(sequence):
            self._record(sequence, "recomputed", 0, away_seconds=away_seconds)

    def _swap_out(self, victim: Sequence, reason: PreemptionReason) -> None:
        self.absences.begin(victim, PreemptionMode.SWAP)
        # Its blocks are copied after the step in flight, and so include what that step computes.
        victim.num_computed_tokens = victim.num_scheduled_tokens
        blocks = self._kv_cache_manager.swap_out(victim.block_table, victim.num_computed_tokens)
        self._stats.blocks_swapped_out += blocks
        self._stats.blocks_used_ahead = self._kv_cache_manager.host.num_used_ahead
        victim.status = SequenceStatus.SWAPPED
        self.swapped.push(victim)
        self._record(victim, "swap_out", blocks, reason)

    def _recompute(self, victim: Sequence, reason: PreemptionReason) -> None:
        self.absences.begin(victim, PreemptionMode.RECOMPUTE)
        self._kv_cache_manager.free(victim.block_table)
        victim.num_computed_tokens = victim.num_scheduled_tokens = 0
        victim.status = SequenceStatus.PREEMPTED
        self.preempted.push(victim)
        self._record(victim, "recompute", 0, reason)

    def _record(self, sequence: Sequence, name: str, blocks: int, reason: str = "", away_seconds: float = 0.0) -> None:
        sequence.timings.events.append(SequenceEvent(name, self._clock(), blocks, reason, away_seconds))
