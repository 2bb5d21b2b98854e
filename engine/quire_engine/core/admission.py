"""Admission of new and preempted sequences to the running ones, and what they need for it.

A sequence needs a slot among ``max_num_seqs`` and memory for all its tokens. It also waits for each ``AdmissionGate``
(``request_queue``): for a slot for its adapter (``LoRAGate``), and for blocks that a tier loads (``TransferGate``).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire_engine.core.block_table import CachedBlocks
from quire_engine.core.executor import Rates
from quire_engine.core.gates import LoRAGate, TransferGate
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.preemption import Preemptor, preempted_with
from quire_engine.core.request import Sequence, SequenceStatus
from quire_engine.core.request_queue import AdmissionGate, AdmittedQueue, WaitingQueue, rank_by
from quire_engine.core.step import SchedulerOutput

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig

BEST_EFFORT_RESERVE = 1 / 8
"""Fraction of the blocks that a best-effort admission leaves free, so that regular requests rarely have to preempt it.
"""
QUIET_SECONDS = 60.0
"""Seconds since the last regular request after which best-effort work gets whole steps."""
_NANOSECONDS = 1_000_000_000


class Admission:
    """Owns the ``waiting`` queue and its gates, one of which is ``loras``. Admits a sequence to ``running`` if there is
    room; for a regular sequence, makes room by preempting best-effort ones.
    """

    def __init__(
        self,
        config: "SchedulerConfig",
        running: AdmittedQueue,
        preemptor: Preemptor,
        kv_cache_manager: KVCacheManager,
        *,
        rates: Rates,
        stats: SchedulerStats,
        clock: Callable[[], int],
    ) -> None:
        self.waiting = WaitingQueue(
            config.max_overtakes if config.scheduling_policy == "sjf" else None,
            rank_by(config.scheduling_policy, kv_cache_manager),
        )
        self.loras = LoRAGate(
            config.max_loras, config.max_overtakes, self.waiting, running, (preemptor.swapped, preemptor.preempted)
        )
        self._gates: list[AdmissionGate] = [self.loras]
        for tier in kv_cache_manager.tiers.asynchronous:
            self._gates.append(TransferGate(tier, kv_cache_manager, rates.tokens_per_second, config.max_overtakes))
        self._config = config
        self._running = running
        self._preemptor = preemptor
        self._kv_cache_manager = kv_cache_manager
        self._stats = stats
        self._clock = clock
        self._last_regular = -(1 << 62)
        self._num_admitted = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        if not sequence.best_effort:
            self._last_regular = sequence.timings.arrived
        sequence.served_at_arrival = self._stats.computed_tokens
        self.waiting.push(sequence)

    @property
    def is_quiet(self) -> bool:
        """Whether no regular request has arrived in the last ``QUIET_SECONDS``."""
        return self._clock() - self._last_regular > QUIET_SECONDS * _NANOSECONDS

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence to the running ones."""
        sequence.status = SequenceStatus.RUNNING
        self._running.push(sequence)

    # Waiting sequences

    def release_held(self) -> None:
        """Starts a step that may admit waiting sequences: releases the sequences that gates no longer hold, and
        recomputes the ranks of a few.
        """
        self.waiting.rank_some()
        for gate in self._gates:
            self.waiting.release(gate.release())

    def passes_gates(self, sequence: Sequence) -> bool:
        """Whether no gate makes the next sequence wait. Holds the sequence otherwise."""
        if all(gate.admits(sequence) for gate in self._gates):
            return True
        self.waiting.hold(sequence)
        return False

    def admit(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        """Admits a waiting sequence that all gates let pass. Returns False if it lacks room."""
        fits = self.fits_max_num_seqs(sequence, scheduler_output)
        hits = self._cached_blocks_if_fits(sequence, scheduler_output) if fits else None
        if hits is None:
            return False
        self.waiting.remove_admitted(sequence)
        for gate in self._gates:
            gate.on_admission(sequence)
        self._attach(sequence, hits)
        self._record_admission(sequence, hits, scheduler_output.step)
        return True

    def abort(self, sequence: Sequence) -> None:
        """Removes a waiting sequence that has ended."""
        self.waiting.remove(sequence)
        for gate in self._gates:
            gate.on_abort(sequence)

    # Preempted sequences

    def resume(self, sequence: Sequence, budget: int, scheduler_output: SchedulerOutput) -> bool:
        """Resumes a preempted sequence, which computes at most ``budget`` tokens next. Returns False if it lacks
        room.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._swap_in(sequence, budget, scheduler_output)
        return self._readmit(sequence, scheduler_output)

    def _swap_in(self, sequence: Sequence, budget: int, scheduler_output: SchedulerOutput) -> bool:
        num_tokens = min(sequence.num_tokens, sequence.num_computed_tokens + budget)
        missing = self._kv_cache_manager.num_blocks_needed_to_swap_in(sequence.block_table, num_tokens)
        while missing > self._kv_cache_manager.device_pool.num_free - self._reserve(sequence):
            if not self._preempt_for(sequence, scheduler_output):
                return False
            missing = self._kv_cache_manager.num_blocks_needed_to_swap_in(sequence.block_table, num_tokens)
        self._preemptor.swap_in(sequence)
        self.start(sequence)
        return True

    def _readmit(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        hits = self._cached_blocks_if_fits(sequence, scheduler_output)
        if hits is None:
            return False
        self._preemptor.preempted.remove(sequence)
        self._attach(sequence, hits)
        return True

    # Room

    def fits_max_num_seqs(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        """Whether there is a slot among ``max_num_seqs``, after preempting best-effort sequences if needed."""
        while self._running.num_seqs + sequence.num_seqs > self._config.max_num_seqs:
            if not self._preempt_for(sequence, scheduler_output):
                return False
        return True

    def _preempt_for(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        """Preempts the last best-effort sequence that is not in the step yet, to make room for a regular ``sequence``.
        Returns False if there is none.
        """
        if sequence.best_effort or not self._running or not self._running.last().best_effort:
            return False
        victims = preempted_with(self._running.last())
        if any(victim.last_step == scheduler_output.step for victim in victims):
            return False
        for victim in victims:
            scheduler_output.num_preempted += 1
            self._preemptor.preempt(victim)
        return True

    def _cached_blocks_if_fits(
        self, sequence: Sequence, scheduler_output: SchedulerOutput
    ) -> list[CachedBlocks] | None:
        """Returns the cached blocks of a sequence that can be admitted now; None if it has to wait.

        There must be room for all known tokens, although a step may compute only some of them. A prompt admitted with
        room for only its first chunk would be preempted before it made a token.
        """
        if self._waits_for_other_choice(sequence):
            return None
        memory = self._kv_cache_manager
        while True:
            # Look again after a preemption: blocks swapped out replace cached blocks of the host pool.
            hits = self._find_cached_blocks(sequence)
            if memory.num_free_blocks_after(sequence.block_table, hits, sequence.num_tokens) >= self._reserve(sequence):
                return hits
            if not self._preempt_for(sequence, scheduler_output):
                return None

    def _find_cached_blocks(self, sequence: Sequence) -> list[CachedBlocks]:
        """Returns the cached blocks that a sequence may start from."""
        if sequence.group.needs_prompt_logprobs or self._is_pooled_whole(sequence):
            return []
        return self._kv_cache_manager.get_cached_blocks(sequence.block_table, sequence.token_ids)

    def _is_pooled_whole(self, sequence: Sequence) -> bool:
        """Whether the sequence is pooled from hidden states that cached blocks do not hold."""
        pooler = self._config.pooler_config
        return sequence.request.pooling is not None and pooler is not None and pooler.skip_reading_prefix_cache

    def _waits_for_other_choice(self, sequence: Sequence) -> bool:
        """Whether another output of the same request is computing blocks that this one could then share."""
        others = sequence.group.sequences
        return (
            self._kv_cache_manager.prefix_caching
            and len(others) > 1
            and any(
                other.status is SequenceStatus.RUNNING and other.num_uncomputed_tokens > 1 for other in others.values()
            )
        )

    def _reserve(self, sequence: Sequence) -> int:
        """Returns the blocks that an admission must leave free for running sequences, other than outputs of the same
        request.
        """
        if not any(running.group is not sequence.group for running in self._running):
            return 0
        num_blocks = self._kv_cache_manager.device_pool.num_blocks
        watermark = max(1, int(self._config.watermark * num_blocks))
        return max(watermark, int(BEST_EFFORT_RESERVE * num_blocks)) if sequence.best_effort else watermark

    def _attach(self, sequence: Sequence, hits: list[CachedBlocks]) -> None:
        """Starts a sequence from its cached blocks. Its first admission fixes its precedence."""
        group = sequence.group
        if group.precedence is None:
            by_priority = self._config.scheduling_policy == "priority" or group.best_effort
            group.precedence = group.request.priority if by_priority else 0, self._num_admitted
            self._num_admitted += 1
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = self._kv_cache_manager.attach_cached_blocks(
            sequence.block_table, hits
        )
        self.start(sequence)

    def _record_admission(self, sequence: Sequence, hits: list[CachedBlocks], step: int) -> None:
        """Records when a sequence was admitted and, the first time, how many tokens the prefix cache had."""
        sequence.timings.admitted = self._clock()
        sequence.timings.first_step = step
        group = sequence.group
        if group.num_cached_tokens is not None:
            return
        group.num_cached_tokens = min(sequence.num_computed_tokens, group.num_prompt_tokens)
        block_size = self._kv_cache_manager.block_size
        on_host, loaded = (n * block_size for n in self._kv_cache_manager.count_tiers(sequence.block_table, hits))
        on_host = min(on_host, group.num_cached_tokens)
        self._stats.prefix_query_tokens += group.num_prompt_tokens
        self._stats.prefix_device_tokens += group.num_cached_tokens - on_host
        self._stats.prefix_host_tokens += max(0, on_host - loaded)
        self._stats.prefix_disk_tokens += min(on_host, loaded)
