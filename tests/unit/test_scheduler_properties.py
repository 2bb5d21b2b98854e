"""Whatever arrives, is aborted, finishes or is preempted: outputs are right and every block comes back."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from quire_engine.core import Abort, Add, EngineCore, StepOutput
from quire_engine.kv.capacity import KvCapacity
from quire_engine.kv.events import Stored
from quire_engine.kv.memory import KvMemory
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.plan import StepPlan, StepResult
from quire_engine.scheduling.scheduler import Scheduler
from quire_proto.sampling import FinishReason, SamplingParams

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor, expected_output

EOS = 7
MAX_MODEL_LEN = 40


@dataclass
class Client:
    """What one client sent and has seen."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class CheckedExecutor(PagedExecutor):
    """Shows each plan to a check before it runs."""

    def __init__(self, capacity: KvCapacity, check: Callable[[StepPlan], None]) -> None:
        super().__init__(capacity)
        self._check = check

    def run(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        return super().run(plan)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(30, 70),
        host_blocks=st.sampled_from([0, 80, 3, 80]),
        budget=st.sampled_from([3, 7, 64]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        prefix_caching=st.booleans(),
    )
    def start(self, block_size, pool_tokens, host_blocks, budget, max_num_seqs, prefix_caching):
        capacity = KvCapacity(block_size, 1 + pool_tokens // block_size, host_blocks)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
        )
        self.memory = KvMemory(capacity, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(config, self.memory)
        self.core = EngineCore(self.scheduler, CheckedExecutor(capacity, self.check_plan), self.receive)
        self.clients: dict[str, Client] = {}
        self.cached: set[bytes] = set()
        self.ran_before: set[int] = set()
        self.limit = min(MAX_MODEL_LEN, self.memory.device.num_blocks * block_size)

    def check_plan(self, plan: StepPlan) -> None:
        """A step that preempts takes nobody in."""
        if plan.preempted:
            assert not plan.copies_in
            assert all(chunk.sequence_id in self.ran_before for chunk in plan.chunks)
        self.ran_before = {sequence.id for sequence in self.scheduler.running}

    @rule(
        count=st.integers(1, 4),
        shared=st.sampled_from([0, 3, 6, 9]),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6),
        max_tokens=st.integers(1, 25),
        ignore_eos=st.sampled_from([True, True, False]),
        delivered=st.integers(0, 3),
    )
    def arrive(self, count, shared, own, max_tokens, ignore_eos, delivered):
        for seed in range(count):
            self.arrive_one(shared, own, max_tokens, seed, ignore_eos, delivered)

    def arrive_one(self, shared, own, max_tokens, seed, ignore_eos, delivered):
        prompt = [token % VOCAB_SIZE for token in range(shared)] + own
        params = SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=ignore_eos)
        output = self.expected(prompt, params)[:delivered] if prompt else []
        request = Request(f"r{len(self.clients)}", prompt, params, output)
        self.clients[request.request_id] = Client(request, list(output))
        self.core._carry_out(Add(request))

    @rule(which=st.integers(0, 10_000))
    def abort(self, which):
        if self.clients:
            self.core._carry_out(Abort(f"r{which % len(self.clients)}"))

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self.core.step()

    def receive(self, output: StepOutput) -> None:
        for event in output.kv_events:
            if isinstance(event, Stored):
                assert event.block_hash not in self.cached, "a block was stored twice"
                self.cached.add(event.block_hash)
            else:
                self.cached.remove(event.block_hash)
        for news in output.outputs:
            client = self.clients[news.request_id]
            assert client.finish_reason is None, "an output came after the end"
            if news.token_ids:
                assert news.position == len(client.token_ids), "a token was lost or repeated"
            client.token_ids += news.token_ids
            client.finish_reason = news.finish_reason

    def expected(self, prompt, params):
        stops = frozenset() if params.ignore_eos else frozenset({EOS})
        return expected_output(prompt, params.seed, params.max_tokens, stops)

    @invariant()
    def every_block_is_in_one_place(self):
        if not hasattr(self, "memory"):
            return
        self.memory.check()
        held = [b for queue in self.queues() for s in queue for b in s.table.block_ids]
        assert all((count := held.count(b)) == self.memory.device._references[b] for b in set(held)), count
        in_use = self.memory.device.num_blocks - self.memory.device.num_free
        assert in_use == len(set(held)), "a block is held by nobody"
        on_host = [b for queue in self.queues() for s in queue for b in s.table.host_block_ids]
        assert self.memory.host.num_blocks - self.memory.host.num_free == len(set(on_host))
        known = set(self.cached)
        for event in self.memory._events:
            (known.add if isinstance(event, Stored) else known.remove)(event.block_hash)
        assert set(self.memory.device.names()) == known, "routers are told something else than what is cached"

    def queues(self):
        return self.scheduler.running, self.scheduler.swapped, self.scheduler.waiting

    @invariant()
    def queues_agree_with_their_sequences(self):
        if not hasattr(self, "memory"):
            return
        assert not any(s.table.block_ids or s.num_computed for s in self.scheduler.waiting)
        assert not any(s.table.block_ids for s in self.scheduler.swapped)
        assert self.scheduler.waiting.uncomputed_tokens == sum(s.num_uncomputed for s in self.scheduler.waiting)
        assert len(self.scheduler.running) <= self.scheduler.config.max_num_seqs

    def teardown(self):
        if not hasattr(self, "memory"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work and not self.core._refused:
                break
            self.core.step()
        assert not self.scheduler.has_work, "the engine made no progress"
        for client in self.clients.values():
            self.check_client(client)
        self.memory.check()
        assert self.memory.device.num_free == self.memory.device.num_blocks
        assert self.memory.host.num_free == self.memory.host.num_blocks

    def check_client(self, client: Client) -> None:
        request = client.request
        assert client.finish_reason is not None, "a request never ended"
        if client.finish_reason is FinishReason.ERROR:
            fits = 0 < len(request.prompt_token_ids) <= self.limit - request.sampling.max_tokens
            assert not fits or len(request.output_token_ids) >= request.sampling.max_tokens
            return
        expected = self.expected(list(request.prompt_token_ids), request.sampling)
        if client.finish_reason is FinishReason.ABORT:
            assert client.token_ids == expected[: len(client.token_ids)]
        else:
            assert client.token_ids == expected
            is_full = len(expected) == request.sampling.max_tokens
            assert client.finish_reason is (FinishReason.LENGTH if is_full else FinishReason.STOP)


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase
