"""The simulator and the real executor on the CPU see the same sequence of scheduler outputs on the same arrivals,
whatever the scheduler's settings are: so what the simulator says about memory and order is what the engine does.

Prompts and the structure of the outputs are equal in both; only the drawn tokens differ. Where the prefix cache is on,
requests are greedy: drawn by chance, two outputs of one prompt may or may not begin alike, and share a block or not, as
no simulator can know.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.config import EngineArgs
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.executor import AsyncExecutor, AsyncModelOutput, Executor, Rates
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.core.lora import LoRARequest
from quire_engine.core.outputs import SchedulerStats
from quire_engine.core.request import Request
from quire_engine.core.request import Sequence as EngineSequence
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import BeamCandidates, ModelOutput, SchedulerOutput
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.lora.manager import LoRAManager
from quire_engine.simulation.config import PRESETS
from quire_engine.simulation.simulated_executor import SimulatedExecutor, uniform
from quire_engine.simulation.simulator import VirtualClock
from quire_engine.simulation.step_policies import STEP_POLICIES, Batching
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams

from tests.model.engine import BLOCK_SIZE, load
from tests.model.models import VOCAB_SIZE, small_model
from tests.support.guessing import Guesser
from tests.support.rank_threads import ranks_are_threads

MAX_MODEL_LEN = 160
DEVICE_BLOCKS, HOST_BLOCKS = 60, 60
MAX_STEPS = 5000
NUM_SCENARIOS = 40
LATENCY = PRESETS["cpu"].latency
LORAS = [LoRARequest(str(number), number, "", bytes([number])) for number in (1, 2, 3)]
# What executes steps, by the settings of a real engine.
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "overlapping": {"async_scheduling": True},
    "two stages": {"pipeline_parallel_size": 2},
    "three stages": {"pipeline_parallel_size": 3},
}


@dataclass(frozen=True)
class Abort:
    """Ends a request, or some of its choices."""

    request_id: str
    indexes: tuple[int, ...] = ()


Event = tuple[int, Request | Abort]


@dataclass(frozen=True)
class Disk:
    """A disk whose transfers last for so many rounds, and seem to take so many seconds each."""

    num_slots: int
    rounds: int
    block_seconds: float


@dataclass(frozen=True)
class Scenario:
    """An engine's shape, and what arrives or is aborted before which step. With ``guesses`` tokens are guessed, from
    that seed.
    """

    limits: SchedulerConfig
    capacity: KVCacheConfig
    rates: Rates
    prefix_caching: bool
    host_caching: bool
    events: tuple[Event, ...]
    depth: int = 1
    batching: Batching = "continuous"
    disk: Disk | None = None
    guesses: int | None = None

    def alone(self) -> "Scenario":
        """The same requests, with no aborts and no guesses."""
        requests = tuple(event for event in self.events if isinstance(event[1], Request))
        return replace(self, events=requests, guesses=None)


def make_scenario(seed: int, kind: str) -> Scenario:
    """A random engine of this kind, to which few prompts come again and again."""
    random = Random(seed)
    choose = random.choice
    prefix_caching, host_caching = choose((False, True, True, True)), choose((False, True, True))
    host_blocks = choose((0, 4, 6, 12, HOST_BLOCKS))
    num_stages = KINDS[kind].get("pipeline_parallel_size", 1)
    drawn: dict[str, Any] = {
        "max_num_seqs": choose((4, 16)),
        "max_num_batched_tokens": choose((9, 40, 512)),
        "max_model_len": MAX_MODEL_LEN,
        "max_step_seconds": choose((0.0, 0.0, None, 0.01)),
        "max_swapped": choose((1, 64)),
        "preemption_mode": choose(("auto", "auto", "swap", "recompute")),
        "scheduling_policy": choose(("fcfs", "sjf", "priority")),
        "max_overtakes": choose((1, 64)),
    }
    batching: Batching = choose(("continuous", "continuous", "static", "phased"))
    limits = SchedulerConfig(
        **drawn,
        swap_ahead=choose((0.0, 0.3, 0.8)),
        max_loras=choose((1, 2)),
        vocab_size=VOCAB_SIZE,
        num_stages=num_stages,
    )
    has_disk = prefix_caching and host_caching and host_blocks > 0
    disk = Disk(choose((2, 8, 100)), choose((1, 3, 20)), choose((0.0, 0.001, 0.006)))
    return Scenario(
        limits,
        KVCacheConfig(BLOCK_SIZE, random.randint(11, 18), host_blocks, 1000),
        Rates(1e3, choose((3e4, 1e6, 1e9))),
        prefix_caching,
        host_caching,
        make_events(random, greedy=prefix_caching),
        depth=2 if kind == "overlapping" else num_stages,
        batching=batching,
        disk=disk if has_disk else None,
        guesses=seed if kind == "whole" and choose((False, True)) else None,
    )


def make_events(random: Random, *, greedy: bool) -> tuple[Event, ...]:
    some = [make_request(random, greedy=greedy) for _ in range(random.randint(2, 8))]
    events: list[Event] = []
    last = random.choice((20, 100, 300))
    for index in range(random.randint(2, 25)):
        events.append((random.randint(0, last), replace(random.choice(some), request_id=f"r{index}")))
    for _ in range(random.randint(0, 3)):
        indexes = random.choice(((), (), (0,), (1, 2)))
        events.append((random.randint(1, 150), Abort(f"r{random.randrange(20)}", indexes)))
    return tuple(sorted(events, key=lambda event: event[0]))


def make_request(random: Random, *, greedy: bool) -> Request:
    choose = random.choice
    shared, own, seed = choose((0, 20, 64, 64)), random.randint(1, 30), random.randrange(4)
    num_choices = choose((1, 1, 1, 3))
    is_search = num_choices > 1 and choose((False, True))
    params = SamplingParams(
        temperature=0.0 if greedy or is_search else choose((0.0, 1.0)),
        seed=seed,
        max_tokens=random.randint(1, 50),
        n=num_choices,
        beam_width=num_choices if is_search else 0,
        early_stopping=choose((False, True, "never")),
        ignore_eos=True,
        logprobs=None if is_search else choose((None, 2)),
        prompt_logprobs=choose((None, None, None, 1)),
    )
    # No prompt goes on where another one ends, nor with a run of one token: a model may go on like that, and one
    # request's output would be another one's prompt.
    first = 30 * seed + own - 1
    prompt = [3 + position % 50 for position in range(shared)] + [60 + (first + 29 * at) % 190 for at in range(own)]
    priority, salt = random.randint(0, 1), choose((b"", b"", b"", b"another tenant"))
    return Request("", prompt, params, priority=priority, cache_salt=salt, lora=choose((None, None, None, *LORAS)))


class Noting:
    """Another executor, and the scheduler outputs that it was given: step by step, unless ``depth`` is above 1.

    What no simulator can know is the same for all executors: the time that passes in a step, how long transfers take,
    and which beam is more probable than another.
    """

    def __init__(self, executor: Executor, scenario: Scenario) -> None:
        self.depth = scenario.depth
        self.clock = VirtualClock()
        self.scheduler_outputs: list[Any] = []
        self.kv_cache_config = executor.kv_cache_config
        self.rates = executor.rates
        self._executor = executor
        self._disk = scenario.disk
        self._round = 0
        self._under_way: deque[tuple[int, int]] = deque()
        self._ended: set[int] = set()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        self._note(scheduler_output)
        return self.known(scheduler_output, self._executor.execute_model(scheduler_output))

    def execute_model_async(self, scheduler_output: SchedulerOutput) -> AsyncModelOutput:
        self._note(scheduler_output)
        launched = cast("AsyncExecutor", self._executor).execute_model_async(scheduler_output)
        return NotingStep(self, scheduler_output, launched)

    def known(self, scheduler_output: SchedulerOutput, model_output: ModelOutput) -> ModelOutput:
        """The model output with what is the same for all executors."""
        model_output.timings = LATENCY.timings(scheduler_output, BLOCK_SIZE, 1000)
        timings = model_output.timings
        self.clock.sleep(timings.swap + timings.forward + timings.sample)
        for sequence_id, candidates in model_output.candidates.items():
            logprobs = [-0.2 * rank - 0.1 * uniform(rank, sequence_id) for rank in range(len(candidates.token_ids))]
            model_output.candidates[sequence_id] = BeamCandidates(candidates.token_ids, logprobs)
        return model_output

    def take_transfers(self, timeout: float) -> Sequence[TransferResult]:
        assert self._disk is not None
        self._round += 1
        due: list[int] = []
        while self._under_way and self._under_way[0][0] <= self._round:
            due.append(self._under_way.popleft()[1])
        for _ in range(10):
            if not self._ended.issuperset(due):
                self._ended.update(result.transfer_id for result in self._executor.take_transfers(1.0))
        assert self._ended.issuperset(due), "a transfer does not end"
        return [TransferResult(transfer_id, seconds=self._disk.block_seconds) for transfer_id in due]

    def remove_lora(self, lora_id: int) -> None:
        raise AssertionError("nobody asks for that")

    def close(self) -> None:
        pass

    def _note(self, scheduler_output: SchedulerOutput) -> None:
        self.scheduler_outputs.append(normal(scheduler_output))
        copies = scheduler_output.copies
        for transfer in copies.transfers:
            assert self._disk is not None
            self._under_way.append((self._round + self._disk.rounds, transfer.transfer_id))


@dataclass
class NotingStep:
    """A step in flight of another executor."""

    noting: Noting
    scheduler_output: SchedulerOutput
    launched: AsyncModelOutput

    def sample_tokens(self) -> None:
        self.launched.sample_tokens()

    def get_output(self) -> ModelOutput:
        return self.noting.known(self.scheduler_output, self.launched.get_output())


def normal(scheduler_output: SchedulerOutput) -> Any:
    """All of a scheduler output except which tokens were drawn, of which the hashes of blocks are made."""
    chunks = [
        (
            chunk.sequence_id,
            chunk.start,
            chunk.end,
            chunk.row,
            chunk.num_draws,
            chunk.awaits_token,
            chunk.num_draft_tokens,
        )
        for chunk in scheduler_output.chunks
    ]
    copies = scheduler_output.copies
    transfers = [replace(transfer, block_hash=b"") for transfer in copies.transfers]
    return (
        chunks,
        [replace(new, token_ids=len(new.token_ids)) for new in scheduler_output.new],
        len(scheduler_output.new_tokens),
        scheduler_output.new_blocks,
        replace(copies, transfers=transfers),
        scheduler_output.freed_rows,
        scheduler_output.num_preempted,
        scheduler_output.max_seconds,
    )


Outputs = dict[tuple[str, int], list[int]]


@dataclass
class Recalling(Guesser):
    """Guesses what an executor drew in an earlier run, or something else."""

    random: Random
    outputs: Outputs
    right: float = 0.7
    most: int = 6

    def guess(self, sequence: EngineSequence, count: int) -> list[int]:
        drawn = self.outputs.get((sequence.request.request_id, sequence.index), [])
        drawn = drawn[sequence.num_output :][:count]
        return [token if self.random.random() < self.right else (token + 1) % VOCAB_SIZE for token in drawn]


@dataclass
class Run:
    """What the scheduler put out in every step of a run, its counters, and the outputs."""

    scheduler_outputs: list[Any]
    stats: SchedulerStats
    outputs: Outputs = field(default_factory=dict)


def run(executor: Executor, scenario: Scenario) -> Run:
    """A run to the end."""
    guesser = None
    if scenario.guesses is not None:
        guesser = Recalling(Random(scenario.guesses), run(executor, scenario.alone()).outputs)
    noting = Noting(executor, scenario)
    outputs: Outputs = {}

    def receive(step: EngineCoreOutputs) -> None:
        for output in step.all_outputs():
            outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)

    with open_disk(executor, scenario) as disk:
        memory = KVCacheManager(
            scenario.capacity,
            prefix_caching=scenario.prefix_caching,
            host_caching=scenario.host_caching,
            disk=disk,
            clock=noting.clock,
        )
        scheduler = Scheduler(
            scenario.limits,
            memory,
            rates=scenario.rates,
            clock=noting.clock,
            step_policy=STEP_POLICIES[scenario.batching],
        )
        core = EngineCore(scheduler, noting, receive, lambda: noting.clock.seconds)
        scheduler._batch_scheduler.speculator = guesser
        due = deque(scenario.events)
        for step in range(MAX_STEPS):
            while due and due[0][0] <= step:
                send(scheduler, due.popleft()[1])
            if scheduler.has_work:
                core.step()
            elif not due:
                memory.check_integrity()
                return Run(noting.scheduler_outputs, scheduler.stats, outputs)
    raise AssertionError("the engine made no progress")


def send(scheduler: Scheduler, event: Request | Abort) -> None:
    if isinstance(event, Abort):
        scheduler.abort_request(event.request_id, event.indexes)
    else:
        with suppress(QuireError):  # beams that could never be held
            scheduler.add_request(event)


@contextmanager
def open_disk(executor: Executor, scenario: Scenario) -> Iterator[DiskContents | None]:
    """An empty disk of the executor's."""
    if scenario.disk is None:
        yield None
        return
    contents = DiskContents(scenario.disk.num_slots, block_seconds=scenario.disk.block_seconds)
    if isinstance(executor, TorchExecutor):
        with TemporaryDirectory() as folder:
            space = {"kv_disk_space": scenario.disk.num_slots / 1024, "kv_disk_path": Path(folder)}
            config = EngineArgs(model=Path(), **space, pipeline_parallel_size=scenario.limits.num_stages)
            executor.open_disk(config, Path(folder), block_bytes=1 << 20)
            yield contents
    else:
        yield contents


