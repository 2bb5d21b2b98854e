"""The simulator and the real executor on the CPU see the same sequence of scheduler outputs on the same arrivals.

So what the simulator says about memory and order is what the engine does. Prompts and the structure of the outputs are
equal in both; only the drawn tokens differ. Where the prefix cache is on, requests are greedy: drawn by chance, two
outputs of one prompt may or may not begin alike, and share a block or not, as no simulator can know.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore
from quire_engine.core.executor import AsyncExecutor, AsyncModelOutput, Executor, Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.lora.manager import LoRAManager
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor
from quire_proto.sampling import SamplingParams

from tests.model.engine import BLOCK_SIZE, load
from tests.model.models import VOCAB_SIZE, SmallModels
from tests.support.rank_threads import ranks_are_threads

MAX_MODEL_LEN = 160
DEVICE_BLOCKS, HOST_BLOCKS = 60, 60
MAX_STEPS = 5000
Event = tuple[int, Request | str]
LORAS = [LoRARequest(str(number), number, "", bytes([number])) for number in (1, 2, 3)]


class Noting:
    """Another executor, and the scheduler outputs that it was given: step by step, unless it is a pipeline."""

    def __init__(self, executor: Executor, num_stages: int) -> None:
        self.depth = num_stages
        self.scheduler_outputs: list[Any] = []
        self._executor = executor
        self.kv_cache_config = executor.kv_cache_config
        self.rates = executor.rates

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self.scheduler_outputs.append(normal(scheduler_output))
        return self._executor.execute_model(scheduler_output)

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> AsyncModelOutput:
        self.scheduler_outputs.append(normal(scheduler_output))
        return cast("AsyncExecutor", self._executor).execute_model_async(scheduler_output)

    def close(self) -> None:
        pass


def normal(scheduler_output: SchedulerOutput) -> Any:
    """All of a scheduler output except which tokens were drawn."""
    chunks = [
        (
            chunk.sequence_id,
            chunk.start,
            chunk.end,
            tuple(chunk.block_ids),
            tuple(request.sequence_id for request in chunk.sample_requests),
            len(chunk.prompt_logprob_targets),
        )
        for chunk in scheduler_output.chunks
    ]
    return (
        chunks,
        scheduler_output.copies,
        scheduler_output.finished_seq_ids,
        scheduler_output.num_preempted,
    )


@dataclass(frozen=True)
class Scenario:
    """An engine's shape, and what arrives or is aborted before which step."""

    limits: SchedulerConfig
    capacity: KVCacheConfig
    rates: Rates
    prefix_caching: bool
    host_caching: bool
    events: tuple[Event, ...]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    prefix_caching = draw(st.booleans())
    limits = SchedulerConfig(
        max_num_seqs=draw(st.sampled_from([4, 16])),
        max_num_batched_tokens=draw(st.sampled_from([9, 40, 512])),
        max_model_len=MAX_MODEL_LEN,
        max_swapped=draw(st.sampled_from([1, 64])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "sjf", "priority"])),
        max_overtakes=draw(st.sampled_from([1, 64])),
        batching=draw(st.sampled_from(["continuous", "continuous", "static", "phased"])),
        swap_ahead=draw(st.sampled_from([0.0, 0.5, 0.9])),
        max_loras=draw(st.sampled_from([1, 2])),
        vocab_size=VOCAB_SIZE,
    )
    return Scenario(
        limits,
        KVCacheConfig(BLOCK_SIZE, draw(st.integers(11, 22)), draw(st.sampled_from([0, 4, HOST_BLOCKS])), 1000),
        Rates(1e3, draw(st.sampled_from([1e4, 1e9]))),
        prefix_caching,
        draw(st.booleans()),
        tuple(sorted(draw(events(prefix_caching)), key=lambda event: event[0])),
    )


@st.composite
def events(draw: st.DrawFn, greedy: bool) -> list[Event]:
    arrivals = draw(st.lists(st.tuples(st.integers(0, 40), requests(greedy)), min_size=2, max_size=12))
    named = [(step, replace(request, request_id=f"r{index}")) for index, (step, request) in enumerate(arrivals)]
    aborts = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 11)), max_size=3))
    return [*named, *((step, f"r{index}") for step, index in aborts)]


