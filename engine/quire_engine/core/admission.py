"""Admission: what joins the sequences that run, new ones and those that were preempted, and what they need for that: a
place among ``max_num_seqs``, memory for all their tokens, and whatever else an ``AdmissionGate`` (``request_queue``)
has them wait for: a slot for their adapter (``lora``), blocks that come from a tier (``kv_transfer``).
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
"""Part of the blocks that an admission of what is best effort leaves free, so that others seldom have to preempt it."""


class Admission:
    """Owns the ``waiting`` queue and its gates, of which ``loras`` is one. A sequence joins those that are ``running``
    where there is room; for one that is not best effort, that is made by preempting those that are.
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
        self._by_priority = config.scheduling_policy == "priority"
        num_blocks = kv_cache_manager.device_pool.num_blocks
        self._watermark = max(1, int(config.watermark * num_blocks))
        self._best_effort_reserve = max(self._watermark, int(BEST_EFFORT_RESERVE * num_blocks))
        self._num_admitted = 0

    def start(self, sequence: Sequence) -> None:
        """Adds a sequence to those that run."""
        sequence.status = SequenceStatus.RUNNING
        self._running.push(sequence)

    # What waits

    def release_held(self) -> None:
        """Begins a step that may admit what waits: those that gates held, and need no longer, have their places again,
        and some ranks are computed again.
        """
        self.waiting.rank_some()
        for gate in self._gates:
            self.waiting.release(gate.release())

    def passes_gates(self, sequence: Sequence) -> bool:
        """Whether the next sequence waits for nothing but its place and its memory. It is held if not."""
        if all(gate.admits(sequence) for gate in self._gates):
            return True
        self.waiting.hold(sequence)
        return False

    def admit(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        """Admits a waiting sequence that all gates let pass. Returns False if there is no room for it."""
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
        """Removes a waiting sequence that ends."""
        self.waiting.remove(sequence)
        for gate in self._gates:
            gate.on_abort(sequence)

    # What was preempted

    def resume(self, sequence: Sequence, budget: int, scheduler_output: SchedulerOutput) -> bool:
        """Brings a preempted sequence back to compute at most ``budget`` tokens. Returns False if there is no room for
        it.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._swap_in(sequence, budget, scheduler_output)
        return self._readmit(sequence, scheduler_output)

    def _swap_in(self, sequence: Sequence, budget: int, scheduler_output: SchedulerOutput) -> bool:
        num_tokens = min(sequence.num_tokens, sequence.num_computed_tokens + budget)
        missing = self._kv_cache_manager.num_blocks_needed_to_swap_in(sequence.table, num_tokens)
        while missing > self._kv_cache_manager.device_pool.num_free - self._reserve(sequence):
            if not self._preempt_for(sequence, scheduler_output):
                return False
            missing = self._kv_cache_manager.num_blocks_needed_to_swap_in(sequence.table, num_tokens)
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
        """Whether there is a place among ``max_num_seqs``, once what is best effort has given way."""
        while self._running.num_seqs + sequence.num_seqs > self._config.max_num_seqs:
            if not self._preempt_for(sequence, scheduler_output):
                return False
        return True

    def _preempt_for(self, sequence: Sequence, scheduler_output: SchedulerOutput) -> bool:
        """Preempts the last that is best effort and not in the step yet, for a sequence that is not best effort.
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
        """The cached blocks of a sequence that can be admitted now; None if it has to wait.

        There must be room for all known tokens, though a step may compute only some of them: a prompt that is admitted
        by its first chunk alone would be preempted before it made a token.
        """
        if self._waits_for_other_choice(sequence):
            return None
        memory = self._kv_cache_manager
        while True:
            # Looked for anew after a preemption: what is swapped out takes the place of blocks that the host had.
            hits = self._find_cached_blocks(sequence)
            if memory.num_free_blocks_after(sequence.table, hits, sequence.num_tokens) >= self._reserve(sequence):
                return hits
            if not self._preempt_for(sequence, scheduler_output):
                return None

    def _find_cached_blocks(self, sequence: Sequence) -> list[CachedBlocks]:
        """The cached blocks that a sequence may begin with."""
        if sequence.group.needs_prompt_logprobs or self._is_pooled_whole(sequence):
            return []
        return self._kv_cache_manager.get_cached_blocks(sequence.table, sequence.token_ids)

    def _is_pooled_whole(self, sequence: Sequence) -> bool:
        """Whether hidden states are pooled that cached blocks do not hold."""
        pooler = self._config.pooler_config
        return sequence.request.pooling is not None and pooler is not None and pooler.skip_reading_prefix_cache

    def _waits_for_other_choice(self, sequence: Sequence) -> bool:
        """Whether another output of the same request is computing what this one could then share."""
        others = sequence.group.sequences
        return (
            self._kv_cache_manager.prefix_caching
            and len(others) > 1
            and any(
                other.status is SequenceStatus.RUNNING and other.num_uncomputed_tokens > 1 for other in others.values()
            )
        )

    def _reserve(self, sequence: Sequence) -> int:
        """Blocks that an admission must leave free for what runs already, other outputs of the same request aside."""
        if not any(running.group is not sequence.group for running in self._running):
            return 0
        return self._best_effort_reserve if sequence.best_effort else self._watermark

    def _attach(self, sequence: Sequence, hits: list[CachedBlocks]) -> None:
        """Starts a sequence from what the cache has of it. From its first admission on it has its precedence."""
        group = sequence.group
        if group.admission_index is None:
            group.admission_index = self._num_admitted
            self._num_admitted += 1
        sequence.preemption_key = (
            group.request.priority if self._by_priority or sequence.best_effort else 0,
            group.admission_index,
            sequence.id,
        )
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = self._kv_cache_manager.attach_cached_blocks(
            sequence.table, hits
        )
        self.start(sequence)

    def _record_admission(self, sequence: Sequence, hits: list[CachedBlocks], step: int) -> None:
        """Counts what a sequence that is admitted for the first time found in the prefix cache."""
        sequence.timings.admitted = self._clock()
        sequence.timings.first_step = step
        group = sequence.group
        if group.num_cached_tokens is not None:
            return
        group.num_cached_tokens = min(sequence.num_computed_tokens, group.num_prompt_tokens)
        block_size = self._kv_cache_manager.block_size
        on_host, loaded = (n * block_size for n in self._kv_cache_manager.count_tiers(sequence.table, hits))
        on_host = min(on_host, group.num_cached_tokens)
        self._stats.prefix_query_tokens += group.num_prompt_tokens
        self._stats.prefix_device_tokens += group.num_cached_tokens - on_host
        self._stats.prefix_host_tokens += max(0, on_host - loaded)
        self._stats.prefix_disk_tokens += min(on_host, loaded)
