"""Decides what the next step computes: spends one token budget, and preempts sequences if memory runs out.

Prefill and decode are not separate phases. A sequence has known tokens and computed tokens, and a step computes part of
the difference. Tokens that a step in flight computes count as computed. A token that it samples counts as known (the
*pending token*), although its value is not known yet. The order is: running sequences, then preempted ones, both by
precedence, then waiting ones in the policy's order. To avoid thrashing, a step that preempts admits nothing, and
nothing is admitted while an admitted sequence is off the device. The unified budget comes from vLLM V1, which has it
from Sarathi's chunked prefill.

Best-effort sequences come last. They get what is left of a step, and only in steps that compute no prompt of regular
requests. Regular prompts take the slots and memory of best-effort sequences at once. They wait only for the current
step, whose length best effort may increase only slightly.

``admission`` holds what a sequence needs to be admitted; ``preemption`` holds how a victim leaves the device and
returns.
"""

from array import array
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress, count
from typing import TYPE_CHECKING, Protocol, cast

from quire_engine.core.admission import Admission
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.preemption import Preemptor, preempted_with, running_beams
from quire_engine.core.request import Sequence, SequenceGroup, SequenceStatus
from quire_engine.core.request_queue import AdmittedQueue
from quire_engine.core.speculation import Speculator, can_take_drafts
from quire_engine.core.step import SchedulerOutput
from quire_engine.core.step_time_model import StepBudget, StepTimeEstimator
from quire_engine.core.worker_rows import WorkerRows

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig

MIN_STAGE_TOKENS = 64

Accepts = Callable[[Sequence], bool]
"""Returns whether the policy lets a sequence into the step."""


class StepPolicy(Protocol):
    """Decides what a step takes from the queues, and in which order. An engine uses ``continuous_batching``; simulators
    compare other policies with it.
    """

    def __call__(self, batch: "BatchScheduler", scheduler_output: SchedulerOutput, budget: StepBudget) -> None:
        """Adds chunks to the step within ``budget``, by calling ``batch.schedule_running``, ``schedule_preempted`` and
        ``schedule_waiting``.
        """
        ...


def continuous_batching(batch: "BatchScheduler", scheduler_output: SchedulerOutput, budget: StepBudget) -> None:
    """Fills each step from all queues. Best-effort sequences get what the others leave."""
    running = batch.running_of_step()
    if not batch.num_best_effort:
        batch.schedule_in_order(running, scheduler_output, budget)
        return
    regular = [each for each in running if not each.best_effort]
    batch.schedule_in_order(regular, scheduler_output, budget, _is_regular)
    if batch.regular_needs_step(scheduler_output):
        return
    rest = batch.make_best_effort_budget(budget.tokens)
    best_effort = [each for each in batch.running_of_step() if each.best_effort]
    batch.schedule_in_order(best_effort, scheduler_output, rest, _is_best_effort)
    scheduler_output.has_fragments = rest.has_prompts


