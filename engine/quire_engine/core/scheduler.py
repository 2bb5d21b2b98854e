"""The scheduler: takes requests, schedules steps, and updates its state from their model outputs.

A request begins as one sequence, its root. After the root has computed all its known tokens, one token is sampled for
each choice and the root is forked: the choices' block tables share every block. The first choice that writes into a
shared, partly filled last block gets a copy of it (copy on write). From then on the choices are sequences like all
others. Beams are an exception: they wait for each other at every token.

One step may be scheduled ahead, while the step before it is in flight. A pipeline may have one step in flight per
stage. If a sequence ends, is preempted or is aborted while a step in flight computes it, its blocks are freed at once,
although that step still writes into them. This is safe for five reasons:

* Steps run in the order in which they were scheduled, copies first. So the next owner of such a block writes it later.
* A block gets its hash only after the output of the step that fills it was processed. So the prefix cache never finds a
  block that is still being written, and a chunk starts after the blocks that have a hash.
* A sequence that may fork is never scheduled ahead. So no step in flight writes a partial block when it becomes shared,
  and the copy for the first writer belongs to a later step.
* A preempted sequence does not resume while a step in flight samples its token. It would sample that token again.
* The results of a step in flight are dropped for sequences that have ended, and their rows are not reused before then.
"""

import logging
from collections import Counter, abc, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import time_ns
from typing import TYPE_CHECKING

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs

from quire_engine.core.absence import TimeAway
from quire_engine.core.batch_scheduler import BatchScheduler, StepPolicy, continuous_batching
from quire_engine.core.beam_search import Continuation
from quire_engine.core.executor import UNMEASURED, Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.transfer import DISK, TransferResult
from quire_engine.core.lora import LoRAStats
from quire_engine.core.outputs import (
    EngineCoreOutput,
    EngineLoad,
    KVCacheFragmentation,
    SchedulerStats,
    TokenColumns,
    count_leaked_blocks,
    measure_fragmentation,
)
from quire_engine.core.request import (
    Request,
    Sequence,
    SequenceGroup,
    SequenceRegistry,
    SequenceStatus,
    check_request,
)
from quire_engine.core.request_queue import AdmittedQueue, WaitingQueue
from quire_engine.core.step import BeamCandidates, ModelOutput, ScheduledChunk, SchedulerOutput
from quire_engine.core.step_time_model import StepTimeEstimator
from quire_engine.core.worker_rows import new_request

if TYPE_CHECKING:
    from quire_engine.core.config import SchedulerConfig

log = logging.getLogger(__name__)

ASYNC_DEPTH = 2


@dataclass(slots=True)
class ScheduledStep:
    """A scheduled step without its output. ``sequences`` has the sequence of each chunk, or None if the chunk's results
    are dropped.
    """

    output: SchedulerOutput
    sequences: abc.Sequence[Sequence | None]


_FINISHED = SequenceStatus.FINISHED  # looking up an enum member is slow


