"""Searches that compete for a small pool, with each other and with sampled outputs: all are right, none hangs."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.outputs import EngineCoreOutput
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams, choice_seed

from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor, expected_beams, expected_output

SEARCHES = st.builds(
    SamplingParams,
    beam_width=st.integers(2, 4),
    max_tokens=st.integers(6, 16),
    n=st.just(2),
    ignore_eos=st.just(True),
    early_stopping=st.just("never"),
    length_penalty=st.just(2.0),
)
SAMPLES = st.builds(
    SamplingParams, n=st.integers(1, 2), max_tokens=st.integers(6, 20), seed=st.integers(0, 9), ignore_eos=st.just(True)
)
CACHING = st.sampled_from(["none", "device", "host"])
RATES = st.sampled_from([Rates(1e3, 1e9), Rates(1e9, 1.0), Rates(1e3, 1e4)])


class Engine:
    """Runs requests to the end on a pool of so many blocks."""

    def __init__(self, capacity: KVCacheConfig, caching: str, rates: Rates, **limits: int) -> None:
        config = SchedulerConfig(max_model_len=60, vocab_size=VOCAB_SIZE, **limits)
        self.memory = KVCacheManager(capacity, prefix_caching=caching != "none", host_caching=caching == "host")
        self.scheduler = Scheduler(config, self.memory, rates=rates)
        self.core = EngineCore(self.scheduler, PagedExecutor(capacity), self.receive)
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def receive(self, step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                self.scheduler.add_request(request)
            except QuireError as refusal:
                assert refusal.code is ErrorCode.INVALID  # noqa: PT017 - it does not fit, and is left out
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.core.step()
        assert not self.scheduler.has_work, "the engine made no progress"
        self.memory.check_integrity()
        assert self.memory.device_pool.num_free == self.memory.device_pool.num_blocks

    def result(self, request: Request) -> list[tuple[list[int], float | None]] | ErrorCode:
        outputs = self.outputs[request.request_id]
        if outputs[-1].error is not None:
            return outputs[-1].error.code
        choices: list[tuple[list[int], float | None]] = []
        for index in range(request.sampling.n):
            own = [output for output in outputs if output.index == index]
            choices.append(([token for output in own for token in output.token_ids], own[-1].score))
        return choices


def expected(request: Request) -> list[tuple[list[int], float | None]]:
    prompt, params = list(request.prompt_token_ids), request.sampling
    if params.beam_width:
        return [(beam.token_ids, beam.score) for beam in expected_beams(prompt, params, frozenset())]
    seeds = [choice_seed(params.seed, index) for index in range(params.n)]
    return [(expected_output(prompt, seed, params.max_tokens), None) for seed in seeds]


@given(
    st.lists(SEARCHES | SAMPLES, min_size=2, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.integers(24, 90),
    st.sampled_from([0, 10, 90]),
    st.sampled_from([5, 9, 64]),
    CACHING,
    RATES,
)
@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
def test_beam_searches_under_memory_pressure_find_the_same_as_alone(
    params: list[SamplingParams], size: int, tokens: int, host: int, budget: int, caching: str, rates: Rates
) -> None:
    capacity = KVCacheConfig(size, 1 + tokens // size, host, block_bytes=100)
    engine = Engine(capacity, caching, rates, max_num_batched_tokens=budget, max_num_seqs=8)
    requests = [Request(str(i), list(range(i, i + 5 + i % 3)), each) for i, each in enumerate(params)]
    engine.run(requests)
    for request in requests:
        if request.request_id not in engine.outputs:
            continue
        result = engine.result(request)
        if result is ErrorCode.OVERLOADED:
            assert request.sampling.beam_width, "an output that fits alone was given up"
            assert caching == "none", "beams share what is cached, so they fit"
        else:
            assert result == expected(request)


def search(width: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        beam_width=width, max_tokens=max_tokens, ignore_eos=True, early_stopping="never", length_penalty=2.0
    )


def test_the_beams_of_a_search_are_preempted_together() -> None:
    engine = Engine(KVCacheConfig(2, 28, 90, block_bytes=1), "device", Rates(1.0, 1e9))
    requests = [Request("old", [1] * 26, SamplingParams(max_tokens=26, ignore_eos=True))]
    requests += [Request("search", [2, 3, 4], search(3, 12))]
    for request in requests:
        engine.scheduler.add_request(request)
    scheduler = engine.scheduler
    for _ in range(100):
        if scheduler.swapped or scheduler.preempted:
            break
        engine.core.step()
    away = [*scheduler.swapped, *scheduler.preempted]
    assert [sequence.request.request_id for sequence in away] == ["search"] * 3
    assert [sequence.request.request_id for sequence in scheduler.running] == ["old"]
    engine.run([])
    assert [engine.result(request) for request in requests] == [expected(request) for request in requests]


class Forbidding(PagedExecutor):
    """Leaves a beam one token to go on with, and none after three."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        model_output = super().execute_model(scheduler_output)
        ends = [chunk.end for chunk in scheduler_output.chunks if chunk.num_draws]
        for draw, end in enumerate(ends):
            allowed, found = 1 if end < 8 else 0, model_output.candidates[draw]
            del found.token_ids[allowed:], found.logprobs[allowed:]
        return model_output


def test_a_search_that_finds_fewer_than_n_outputs_ends_with_a_typed_error() -> None:
    engine = Engine(KVCacheConfig(4, 60, 0), "device", Rates(1.0, 1.0))
    engine.core = EngineCore(engine.scheduler, Forbidding(KVCacheConfig(4, 60, 0)), engine.receive)
    request = Request("search", [1] * 5, search(3, 8))
    engine.run([request])
    assert engine.result(request) is ErrorCode.INVALID
    assert engine.outputs["search"][-1].ends_request


def test_a_search_that_does_not_fit_alone_ends_with_a_typed_error_and_others_continue() -> None:
    # Without the prefix cache, beams that are computed again share nothing, and these do not fit so.
    engine = Engine(KVCacheConfig(1, 61, 0), "none", Rates(1.0, 1.0), max_num_batched_tokens=64)
    requests = [Request("old", [1] * 30, SamplingParams(max_tokens=25, ignore_eos=True))]
    requests += [Request("search", [2] * 22, search(3, 8)), Request("late", [4] * 5, SamplingParams(ignore_eos=True))]
    engine.run(requests)
    assert engine.result(requests[1]) is ErrorCode.OVERLOADED
    assert engine.scheduler.stats.out_of_memory == 1
    assert [engine.result(requests[i]) for i in (0, 2)] == [expected(requests[i]) for i in (0, 2)]
