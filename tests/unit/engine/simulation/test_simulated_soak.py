"""A soak: very many simulated requests of every kind, aborted at every moment, on engines of every shape.

Whatever happens, each choice ends once, no token is lost or repeated, and whenever an engine is idle all of its memory
is back. `make soak` runs 100,000 requests step by step and as many with a step ahead, the usual tests a part of them.
"""

import random
from dataclasses import dataclass, field

import pytest
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput, count_leaked_blocks
from quire_engine.core.request import Request, ResumedOutput
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_engine.simulation.step_policies import STEP_POLICIES
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams

VOCAB_SIZE = 60
EOS = 7
MAX_MODEL_LEN = 96
REQUESTS_PER_ENGINE = 250
LATENCY = PRESETS["cpu"].latency


@dataclass
class Client:
    """What one client has sent and seen."""

    request: Request
    refused: bool = False
    aborted: bool = False
    ended: bool = False
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    error: QuireError | None = None

    def hear(self, output: EngineCoreOutput) -> None:
        assert not self.ended, "an output came after the end"
        assert output.index not in self.reasons, "a choice went on after its end"
        tokens = self.token_ids.setdefault(output.index, self.delivered(output.index))
        if output.token_ids and not self.request.sampling.beam_width:
            assert output.position == len(tokens), "a token was lost or repeated"
        tokens += output.token_ids
        if output.finish_reason is not None:
            self.reasons[output.index] = output.finish_reason
        self.error = self.error or output.error
        self.ended = output.ends_request

    def delivered(self, index: int) -> list[int]:
        return next(([*one.token_ids] for one in self.request.resumed_outputs if one.index == index), [])

    def check(self, shares: bool) -> None:
        """How it all ended. ``shares``: equal prefixes share their blocks."""
        assert self.ended, "a request never ended"
        params = self.request.sampling
        if self.error is not None:
            # Beams that start over share their prompt again only through the prefix cache.
            assert self.refused or (self.error.code is ErrorCode.OVERLOADED and params.beam_width and not shares)
            return
        if self.aborted:
            return
        finished = sum(one.finished for one in self.request.resumed_outputs)
        assert len(self.reasons) + finished == (params.n if params.beam_width else params.num_sequences)
        for index, reason in self.reasons.items():
            length = len(self.token_ids[index])
            assert reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert params.min_tokens <= length <= params.max_tokens
            assert reason is FinishReason.STOP or length == params.max_tokens


