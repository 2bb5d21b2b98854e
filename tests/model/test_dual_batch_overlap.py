"""Steps that are computed in two halves, so that sums over the ranks go on beside products, have the results of whole
steps to the last bit; the sums really are under way meanwhile; and ranks that fail or are lost then are reported as
ever.

Most ranks here are threads, so that none has to start; those that are killed are processes. Sums go through sockets.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import current_thread, local
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quire_engine.attention.base import LayerKV
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import EngineArgs, ExecutorConfig
from quire_engine.distributed import shared_memory
from quire_engine.distributed.communicator import PendingSum
from quire_engine.executor.multiproc import NO_OVERLAP
from quire_engine.executor.rank_processes import RankError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_linear import is_fast
from quire_engine.layers.linear import RowParallelLinear
from quire_engine.layers.mlp import GatedMLP, MoE
from quire_engine.models.decoder import DecoderModel
from quire_engine.models.loader import load_model, read_model_config
from quire_engine.worker.input_batch import ModelInput
from quire_engine.worker.model_runner import ModelRunner
from quire_proto.sampling import SamplingParams

from tests.model.driver import Driver
from tests.model.engine import BLOCK_SIZE, Run, numbers_a_token, run
from tests.model.models import FAMILIES, SmallModels, small_model
from tests.model.ranks import SCHEDULES, Watched, assert_near, chunk, expected, generate, record_split
from tests.model.streamed import gib_of, needs_kernels, streamed_layers
from tests.model.test_lora import Adapters
from tests.model.test_streamed_models import layer_bytes
from tests.support import forked_ranks
from tests.support.executors import load_executor
from tests.support.rank_threads import ranks_are_threads
from tests.support.steps import make_step

POOL = 4 << 20
THRESHOLD = 4
OF_THREE: dict[str, dict[str, Any]] = {
    "llama2": {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "mixtral": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
}


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 cannot make, all do without."""
    monkeypatch.setattr(shared_memory, "library", lambda: None)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, sockets: None) -> None:
    ranks_are_threads(monkeypatch)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return record_split(monkeypatch)


def load(folder: Path, size: int = 2, *, dbo: bool = True, **settings: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "kv_cache_memory": POOL, "swap_bytes": 0, **settings}
    settings = {"dbo_prefill_token_threshold": THRESHOLD, **settings}
    return load_executor(folder, tensor_parallel_size=size, enable_dbo=dbo, **settings)


def assert_equal(made: Run, whole: Run) -> None:
    """To the last bit where products of a row do not depend on how many there are."""
    if library() is not None and is_fast(torch.float32):
        assert made.choices == whole.choices
    else:
        assert_near(made, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_make_the_tokens_of_whole_steps(
    threads: None, split: list[int], small_models: SmallModels, name: str
) -> None:
    folder = small_models.folder(name)
    with closing(load(folder)) as halves, closing(load(folder, dbo=False)) as whole:
        split.clear()
        made, steps = generate(halves, small_models), list(split)
        assert_equal(made, generate(whole, small_models))
    assert made.outputs == expected(small_models, name)
    assert min(steps) > THRESHOLD
    assert max(steps) == 64
    assert split == steps, "without --enable-dbo no step is split"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OF_THREE)
def test_three_ranks_add_up_in_order(
    threads: None, split: list[int], small_models: SmallModels, tmp_path: Path, name: str, deterministic: bool
) -> None:
    folder, settings = small_model(name, tmp_path, **OF_THREE[name]), {"deterministic": deterministic}
    with closing(load(folder, 3, **settings)) as halves, closing(load(folder, 3, dbo=False, **settings)) as whole:
        assert_equal(generate(halves, small_models), generate(whole, small_models))
    assert split


@needs_kernels
def test_deterministic_logits_do_not_depend_on_how_steps_are_cut(
    threads: None, split: list[int], small_models: SmallModels, tmp_path: Path
) -> None:
    folder, settings = small_model("llama2", tmp_path, **OF_THREE["llama2"]), {"dtype": "bfloat16"}
    with closing(load(folder, 3, deterministic=True, **settings)) as halves:
        made = [generate(halves, small_models, chunk=each).choices for each in (64, 17, 7, 3)]
        assert split
    assert all(each == made[0] for each in made)