@st.composite
def requests(draw: st.DrawFn, greedy: bool) -> Request:
    shared, own = draw(st.sampled_from([0, 20, 40, 64])), draw(st.integers(1, 30))
    seed = draw(st.integers(0, 3))
    params = SamplingParams(
        temperature=0.0 if greedy else draw(st.sampled_from([0.0, 1.0])),
        seed=seed,
        max_tokens=draw(st.integers(1, 50)),
        n=draw(st.sampled_from([1, 1, 1, 3])),
        ignore_eos=True,
        logprobs=draw(st.sampled_from([None, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )
    # No prompt goes on where another one ends, nor with a run of one token: a model may go on like that, and one
    # request's output would be another one's prompt.
    first = 30 * seed + own - 1
    prompt = [3 + position % 50 for position in range(shared)] + [60 + (first + 29 * at) % 190 for at in range(own)]
    lora = draw(st.sampled_from([None, None, *LORAS]))
    return Request("", prompt, params, priority=draw(st.integers(0, 1)), lora=lora)


def scheduler_outputs(executor: Executor, scenario: Scenario) -> list[Any]:
    """Every scheduler output of a run to the end."""
    noting = Noting(executor, scenario.limits.num_stages)
    memory = KVCacheManager(
        scenario.capacity, prefix_caching=scenario.prefix_caching, host_caching=scenario.host_caching
    )
    core = EngineCore(Scheduler(scenario.limits, memory, rates=scenario.rates), noting, lambda _: None)
    due = list(scenario.events)
    for step in range(MAX_STEPS):
        while due and due[0][0] <= step:
            send(core.scheduler, due.pop(0)[1])
        if core.scheduler.has_work:
            core.step()
        elif not due:
            return noting.scheduler_outputs
    raise AssertionError("the engine made no progress")


def send(scheduler: Scheduler, event: Request | str) -> None:
    if isinstance(event, str):
        scheduler.abort_request(event)
    else:
        scheduler.add_request(event)


def read_no_folders(patch: pytest.MonkeyPatch) -> None:
    """Every adapter is one that changes nothing: steps do not depend on what is computed in them."""
    patch.setattr(LoRAManager, "add", lambda self, lora: self._held.update({lora.lora_int_id: self._layers.shard({})}))


@pytest.fixture(scope="module", params=[1, 2], ids=["whole", "pipeline"])
def real(small_models: SmallModels, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    """The model in so many stages."""
    with pytest.MonkeyPatch.context() as patch:
        ranks_are_threads(patch)
        settings = {"enable_lora": True, "max_loras": 2, "pipeline_parallel_size": request.param}
        executor = load(small_models.folder("llama3"), DEVICE_BLOCKS, HOST_BLOCKS, **settings)
        read_no_folders(patch)
        yield executor
    executor.close()


@given(scenario=scenarios(), seed=st.integers(0, 5))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_simulator_and_the_real_executor_are_given_the_same_steps(
    real: TorchExecutor, scenario: Scenario, seed: int
) -> None:
    scenario = replace(scenario, limits=scenario.limits.model_copy(update={"num_stages": real.depth}))
    simulated = SimulatedExecutor(
        scenario.capacity,
        PRESETS["cpu"].latency,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        num_stages=real.depth,
        sleep=lambda _: None,
    )
    assert scheduler_outputs(simulated, scenario) == scheduler_outputs(real, scenario)


def test_the_comparison_sees_a_difference_of_one_block(real: TorchExecutor) -> None:
    request = Request("r0", [5] * 40, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    scenario = Scenario(limits, KVCacheConfig(BLOCK_SIZE, 12, 0), Rates(1, 1), True, True, ((0, request),))
    less = replace(scenario, limits=limits.model_copy(update={"max_num_batched_tokens": 39}))
    simulated = SimulatedExecutor(scenario.capacity, PRESETS["cpu"].latency, sleep=lambda _: None)
    assert scheduler_outputs(simulated, scenario) == scheduler_outputs(real, scenario) != scheduler_outputs(real, less)