class Soak:
    """One engine of a random shape, its clients, and the chaos between them."""

    def __init__(self, seed: int, depth: int = 1) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        size = choose((1, 4, 4, 16))
        tokens = self.random.randint(MAX_MODEL_LEN, 2 * MAX_MODEL_LEN)
        capacity = KVCacheConfig(size, 1 + -(-tokens // size), choose((0, 20, 100, 600)) // size, block_bytes=1 << 10)
        limits = SchedulerConfig(
            max_num_seqs=choose((4, 16, 16, 64)),
            max_num_batched_tokens=choose((5, 32, 256, 256)),
            max_model_len=MAX_MODEL_LEN,
            max_waiting=choose((40, 1000, 1000)),
            max_swapped=choose((0, 2, 64)),
            scheduling_policy=choose(("fcfs", "sjf", "priority")),
            max_overtakes=choose((1, 4, 64)),
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
        )
        self.memory = KVCacheManager(capacity, prefix_caching=choose((True, True, False)))
        rates = Rates(1e3, choose((1e3, 1e9, 1e9)))
        batching = choose(("continuous", "continuous", "static", "phased"))
        self.scheduler = Scheduler(limits, self.memory, rates=rates, step_policy=STEP_POLICIES[batching])
        executor = Interrupted(self, capacity, seed, depth)
        self.core = EngineCore(self.scheduler, executor, self.receive)
        self.clients: dict[str, Client] = {}
        self.live: dict[str, None] = {}
        self.idles = 0
        self.stem = [self.random.randrange(VOCAB_SIZE) for _ in range(MAX_MODEL_LEN)]

    def run(self, requests: int) -> None:
        """So many requests in bursts; the engine is left to run dry after some of them."""
        while len(self.clients) < requests:
            for _ in range(min(self.random.randint(1, 30), requests - len(self.clients))):
                self.arrive()
            patience = self.random.choice((1, 10, 100, 10_000))
            self.step_while_working(patience)
        self.step_while_working(100_000)
        assert not self.scheduler.has_work, "the engine made no progress"
        for client in self.clients.values():
            client.check(self.memory.prefix_caching)

    def step_while_working(self, steps: int) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                self.check_idle()
                return
            self.abort_some(0.05)
            self.core.step()

    def arrive(self) -> None:
        request = self.make_request(f"r{len(self.clients)}")
        client = self.clients[request.request_id] = Client(request)
        try:
            self.scheduler.add_request(request)
        except QuireError as error:
            client.error, client.refused, client.ended = error, True, True
            self.check_refusal(error)
        else:
            self.live[request.request_id] = None

    def check_refusal(self, error: QuireError) -> None:
        is_full = len(self.scheduler.waiting) >= self.scheduler.config.max_waiting
        assert error.code is ErrorCode.OVERLOADED if is_full else error.param in ("n", "best_of", "beam_width")

    def make_request(self, request_id: str) -> Request:
        shared, own = self.random.randint(0, 20), self.random.randint(1, 12)
        prompt = self.stem[:shared] + [self.random.randrange(VOCAB_SIZE) for _ in range(own)]
        params = self.make_params()
        return Request(
            request_id,
            prompt,
            params,
            cache_salt=self.random.choice((b"", b"", b"other")),
            resumed_outputs=self.make_history(params),
            priority=self.random.randint(0, 2),
        )

    def make_params(self) -> SamplingParams:
        choose = self.random.choice
        max_tokens = self.random.randint(1, choose((4, 20, 60)))
        common = {
            "seed": self.random.randrange(1 << 64),
            "max_tokens": max_tokens,
            "min_tokens": self.random.randint(0, max_tokens) if self.random.random() < 0.2 else 0,
            "ignore_eos": choose((True, False)),
            "stop_token_ids": choose(((), (), (1, 2, 3))),
            "prompt_logprobs": choose((None, None, None, 2)),
        }
        kind = self.random.random()
        if kind < 0.1:
            width = self.random.randint(2, 4)
            early = choose((True, False, "never"))
            return SamplingParams(**common, n=self.random.randint(1, width), beam_width=width, early_stopping=early)
        n = self.random.randint(2, 4) if kind < 0.3 else 1
        best_of = n + self.random.randint(1, 2) if kind < 0.15 else 0
        return SamplingParams(
            **common, n=n, best_of=best_of, temperature=choose((0.0, 1.0)), logprobs=choose((None, None, 3))
        )

    def make_history(self, params: SamplingParams) -> tuple[ResumedOutput, ...]:
        """What an earlier attempt delivered, of some requests."""
        if params.beam_width or self.random.random() > 0.05:
            return ()
        return tuple(
            ResumedOutput(index, [5] * self.random.randint(0, params.max_tokens - 1), self.random.random() < 0.3)
            for index in range(params.num_sequences - 1)
        )

    def abort_some(self, probability: float) -> None:
        """Aborts a request in whatever state it is, and now and then one that has ended or never was."""
        if self.random.random() < probability:
            some = self.random.choice(list(self.live) or ["nobody"])
            self.abort(self.random.choice((some, some, some, some, "r0", "nobody")))

    def abort(self, request_id: str) -> None:
        client = self.clients.get(request_id)
        if client is not None:
            client.aborted = True
        choices = self.random.choice(((), (), (0,), (1, 2), (0, 63)))
        self.scheduler.abort_request(request_id, choices)

    def receive(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            client = self.clients[output.request_id]
            client.hear(output)
            if client.ended:
                del self.live[output.request_id]

    def check_idle(self) -> None:
        """Nothing runs: every block is free, and both pools are whole."""
        self.idles += 1
        assert not self.live, "a request was forgotten"
        self.memory.check_integrity()
        for pool in (self.memory.device_pool, self.memory.host_pool):
            assert pool.num_free == pool.num_blocks, "a block was lost"

    def check_busy(self) -> None:
        """Something runs: every block that is in use has somebody who uses it."""
        queues = (self.scheduler.running, self.scheduler.swapped)
        assert count_leaked_blocks(self.memory, (s.block_table for queue in queues for s in queue)) == 0


class Interrupted(SimulatedExecutor):
    """Aborts come before a step's work and after it too: between its plan and its commit."""

    def __init__(self, soak: Soak, capacity: KVCacheConfig, seed: int, depth: int) -> None:
        super().__init__(capacity, LATENCY, seed=seed, vocab_size=VOCAB_SIZE, depth=depth, sleep=lambda _: None)
        self._soak = soak

    def compute(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self._soak.abort_some(0.03)
        model_output = super().compute(scheduler_output)
        self._soak.abort_some(0.03)
        self._soak.check_busy()
        return model_output


def soak(requests: int, depth: int) -> list[Soak]:
    engines = [Soak(seed, depth) for seed in range(-(-requests // REQUESTS_PER_ENGINE))]
    for engine in engines:
        engine.run(REQUESTS_PER_ENGINE)
    return engines


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("requests", [1_500, pytest.param(100_000, marks=pytest.mark.soak)])
def test_whatever_is_aborted_when_all_requests_end_once_and_all_memory_comes_back(requests: int, depth: int) -> None:
    engines = soak(requests, depth)
    assert sum(len(engine.clients) for engine in engines) == requests
    assert sum(engine.idles for engine in engines) > requests / 100, "the engines were hardly ever idle"
    statistics = [engine.scheduler.stats for engine in engines]
    assert sum(one.preemptions_by_swap for one in statistics) > 0
    assert sum(one.preemptions_by_recompute for one in statistics) > 0
    ends = [client for engine in engines for client in engine.clients.values()]
    assert 0.03 < sum(client.aborted for client in ends) / requests < 0.8
