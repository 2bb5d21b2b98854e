"""However the work is cut, cached, preempted or swapped: the tokens are those that transformers makes."""

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import PreemptionPolicy
from quire_engine.core.absence import PreemptionReason
from quire_engine.core.executor import Rates
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import SamplingParams

from tests.model.engine import SWAPPING_PAYS, load, run
from tests.model.models import FALLBACK, NUM_PROMPTS, OUTPUT_TOKENS, OWN, SmallModels, tight
from tests.support.kernels import PATHS, cpu_path

UNLIMITED = 1 << 20
CHUNKS = (7, 64, UNLIMITED)
RECOMPUTING_PAYS = Rates(tokens_per_second=1e12, bytes_per_second=1.0)
PRESSURES = {"no pressure": (200, 0), "recompute": (18, 0), "swap": (18, 200)}

# Where blocks may be found again: on the device, on the host as well (if there is a host pool), or nowhere.
SCHEDULES = [(pressure, caching) for pressure in PRESSURES for caching in ("device", "none")] + [("swap", "host")]


@cache
def executor_of(folder: Path, pressure: str, path: str = "") -> TorchExecutor:
    """On a path of its own: what is packed for one cannot be used by the other."""
    del path
    device, host = PRESSURES[pressure]
    return load(folder, tight(folder, device), host)


def matrix() -> Iterator[Any]:
    """Everything with everything. Little of it runs always, each model with every third schedule, in chunks and on
    paths that go round, and the rest is for `make soak`.
    """
    for (row, model), (column, schedule) in product(enumerate(OWN), enumerate(SCHEDULES)):
        for chunk, (turn, path) in product(CHUNKS, enumerate(PATHS)):
            goes_round = chunk == CHUNKS[(row // 3 + column) % len(CHUNKS)] and turn == (row + column // 2) % len(PATHS)
            always = goes_round and (row + column) % 3 == 0
            marks = [*path.marks, *([] if always else [pytest.mark.soak])]
            yield pytest.param(*path.values, model, *schedule, chunk, marks=marks)


@pytest.mark.parametrize(("path", "model_name", "pressure", "caching", "chunk"), list(matrix()))
def test_greedy_output_is_transformers_own(
    small_models: SmallModels, path: str, model_name: str, pressure: str, caching: str, chunk: int
) -> None:
    with cpu_path(path):
        check_greedy_output(small_models, model_name, pressure, chunk, caching, path)


def fallback_matrix() -> Iterator[Any]:
    """Models without a native implementation with schedules of every kind: all of those whose memory is unlike that
    of the others, and of the rest one that goes round; the rest of them is for `make soak`.
    """
    schedules = [("no pressure", UNLIMITED, "none"), ("recompute", 64, "device"), ("swap", 7, "host")]
    for (row, model), (column, schedule) in product(enumerate(FALLBACK), enumerate(schedules)):
        always = model in {"gemma4", "qwen3.5"} or column == row % len(schedules)
        yield pytest.param(model, *schedule, marks=() if always else pytest.mark.soak)


@pytest.mark.parametrize(("model_name", "pressure", "chunk", "caching"), list(fallback_matrix()))
def test_greedy_output_of_models_without_a_native_implementation_is_transformers_own(
    small_models: SmallModels, model_name: str, pressure: str, chunk: int, caching: str
) -> None:
    check_greedy_output(small_models, model_name, pressure, chunk, caching, count=12)


def check_greedy_output(
    small_models: SmallModels,
    model_name: str,
    pressure: str,
    chunk: int,
    caching: str,
    path: str = "",
    count: int = NUM_PROMPTS,
) -> None:
    folder = small_models.folder(model_name)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompts = small_models.prompts[:count]
    made = run(
        executor_of(folder, pressure, path),
        prompts,
        [params] * len(prompts),
        chunk=chunk,
        prefix_caching=caching != "none",
        host_caching=caching == "host",
        max_num_seqs=8,  # in waves, so that later prompts find the blocks of earlier ones
    )
    assert made.outputs == small_models.outputs(model_name, range(count))
    counted = made.statistics
    assert (counted.preemptions_by_recompute > 0) == (pressure == "recompute")
    assert (counted.preemptions_by_swap > 0) == (pressure == "swap")
    assert (counted.prefix_hit_tokens > 0) == (caching != "none")


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_output_is_transformers_own_where_blocks_are_swapped_ahead(
    small_models: SmallModels, depth: int
) -> None:
    folder, prompts = small_models.folder("llama3"), small_models.prompts
    params = [SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)] * len(prompts)
    executor = load(folder, *PRESSURES["swap"], async_scheduling=depth == 2)
    made = run(executor, prompts, params, chunk=64, host_caching=False, swap_ahead=0.3)
    assert made.outputs == small_models.outputs("llama3")
    assert made.statistics.preemptions_by_swap > 0
    assert 0 < made.statistics.blocks_used_ahead <= made.statistics.blocks_copied_ahead
    executor.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize(("mode", "rates"), [("swap", RECOMPUTING_PAYS), ("recompute", SWAPPING_PAYS)])
def test_greedy_output_is_transformers_own_in_either_mode_of_preemption_whatever_it_costs(
    small_models: SmallModels, mode: PreemptionPolicy, rates: Rates, chunk: int, depth: int
) -> None:
    """The rates would have it the other way."""
    folder, prompts = small_models.folder("llama3"), small_models.prompts
    params = [SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)] * len(prompts)
    executor = load(folder, *PRESSURES["swap"], async_scheduling=depth == 2)
    made = run(executor, prompts, params, chunk=chunk, host_caching=False, preemption_mode=mode, rates=rates)
    assert made.outputs == small_models.outputs("llama3")
    assert (made.statistics.preemptions_by_swap > 0) == (mode == "swap")
    assert {reason for _, reason in made.statistics.preemptions} == {PreemptionReason.CONFIGURED}
    executor.close()


