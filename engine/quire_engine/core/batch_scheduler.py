"""What the next step computes: hands out one token budget, and decides what is preempted when memory runs out.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens computed, and a step computes some
of the difference. While a step is in flight, what it computes counts as computed, and a token that it draws as known,
though nobody knows it yet. Order: running, then preempted, by precedence, then waiting in the policy's order. Nothing
is admitted in a step that preempted, or while anything that was admitted is off the device: that is what keeps
preemption from thrashing. The unified budget is vLLM V1's idea, after Sarathi's chunked prefill.

Best-effort sequences come after all of that, out of what is left, and only in steps that compute no prompt of others:
these take their places and their memory at once, and wait only for the step that is running, which best effort may not
make much longer.

What a sequence needs to be admitted is in ``admission``; how a victim leaves the device and returns, in ``preemption``.
"""

from array import array
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from quire_engine.core.admission import Admission
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.preemption import Preemptor, copy_beside, preempted_with, running_beams
from quire_engine.core.request import Sequence, SequenceGroup, SequenceStatus
from quire_engine.core.request_queue import AdmittedQueue
from quire_engine.core.speculation import Speculator, can_take_drafts
from quire_engine.core.step import SchedulerOutput
from quire_engine.core.step_time_model import StepBudget, StepTimeEstimator
from quire_engine.core.worker_rows import WorkerRows

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig

MIN_STAGE_TOKENS = 64
QUIET_SECONDS = 60.0
"""Since the last request that is not best effort: from then on what is best effort has whole steps."""
_NANOSECONDS = 1_000_000_000

Accepts = Callable[[Sequence], bool]
"""Whether a sequence may be in the step, as far as the policy is concerned."""