class Scheduler:
    """Owns the requests of one engine. Use it from one thread. ``schedule`` and ``update_from_output`` alternate, but
    ``schedule`` may run ahead: up to ``max_depth`` steps may be in flight.
    """

    def __init__(
        self,
        config: "SchedulerConfig",
        kv_cache_manager: KVCacheManager,
        *,
        rates: Rates = UNMEASURED,
        clock: Callable[[], int] = time_ns,
        step_policy: StepPolicy = continuous_batching,
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.stats = SchedulerStats()
        self.step_times = StepTimeEstimator(rates, kv_cache_manager.block_bytes)
        self._clock = clock
        self._registry = SequenceRegistry(config, kv_cache_manager, clock)
        self._batch_scheduler = BatchScheduler(
            config, kv_cache_manager, rates, self.stats, self.step_times, clock=clock, step_policy=step_policy
        )
        self._step = 0
        self._last_step = 0
        self._in_flight: deque[ScheduledStep] = deque()
        self._outputs: list[EngineCoreOutput] = []
        self._complete_searches: list[SequenceGroup] = []

    @property
    def max_depth(self) -> int:
        """The most steps that may be in flight."""
        return max(ASYNC_DEPTH, self.config.num_stages)

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that were not admitted yet."""
        return self._batch_scheduler.admission.waiting

    @property
    def running(self) -> AdmittedQueue:
        """Admitted sequences on the device."""
        return self._batch_scheduler.running

    @property
    def swapped(self) -> AdmittedQueue:
        """Preempted sequences whose blocks are on the host."""
        return self._batch_scheduler.preemptor.swapped

    @property
    def preempted(self) -> AdmittedQueue:
        """Preempted sequences that are recomputed."""
        return self._batch_scheduler.preemptor.preempted

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule, to process or to return."""
        tiers = self.kv_cache_manager.tiers
        return bool(self._registry.groups or self._outputs or self._in_flight or tiers.is_busy)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._registry.groups)

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises ``QuireError`` if it can never run or if the queue is full."""
        if request.request_id in self._registry.groups:
            raise QuireError(ErrorCode.CONFLICT, "A request with this id is already running.", param="request_id")
        best_effort = request.priority >= BEST_EFFORT
        waiting = self.waiting.num_best_effort if best_effort else self.waiting.num_regular
        if waiting >= self.config.max_waiting:
            raise QuireError(ErrorCode.OVERLOADED, "The engine's queue is full.", retry_after=1.0)
        check_request(request, self.config, self.kv_cache_manager)
        for sequence in self._registry.create(request):
            self._batch_scheduler.admission.add(sequence)

    def reject_request(self, request_id: str, error: QuireError) -> None:
        """Publishes with the next step that a request which was not added has failed."""
        output = EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error, ends_request=True)
        self._outputs.append(output)

    def abort_request(self, request_id: str, indexes: Iterable[int] = ()) -> None:
        """Aborts a request, or only the choices at ``indexes``, in any state. Frees their blocks at once. Unknown
        requests and choices are ignored, because they may just have ended. A beam search is only aborted as a whole.
        """
        group = self._registry.groups.get(request_id)
        if group is None:
            return
        ending = [index for index in indexes if index in group.unfinished] if indexes else list(group.unfinished)
        if len(ending) == len(group.unfinished):
            self._abort_all(group)
        elif group.beam_search is None:
            for index in ending:
                self._abort_choice(group, index)

    def schedule(self) -> SchedulerOutput:
        """Schedules the next step. The output is empty if nothing can be computed now, for example because the step in
        flight still has to sample the tokens. An empty output need not be passed to ``update_from_output``.
        """
        assert len(self._in_flight) < self.max_depth, "too many steps are in flight"
        self._step += 1
        in_flight = [each.output for each in self._in_flight]
        scheduler_output = self._batch_scheduler.schedule(self._step, in_flight)
        if not in_flight:  # otherwise the step in flight may free memory
            for sequence in self._batch_scheduler.out_of_memory:
                self.stats.out_of_memory += 1
                self._fail(sequence.group, _out_of_memory())
        if not scheduler_output.is_empty:
            self._in_flight.append(ScheduledStep(scheduler_output, self._batch_scheduler.scheduled))
        self._batch_scheduler.scheduled = []  # keep no reference to a sequence after its request has ended
        return scheduler_output

    def disable_speculation(self) -> None:
        """Turns off speculation. Used if the executor overlaps steps: no draft can be looked up after a pending
        token.
        """
        if self._batch_scheduler.speculator is not None:
            log.info("speculation is off, because steps overlap")
        self._batch_scheduler.speculator = None

    def split_for_retry(self, scheduler_output: SchedulerOutput) -> list[SchedulerOutput | None]:
        """Returns one step per chunk of the oldest step in flight, which failed, so that each chunk runs alone. An
        entry is None if the chunk's sequence has lost its blocks; nothing is committed for it.
        """
        failed = self._in_flight[0]
        sequences = failed.sequences = [each if self._can_retry(each) else None for each in failed.sequences]
        return [
            None if sequence is None else self._alone(scheduler_output.step, chunk, sequence)
            for chunk, sequence in zip(scheduler_output.chunks, sequences, strict=True)
        ]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> tuple[list[EngineCoreOutput], TokenColumns]:
        """Adds the step's tokens to their sequences. Returns the outputs, also of requests that ended in other ways
        since the last update, and the tokens that need no output of their own.
        """
        sequences: abc.Sequence[Sequence | None] = ()
        if self._in_flight and self._in_flight[0].output is scheduler_output:
            sequences = self._in_flight.popleft().sequences
        self._last_step = scheduler_output.step
        copies = scheduler_output.copies
        self.stats.blocks_parted += len(copies.blocks_to_copy)
        self.stats.blocks_copied_out += len(copies.blocks_to_swap_out)
        self.stats.blocks_copied_in += len(copies.blocks_to_swap_in)
        self.stats.blocks_copied_ahead += len(copies.blocks_to_swap_ahead)
        if copies.transfers:  # copies that a tier stores do not count as copied ahead
            stored = {transfer.host_block for transfer in copies.transfers if not transfer.is_load}
            self.stats.blocks_copied_ahead -= sum(copy.target in stored for copy in copies.blocks_to_swap_ahead)
        if self._batch_scheduler.speculator is not None:
            self._batch_scheduler.speculator.observe(scheduler_output, model_output.timings)
        tokens = self._commit(sequences, scheduler_output, model_output)
        if self._complete_searches:
            self._advance_beams()
        outputs, self._outputs = self._outputs, []
        return outputs, tokens

    def take_times_away(self) -> list[TimeAway]:
        """Returns how long preempted sequences were away that came back or ended since the last call."""
        absences = self._batch_scheduler.preemptor.absences
        return absences.take() if absences.ended else []

    def finish_transfers(self, results: abc.Sequence[TransferResult]) -> None:
        """Processes ``results`` of transfers between the host and further tiers. Called in each round while transfers
        run.
        """
        tiers = self.kv_cache_manager.tiers
        tiers.finish(results)
        stats = [tier.stats for tier in tiers.asynchronous if tier.name == DISK]
        self.stats.disk_blocks_stored = sum(each.num_stored for each in stats)
        self.stats.disk_blocks_loaded = sum(each.num_loaded for each in stats)
        self.stats.disk_bytes_stored = sum(each.num_stored * each.block_bytes for each in stats)
        self.stats.disk_bytes_loaded = sum(each.num_loaded * each.block_bytes for each in stats)
        self.stats.disk_failures = sum((each.failures for each in stats), Counter())

    def request_ids(self) -> list[str]:
        """Returns the ids of the requests in the oldest step in flight, in the order of its chunks."""
        sequences = self._in_flight[0].sequences if self._in_flight else ()
        live = [s.group.request.request_id for s in sequences if s is not None and s.status is not _FINISHED]
        return list(dict.fromkeys(live))

    def get_load(self, *, is_sleeping: bool = False) -> EngineLoad:
        """Returns the engine's load. O(running)."""
        device, host = self.kv_cache_manager.device_pool, self.kv_cache_manager.host.pool
        disks = [tier for tier in self.kv_cache_manager.tiers.asynchronous if tier.name == DISK]
        running, preemptor = self._batch_scheduler.running, self._batch_scheduler.preemptor
        loras, waiting = self._batch_scheduler.admission.loras, self._batch_scheduler.admission.waiting
        # A best-effort sequence adds only 1, like a decoding one: no other request waits for its prompt.
        admitted = sum([1 if s.group.best_effort else len(s.token_ids) - s.num_computed_tokens for s in running])
        if preemptor.preempted:
            admitted += sum([s.num_uncomputed_tokens for s in preemptor.preempted if not s.best_effort])
        return EngineLoad(
            running=len(running),
            waiting=len(waiting.sequences) + len(preemptor.preempted),
            swapped=len(preemptor.swapped),
            uncomputed_tokens=waiting.uncomputed_tokens + admitted,
            blocks_total=device.num_blocks,
            blocks_free=device.num_free,
            host_blocks_total=host.num_blocks,
            host_blocks_free=host.num_free,
            pace=self.step_times.pace,
            prompt_tokens_per_step=self._batch_scheduler.prompt_tokens_per_step(),
            best_effort=self._batch_scheduler.num_best_effort,
            disk_blocks_total=sum([disk.num_blocks for disk in disks]),
            disk_blocks_free=sum([disk.num_free for disk in disks]),
            loras=loras.get_stats() if loras.active or waiting.loras else LoRAStats(),
            is_sleeping=is_sleeping,
        )

    def get_fragmentation(self) -> KVCacheFragmentation:
        """Measures the KV memory that is held but unused. O(running). Looks for leaked blocks only if nothing should be
        held.
        """
        device = measure_fragmentation(
            self.kv_cache_manager, ((sequence.block_table, sequence.num_scheduled_tokens) for sequence in self.running)
        )
        if self.has_work:
            return device
        return replace(device, leaked_blocks=count_leaked_blocks(self.kv_cache_manager, ()))

    # Processing a step's output

    def _can_retry(self, sequence: Sequence | None) -> bool:
        if sequence is None or sequence.status is _FINISHED:
            return False
        if sequence.status is not SequenceStatus.RUNNING:
            self._batch_scheduler.preemptor.invalidate_kv(sequence)
        return sequence.status is SequenceStatus.RUNNING

    @staticmethod
    def _alone(step: int, chunk: ScheduledChunk, sequence: Sequence) -> SchedulerOutput:
        """Returns a step with only this chunk, with its sequence sent anew. If the chunk's last token was pending, it
        is known by now.
        """
        new = new_request(sequence, chunk.row)
        new.token_ids.extend(chunk.draft_token_ids)
        alone = SchedulerOutput(step, new=[new])
        alone.add_chunk(replace(chunk, awaits_token=False))
        return alone

    def _commit(
        self, sequences: abc.Sequence[Sequence | None], scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> TokenColumns:
        """Commits what the step computed and sampled, chunk by chunk. Skips sequences that have ended meanwhile.
        Returns the tokens of the sequences to which nothing else happened.
        """
        only_tokens = model_output.has_only_tokens and not scheduler_output.drafts
        token_ids, draw, plain = model_output.token_ids, 0, list[Sequence]()
        columns = zip(
            sequences, scheduler_output.starts, scheduler_output.lengths, scheduler_output.num_draws, strict=True
        )
        for number, (sequence, start, length, num_draws) in enumerate(columns):
            first, draw = draw, draw + num_draws
            if sequence is None:
                continue
            if (
                only_tokens
                and start + length < sequence.plain_until
                and token_ids[first] not in sequence.sample_requests[0].stop_token_ids
            ):
                sequence.num_computed_tokens = start + length
                sequence.token_ids.append(token_ids[first])
                plain.append(sequence)
            elif sequence.status is not _FINISHED:
                self._commit_chunk(sequence, number, first, scheduler_output, model_output)
        self.stats.computed_tokens += len(plain)
        self.stats.generated_tokens += len(plain)
        return _token_columns(plain)

    def _commit_chunk(
        self,
        sequence: Sequence,
        number: int,
        first: int,
        scheduler_output: SchedulerOutput,
        model_output: ModelOutput,
    ) -> None:
        """Commits chunk ``number``, whose draws begin with draw ``first``."""
        start, num_draws = scheduler_output.starts[number], scheduler_output.num_draws[number]
        if (error := _error_of(number, first, scheduler_output, model_output)) is not None:
            self._fail(sequence.group, error)
            return
        if number in scheduler_output.drafts:
            self._commit_drafts(sequence, start, scheduler_output.drafts[number], model_output, first)
            return
        self._commit_computed(sequence, start, scheduler_output.lengths[number])
        if number in model_output.prompt_logprobs:
            self._emit_prompt_logprobs(sequence.group, start + 1, model_output.prompt_logprobs[number])
        if num_draws == 1 and first not in model_output.candidates and first not in model_output.pooled:
            self._commit_token(sequence, model_output.token_ids[first], _logprobs(first, model_output))
        elif num_draws:
            self._commit_draws(sequence, model_output, first)

    def _commit_computed(self, sequence: Sequence, start: int, length: int) -> None:
        if sequence.block_table.num_blocks:  # if it was preempted, its computed tokens were counted then
            end = sequence.num_computed_tokens = start + length
            self.kv_cache_manager.on_computed(sequence.block_table, sequence.token_ids, end)
            if sequence.absence is not None:
                self._batch_scheduler.preemptor.on_computed(sequence)
        self.stats.computed_tokens += length

    def _commit_draws(self, sequence: Sequence, model_output: ModelOutput, first: int) -> None:
        """Commits beam candidates, pooled output, or the first tokens of several choices."""
        if first in model_output.pooled:
            self._end_pooled(sequence, model_output.pooled[first])
        elif first in model_output.candidates:
            self._collect(sequence, model_output.candidates[first])
        elif sequence.status is SequenceStatus.RUNNING:
            self._fork_choices(sequence, model_output, first)
        else:  # preempted, so no blocks to share: the same tokens are sampled when it runs again
            self._batch_scheduler.preemptor.invalidate_kv(sequence)

    def _fork_choices(self, root: Sequence, model_output: ModelOutput, first: int) -> None:
        """Forks the root into one sequence per choice and commits the first token of each."""
        self._batch_scheduler.running.remove(root)
        children = self._registry.split(root)
        self._batch_scheduler.running.push(root)
        for child in children:
            self._batch_scheduler.admission.start(child)
        if root.index in root.group.unfinished:
            children.insert(0, root)
        else:
            self._remove(root)
        for sequence in children:
            draw = first + sequence.index
            self._commit_token(sequence, model_output.token_ids[draw], _logprobs(draw, model_output))

    def _commit_drafts(
        self, sequence: Sequence, start: int, drafts: abc.Sequence[int], model_output: ModelOutput, first: int
    ) -> None:
        """Commits the accepted drafts and the token sampled after them. Rejected drafts leave nothing: their KV entries
        are overwritten later, and blocks that hold only rejected drafts are freed.
        """
        *accepted, last = _accepted_tokens(sequence, drafts, model_output, first)
        for token_id in accepted:
            self._append(sequence, token_id)
        sequence.num_unsent_tokens += len(accepted) + 1  # the worker keeps no token that was sampled with drafts
        end = sequence.num_computed_tokens = len(sequence.token_ids)
        if sequence.absence is not None:
            self._batch_scheduler.preemptor.on_computed(sequence)
        sequence.num_scheduled_tokens = end
        self.kv_cache_manager.free_unused_blocks(sequence.block_table, end)
        self.kv_cache_manager.on_computed(sequence.block_table, sequence.token_ids, end)
        self.stats.computed_tokens += end - start
        self.stats.num_drafts += 1
        self.stats.num_draft_tokens += len(drafts)
        self.stats.num_accepted_tokens += len(accepted)
        draws = range(first, first + len(accepted) + 1)
        logprobs = [each for draw in draws for each in _logprobs(draw, model_output)]
        self._commit_token(sequence, last, logprobs, len(accepted))

    def _commit_token(
        self, sequence: Sequence, token_id: int, logprobs: abc.Sequence[TokenLogprobs], num_unpublished: int = 0
    ) -> None:
        """Adds the token, or ends the sequence. Publishes it after the last ``num_unpublished`` tokens. ``logprobs``
        belong to all of them.
        """
        if token_id in sequence.sample_requests[0].stop_token_ids:
            stop_token = None
            if logprobs or token_id in sequence.group.request.sampling.stop_token_ids:
                stop_token = StopToken(token_id, logprobs[-1] if logprobs else None)
            self._end(_output_delta(sequence, num_unpublished, logprobs[:-1]), sequence, FinishReason.STOP, stop_token)
            return
        self._append(sequence, token_id)
        delta = _output_delta(sequence, num_unpublished + 1, logprobs)
        if len(sequence.token_ids) >= sequence.group.limit:
            self._end(delta, sequence, FinishReason.LENGTH)
        else:
            self._outputs.append(delta)

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.token_ids.append(token_id)
        self.stats.generated_tokens += 1
        if not sequence.timings.first_token:
            sequence.timings.first_token = self._clock()

    def _emit_prompt_logprobs(self, group: SequenceGroup, position: int, logprobs: list[TokenLogprobs]) -> None:
        """Publishes each prompt log-probability once: they are computed again after a preemption."""
        delta = logprobs[group.next_prompt_logprob - position :] if position <= group.next_prompt_logprob else []
        if delta:
            index = next(iter(group.unfinished))
            output = EngineCoreOutput(
                group.request.request_id, index=index, prompt_logprobs=delta, prompt_position=group.next_prompt_logprob
            )
            output.cached_tokens = group.num_cached_tokens or 0
            group.next_prompt_logprob += len(delta)
            self._outputs.append(output)

    # Beams

    def _collect(self, beam: Sequence, candidates: BeamCandidates) -> None:
        group = beam.group
        group.candidates[beam.id] = candidates
        if len(group.candidates) == len(group.sequences) and group not in self._complete_searches:
            self._complete_searches.append(group)

    def _advance_beams(self) -> None:
        """Advances every search whose beams have all been computed. A search with a preempted beam waits."""
        ready = [group for group in self._complete_searches if all(map(_is_ready, group.sequences.values()))]
        self._complete_searches = [group for group in self._complete_searches if group.sequences and group not in ready]
        for group in ready:
            if group.sequences:
                self._advance(group)

    def _advance(self, group: SequenceGroup) -> None:
        assert group.beam_search is not None
        beams = list(group.sequences.values())
        histories = [(beam.token_ids[group.num_prompt_tokens :], group.candidates[beam.id]) for beam in beams]
        continuations = group.beam_search.advance(histories)
        group.candidates.clear()
        if continuations:
            self._continue(group, beams, continuations)
        else:
            self._end_search(group)

    def _continue(self, group: SequenceGroup, beams: list[Sequence], continuations: list[Continuation]) -> None:
        """Forks beams that continue more than once, and removes beams that do not continue."""
        for beam in beams:
            if beam.num_seqs > 1:
                self.running.remove(beam)
                beam.num_seqs = 1
                self.running.push(beam)
        successors: list[Sequence] = []
        taken: set[int] = set()
        for each in continuations:
            parent = beams[each.parent]
            successors.append(self._fork_beam(parent) if each.parent in taken else parent)
            taken.add(each.parent)
        for index, beam in enumerate(beams):
            if index not in taken:
                self._remove(beam)
        for successor, each in zip(successors, continuations, strict=True):
            self._append(successor, each.token_id)
            successor.num_unsent_tokens += 1
        group.sequences = {successor.id: successor for successor in successors}

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = self._registry.fork(parent)
        self._batch_scheduler.admission.start(child)
        return child

    def _end_search(self, group: SequenceGroup) -> None:
        assert group.beam_search is not None
        if len(group.beam_search.finished) < len(group.unfinished):
            self._fail(group, _too_few_beams(len(group.beam_search.finished)))
            return
        last = next(iter(group.sequences.values()))
        for index, hypothesis in enumerate(group.beam_search.finished[: len(group.unfinished)]):
            output = self._finish_output(last, index, hypothesis.finish_reason)
            output.token_ids, output.position, output.score = hypothesis.token_ids, 0, hypothesis.score
            self._outputs.append(output)
        self._outputs[-1].ends_request = True
        self._remove_all(group)

    # Ending

    def _end(
        self, delta: EngineCoreOutput, sequence: Sequence, reason: FinishReason, stop_token: StopToken | None = None
    ) -> None:
        """Ends a choice at a stop token or at its length limit, with its last tokens."""
        output = self._finish_output(sequence, sequence.index, reason)
        output.token_ids, output.position, output.logprobs = delta.token_ids, delta.position, delta.logprobs
        output.stop_token = stop_token
        self._finish_choice(output, sequence.group)
        self._remove(sequence)

    def _end_pooled(self, sequence: Sequence, pooled: bytes) -> None:
        """Ends a pooling request."""
        output = self._finish_output(sequence, sequence.index, FinishReason.STOP)
        output.pooled = pooled
        self._finish_choice(output, sequence.group)
        self._remove(sequence)

    def _abort_choice(self, group: SequenceGroup, index: int) -> None:
        """Ends one of several choices. Before the fork, the choice has no sequence of its own."""
        own = next((each for each in group.sequences.values() if each.index == index and each.num_seqs == 1), None)
        sequence = own or next(iter(group.sequences.values()))
        self._finish_choice(self._finish_output(sequence, index, FinishReason.ABORT), group)
        if own is not None:
            self._remove(own)

    def _abort_all(self, group: SequenceGroup) -> None:
        sequences = {each.index: each for each in group.sequences.values()}
        some = next(iter(group.sequences.values()))
        for index in list(group.unfinished):
            self._finish_choice(self._finish_output(sequences.get(index, some), index, FinishReason.ABORT), group)
        self._remove_all(group)

    def _fail(self, group: SequenceGroup, error: QuireError) -> None:
        """Ends a request with all its choices, with an error."""
        output = self._finish_output(
            next(iter(group.sequences.values())), next(iter(group.unfinished)), FinishReason.ERROR
        )
        output.error, output.ends_request = error, True
        self._outputs.append(output)
        self._remove_all(group)

    def _finish_choice(self, output: EngineCoreOutput, group: SequenceGroup) -> None:
        del group.unfinished[output.index]
        output.ends_request = not group.unfinished
        self._outputs.append(output)

    def _finish_output(self, sequence: Sequence, index: int, reason: FinishReason) -> EngineCoreOutput:
        """Returns the last output of a choice, without tokens."""
        sequence.timings.finished = self._clock()
        sequence.timings.last_step = self._last_step
        return EngineCoreOutput(
            sequence.request.request_id,
            position=0 if sequence.group.beam_search is not None else sequence.num_output,
            finish_reason=reason,
            cached_tokens=sequence.group.num_cached_tokens or 0,
            timings=sequence.timings,
            index=index,
        )

    def _remove_all(self, group: SequenceGroup) -> None:
        for sequence in list(group.sequences.values()):
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Removes a sequence from its queue, frees its blocks and forgets it. Every sequence leaves this way."""
        self._batch_scheduler.remove(sequence)
        self.kv_cache_manager.free(sequence.block_table)
        self._registry.free(sequence)


def _accepted_tokens(sequence: Sequence, drafts: abc.Sequence[int], model_output: ModelOutput, first: int) -> list[int]:
    """Returns the accepted drafts and the token sampled after them. A draft is accepted if it equals the token sampled
    in its place. The list also ends at a stop token, and before a position whose sampling failed: the next step reports
    that error, if it is real.
    """
    stops = sequence.sample_requests[0].stop_token_ids
    sampled = [model_output.token_ids[first]]
    for draw, draft in enumerate(drafts, first + 1):
        if sampled[-1] != draft or draft in stops or draw in model_output.draw_errors:
            break
        sampled.append(model_output.token_ids[draw])
    return sampled


def _logprobs(draw: int, model_output: ModelOutput) -> abc.Sequence[TokenLogprobs]:
    """Returns the log-probabilities of a sampled token; empty if none were requested."""
    logprobs = model_output.logprobs.get(draw)
    return () if logprobs is None else (logprobs,)


def _token_columns(sequences: list[Sequence]) -> TokenColumns:
    """Returns the last token of each of ``sequences``."""
    return TokenColumns(
        [each.group.request.request_id for each in sequences],
        [each.index for each in sequences],
        [each.token_ids[-1] for each in sequences],
        [len(each.token_ids) - each.group.num_prompt_tokens - 1 for each in sequences],
    )


def _output_delta(sequence: Sequence, num_tokens: int, logprobs: abc.Sequence[TokenLogprobs]) -> EngineCoreOutput:
    """Returns the sequence's last ``num_tokens`` tokens."""
    group, first = sequence.group, len(sequence.token_ids) - num_tokens
    return EngineCoreOutput(
        group.request.request_id,
        sequence.token_ids[first:],
        first - group.num_prompt_tokens,
        cached_tokens=group.num_cached_tokens or 0,
        timings=sequence.timings,
        index=sequence.index,
        logprobs=logprobs,
    )


def _error_of(
    number: int, first: int, scheduler_output: SchedulerOutput, model_output: ModelOutput
) -> QuireError | None:
    """Returns the first error of a chunk. Errors after drafts do not count, because the drafts may be wrong."""
    if not model_output.has_errors:
        return None
    num_draws = 1 if number in scheduler_output.drafts else scheduler_output.num_draws[number]
    errors = (model_output.draw_errors.get(draw) for draw in range(first, first + num_draws))
    return model_output.errors.get(number) or next((error for error in errors if error is not None), None)


def _is_ready(beam: Sequence) -> bool:
    return beam.status is SequenceStatus.RUNNING and beam.num_uncomputed_tokens == 0


def _too_few_beams(count: int) -> QuireError:
    message = f"The search found only {count} outputs, because what it was given allows no more."
    return QuireError(ErrorCode.INVALID, message, param="n")


def _out_of_memory() -> QuireError:
    message = "The engine's KV memory cannot hold this request any longer."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0)