def test_prompts_are_split_together_with_the_tokens_of_those_that_decode(
    threads: None, split: list[int], small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[list[int]] = []
    forward = ModelRunner.forward

    def record(runner: ModelRunner, batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
        chunks.append(batch.attention[0].query_indptr.diff().tolist())
        return forward(runner, batch, pending)

    monkeypatch.setattr(ModelRunner, "forward", record)
    with closing(load(small_models.folder("llama3"))) as halves:
        assert generate(halves, small_models, chunk=16).outputs == expected(small_models, "llama3")
    assert any(sum(lengths) in split and lengths.count(1) > 1 and max(lengths) > 1 for lengths in chunks)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama3", "qwen3-moe"])
def test_blocks_are_swapped_and_computed_again(
    threads: None, split: list[int], small_models: SmallModels, name: str, schedule: str
) -> None:
    (blocks, host_blocks, length), folder = SCHEDULES[schedule], small_models.folder(name)
    block_bytes = 4 * numbers_a_token(folder) * BLOCK_SIZE
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_bytes": host_blocks * block_bytes}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with closing(load(folder, **pools)) as halves:
        made = run(halves, small_models.prompts[:4], [params] * 4, chunk=length)
    assert made.outputs == small_models.outputs(name, range(4), 40)
    assert (made.statistics.preemptions_by_swap > 0) == (schedule == "swap")
    assert (made.statistics.preemptions_by_recompute > 0) == (schedule == "recompute")
    assert split


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_quantised_weights(
    threads: None, split: list[int], small_models: SmallModels, name: str, quantization: str
) -> None:
    folder, settings = small_models.folder(name), {"quantization": quantization}
    with closing(load(folder, **settings)) as halves, closing(load(folder, dbo=False, **settings)) as whole:
        assert_equal(generate(halves, small_models), generate(whole, small_models))
    assert split


def test_a_grid_of_ranks_makes_transformers_tokens(threads: None, split: list[int], small_models: SmallModels) -> None:
    with closing(load(small_models.folder("qwen3-moe"), pipeline_parallel_size=2)) as halves:
        made = generate(halves, small_models, num_stages=2)
    assert made.outputs == expected(small_models, "qwen3-moe")
    assert split


@needs_kernels
def test_layers_are_read_from_disk(
    threads: None, split: list[int], small_models: SmallModels, tmp_path: Path, cache_folder: Path
) -> None:
    folder, settings = small_model("llama2", tmp_path, num_hidden_layers=8), {"tensor_parallel_size": 2}
    memory = 2 * gib_of(4, layer_bytes(folder, **settings))
    with closing(load(folder, weights_memory_gb=memory)) as on_disk, closing(load(folder, dbo=False)) as whole:
        assert streamed_layers(on_disk)
        assert_equal(generate(on_disk, small_models), generate(whole, small_models))
    assert split


def test_steps_with_adapters_are_whole_and_others_are_not(
    threads: None, split: list[int], small_models: SmallModels, tmp_path: Path
) -> None:
    adapters, settings = Adapters(small_models, tmp_path), {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with closing(load(small_models.folder("llama2"), **settings)) as halves:
        for numbers in ([1, 2], [0]):
            split.clear()
            sequences = adapters.sequences("llama2", numbers)
            assert Driver(halves, seed=1, max_chunk=13).run(sequences) == adapters.expected("llama2", numbers)
            assert bool(split) == (numbers == [0])


def test_pools_are_measured_with_the_largest_step_in_halves(
    threads: None, split: list[int], small_models: SmallModels
) -> None:
    settings = {"kv_cache_memory": None, "swap_bytes": 1 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    with closing(load(small_models.folder("llama3"), **settings)) as halves:
        assert split[0] == 64
        assert generate(halves, small_models).outputs == expected(small_models, "llama3")


@needs_kernels
def test_sums_in_shared_memory_are_not_split(
    split: list[int], small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks_are_threads(monkeypatch)
    with closing(load(small_models.folder("llama3"))) as shared:
        assert generate(shared, small_models).outputs == expected(small_models, "llama3")
    assert not split
    assert NO_OVERLAP in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "--enable-dbo needs a --tensor-parallel-size above 1"),
        ({"tensor_parallel_size": 2, "all2all_backend": "alltoall"}, "alltoall exclude each other"),
    ],
)
def test_what_has_no_sums_to_overlap_is_refused(
    small_models: SmallModels, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        EngineArgs(model=small_models.folder("mixtral"), enable_dbo=True, **settings)


# What happens in what order


class Work:
    """A handle of torch's."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class RecordedRanks:
    """The ``Communicator`` of rank 0 of two, which adds nothing and keeps what is asked of it."""

    rank, size, is_capturable, overlaps_sums = 0, 2, False, True

    def __init__(self, events: list[str], *, waits_at_once: bool = False) -> None:
        self._events, self._waits_at_once, self._num_sums = events, waits_at_once, 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._events.append("sum")
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> PendingSum:
        number, self._num_sums = self._num_sums, self._num_sums + 1
        self._events.append(f"start {number}")
        if self._waits_at_once:
            self._events.append(f"wait {number}")
            return PendingSum([tensor])
        return PendingSum([tensor], Work(lambda: self._events.append(f"wait {number}")))


class Recorded:
    """A layer that keeps when it multiplies, and how many rows."""

    def __init__(self, name: str, events: list[str], layer: Any) -> None:
        self._name, self._events, self._layer = name, events, layer

    def __call__(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self._events.append(f"{self._name} of {len(x)}")
        return self._layer(x, *others)


class RecordedAttention:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def forward(self, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._events.append(f"attention of {len(query)}")
        return query


def recorded_step(folder: Path, tokens: int, *, waits_at_once: bool = False) -> list[str]:
    """What the layers of the model do with so many tokens on one of two ranks, in order."""
    events: list[str] = []
    config = read_model_config(folder)
    options = LoadOptions(
        ExecutorConfig(enable_dbo=True, dbo_prefill_token_threshold=8),
        communicator=RecordedRanks(events, waits_at_once=waits_at_once),  # type: ignore[arg-type]
    )
    model = load_model(config, folder, options)
    assert isinstance(model, DecoderModel)
    for layer in model._stack.layers:
        attention, mlp = layer._attention, layer._mlp  # type: ignore[attr-defined]
        attention.qkv_proj = Recorded("qkv", events, attention.qkv_proj)
        output, down = attention.output_proj, mlp._experts if isinstance(mlp, MoE) else mlp.down_proj
        assert isinstance(output, RowParallelLinear)
        output._local = Recorded("output", events, output._local)
        if isinstance(mlp, MoE):
            mlp._experts = Recorded("mlp", events, down)
        else:
            down._local = Recorded("mlp", events, down._local)
    kv = [LayerKV(torch.empty(1))] * config.num_layers
    with torch.inference_mode():
        states = model.embed(torch.arange(tokens))
        model.layers(states, torch.arange(tokens), kv, RecordedAttention(events))  # type: ignore[arg-type]
    return events


def sums_beside_products(events: Sequence[str]) -> int:
    """Of how many sums the start and the wait have a product between them."""
    count = 0
    for place, event in enumerate(events):
        if event.startswith("start"):
            between = events[place + 1 : events.index(event.replace("start", "wait"))]
            count += any(" of " in each for each in between)
    return count


@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_each_sum_goes_on_while_the_other_half_is_multiplied(small_models: SmallModels, name: str) -> None:
    events = recorded_step(small_models.folder(name), 9)
    assert events == [
        *("qkv of 5", "qkv of 4", "attention of 9", "output of 5", "start 0", "output of 4", "start 1"),
        *("wait 0", "mlp of 5", "start 2", "wait 1", "mlp of 4", "start 3"),
        *("wait 2", "qkv of 5", "wait 3", "qkv of 4", "attention of 9"),
        *("output of 5", "start 4", "output of 4", "start 5"),
        *("wait 4", "mlp of 5", "start 6", "wait 5", "mlp of 4", "start 7", "wait 6", "wait 7"),
    ]
    assert sums_beside_products(events) == 7, "all but the last one, behind which there is nothing to multiply"


def test_a_sum_that_is_waited_for_at_once_is_beside_nothing(small_models: SmallModels) -> None:
    assert sums_beside_products(recorded_step(small_models.folder("llama2"), 9, waits_at_once=True)) == 0


def test_a_step_of_no_more_tokens_than_the_threshold_is_whole(small_models: SmallModels) -> None:
    layer = ["qkv of 8", "attention of 8", "output of 8", "sum", "mlp of 8", "sum"]
    assert recorded_step(small_models.folder("llama2"), 8) == layer * 2


# Failures


def step(executor: TorchExecutor) -> dict[int, int]:
    return executor.execute_model(make_step(0, [chunk([5, 6, 7, 8, 9], [1])])).token_ids


@pytest.mark.parametrize("half", [1, 2])
def test_a_half_that_fails_on_all_ranks_leaves_them_in_step(
    threads: None, split: list[int], small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, half: int
) -> None:
    """Sums are under way then, and nobody waits for them."""
    start, calls = GatedMLP.start, local()

    def fail(mlp: GatedMLP, states: torch.Tensor) -> PendingSum:
        calls.count = getattr(calls, "count", 0) + 1
        if calls.count == half:
            raise RuntimeError(f"out of memory on {current_thread().name}")
        return start(mlp, states)

    with closing(load(small_models.folder("llama3"))) as halves:
        wanted = step(halves)
        for _ in range(3):
            with monkeypatch.context() as patch:
                calls = local()
                patch.setattr(GatedMLP, "start", fail)
                with pytest.raises(RuntimeError, match="out of memory"):
                    step(halves)
            assert step(halves) == wanted
    assert split


@pytest.fixture
def watched(small_models: SmallModels, sockets: None) -> Iterator[Watched]:
    with closing(Watched(partial(load, small_models.folder("llama3"), dbo_prefill_token_threshold=2))) as watched:
        yield watched


def test_a_rank_that_dies_while_sums_are_under_way_is_reported(watched: Watched, split: list[int]) -> None:
    watched.check_stopped_and_killed(1)
    assert split


def test_rank_0_failing_in_its_second_half_alone_is_reported(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.run()
    monkeypatch.setattr(GatedMLP, "start", FailsOnRows(1))
    with pytest.raises(RankError, match=r"Rank 0 failed in a step in which other ranks did not: .*out of memory"):
        watched.run()
    watched.loss()


class FailsOnRows:
    """``GatedMLP.start`` that runs out of memory with so many rows."""

    def __init__(self, rows: int) -> None:
        self._rows, self._start = rows, GatedMLP.start

    def __get__(self, mlp: GatedMLP, _: type) -> Callable[[torch.Tensor], PendingSum]:
        return lambda states: self(mlp, states)

    def __call__(self, mlp: GatedMLP, states: torch.Tensor) -> PendingSum:
        if len(states) == self._rows:
            raise RuntimeError("out of memory")
        return self._start(mlp, states)


def fail_on_rows(rows: int) -> None:
    GatedMLP.start = FailsOnRows(rows)  # type: ignore[assignment]


def test_ranks_that_fail_in_different_halves_end_the_engine(
    sockets: None, small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_ranks, "prepare", partial(fail_on_rows, 2))
    with closing(Watched(partial(load, small_models.folder("llama3"), dbo_prefill_token_threshold=2))) as watched:
        monkeypatch.setattr(GatedMLP, "start", FailsOnRows(1))
        with pytest.raises(RankError, match="Rank 1 failed in another place than rank 0: RuntimeError: out of memory"):
            watched.run()
        watched.loss()
