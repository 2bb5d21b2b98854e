"""A hypothesis state machine that drives a whole engine step by step. Whichever requests arrive, are aborted, finish or
are preempted, outputs are right and every block is freed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quire_engine.core.absence import PreemptionReason, TimeAway
from quire_engine.core.block_pool import BlockStored, KVCacheConfig, KVCacheGroup, StateCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferOutcome
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request, ResumedOutput
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.simulation.step_policies import STEP_POLICIES
from quire_proto.errors import QuireError
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import FinishReason, SamplingParams, choice_seed

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor, expected_beams, expected_output

EOS = 7
MAX_MODEL_LEN = 40
# Of each group of layers; a model has one group more often than any other number.
WINDOWS = [(None,), (None,), (None,), (None, 5), (None, 2, 9), (None, None, 4), (3, 8), (6,), (None, 1, 30)]
LORAS = [LoRARequest(name, number, name, name.encode()) for number, name in enumerate("xyz", 1)]
TOO_SHORT = 1e-12  # seconds; prompts get the least, however long steps take


@dataclass
class Choice:
    """What one client has received of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: int = 0
    finish_reason: FinishReason | None = None
    score: float | None = None


@dataclass
class Client:
    """What one client sent and has received."""

    request: Request
    choices: dict[int, Choice]
    prompt_position: int = 1  # of the next prompt log-probability; the first token has none
    ended: bool = False
    error: QuireError | None = None


def unsteady(random: Random, fails: float) -> tuple[Callable[[int], int], Callable[[bool], TransferOutcome]]:
    """A disk that is slow at times, damages a part of what it has, and fails altogether with probability ``fails``."""

    def outcome(is_load: bool) -> TransferOutcome:
        if random.random() < fails:
            return TransferOutcome.FAILED
        return TransferOutcome.DAMAGED if is_load and random.random() < 0.1 else TransferOutcome.DONE

    return lambda count: random.choice((0, 0, 1, count)), outcome


class CheckedExecutor(PagedExecutor):
    """Passes each plan to a check before it runs, but not the parts of one that has failed."""

    def __init__(self, capacity: KVCacheConfig, check: Callable[[SchedulerOutput], None]) -> None:
        super().__init__(capacity)
        self._check = check
        self._last_step = -1

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        if scheduler_output.step != self._last_step:
            self._check(scheduler_output)
        self._last_step = scheduler_output.step
        return super().execute_model(scheduler_output)


