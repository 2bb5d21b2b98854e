"""The scheduler: hands out one token budget a step, and takes in what the step made.

There is no prefill phase and no decode phase: a sequence has tokens known and tokens computed, and a step computes
some of the difference. Order: running, then swapped, then waiting. Nothing is admitted in a step that preempted, or
while a sequence is swapped out: that is what keeps swapping from thrashing. The unified budget is vLLM V1's idea,
after Sarathi's chunked prefill.
"""

from collections.abc import Callable
from time import time_ns

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, choice_seed

from quire_engine.kv.memory import KvMemory
from quire_engine.request import Moment, Request, Sequence, Status
from quire_engine.scheduling.admission import check_request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.output import Load, Output
from quire_engine.scheduling.plan import Chunk, Draw, StepPlan, StepResult
from quire_engine.scheduling.queue import SequenceQueue, WaitingQueue
from quire_engine.scheduling.statistics import Statistics


class Scheduler:
    """Owns the queues of one engine. Used by one thread; ``plan`` and ``commit`` alternate."""

    def __init__(self, config: SchedulerConfig, memory: KvMemory, *, clock: Callable[[], int] = time_ns) -> None:
        self.config = config
        self.memory = memory
        self.statistics = Statistics()
        self.waiting = WaitingQueue()
        self.running = SequenceQueue()
        self.swapped = SequenceQueue()
        self._clock = clock
        self._step = 0
        self._next_id = 0
        self._by_request: dict[str, Sequence] = {}
        self._by_id: dict[int, Sequence] = {}
        self._news: list[Sequence] = []
        self._watermark = max(1, int(config.watermark * memory.device.num_blocks))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._by_id) or bool(self._news)

    def add(self, request: Request) -> Sequence:
        """Queues a request. Raises ``QuireError`` if it can never run, or if too many wait already."""
        if request.request_id in self._by_request:
            raise QuireError(ErrorCode.CONFLICT, "A request with this id is already running.", param="request_id")
        if len(self.waiting) >= self.config.max_waiting:
            raise QuireError(ErrorCode.OVERLOADED, "The engine's queue is full.", retry_after=1.0)
        check_request(request, self.config, self.memory)
        sequence = Sequence(self._next_id, request, self.config.model_revision, self._clock())
        sequence.draw = Draw(
            sequence.id,
            request.sampling,
            choice_seed(request.sampling.seed, 0),
            sequence.token_ids,
            sequence.num_prompt,
            self.config.eos_token_ids.union(request.sampling.stop_token_ids),
            request.grammar,
        )
        self._next_id += 1
        self._by_request[request.request_id] = sequence
        self._by_id[sequence.id] = sequence
        self.waiting.push(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        """Ends a request, wherever it is; its blocks are free at once. Unknown ids are ignored: it may just have
        ended.
        """
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def plan(self) -> StepPlan:
        """What the next step does. Empty when nothing can be computed."""
        self._step += 1
        plan = StepPlan(self._step)
        budget = self._plan_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:
            budget = self._plan_swapped(plan, budget)
            if not self.swapped:
                self._plan_waiting(plan, budget)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Takes in what the step made; returns it for the outside, with what else ended since the last commit."""
        for chunk in plan.chunks:
            self._commit_chunk(chunk, result)
        outputs = [_report(sequence) for sequence in self._news]
        self._news.clear()
        return outputs

    def request_ids(self, plan: StepPlan) -> list[str]:
        """Whose tokens the plan computes, in its order."""
        return [self._by_id[chunk.sequence_id].request.request_id for chunk in plan.chunks]

    def load(self) -> Load:
        """What the engine is busy with. O(running)."""
        device, host = self.memory.device, self.memory.host
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            swapped=len(self.swapped),
            uncomputed_tokens=self.waiting.uncomputed_tokens + sum(s.num_uncomputed for s in self.running),
            blocks_total=device.num_blocks,
            blocks_free=device.num_free,
            host_blocks_total=host.num_blocks,
            host_blocks_free=host.num_free,
        )

    # Planning

    def _plan_running(self, plan: StepPlan, budget: int) -> int:
        for sequence in list(self.running):
            if budget == 0 or sequence.status is not Status.RUNNING:
                break  # victims are the newest, so whatever follows a victim is one too
            if self._make_room(sequence, min(sequence.num_uncomputed, budget), plan):
                budget -= self._schedule(sequence, budget, plan)
        return budget

    def _make_room(self, sequence: Sequence, num_new: int, plan: StepPlan) -> bool:
        """Preempts until ``sequence`` can grow; False when it had to go itself."""
        while self.memory.missing(sequence.table, sequence.num_computed + num_new) > self.memory.device.num_free:
            victim = self.running.last()
            if victim is sequence and len(self.running) == 1:
                self._end(sequence, FinishReason.ERROR, _out_of_memory())
                return False
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _plan_swapped(self, plan: StepPlan, budget: int) -> int:
        while self.swapped and budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.swapped.first()
            num_tokens = sequence.num_computed + min(sequence.num_uncomputed, budget)
            missing = self.memory.missing_on_device(sequence.table, num_tokens)
            if missing > self.memory.device.num_free - self._reserve():
                break
            self._swap_in(sequence, plan)
            budget -= self._schedule(sequence, budget, plan)
        return budget

    def _plan_waiting(self, plan: StepPlan, budget: int) -> int:
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.first()
            hits = self.memory.match(sequence.table, sequence.token_ids)
            # Room for all known tokens, though this step may compute only some of them: a prompt that is admitted by
            # its first chunk alone would be preempted before it made a token.
            if self.memory.free_after(hits, sequence.num_tokens) < self._reserve():
                break
            self._admit(sequence, hits, plan)
            budget -= self._schedule(sequence, budget, plan)
        return budget

    def _reserve(self) -> int:
        """Blocks that an admission must leave free for what runs already."""
        return self._watermark if self.running else 0

    def _schedule(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Adds the sequence's next chunk to the plan and returns its length. There is room for it."""
        start = sequence.num_computed
        end = start + min(sequence.num_uncomputed, budget)
        self.memory.grow(sequence.table, end)
        draws = (sequence.draw,) if end == sequence.num_tokens else ()
        chunk = Chunk(sequence.id, sequence.token_ids[start:end], start, sequence.table.block_ids, draws)
        plan.chunks.append(chunk)
        return end - start

    def _admit(self, sequence: Sequence, hits: list[int], plan: StepPlan) -> None:
        self.waiting.remove(sequence)
        sequence.num_computed = self.memory.admit(sequence.table, hits)
        self._run(sequence)
        if sequence.num_cached is None:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.timeline.admitted = self._clock()
            sequence.timeline.first_step = plan.step
            self.statistics.prefix_query_tokens += sequence.num_prompt
            self.statistics.prefix_hit_tokens += sequence.num_cached

    def _swap_in(self, sequence: Sequence, plan: StepPlan) -> None:
        self.swapped.remove(sequence)
        copies = self.memory.swap_in(sequence.table)
        plan.copies_in.extend(copies)
        self._run(sequence)
        self.statistics.blocks_swapped_in += len(copies)
        self._note(sequence, "swap_in", len(copies))

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.running.push(sequence)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Takes a running sequence off the device: to the host pool if that has room, otherwise back to the start."""
        plan.preempted += 1
        self.running.remove(victim)
        if self.memory.can_swap_out(victim.num_computed):
            self._swap_out(victim, plan)
        else:
            self._recompute(victim)

    def _swap_out(self, victim: Sequence, plan: StepPlan) -> None:
        copies = self.memory.swap_out(victim.table, victim.num_computed)
        plan.copies_out.extend(copies)
        victim.status = Status.SWAPPED
        # The newest goes first, so each later victim is older and has to come back before it.
        self.swapped.push_front(victim)
        self.statistics.preemptions_by_swap += 1
        self.statistics.blocks_swapped_out += len(copies)
        self._note(victim, "swap_out", len(copies))

    def _recompute(self, victim: Sequence) -> None:
        self.memory.release(victim.table)
        victim.num_computed = 0
        victim.status = Status.WAITING
        self.waiting.push_front(victim)
        self.statistics.preemptions_by_recompute += 1
        self._note(victim, "recompute")

    # Committing

    def _commit_chunk(self, chunk: Chunk, result: StepResult) -> None:
        sequence = self._by_id.get(chunk.sequence_id)
        if sequence is None:
            return  # it was aborted while the step ran
        error = result.errors.get(sequence.id)
        if error is not None:
            self._end(sequence, FinishReason.ERROR, error)
            return
        sequence.num_computed = chunk.end
        self.memory.name_full_blocks(sequence.table, sequence.token_ids, chunk.end)
        self.statistics.computed_tokens += len(chunk.token_ids)
        if chunk.draws:
            self._commit_token(sequence, result.token_ids[sequence.id])

    def _commit_token(self, sequence: Sequence, token_id: int) -> None:
        if self._is_stop(sequence, token_id):
            self._end(sequence, FinishReason.STOP)
            return
        sequence.append(token_id)
        self.statistics.generated_tokens += 1
        if not sequence.timeline.first_token:
            sequence.timeline.first_token = self._clock()
        at_limit = sequence.num_output >= sequence.request.sampling.max_tokens
        if at_limit or sequence.num_tokens >= self.config.max_model_len:
            self._end(sequence, FinishReason.LENGTH)
        else:
            self._news.append(sequence)

    def _is_stop(self, sequence: Sequence, token_id: int) -> bool:
        sampling = sequence.request.sampling
        is_eos = token_id in self.config.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

    def _end(self, sequence: Sequence, reason: FinishReason, error: QuireError | None = None) -> None:
        """The one way out for a sequence: leaves its queue, gives its blocks back, is reported by the next commit."""
        queue = {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        queue[sequence.status].remove(sequence)
        self.memory.release(sequence.table)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.error = reason, error
        sequence.timeline.finished = self._clock()
        sequence.timeline.last_step = self._step
        del self._by_request[sequence.request.request_id]
        del self._by_id[sequence.id]
        self._news.append(sequence)

    def _note(self, sequence: Sequence, name: str, blocks: int = 0) -> None:
        sequence.timeline.moments.append(Moment(name, self._clock(), blocks))


def _report(sequence: Sequence) -> Output:
    """What the outside has not seen of the sequence yet."""
    position = sequence.num_reported
    sequence.num_reported = sequence.num_output
    return Output(
        request_id=sequence.request.request_id,
        token_ids=sequence.token_ids[sequence.num_prompt + position :],
        position=position,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        cached_tokens=sequence.num_cached or 0,
        timeline=sequence.timeline if sequence.finish_reason else None,
        ends_request=sequence.finish_reason is not None,
    )


def _out_of_memory() -> QuireError:
    message = "The engine's KV memory cannot hold this request any longer."
    return QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0)