def simulated(scenario: Scenario, seed: int = 0) -> SimulatedExecutor:
    clock = VirtualClock()
    return SimulatedExecutor(
        scenario.capacity,
        LATENCY,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        depth=scenario.depth,
        num_stages=scenario.limits.num_stages,
        sleep=clock.sleep,
        clock=lambda: clock.seconds,
    )


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be divided into three stages."""
    return small_model("llama3", tmp_path_factory.mktemp("deep"), num_hidden_layers=3)


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.soak] if kind.endswith("stages") else []) for kind in KINDS],
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def real(deep: Path, kind: str) -> Iterator[TorchExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        ranks_are_threads(patch)
        settings = {"enable_lora": True, "max_loras": 2, **KINDS[kind]}
        executor = load(deep, DEVICE_BLOCKS, HOST_BLOCKS, **settings)
        read_no_folders(patch)
        with closing(executor):
            yield executor


def read_no_folders(patch: pytest.MonkeyPatch) -> None:
    """Every adapter is one that changes nothing: steps do not depend on what is computed in them."""
    patch.setattr(LoRAManager, "add", lambda self, lora: self._held.update({lora.lora_int_id: self._layers.shard({})}))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_simulator_and_the_real_executor_are_given_the_same_steps(
    real: TorchExecutor, kind: str, seed: int
) -> None:
    scenario = make_scenario(seed, kind)
    made, wanted = run(simulated(scenario, seed), scenario), run(real, scenario)
    assert made.scheduler_outputs == wanted.scheduler_outputs
    assert made.stats == wanted.stats


MEETS = {
    "hits on the device": lambda stats: stats.prefix_device_tokens,
    "hits on the host": lambda stats: stats.prefix_host_tokens,
    "hits on disk": lambda stats: stats.prefix_disk_tokens,
    "blocks stored": lambda stats: stats.disk_blocks_stored,
    "swaps": lambda stats: stats.preemptions_by_swap,
    "recomputation": lambda stats: stats.preemptions_by_recompute,
    "blocks swapped ahead": lambda stats: stats.blocks_used_ahead,
    "right drafts": lambda stats: stats.num_accepted_tokens,
    "wrong drafts": lambda stats: stats.num_draft_tokens - stats.num_accepted_tokens,
    "parted choices": lambda stats: stats.blocks_parted,
}


@pytest.mark.parametrize("feature", MEETS)
def test_some_scenario_in_twenty_meets(feature: str) -> None:
    assert sum(bool(MEETS[feature](stats)) for stats in some_stats()) >= NUM_SCENARIOS / 20


@cache
def some_stats() -> list[SchedulerStats]:
    """The counters of simulated engines of the first kind."""
    some = [make_scenario(seed, "whole") for seed in range(NUM_SCENARIOS)]
    return [run(simulated(scenario), scenario).stats for scenario in some]


def test_the_comparison_sees_a_difference_of_one_block(real: TorchExecutor) -> None:
    request = Request("r0", [5] * 40, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    scenario = Scenario(limits, KVCacheConfig(BLOCK_SIZE, 12, 0), Rates(1, 1), True, True, ((0, request),))
    less = replace(scenario, limits=limits.model_copy(update={"max_num_batched_tokens": 39}))
    made, wanted = run(simulated(scenario), scenario), run(real, scenario)
    assert made.scheduler_outputs == wanted.scheduler_outputs != run(real, less).scheduler_outputs
