"""A random engine, random requests and aborts, from a seed: to be run on either kind of executor and compared."""

from dataclasses import dataclass, field
from random import Random

from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AbortRequest, AddRequest, EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request, ResumedOutput
from quire_engine.core.scheduler import Scheduler
from quire_engine.simulation.step_policies import STEP_POLICIES
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor

EOS = 7
MAX_MODEL_LEN = 40
MAX_ROUNDS = 5000


@dataclass
class Choice:
    """All that was told of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None

    def hear(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None, "a choice went on after its end"
        assert not output.token_ids or output.position == len(self.token_ids) or output.score is not None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason, self.score = output.finish_reason, output.score

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason is FinishReason.ABORT


@dataclass
class Answer:
    """All that was told of one request."""

    choices: dict[int, Choice]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: ErrorCode | None = None
    ended: bool = False

    def hear(self, output: EngineCoreOutput) -> None:
        assert not self.ended, "an output came after the end"
        self.ended = output.ends_request
        self.prompt_logprobs += output.prompt_logprobs
        self.error = output.error.code if output.error else None
        if self.error is None:
            self.choices[output.index].hear(output)

    @property
    def is_aborted(self) -> bool:
        return any(choice.is_aborted for choice in self.choices.values())


class Scenario:
    """What is decided before a run: the engine's shape, and who arrives and is aborted in which round."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.capacity = KVCacheConfig(
            block_size := random.choice((1, 2, 4)),
            1 + random.randint(MAX_MODEL_LEN, 60) // block_size,
            random.choice((0, 20, 200)) // block_size,
            block_bytes=100,
        )
        self.limits = SchedulerConfig(
            max_num_seqs=random.choice((4, 8, 8)),
            max_num_batched_tokens=random.choice((3, 9, 64)),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
            scheduling_policy=random.choice(("fcfs", "sjf", "priority")),
            max_overtakes=random.choice((1, 4)),
            max_swapped=random.choice((1, 64, 64)),
            swap_ahead=random.choice((0.0, 0.1, 0.8)),
            preemption_mode=random.choice(("auto", "auto", "swap", "recompute")),
        )
        self.batching = random.choice(("continuous", "continuous", "static", "phased"))
        self.caching = random.choice(("none", "device", "host"))
        self.rates = random.choice((Rates(1.0, 1e9), Rates(1.0, 1e9), Rates(1e9, 1.0)))
        self.arrivals: dict[int, list[Request]] = {}
        self.aborts: dict[int, list[AbortRequest]] = {}
        for index in range(random.randint(3, 16)):
            self._plan_request(f"r{index}", random.randint(0, 15))

    def _plan_request(self, request_id: str, arrival: int) -> None:
        random = self.random
        shared, own = random.randint(0, 9), random.randint(1, 6)
        prompt = [*range(shared), *(random.randrange(VOCAB_SIZE) for _ in range(own))]
        params = self._params()
        request = Request(
            request_id, prompt, params, resumed_outputs=self._history(params), priority=random.randint(0, 2)
        )
        self.arrivals.setdefault(arrival, []).append(request)
        if random.random() < 0.25:
            abort = AbortRequest(request_id, random.choice(((), (), (0,), (1,))))
            self.aborts.setdefault(arrival + random.randint(0, 20), []).append(abort)

    def _params(self) -> SamplingParams:
        choose, random = self.random.choice, self.random
        max_tokens = random.randint(1, choose((2, 8, 24)))
        common = {
            "max_tokens": max_tokens,
            "min_tokens": choose((0, 0, random.randint(0, max_tokens))),
            "ignore_eos": choose((True, False)),
            "stop_token_ids": choose(((), (1, 2, 3), tuple(range(8, 24)))),
            "prompt_logprobs": choose((None, None, 0)),
        }
        kind = random.random()
        if kind < 0.15:
            stops = {"stop_token_ids": (), "max_tokens": min(max_tokens, 8), "min_tokens": 0}
            early = choose((True, False, "never"))
            return SamplingParams(**{**common, **stops}, n=random.randint(1, 2), beam_width=2, early_stopping=early)
        n = random.randint(2, 3) if kind < 0.4 else 1
        best_of = n + 1 if kind < 0.25 else 0
        return SamplingParams(**common, n=n, best_of=best_of, seed=random.randint(0, 9), logprobs=choose((None, 0)))

    def _history(self, params: SamplingParams) -> tuple[ResumedOutput, ...]:
        if params.beam_width or self.random.random() > 0.15:
            return ()
        length = self.random.randint(0, params.max_tokens - 1)
        return tuple(ResumedOutput(index, [5] * length) for index in range(params.num_sequences))


class Run:
    """A scenario on one executor, to the end: every request is answered, and every block comes back."""

    def __init__(self, scenario: Scenario, executor: PagedExecutor) -> None:
        self.answers: dict[str, Answer] = {}
        memory = KVCacheManager(
            scenario.capacity, prefix_caching=scenario.caching != "none", host_caching=scenario.caching == "host"
        )
        step_policy = STEP_POLICIES[scenario.batching]
        self.scheduler = Scheduler(scenario.limits, memory, rates=scenario.rates, step_policy=step_policy)
        self.core = EngineCore(self.scheduler, executor, self._receive)
        self.prepare()
        last = max([*scenario.arrivals, *scenario.aborts])
        for number in range(MAX_ROUNDS):
            for request in scenario.arrivals.get(number, ()):
                self._add(request)
            for abort in scenario.aborts.get(number, ()):
                self.core._handle_command(abort)
            if number > last and not self.scheduler.has_work:
                break
            self.core.step()
        assert not self.scheduler.has_work, "the engine made no progress"
        assert all(answer.ended for answer in self.answers.values()), "a request never ended"
        memory.check_integrity()
        assert all(pool.num_free == pool.num_blocks for pool in (memory.device_pool, memory.host_pool)), (
            "a block was lost"
        )

    def prepare(self) -> None:
        """Called before the first request."""

    def _add(self, request: Request) -> None:
        history = {one.index: [*one.token_ids] for one in request.all_resumed_outputs}
        choices = {index: Choice(history.get(index, [])) for index in range(request.sampling.num_returned)}
        self.answers[request.request_id] = Answer(choices)
        self.core._handle_command(AddRequest(request))

    def _receive(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            self.answers[output.request_id].hear(output)