class BatchScheduler:
    """Decides each step. ``admission`` owns the waiting sequences, ``preemptor`` the preempted ones.

    For the last step, ``scheduled`` holds the sequence of each chunk, and ``out_of_memory`` the sequences that did not
    fit even after preemption. ``speculator`` chooses drafts; None without speculation.
    """

    def __init__(
        self,
        config: "SchedulerConfig",
        kv_cache_manager: KVCacheManager,
        rates: Rates,
        stats: SchedulerStats,
        step_times: StepTimeEstimator,
        *,
        clock: Callable[[], int],
        step_policy: StepPolicy,
    ) -> None:
        self.running = AdmittedQueue()
        self.rows = WorkerRows()
        self.preemptor = Preemptor(
            config, self.running, self.rows, kv_cache_manager, rates=rates, stats=stats, clock=clock
        )
        self.admission = Admission(
            config, self.running, self.preemptor, kv_cache_manager, rates=rates, stats=stats, clock=clock
        )
        self.scheduled: list[Sequence] = []
        self.out_of_memory: list[Sequence] = []
        self.speculator = Speculator(config, rates) if config.speculative_method != "none" else None
        self._config = config
        self.kv_cache_manager = kv_cache_manager
        self._step_times = step_times
        self._step_policy = step_policy
        self._oldest_in_flight = 0

    def remove(self, sequence: Sequence) -> None:
        """Removes a finished sequence from its queue."""
        if sequence.status is SequenceStatus.WAITING:
            self.admission.abort(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        else:
            self.preemptor.remove(sequence)
        self.rows.release(sequence)
        self.preemptor.absences.end(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self, step: int, in_flight: Collection[SchedulerOutput] = ()) -> SchedulerOutput:
        """Returns the next step, to run after the steps ``in_flight``. It is empty if nothing can be computed."""
        self.scheduled = []
        self.out_of_memory.clear()
        self._oldest_in_flight = min((each.step for each in in_flight), default=step)
        num_tables = self.kv_cache_manager.num_tables
        scheduler_output = SchedulerOutput(step, new_blocks=tuple([array("i") for _ in range(num_tables)]))
        if self.rows.released:
            scheduler_output.freed_rows = self.rows.free_released(self._oldest_in_flight)
        budget = self._make_budget()
        if self._config.num_stages > 1:
            waiting_tokens = self.admission.waiting.uncomputed_tokens
            share = _share_of_tokens(self.running, waiting_tokens, in_flight, self._config.num_stages)
            budget.tokens = min(budget.tokens, share)
        self._step_policy(self, scheduler_output, budget)
        if not (
            in_flight
            or scheduler_output.rows
            or scheduler_output.num_preempted
            or self.out_of_memory
            or self.kv_cache_manager.has_pending_copies
        ):
            self._break_beam_deadlock(scheduler_output)
        if budget.has_prompts:
            scheduler_output.max_seconds = budget.max_seconds
        if self._config.swap_ahead or self.kv_cache_manager.tiers.asynchronous:
            self.preemptor.copy_beside(scheduler_output, self._step_times.model)
        scheduler_output.copies = self.kv_cache_manager.take_pending_copies()
        return scheduler_output

    @property
    def num_best_effort(self) -> int:
        """The number of best-effort sequences in all queues."""
        preempted = self.preemptor.swapped.num_best_effort + self.preemptor.preempted.num_best_effort
        return self.running.num_best_effort + preempted + self.admission.waiting.num_best_effort

    def prompt_tokens_per_step(self) -> int:
        """Returns how many prompt tokens one more prompt may compute in a step with the sequences that decode now; 0 if
        steps have no time limit.
        """
        budget = self._make_budget(more=1)
        return budget.chunk_length(self._step_times.mean_prompt_context, budget.tokens) if budget.max_seconds else 0

    # What step policies call

    def running_of_step(self) -> abc.Sequence[Sequence]:
        """Returns the running sequences that the step may compute. In a pipeline the others are in steps in flight."""
        num_stages = self._config.num_stages
        return _micro_batch(self.running, num_stages) if num_stages > 1 else self.running

    def schedule_in_order(
        self,
        running: abc.Sequence[Sequence],
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        accepts: Accepts | None = None,
    ) -> None:
        """Schedules ``running`` sequences, then preempted ones, then, if none are left, waiting ones. Sequences that
        ``accepts`` rejects are treated as absent.
        """
        self.schedule_running(running, scheduler_output, budget)
        if self.preemptor.swapped or self.preemptor.preempted:
            self.schedule_preempted(scheduler_output, budget, accepts)
        if self.admission.waiting.sequences and self.next_preempted(accepts) is None:
            if accepts is not _is_best_effort:  # best effort comes second; held sequences are released already
                self.admission.release_held()
            self.schedule_waiting(scheduler_output, budget, accepts)

    def next_preempted(self, accepts: Accepts | None = None) -> Sequence | None:
        """Returns the preempted sequence to resume next; None if there is none or if ``accepts`` rejects it."""
        sequence = self.preemptor.next()
        return sequence if sequence is None or accepts is None or accepts(sequence) else None

    def regular_needs_step(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether best effort must stay out of a step whose regular work is scheduled: the step computes a regular
        prompt, or had no room for one.
        """
        waits = self.next_preempted(_is_regular) is not None or self.admission.waiting.has_regular_ready
        chunks = zip(self.scheduled, scheduler_output.starts, strict=True)
        return waits or bool(self.out_of_memory) or any(start < each.group.num_prompt_tokens for each, start in chunks)

    def make_best_effort_budget(self, tokens: int) -> StepBudget:
        """Returns the budget that the step has for best effort. It limits time too unless nothing else is admitted and
        ``admission.is_quiet``.
        """
        is_bounded = self._config.max_step_seconds != 0 and self._config.enable_chunked_prefill
        is_alone = not self.running or self.running[0].best_effort
        if not is_bounded or (is_alone and self.admission.is_quiet):
            return StepBudget(tokens)
        return self._step_times.make_best_effort_budget(tokens)

    def _make_budget(self, more: int = 0) -> StepBudget:
        """Returns the step's budget, which prompts share with decoding sequences, as if ``more`` prompts were waiting.
        Best effort does not count.
        """
        config = self._config
        if config.max_step_seconds == 0:
            return StepBudget(config.max_num_batched_tokens)
        waiting, preempted = self.admission.waiting, self.preemptor.preempted
        num_waiting = len(waiting.sequences) - waiting.num_best_effort + len(preempted) - preempted.num_best_effort
        contexts: list[int] = []
        prompts: list[int] = []
        for sequence in self.running_of_step():
            if sequence.group.best_effort:
                break
            if sequence.num_scheduled_tokens < sequence.plain_until:
                contexts.append(sequence.num_scheduled_tokens)
            elif lacking := sequence.num_unscheduled_tokens:
                (contexts if lacking == 1 else prompts).append(sequence.num_scheduled_tokens)
        return self._step_times.make_budget(
            config.max_num_batched_tokens,
            config.max_step_seconds,
            contexts,
            waiting=len(prompts) + num_waiting + more,
            start=prompts[0] if prompts else 0,
        )

    # Running

    def schedule_running(
        self, sequences: abc.Sequence[Sequence], scheduler_output: SchedulerOutput, budget: StepBudget
    ) -> None:
        """Adds the next chunks of running ``sequences``, which are in order of precedence. Makes room by preempting
        running sequences of the lowest precedence.
        """
        search: SequenceGroup | None = None
        best_effort = bool(sequences) and sequences[-1].group.best_effort
        drafts: Mapping[int, abc.Sequence[int]] = {}
        if self.speculator is not None:
            drafts = self._propose_drafts(self.speculator, sequences, budget)
        running = SequenceStatus.RUNNING  # looking up an enum member is slow
        decoding: list[Sequence] = []  # decode before the current sequence, but are not in the columns yet
        all_at_once = not (drafts or best_effort)  # the best-effort budget charges time for each decode
        for sequence in [*sequences]:  # iterates over a copy: preempted sequences leave the queue
            if budget.tokens == len(decoding) or self.out_of_memory or sequence.status is not running:
                break  # victims have the lowest precedence, so everything after a victim is a victim too
            if all_at_once and sequence.num_scheduled_tokens < sequence.plain_until:
                decoding.append(sequence)
            elif all_at_once and _is_ordinary(sequence) and sequence.num_unscheduled_tokens == 1:
                if self._preempt_until_fits([sequence], 1, scheduler_output):
                    self._prepare(sequence, sequence.num_scheduled_tokens + 1, scheduler_output)
                    decoding.append(sequence)
            else:
                self._schedule_decodes(decoding, scheduler_output, budget)
                decoding = []
                group = sequence.group
                if group.beam_search is not None and group is not search:
                    # Room for all beams of a search is made at once: none of them may be preempted after another was
                    # scheduled.
                    search = group
                    if not self._preempt_until_fits(running_beams(group), budget.tokens, scheduler_output):
                        continue
                self._schedule_running(sequence, scheduler_output, budget, drafts.get(sequence.id, ()))
        self._schedule_decodes(decoding, scheduler_output, budget)

    def _schedule_running(
        self,
        sequence: Sequence,
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        drafts: abc.Sequence[int],
    ) -> None:
        """Adds the next chunk of a running sequence, if the budget and the memory allow one."""
        wanted = sequence.num_unscheduled_tokens
        length = budget.chunk_length(sequence.num_scheduled_tokens, wanted) if wanted else 0
        if length and self._preempt_until_fits([sequence], length, scheduler_output):
            self._schedule(sequence, length, scheduler_output, budget, drafts)

    def _schedule_decodes(
        self, sequences: list[Sequence], scheduler_output: SchedulerOutput, budget: StepBudget
    ) -> None:
        """Adds the next token of each of ``sequences``, like ``_schedule``, but for all of them at once. They are
        ordinary and prepared, or before their ``plain_until``.
        """
        step, first = scheduler_output.step, len(scheduler_output.rows)
        budget.spend_decodes(len(sequences))
        if self._oldest_in_flight < step:
            pending = [each.num_scheduled_tokens == len(each.token_ids) for each in sequences]
            scheduler_output.awaiting.extend(compress(count(first), pending))
        scheduler_output.sequence_ids.extend([each.id for each in sequences])
        scheduler_output.rows.extend([cast("int", each.row) for each in sequences])
        scheduler_output.starts.extend([each.num_scheduled_tokens for each in sequences])
        ones = array("i", (1,)) * len(sequences)
        scheduler_output.lengths.extend(ones)
        scheduler_output.num_draws.extend(ones)
        self.scheduled += sequences
        for sequence in sequences:
            sequence.num_scheduled_tokens += 1
            sequence.last_step = step

    def _propose_drafts(
        self, speculator: Speculator, running: abc.Sequence[Sequence], budget: StepBudget
    ) -> Mapping[int, abc.Sequence[int]]:
        """Returns drafts for ``running`` by sequence id. A step that may also compute a prompt gets none. Drafts use
        only tokens and blocks that the step does not need otherwise, so they never preempt.

        Best-effort sequences get no drafts in a step with regular ones, and are ignored when regular sequences get
        drafts.
        """
        best_effort = bool(running) and running[-1].best_effort
        waiting = self.admission.waiting
        may_grow = waiting.sequences if best_effort else waiting.num_regular
        if may_grow or self.next_preempted(None if best_effort else _is_regular) is not None:
            return {}
        beside_others = best_effort and len(running) < len(self.running)
        if beside_others or not can_take_drafts(running):
            return {}
        sequences = [each for each in running if not each.block_table.tail_shared and each.group.beam_search is None]
        blocks = self.kv_cache_manager.device_pool.num_free // self.kv_cache_manager.num_groups - len(self.running)
        room = min(budget.tokens - len(self.running), blocks * self.kv_cache_manager.block_size)
        return speculator.propose(sequences, room) if room > 0 else {}

    def _preempt_until_fits(self, beams: list[Sequence], budget: int, scheduler_output: SchedulerOutput) -> bool:
        """Preempts until there are blocks for the next tokens of ``beams``, which are scheduled together, or of a
        single sequence. Returns False if ``beams`` were preempted themselves, or if they run alone and are out of
        memory.
        """
        pool = self.kv_cache_manager.device_pool
        while (needed := self._num_blocks_needed(beams, budget)) and needed > pool.num_free:
            victims = preempted_with(self.running.last())
            if beams[0] in victims and len(victims) == len(self.running):
                self.out_of_memory.append(beams[0])
                return False
            for victim in victims:
                self._preempt(victim, scheduler_output)
            if beams[0] in victims:
                return False
        return True

    def _num_blocks_needed(self, beams: list[Sequence], budget: int) -> int:
        """Returns the device blocks that ``beams`` lack for the tokens that ``budget`` lets them compute."""
        missing = 0
        for sequence in beams:
            start, length = sequence.num_scheduled_tokens, min(sequence.num_unscheduled_tokens, budget)
            missing += self.kv_cache_manager.num_blocks_needed(sequence.block_table, start, start + length)
            budget -= length
        return missing

    def _schedule(
        self,
        sequence: Sequence,
        length: int,
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        drafts: abc.Sequence[int] = (),
    ) -> None:
        """Adds the sequence's next chunk to the step, with ``drafts`` after its known tokens. The caller has made room
        for it.
        """
        start, num_known = sequence.num_scheduled_tokens, len(sequence.token_ids)
        budget.spend(start, length, sequence.num_unscheduled_tokens)
        end = start + length
        if drafts:
            end, num_known = end + len(drafts), num_known + len(drafts)
            budget.tokens -= len(drafts)
            scheduler_output.drafts[len(scheduler_output.rows)] = tuple(drafts)
        if end > num_known:
            scheduler_output.awaiting.append(len(scheduler_output.rows))
        scheduler_output.sequence_ids.append(sequence.id)
        scheduler_output.rows.append(self._prepare(sequence, end, scheduler_output, drafts))
        scheduler_output.starts.append(start)
        scheduler_output.lengths.append(end - start)
        num_draws = len(drafts) + 1 if drafts else len(sequence.sample_requests) or 1
        scheduler_output.num_draws.append(num_draws if end >= num_known else 0)
        self.scheduled.append(sequence)
        sequence.num_scheduled_tokens, sequence.last_step = end, scheduler_output.step

    def _prepare(
        self, sequence: Sequence, end: int, scheduler_output: SchedulerOutput, drafts: abc.Sequence[int] = ()
    ) -> int:
        """Makes the sequence's blocks and the worker's row ready for the tokens before ``end``. Returns the row."""
        start, memory = sequence.num_scheduled_tokens, self.kv_cache_manager
        if not memory.has_room(sequence.block_table, end):
            memory.allocate_slots(sequence.block_table, start, end)
        decodes = len(sequence.token_ids) <= end == start + 1 and _is_ordinary(sequence)
        sequence.plain_until = (
            min(memory.unchanged_until(sequence.block_table), sequence.group.limit - 1) if decodes else 0
        )
        return self.rows.send_changes(sequence, scheduler_output, drafts)

    def _preempt(self, victim: Sequence, scheduler_output: SchedulerOutput) -> None:
        scheduler_output.num_preempted += 1
        self.preemptor.preempt(victim)

    def _break_beam_deadlock(self, scheduler_output: SchedulerOutput) -> None:
        """Resolves a deadlock in which nothing can be computed although requests are present: beams wait for others of
        their search that do not fit next to the running sequences. Preempts the newest search. A search that runs alone
        and would be the next to resume ends as out of memory.
        """
        returning = self.preemptor.next()
        if self.running:
            newest = preempted_with(self.running.last())
            is_alone = len(newest) == len(self.running)
            if is_alone and (returning is None or returning.group is newest[0].group):
                self.out_of_memory.append(newest[-1])
                return
            for victim in newest:
                self._preempt(victim, scheduler_output)
        elif returning is not None:
            self.out_of_memory.append(returning)

    # Resuming preempted sequences

    def schedule_preempted(
        self,
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        accepts: Accepts | None = None,
    ) -> None:
        """Resumes preempted sequences, swapped or not, in order of precedence, and stops at the first that ``accepts``
        rejects or that lacks room: none passes another. A step that has preempted resumes nothing.
        """
        if scheduler_output.num_preempted:
            return
        while budget.tokens and (sequence := self.next_preempted(accepts)) is not None:
            if not self.admission.fits_max_num_seqs(sequence, scheduler_output):
                break
            if sequence.last_step >= self._oldest_in_flight:
                break  # a step in flight samples its token, which would be sampled again
            if not self.admission.resume(sequence, budget.tokens, scheduler_output):
                break
            if not self.schedule_next_chunk(sequence, scheduler_output, budget):
                break

    def schedule_next_chunk(self, sequence: Sequence, scheduler_output: SchedulerOutput, budget: StepBudget) -> bool:
        """Adds the tokens of a just admitted sequence that the budget allows. Returns False if the sequence has tokens
        to compute but the budget allows none.
        """
        wanted = sequence.num_unscheduled_tokens
        length = budget.chunk_length(sequence.num_scheduled_tokens, wanted) if wanted else 0
        if length:
            self._schedule(sequence, length, scheduler_output, budget)
        return bool(length) or not wanted

    # Admission

    def schedule_waiting(
        self,
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        accepts: Accepts | None = None,
    ) -> None:
        """Admits waiting sequences in the policy's order and adds their first chunks. Stops at the first that
        ``accepts`` rejects or that lacks room. Call ``admission.release_held`` first.
        """
        while self.admission.waiting.has_ready and budget.allows_prompts:
            sequence = self.admission.waiting.next()
            if accepts is not None and not accepts(sequence):
                break
            if not self._config.enable_chunked_prefill and sequence.num_tokens > budget.tokens:
                break
            if not self.admission.passes_gates(sequence):
                continue
            if not self.admission.admit(sequence, scheduler_output):
                break
            self.schedule_next_chunk(sequence, scheduler_output, budget)


def _is_ordinary(sequence: Sequence) -> bool:
    """Whether the sequence, if it decodes, differs from others only in its tokens: it is no beam, has its first token,
    and has caught up after a preemption.
    """
    return bool(sequence.timings.first_token) and sequence.group.beam_search is None and sequence.absence is None


def _is_regular(sequence: Sequence) -> bool:
    return not sequence.best_effort


def _is_best_effort(sequence: Sequence) -> bool:
    return sequence.best_effort


def _micro_batch(running: Collection[Sequence], num_stages: int) -> list[Sequence]:
    """Returns the running sequences that the next step of a pipeline may compute. Limits those that decode to an equal
    share per stage, so that every stage has some.
    """
    share = -(-len(running) // num_stages)
    ready = [sequence for sequence in running if sequence.num_unscheduled_tokens]
    decoding = [sequence for sequence in ready if sequence.num_unscheduled_tokens == 1]
    late = {sequence.id for sequence in decoding[share:]}
    return [sequence for sequence in ready if sequence.id not in late]


def _share_of_tokens(
    running: Iterable[Sequence], waiting_tokens: int, in_flight: Iterable[SchedulerOutput], num_stages: int
) -> int:
    """Returns the token limit of the next step: its share of all known uncomputed tokens, including those
    ``in_flight``, but at least ``MIN_STAGE_TOKENS``, below which a step gets no shorter.
    """
    known = waiting_tokens + sum(each.num_tokens for each in in_flight)
    known += sum(sequence.num_unscheduled_tokens for sequence in running)
    return max(MIN_STAGE_TOKENS, -(-known // num_stages))