class EngineStateMachine(RuleBasedStateMachine):
    num_stages = 1
    may_keep_states = True  # not if steps overlap or have drafts
    keeps_states = False  # always

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(30, 70),
        host_blocks=st.sampled_from([0, 80, 3, 12]),
        budget=st.sampled_from([3, 7, 64]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        caching=st.sampled_from(["none", "device", "host", "host"]),
        policy=st.sampled_from(["fcfs", "sjf", "priority"]),
        batching=st.sampled_from(["continuous", "continuous", "static", "phased"]),
        rates=st.sampled_from([Rates(1e3, 1e9), Rates(1e3, 1e3), Rates(1e9, 1.0)]),
        max_swapped=st.sampled_from([0, 2, 64]),
        max_step_seconds=st.sampled_from([0.0, TOO_SHORT]),
        swap_ahead=st.sampled_from([0.0, 0.01, 0.5, 0.9]),
        preemption_mode=st.sampled_from(["auto", "auto", "swap", "recompute"]),
        max_loras=st.sampled_from([1, 2]),
        disk_slots=st.sampled_from([0, 5, 40]),
        disk_seed=st.integers(0, 1 << 16),
        disk_fails=st.sampled_from([0.0, 0.0, 0.01]),
        windows=st.sampled_from(WINDOWS),
        blocks_a_state=st.sampled_from([0, 0, 1, 2, 5]),
        more_states=st.sampled_from([0, 3, 30]),
        host_states=st.sampled_from([0, 2, 30]),
        fails=st.sampled_from([0.0, 0.2]),
    )
    def start(
        self,
        block_size,
        pool_tokens,
        host_blocks,
        budget,
        max_num_seqs,
        caching,
        policy,
        batching,
        rates,
        max_swapped,
        max_step_seconds,
        swap_ahead,
        preemption_mode,
        max_loras,
        disk_slots,
        disk_seed,
        disk_fails,
        windows,
        blocks_a_state,
        more_states,
        host_states,
        fails,
    ):
        if self.keeps_states:
            disk_slots, blocks_a_state = 0, blocks_a_state or 3
            batching = "continuous" if batching == "static" else batching
        if self.num_stages > 1 or disk_slots:
            windows = (None,)
        groups = tuple(KVCacheGroup(window) for window in windows)
        num_blocks = len(windows) * (pool_tokens // block_size)
        states = None
        if blocks_a_state and self.may_keep_states and batching != "static" and not disk_slots:
            size = blocks_a_state * block_size
            num_states = 1 + 2 * max_num_seqs + -(-budget // size) + more_states
            states = StateCacheConfig(size, num_states, host_states, 500, max_num_seqs)
        capacity = KVCacheConfig(
            block_size, 1 + num_blocks, host_blocks, 100, groups, max_step_tokens=2 * budget, states=states
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
            scheduling_policy=policy,
            max_overtakes=2,
            max_swapped=max_swapped,
            max_step_seconds=max_step_seconds,
            swap_ahead=swap_ahead,
            preemption_mode=preemption_mode,
            num_stages=self.num_stages,
            max_loras=max_loras,
        )
        disk = DiskContents(disk_slots) if disk_slots else None
        self.memory = KVCacheManager(
            capacity, prefix_caching=caching != "none", host_caching=caching == "host", disk=disk
        )
        self.found: dict[int, int] = {}  # how many tokens the cache had of a table when it was last admitted
        attach = self.memory.attach_cached_blocks

        def note_found(table, hits):
            self.found[id(table)] = attach(table, hits)
            return self.found[id(table)]

        self.memory.attach_cached_blocks = note_found
        self.batching = batching
        self.scheduler = Scheduler(config, self.memory, rates=rates, step_policy=STEP_POLICIES[batching])
        self.scheduler.schedule = self.schedule
        executor = self.make_executor(capacity)
        executor.disk.num_ending, executor.disk.outcome = unsteady(Random(disk_seed), disk_fails)
        if states is not None:
            failures = Random(disk_seed)
            executor.fails = lambda: failures.random() < fails
        self.core = EngineCore(self.scheduler, executor, self.receive)
        self.clients: dict[str, Client] = {}
        self.times_away: list[TimeAway] = []
        self.most_computed: dict[int, int] = {}
        self.cached: set[BlockStored] = set()
        self.ran_before: set[int] = set()
        self.decoding: set[int] = set()
        self.in_use: set[int] = set()
        self.limit = min(MAX_MODEL_LEN, capacity.usable_tokens)

    def make_executor(self, capacity: KVCacheConfig) -> PagedExecutor:
        return CheckedExecutor(capacity, self.check_scheduler_output)

    def check_scheduler_output(self, scheduler_output: SchedulerOutput) -> None:
        """A step that preempts admits no sequence, but one that takes the place of best-effort work."""
        away = [*self.scheduler.swapped, *self.scheduler.preempted]
        if scheduler_output.num_preempted and not any(sequence.best_effort for sequence in away):
            assert not scheduler_output.copies.blocks_to_swap_in
            assert all(chunk.sequence_id in self.ran_before for chunk in scheduler_output.chunks)
        assert scheduler_output.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len({chunk.sequence_id for chunk in scheduler_output.chunks}) == len(scheduler_output.chunks)
        if self.batching == "phased":
            self.check_phase(scheduler_output)
        self.check_rows(scheduler_output)

    def check_phase(self, scheduler_output: SchedulerOutput) -> None:
        """A step that decodes any sequence computes nothing else."""
        decodes = sum(chunk.sequence_id in self.decoding for chunk in scheduler_output.chunks)
        assert decodes in (0, len(scheduler_output.chunks))

    def schedule(self) -> SchedulerOutput:
        """What the core calls instead of the scheduler's own: notes who lacks one token. So does a prompt of one token
        that was preempted before it was computed: it comes back with those that decode.
        """
        admitted = [*self.scheduler.running, *self.scheduler.swapped, *self.scheduler.preempted]
        self.decoding = {sequence.id for sequence in admitted if sequence.num_unscheduled_tokens == 1}
        return Scheduler.schedule(self.scheduler)

    def check_rows(self, scheduler_output: SchedulerOutput) -> None:
        assert self.in_use.issuperset(scheduler_output.freed_rows), "a row was freed twice"
        self.in_use.difference_update(scheduler_output.freed_rows)
        new = {new.row for new in scheduler_output.new}
        assert self.in_use.isdisjoint(new), "a row was given to two sequences"
        self.in_use.update(new)

    @rule(
        count=st.integers(1, 4),
        shared=st.sampled_from([0, 3, 6, 9]),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.integers(1, 25),
        ignore_eos=st.sampled_from([True, True, False]),
        delivered=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        priority=st.sampled_from([0, 1, 2, BEST_EFFORT]),
        lora=st.sampled_from([None, None, *LORAS]),
    )
    def arrive(self, count, own, shared, delivered, priority, lora, **settings):
        for seed in range(count):
            prompt = [token % VOCAB_SIZE for token in range(shared)] + own
            params = SamplingParams(seed=seed, **settings)
            outputs = [
                self.expected(prompt, params, i)[: max(0, delivered - i)] if prompt else [] for i in range(params.n)
            ]
            history = [ResumedOutput(i, output) for i, output in enumerate(outputs) if output]
            request = Request(f"r{len(self.clients)}", prompt, params, resumed_outputs=history, priority=priority)
            self.add(replace(request, lora=lora), outputs)

    @rule(
        shared=st.sampled_from([1, 3, 6, 9]),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.integers(1, 8),
        beam_width=st.integers(2, 3),
        n=st.integers(1, 2),
        ignore_eos=st.booleans(),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from([True, False, "never"]),
    )
    def arrive_beam_search(self, shared, own, **settings):
        prompt = [token % VOCAB_SIZE for token in range(shared)] + own
        self.add(Request(f"r{len(self.clients)}", prompt, SamplingParams(**settings)), [[]] * settings["n"])

    def add(self, request: Request, outputs: list[list[int]]) -> None:
        choices = {index: Choice(list(output)) for index, output in enumerate(outputs)}
        self.clients[request.request_id] = Client(request, choices)
        self.core._handle_command(AddRequest(request))

    @rule(which=st.integers(0, 10_000), indexes=st.sampled_from([(), (), (0,), (1,), (0, 2)]))
    def abort(self, which, indexes):
        if self.clients:
            self.core._handle_command(AbortRequest(f"r{which % len(self.clients)}", indexes))

    @rule(is_idle=st.booleans(), gives_up_host=st.booleans())
    def press(self, is_idle, gives_up_host):
        """What nobody holds is given up, as when other sequences had needed all blocks for a while."""
        for _ in range(300 if is_idle else 0):
            if not self.scheduler.has_work:
                break
            self.step_once()
        for pool in (self.memory.device_pool, self.memory.host_pool)[: 1 + gives_up_host]:
            for block_id in [pool.allocate() for _ in range(pool.num_free)]:
                pool.decref(block_id)
        self.step_once()

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self.step_once()

    def step_once(self) -> None:
        self.core.step()

    def receive(self, output: EngineCoreOutputs) -> None:
        self.ran_before = {sequence.id for sequence in self.scheduler.running}
        self.times_away += output.times_away
        for event in output.kv_events:
            entry = BlockStored(event.block_hash, event.tier)
            if isinstance(event, BlockStored):
                assert entry not in self.cached, "a block was stored twice"
                self.cached.add(entry)
            else:
                self.cached.remove(entry)
        for received in output.all_outputs():
            client = self.clients[received.request_id]
            assert not client.ended, "an output came after the end"
            client.ended = received.ends_request
            client.error = received.error
            if received.error is None:
                self.receive_choice(client, received)

    def receive_choice(self, client: Client, received: EngineCoreOutput) -> None:
        choice = client.choices[received.index]
        assert choice.finish_reason is None, "an output came after its choice ended"
        if received.prompt_logprobs:
            assert received.prompt_position == client.prompt_position
            for position, token in enumerate(received.prompt_logprobs, received.prompt_position):
                assert token.logprob == position
                assert token.top[0][0] == client.request.prompt_token_ids[position]
            client.prompt_position += len(received.prompt_logprobs)
        if received.token_ids:
            assert received.position == len(choice.token_ids), "a token was lost or repeated"
        choice.token_ids += received.token_ids
        choice.logprobs += len(received.logprobs)
        choice.finish_reason, choice.score = received.finish_reason, received.score
        if client.request.sampling.logprobs is not None:
            assert len(received.logprobs) == len(received.token_ids)

    def stops(self, params):
        return frozenset() if params.ignore_eos else frozenset({EOS})

    def expected(self, prompt, params, index):
        return expected_output(prompt, choice_seed(params.seed, index), params.max_tokens, self.stops(params))

    @invariant()
    def every_block_is_referenced_as_often_as_tables_hold_it(self):
        if not hasattr(self, "memory"):
            return
        self.memory.check_integrity()
        groups = [group for queue in self.queues() for s in queue for group in s.block_table.groups]
        referenced = [block for group in groups for block in group.block_ids[group.num_skipped :]]
        assert not any(any(group.block_ids[: group.num_skipped]) for group in groups)
        for block_id in set(referenced):
            assert referenced.count(block_id) == self.memory.device_pool._ref_counts[block_id]
        in_use = self.memory.device_pool.num_blocks - self.memory.device_pool.num_free
        assert in_use == len(set(referenced)), "a block in use is in no sequence's table"
        on_host = [block for group in groups for block in group.host_block_ids]
        transferred = self.memory.tiers.held_host_blocks
        assert self.memory.host_pool.num_blocks - self.memory.host_pool.num_free == len({*on_host, *transferred})
        known = set(self.cached)
        if self.memory.states is not None:
            assert self.memory.states.count_leaked(s.block_table for queue in self.queues() for s in queue) == 0
        for event in self.memory._publisher.events:
            (known.add if isinstance(event, BlockStored) else known.remove)(BlockStored(event.block_hash, event.tier))
        assert set(self.memory.stored_blocks()) == known, "the events disagree with what is cached"

    def queues(self):
        scheduler = self.scheduler
        return scheduler.running, scheduler.swapped, scheduler.preempted, scheduler.waiting

    @invariant()
    def queues_agree_with_their_sequences(self):
        if not hasattr(self, "memory"):
            return
        scheduler = self.scheduler
        for queue in (scheduler.waiting, scheduler.preempted):
            assert not any(s.block_table.num_blocks or s.num_computed_tokens or s.num_scheduled_tokens for s in queue)
        assert not any(s.block_table.num_blocks for s in scheduler.swapped)
        for queue in self.queues():
            assert queue.num_best_effort == sum(s.best_effort for s in queue)
            assert all(len(g.block_ids) == s.block_table.num_blocks for s in queue for g in s.block_table.groups)
        waiting = [s for s in scheduler.waiting if not s.best_effort]
        assert scheduler.waiting.uncomputed_tokens == sum(s.num_uncomputed_tokens for s in waiting)
        assert scheduler.waiting.num_regular == len(waiting)
        assert scheduler.running.num_seqs == sum(s.num_seqs for s in scheduler.running)
        assert scheduler.running.num_seqs <= scheduler.config.max_num_seqs
        assert len(scheduler.swapped) <= scheduler.config.max_swapped
        admitted = [s.request.lora for queue in self.queues()[:3] for s in queue if s.request.lora is not None]
        assert len(set(admitted)) <= scheduler.config.max_loras
        queued = [s.id for queue in self.queues() for s in queue]
        assert sorted(queued) == sorted(scheduler._registry.sequences), "a sequence is in no queue, or in two"

    @invariant()
    def whoever_is_not_back_where_it_was_is_absent(self):
        if not hasattr(self, "memory"):
            return
        for sequence in self.scheduler._registry.sequences.values():
            most = self.most_computed.setdefault(sequence.id, 0)
            off_device = sequence in self.scheduler.swapped or sequence in self.scheduler.preempted
            if off_device or sequence.num_computed_tokens < most:
                assert sequence.absence is not None
            elif sequence.num_computed_tokens > most and sequence.absence is not None:
                found = self.found.get(id(sequence.block_table), 0)  # others of the same tokens may have computed more
                assert sequence.num_computed_tokens <= max(sequence.absence.num_computed_tokens, found)
            self.most_computed[sequence.id] = max(most, sequence.num_computed_tokens)

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step_once()
        assert not self.scheduler.has_work, "the engine made no progress"
        for client in self.clients.values():
            self.check_client(client)
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks
        assert self.memory.host_pool.num_free == self.memory.host_pool.num_blocks
        if self.memory.states is not None:
            assert self.memory.states.device_pool.num_used == self.memory.states.host.pool.num_used == 0
        for tier in self.memory.tiers.asynchronous:
            assert tier.pool.num_free == tier.pool.num_blocks
        self.check_rows(self.scheduler.schedule())
        self.check_times_away()
        assert not self.in_use, "an executor keeps the state of a sequence that has ended"

    def check_times_away(self) -> None:
        """Absences are of preemptions, and one may be of several."""
        self.times_away += self.scheduler.take_times_away()
        preemptions = sum(self.scheduler.stats.preemptions.values())
        assert (len(self.times_away) > 0) == (preemptions > 0)
        assert len(self.times_away) <= preemptions
        mode = self.scheduler.config.preemption_mode
        if mode != "auto":
            reasons = {reason for _, reason in self.scheduler.stats.preemptions}
            assert mode == "swap" or not self.scheduler.stats.preemptions_by_swap
            assert PreemptionReason.CHEAPER not in reasons

    def check_client(self, client: Client) -> None:
        assert client.ended, "a request never ended"
        if client.error is not None:
            assert not self.fits(client.request) or self.may_run_out_of_blocks(client.request), client.error.message
            return
        if client.request.sampling.beam_width:
            self.check_beams(client)
            return
        for index, choice in client.choices.items():
            self.check_choice(client.request, index, choice)

    def fits(self, request: Request) -> bool:
        params, prompt = request.sampling, len(request.prompt_token_ids)
        delivered = max((len(each.token_ids) for each in request.all_resumed_outputs), default=0)
        fits = 0 < prompt <= self.limit - params.max_tokens and delivered < params.max_tokens
        if params.beam_width:
            own = self.memory.num_blocks_for(params.max_tokens) + 2
            num_blocks = prompt // self.memory.block_size + params.beam_width * own
            blocks_suffice = num_blocks * self.memory.num_groups <= self.memory.device_pool.num_blocks
            return fits and blocks_suffice and params.beam_width <= self.scheduler.config.max_num_seqs
        return fits and params.n <= self.scheduler.config.max_num_seqs

    def may_run_out_of_blocks(self, request: Request) -> bool:
        """Without the prefix cache, beams share no blocks after a preemption with recomputation."""
        return bool(request.sampling.beam_width) and not self.memory.prefix_caching

    def check_choice(self, request: Request, index: int, choice: Choice) -> None:
        expected = self.expected(list(request.prompt_token_ids), request.sampling, index)
        assert choice.finish_reason is not None
        if choice.finish_reason is FinishReason.ABORT:
            assert choice.token_ids == expected[: len(choice.token_ids)]
        else:
            assert choice.token_ids == expected
            is_full = len(expected) == request.sampling.max_tokens
            assert choice.finish_reason is (FinishReason.LENGTH if is_full else FinishReason.STOP)

    def check_beams(self, client: Client) -> None:
        if any(choice.finish_reason is FinishReason.ABORT for choice in client.choices.values()):
            assert not any(choice.token_ids for choice in client.choices.values())
            return
        params = client.request.sampling
        expected = expected_beams(list(client.request.prompt_token_ids), params, self.stops(params))
        for hypothesis, choice in zip(expected, client.choices.values(), strict=True):
            assert choice.token_ids == hypothesis.token_ids
            assert choice.score == hypothesis.score
            assert choice.finish_reason is hypothesis.finish_reason