@pytest.mark.parametrize("pressure", PRESSURES)
def test_a_seed_makes_the_same_draws_alone_and_in_any_batch_and_after_any_preemption(
    small_models: SmallModels, pressure: str
) -> None:
    folder = small_models.folder("llama3")
    prompts = small_models.prompts
    params = [
        SamplingParams(
            temperature=0.5 + 0.05 * index,
            top_k=(0, 5, 40)[index % 3],
            top_p=(1.0, 0.9)[index % 2],
            seed=1000 + index,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    roomy = executor_of(folder, "no pressure")
    alone = [run(roomy, [prompt], [wanted]).outputs[0] for prompt, wanted in zip(prompts, params, strict=True)]
    together = run(executor_of(folder, pressure), prompts, params, chunk=64)
    assert together.outputs == alone
    preempted = together.statistics.preemptions_by_swap + together.statistics.preemptions_by_recompute
    assert (preempted > 0) == (pressure != "no pressure")
    other = run(roomy, prompts[:1], [SamplingParams(seed=1, temperature=2, max_tokens=OUTPUT_TOKENS, ignore_eos=True)])
    assert other.outputs[0] != alone[0], "the seed changes nothing"


@pytest.mark.parametrize(
    "model_name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("gemma4", "gemma2")), "qwen3.5"]
)
def test_draws_of_models_without_a_native_implementation_are_the_same_alone_and_after_any_preemption(
    small_models: SmallModels, model_name: str
) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts[3:8]
    params = [
        SamplingParams(temperature=0.7, top_k=20, seed=number, max_tokens=40, ignore_eos=True)
        for number in range(len(prompts))
    ]
    roomy, small = executor_of(folder, "no pressure"), load(folder, 10, 100)
    alone = [run(roomy, [prompt], [wanted]).outputs[0] for prompt, wanted in zip(prompts, params, strict=True)]
    for mode in ("swap", "recompute"):
        together = run(small, prompts, params, chunk=7, preemption_mode=mode)
        assert together.outputs == alone
        counted = together.statistics
        assert (counted.preemptions_by_swap if mode == "swap" else counted.preemptions_by_recompute) > 0


def test_prefixes_that_left_the_device_come_back_from_the_host(small_models: SmallModels) -> None:
    folder = small_models.folder("qwen3")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [prompt for prompt in small_models.prompts if len(prompt) > 20]
    expected = small_models.outputs("qwen3", tokens=8)
    wanted = [output for prompt, output in zip(small_models.prompts, expected, strict=True) if len(prompt) > 20]
    made = run(executor_of(folder, "swap"), prompts * 2, [params] * len(prompts) * 2, chunk=64, max_num_seqs=2)
    assert made.outputs == wanted * 2
    assert made.statistics.prefix_host_tokens > 0
    assert made.statistics.blocks_copied_in > 0
    assert made.statistics.preemptions_by_swap == 0