class StepPolicy(Protocol):
    """Decides what a step takes from the queues, and in which order. An engine has ``continuous_batching``; simulators
    have others, to compare them with it.
    """

    def __call__(self, batch: "BatchScheduler", scheduler_output: SchedulerOutput, budget: StepBudget) -> None:
        """Adds chunks to the step as far as ``budget`` allows, by ``batch.schedule_running``, ``schedule_preempted``
        and ``schedule_waiting``.
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
    """Owns the queues, of which ``admission`` has that of what waits. Of the last step, ``scheduled`` are the sequences
    of its chunks, and ``out_of_memory`` those that it found no memory for, whatever it preempted. ``speculator``
    chooses drafts; None without speculation.
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
        self.swapped, self.preempted = self.preemptor.swapped, self.preemptor.preempted
        self.admission = Admission(
            config, self.running, self.preemptor, kv_cache_manager, rates=rates, stats=stats, clock=clock
        )
        self.waiting = self.admission.waiting
        self.scheduled: list[Sequence] = []
        self.out_of_memory: list[Sequence] = []
        self.speculator = Speculator(config, rates) if config.speculative_method != "none" else None
        self._queues = {
            SequenceStatus.RUNNING: self.running,
            SequenceStatus.SWAPPED: self.swapped,
            SequenceStatus.PREEMPTED: self.preempted,
        }
        self._config = config
        self.kv_cache_manager = kv_cache_manager
        self._rates = rates
        self._stats = stats
        self._clock = clock
        self._step_times = step_times
        self._step_policy = step_policy
        self._last_regular = -(1 << 62)
        self._is_pipeline = config.num_stages > 1
        self._oldest_in_flight = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        if not sequence.best_effort:
            self._last_regular = sequence.timings.arrived
        sequence.served_at_arrival = self._stats.computed_tokens
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends from its queue."""
        if sequence.status is SequenceStatus.WAITING:
            self.admission.abort(sequence)
        else:
            self._queues[sequence.status].remove(sequence)
        self.rows.release(sequence)
        self.preemptor.absences.end(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self, step: int, in_flight: Collection[SchedulerOutput] = ()) -> SchedulerOutput:
        """Returns the next step, behind those that are ``in_flight``. Empty when nothing can be computed."""
        self.scheduled = []
        self.out_of_memory.clear()
        self._oldest_in_flight = min((each.step for each in in_flight), default=step)
        num_groups = self.kv_cache_manager.num_groups
        scheduler_output = SchedulerOutput(step, new_blocks=tuple([array("i") for _ in range(num_groups)]))
        if self.rows.released:
            scheduler_output.freed_rows = self.rows.free_released(self._oldest_in_flight)
        budget = self._make_budget()
        if self._is_pipeline:
            share = _share_of_tokens(self.running, self.waiting.uncomputed_tokens, in_flight, self._config.num_stages)
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
            copy_beside(
                scheduler_output,
                self.running,
                self.kv_cache_manager,
                self._rates,
                self._step_times.model,
                swap_ahead_part=self._config.swap_ahead,
            )
        scheduler_output.copies = self.kv_cache_manager.take_pending_copies()
        return scheduler_output

    @property
    def num_best_effort(self) -> int:
        """How many sequences are best effort, in all queues."""
        admitted = self.running.num_best_effort + self.swapped.num_best_effort + self.preempted.num_best_effort
        return admitted + self.waiting.num_best_effort

    def prompt_tokens_per_step(self) -> int:
        """Returns the tokens of prompts that a step may compute beside the sequences that decode now, if one more
        prompt comes; 0 without a bound in time.
        """
        budget = self._make_budget(more=1)
        return budget.chunk_length(self._step_times.mean_prompt_context, budget.tokens) if budget.max_seconds else 0

    # What step policies call

    def running_of_step(self) -> abc.Sequence[Sequence]:
        """Returns the running sequences that the step may compute: in a pipeline others are in the steps in flight."""
        return _micro_batch(self.running, self._config.num_stages) if self._is_pipeline else self.running

    def schedule_in_order(
        self,
        running: abc.Sequence[Sequence],
        scheduler_output: SchedulerOutput,
        budget: StepBudget,
        accepts: Accepts | None = None,
    ) -> None:
        """Schedules ``running`` sequences, then preempted ones, and when all of these are back, waiting ones. What it
        does not accept counts as not there.
        """
        self.schedule_running(running, scheduler_output, budget)
        if self.swapped or self.preempted:
            self.schedule_preempted(scheduler_output, budget, accepts)
        if self.waiting.sequences and self.next_preempted(accepts) is None:
            if accepts is not _is_best_effort:  # that comes after others, for which it was done in this step
                self.admission.release_held()
            self.schedule_waiting(scheduler_output, budget, accepts)

    def next_preempted(self, accepts: Accepts | None = None) -> Sequence | None:
        """Returns the preempted sequence that comes back next; None if there is none, or if it is not accepted."""
        sequence = self.preemptor.next()
        return sequence if sequence is None or accepts is None or accepts(sequence) else None

    def regular_needs_step(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether best effort has to stay out of a step in which all else is scheduled: the step computes a prompt of
        others, or has no room for one.
        """
        waits = self.next_preempted(_is_regular) is not None or self.waiting.has_regular_ready
        chunks = zip(self.scheduled, scheduler_output.starts, strict=True)
        return waits or bool(self.out_of_memory) or any(start < each.group.num_prompt_tokens for each, start in chunks)

    def make_best_effort_budget(self, tokens: int) -> StepBudget:
        """Returns what the step has for best effort, in time too if others are here or have been lately."""
        is_bounded = self._config.max_step_seconds != 0 and self._config.enable_chunked_prefill
        is_alone = not self.running or self.running[0].best_effort
        if not is_bounded or (is_alone and self._clock() - self._last_regular > QUIET_SECONDS * _NANOSECONDS):
            return StepBudget(tokens)
        return self._step_times.make_best_effort_budget(tokens)

    def _make_budget(self, more: int = 0) -> StepBudget:
        """Returns the step's budget, which prompts share with the sequences that decode, as if ``more`` prompts waited.
        Best effort does not count.
        """
        config = self._config
        if config.max_step_seconds == 0:
            return StepBudget(config.max_num_batched_tokens)
        num_waiting = len(self.waiting.sequences) - self.waiting.num_best_effort
        num_waiting += len(self.preempted) - self.preempted.num_best_effort
        contexts: list[int] = []
        prompts: list[int] = []
        for sequence in self.running_of_step():
            if sequence.best_effort:
                break
            lacking = sequence.num_unscheduled_tokens
            if lacking:
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
        """Adds the next chunks of running ``sequences``, which are in the order of precedence. Makes room for them by
        preemption, from the end of all that run.
        """
        search: SequenceGroup | None = None
        best_effort = bool(sequences) and sequences[-1].best_effort
        drafts: Mapping[int, abc.Sequence[int]] = {}
        if self.speculator is not None:
            drafts = self._propose_drafts(self.speculator, sequences, budget)
        running = SequenceStatus.RUNNING  # a member of an enumeration is slow to look up
        memory = self.kv_cache_manager
        decoding: list[Sequence] = []  # before the sequence that is looked at, and not in the columns yet
        all_at_once = not (drafts or best_effort)  # best effort pays for decodes in time too
        for sequence in [*sequences]:  # those that are preempted leave the queue
            if budget.tokens == len(decoding) or self.out_of_memory or sequence.status is not running:
                break  # victims are those of the least precedence, so all that follow a victim are victims too
            wanted = sequence.num_unscheduled_tokens
            if wanted == 1 and all_at_once and self._lacks_only_its_token(sequence):
                decoding.append(sequence)
                continue
            if decoding:
                self._schedule_decodes(decoding, scheduler_output, budget)
                decoding = []
            group = sequence.group
            if group.beam_search is not None and group is not search:
                # Room for all of them is made at once: none can be preempted when others have been scheduled.
                search = group
                if not self._preempt_until_fits(running_beams(group), budget.tokens, scheduler_output):
                    continue
            length = budget.chunk_length(sequence.num_scheduled_tokens, wanted) if wanted else 0
            if not length:
                continue
            has_room = memory.has_room(sequence.table, sequence.num_scheduled_tokens + length)
            if has_room or self._preempt_until_fits([sequence], length, scheduler_output):
                self._schedule(sequence, length, scheduler_output, budget, drafts.get(sequence.id, ()))
        self._schedule_decodes(decoding, scheduler_output, budget)

    def _lacks_only_its_token(self, sequence: Sequence) -> bool:
        """Whether a sequence that computes one token needs nothing else: no block, and no news for the worker."""
        start, group = sequence.num_scheduled_tokens, sequence.group
        return (
            start >= group.num_prompt_tokens
            and group.beam_search is None
            and self.kv_cache_manager.has_room(sequence.table, start + 1)
            and sequence.worker_is_current
        )

    def _schedule_decodes(
        self, sequences: list[Sequence], scheduler_output: SchedulerOutput, budget: StepBudget
    ) -> None:
        """Adds the next token of each of ``sequences``, as ``_schedule`` does: for all of them at once, as the worker
        lacks nothing of them.
        """
        step, first = scheduler_output.step, len(scheduler_output.rows)
        budget.spend_decodes(len(sequences))
        starts = [sequence.num_scheduled_tokens for sequence in sequences]
        scheduler_output.sequence_ids.extend([sequence.id for sequence in sequences])
        scheduler_output.rows.extend([row for sequence in sequences if (row := sequence.row) is not None])
        scheduler_output.starts.extend(starts)
        ones = array("i", (1,)) * len(sequences)
        scheduler_output.lengths.extend(ones)
        scheduler_output.draws.extend(ones)
        self.scheduled += sequences
        for number, (sequence, start) in enumerate(zip(sequences, starts, strict=True), first):
            if start == len(sequence.token_ids):
                scheduler_output.awaiting.append(number)
            sequence.num_scheduled_tokens, sequence.last_step = start + 1, step

    def _propose_drafts(
        self, speculator: Speculator, running: abc.Sequence[Sequence], budget: StepBudget
    ) -> Mapping[int, abc.Sequence[int]]:
        """Returns drafts for ``running`` by sequence id. There are none in a step that may compute a prompt too, and at
        most so many that all tokens and blocks of the step are there without them: they preempt nothing. Best effort
        has none beside others, and counts for nothing where these have some.
        """
        best_effort = bool(running) and running[-1].best_effort
        may_grow = self.waiting.sequences if best_effort else self.waiting.num_regular
        if may_grow or self.next_preempted(None if best_effort else _is_regular) is not None:
            return {}
        beside_others = best_effort and len(running) < len(self.running)
        if beside_others or not can_take_drafts(running):
            return {}
        sequences = [each for each in running if not each.table.tail_shared and each.group.beam_search is None]
        blocks = self.kv_cache_manager.device_pool.num_free // self.kv_cache_manager.num_groups - len(self.running)
        room = min(budget.tokens - len(self.running), blocks * self.kv_cache_manager.block_size)
        return speculator.propose(sequences, room) if room > 0 else {}

    def _preempt_until_fits(self, beams: list[Sequence], budget: int, scheduler_output: SchedulerOutput) -> bool:
        """Preempts until there are blocks for the next tokens of ``beams``, which are scheduled together, or a single
        sequence. Returns False if these were preempted themselves, or are alone and out of memory.
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
        """Device blocks that ``beams`` lack for what ``budget`` lets it compute."""
        missing = 0
        for sequence in beams:
            start, length = sequence.num_scheduled_tokens, min(sequence.num_unscheduled_tokens, budget)
            missing += self.kv_cache_manager.num_blocks_needed(sequence.table, start, start + length)
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
        """Adds the sequence's next chunk to the step, with ``drafts`` behind its known tokens. There is room for it."""
        start, num_known = sequence.num_scheduled_tokens, len(sequence.token_ids)
        budget.spend(start, length, sequence.num_unscheduled_tokens)
        end = start + length
        if drafts:
            end, num_known = end + len(drafts), num_known + len(drafts)
            budget.tokens -= len(drafts)
            scheduler_output.drafts[len(scheduler_output.rows)] = tuple(drafts)
        if not self.kv_cache_manager.has_room(sequence.table, end):
            self.kv_cache_manager.allocate_slots(sequence.table, start, end)
        if end > num_known:
            scheduler_output.awaiting.append(len(scheduler_output.rows))
        scheduler_output.sequence_ids.append(sequence.id)
        scheduler_output.rows.append(self.rows.send_changes(sequence, scheduler_output, drafts))
        scheduler_output.starts.append(start)
        scheduler_output.lengths.append(end - start)
        num_draws = len(drafts) + 1 if drafts else len(sequence.sample_requests) or 1
        scheduler_output.draws.append(num_draws if end >= num_known else 0)
        self.scheduled.append(sequence)
        sequence.num_scheduled_tokens, sequence.last_step = end, scheduler_output.step

    def _preempt(self, victim: Sequence, scheduler_output: SchedulerOutput) -> None:
        scheduler_output.num_preempted += 1
        self.preemptor.preempt(victim)

    def _break_beam_deadlock(self, scheduler_output: SchedulerOutput) -> None:
        """Nothing can be computed although something is there: beams wait for others of their search that do not fit
        beside what runs. The newest search is preempted; one that is alone, and the next to return, ends.
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
        """Brings preempted sequences back by precedence, swapped out or not, up to the first that it does not accept:
        nothing passes another. A step that has preempted brings none back.
        """
        if scheduler_output.num_preempted:
            return
        while budget.tokens and (sequence := self.next_preempted(accepts)) is not None:
            if not self.admission.fits_max_num_seqs(sequence, scheduler_output):
                break
            if sequence.last_step >= self._oldest_in_flight:
                break  # it draws a token in a step in flight, and would draw that again
            if not self.admission.resume(sequence, budget.tokens, scheduler_output):
                break
            if not self.schedule_next_chunk(sequence, scheduler_output, budget):
                break

    def schedule_next_chunk(self, sequence: Sequence, scheduler_output: SchedulerOutput, budget: StepBudget) -> bool:
        """Adds what the budget allows of a sequence that was just admitted. Returns False if it lacks tokens and the
        budget allows none.
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
        """Admits waiting sequences in the policy's order, up to the first that it does not accept or that lacks room,
        and adds their first chunks. ``admission.release_held`` comes before it.
        """
        while self.waiting.has_ready and budget.allows_prompts:
            sequence = self.waiting.next()
            if accepts is not None and not accepts(sequence):
                break
            if not self._config.enable_chunked_prefill and sequence.num_tokens > budget.tokens:
                break
            if not self.admission.passes_gates(sequence):
                continue
            if not self.admission.admit(sequence, scheduler_output):
                break
            self.schedule_next_chunk(sequence, scheduler_output, budget)


def _is_regular(sequence: Sequence) -> bool:
    return not sequence.best_effort


def _is_best_effort(sequence: Sequence) -> bool:
    return sequence.best_effort


def _micro_batch(running: Collection[Sequence], num_stages: int) -> list[Sequence]:
    """The running sequences that the next step may compute. Each stage is to have some that decode, so there are no
    more of these in a step than their share.
    """
    share = -(-len(running) // num_stages)
    ready = [sequence for sequence in running if sequence.num_unscheduled_tokens]
    decoding = [sequence for sequence in ready if sequence.num_unscheduled_tokens == 1]
    late = {sequence.id for sequence in decoding[share:]}
    return [sequence for sequence in ready if sequence.id not in late]


def _share_of_tokens(
    running: Iterable[Sequence], waiting_tokens: int, in_flight: Iterable[SchedulerOutput], num_stages: int
) -> int:
    """The most tokens of the next step: its share of all that are known, those ``in_flight`` included, but not so few
    that it takes as long as one with more.
    """
    known = waiting_tokens + sum(each.num_tokens for each in in_flight)
    known += sum(sequence.num_unscheduled_tokens for sequence in running)
    return max(MIN_STAGE_TOKENS, -(-known // num_stages))
