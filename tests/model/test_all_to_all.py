"""Ranks that send each token to the ranks of its experts make the tokens of transformers, and bit for bit those of
ranks that all have every token, whatever happens to blocks, batches and ranks.

Most ranks here are threads, so that none has to start; those that are killed are processes.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from quire_engine.config import EngineArgs
from quire_engine.distributed import shared_memory
from quire_engine.errors import ModelError
from quire_engine.executor.rank_processes import RankError
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.layers.mlp import AllToAllExperts
from quire_proto.sampling import SamplingParams

from tests.model.engine import BLOCK_SIZE, numbers_a_token, run
from tests.model.models import SmallModels, greedy_oracle, small_model
from tests.model.ranks import (
    OUTPUT_TOKENS,
    PROMPTS,
    SCHEDULES,
    Watched,
    assert_near,
    assert_only_its_own_request_fails,
    expected,
    generate,
)
from tests.support.executors import load_executor
from tests.support.rank_threads import ranks_are_threads
from tests.support.variants import one_in

POOL = 2 << 20
NAMES = ["mixtral", "qwen3-moe"]
# Three ranks have two of mixtral's four experts, two and none; and three of qwen3-moe's seven, three and one.
OF_THREE: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen3-moe": {"intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 7},
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that three ranks can share."""
    return {name: small_model(name, tmp_path_factory.mktemp("three"), **sizes) for name, sizes in OF_THREE.items()}


@cache
def outputs_of_three(folder: Path, tokens: int) -> list[list[int]]:
    return greedy_oracle(folder, SmallModels(folder).prompts[4 : 4 + PROMPTS], tokens)


def load(folder: Path, size: int, *, backend: str = "alltoall", **settings: Any) -> TorchExecutor:
    settings = {"dtype": "float32", "kv_cache_memory": POOL, "swap_bytes": 0, **settings}
    return load_executor(folder, tensor_parallel_size=size, all2all_backend=backend, **settings)


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_make_transformers_tokens(threads: None, small_models: SmallModels, name: str, chunk: int) -> None:
    with closing(load(small_models.folder(name), 2)) as shared:
        assert generate(shared, small_models, chunk=chunk).outputs == expected(small_models, name)


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_make_transformers_tokens(
    threads: None, small_models: SmallModels, of_three: dict[str, Path], name: str
) -> None:
    with closing(load(of_three[name], 3)) as shared:
        assert generate(shared, small_models).outputs == outputs_of_three(of_three[name], OUTPUT_TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_token_is_computed_by_more_ranks_than_there_are_tokens(
    threads: None, of_three: dict[str, Path], name: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with closing(load(of_three[name], 3)) as shared:
        assert run(shared, [[7]], [params]).outputs == greedy_oracle(of_three[name], [[7]], 20)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_swapped_and_computed_again(
    threads: None, small_models: SmallModels, name: str, schedule: str
) -> None:
    (blocks, host_blocks, chunk), folder = SCHEDULES[schedule], small_models.folder(name)
    block_bytes = 4 * numbers_a_token(folder) * BLOCK_SIZE
    pools = {"kv_cache_memory": blocks * block_bytes, "swap_bytes": host_blocks * block_bytes}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with closing(load(folder, 2, **pools)) as shared:
        made = run(shared, small_models.prompts[:4], [params] * 4, chunk=chunk)
    assert made.outputs == small_models.outputs(name, range(4), 40)
    assert (made.statistics.preemptions_by_swap > 0) == (schedule == "swap")
    assert (made.statistics.preemptions_by_recompute > 0) == (schedule == "recompute")


@pytest.mark.parametrize(
    ("name", "dtype", "sums"), list(one_in(2, NAMES, ("float32", "bfloat16", "float16"), ("shared memory", "sockets")))
)
def test_results_are_those_of_ranks_that_have_every_token_bit_for_bit(
    threads: None,
    monkeypatch: pytest.MonkeyPatch,
    small_models: SmallModels,
    of_three: dict[str, Path],
    name: str,
    dtype: str,
    sums: str,
) -> None:
    if sums == "sockets":
        monkeypatch.setattr(shared_memory, "library", lambda: None)
    settings = {"dtype": dtype, "deterministic": True}
    folder = of_three[name]
    with closing(load(folder, 3, **settings)) as sent:
        made = generate(sent, small_models)
    with closing(load(folder, 3, backend="allgather_reducescatter", **settings)) as reduced:
        assert made.choices == generate(reduced, small_models).choices


WISHES = {
    "sampled": {"temperature": 0.9, "seed": 7, "top_k": 20},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "beams": {"temperature": 0, "beam_width": 3, "n": 2},
    "prompt log-probabilities": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 2},
}


@pytest.mark.parametrize("wish", WISHES)
def test_whatever_is_drawn_is_what_ranks_with_every_token_draw(
    threads: None, small_models: SmallModels, wish: str
) -> None:
    params, folder = (
        [SamplingParams(max_tokens=12, ignore_eos=True, **WISHES[wish])] * 5,
        small_models.folder("mixtral"),
    )
    made = []
    for backend in ("alltoall", "allgather_reducescatter"):
        with closing(load(folder, 2, backend=backend, deterministic=True)) as shared:
            made.append(run(shared, small_models.prompts[:5], params, chunk=48))
    assert made[0].choices == made[1].choices
    assert made[0].prompt_logprobs == made[1].prompt_logprobs


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_make_of_a_sent_token_what_they_make_of_their_own(
    threads: None, small_models: SmallModels, quantization: str
) -> None:
    folder, made = small_models.folder("mixtral"), []
    for backend in ("alltoall", "allgather_reducescatter"):
        with closing(load(folder, 2, backend=backend, quantization=quantization)) as shared:
            made.append(generate(shared, small_models))
    assert_near(*made)


@pytest.mark.parametrize("size", [2, 3])
def test_deterministic_logits_do_not_depend_on_the_batch(
    threads: None, small_models: SmallModels, of_three: dict[str, Path], size: int
) -> None:
    """A needle alone and among others, cut and cached in other ways, is the same to the last bit in bfloat16."""
    needle, *others = small_models.prompts[4 : 4 + PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    folder = small_models.folder("qwen3-moe") if size == 2 else of_three["qwen3-moe"]
    with closing(load(folder, size, dtype="bfloat16", deterministic=True)) as shared:
        alone = run(shared, [needle], [params]).choices[0][0]
        for place, chunk in ((0, 64), (3, 7), (5, 1 << 20)):
            prompts = [*others[:place], needle, *others[place:]]
            among = run(shared, prompts, [params] * PROMPTS, chunk=chunk).choices[place][0]
            assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_a_grid_of_ranks_makes_transformers_tokens(threads: None, small_models: SmallModels, name: str) -> None:
    """Of qwen3-moe a stage has a layer with experts, and the other one without and one with them."""
    with closing(load(small_models.folder(name), 2, pipeline_parallel_size=2)) as shared:
        made = generate(shared, small_models, num_stages=2)
    assert made.outputs == expected(small_models, name)


def test_pools_are_measured(threads: None, small_models: SmallModels) -> None:
    settings = {"kv_cache_memory": None, "swap_bytes": 1 << 20, "max_num_batched_tokens": 64, "max_num_seqs": 5}
    with closing(load(small_models.folder("mixtral"), 2, **settings)) as shared:
        assert shared.kv_cache_config.device_blocks > 1000
        assert generate(shared, small_models).outputs == expected(small_models, "mixtral")


def test_steps_are_not_captured(threads: None, small_models: SmallModels, tmp_path: Path) -> None:
    """Nor are those of a stage without experts, which gathers tokens all the same."""
    folder = small_model("qwen3-moe", tmp_path, num_hidden_layers=4, mlp_only_layers=[0, 1])
    with closing(load(folder, 2, pipeline_parallel_size=2)) as shared:
        assert shared._worker.runner._cpu_graphs is None  # type: ignore[union-attr]
        made = generate(shared, small_models, num_stages=2)
    with closing(load(folder, 1, backend="allgather_reducescatter")) as whole:
        assert_near(made, generate(whole, small_models))


# What cannot be


def test_a_model_without_experts_is_refused(small_models: SmallModels) -> None:
    with pytest.raises(ModelError) as caught:
        load(small_models.folder("llama3"), 2)
    assert str(caught.value) == (
        "--all2all-backend alltoall is for models with experts, and LlamaForCausalLM has none: leave it out."
    )


def test_one_rank_is_refused(small_models: SmallModels) -> None:
    with pytest.raises(
        ValidationError, match="alltoall needs a --tensor-parallel-size or a --data-parallel-size above 1"
    ):
        EngineArgs(model=small_models.folder("mixtral"), pipeline_parallel_size=2, all2all_backend="alltoall")


# Failures


def test_a_step_that_no_rank_can_run_is_that_requests_error(threads: None, small_models: SmallModels) -> None:
    with closing(load(small_models.folder("mixtral"), 2)) as shared:
        assert_only_its_own_request_fails(shared)


@pytest.fixture
def watched(small_models: SmallModels) -> Iterator[Watched]:
    with closing(Watched(partial(load, small_models.folder("mixtral"), 2))) as watched:
        yield watched


def test_a_stopped_rank_is_waited_for_and_one_killed_meanwhile_is_reported(watched: Watched) -> None:
    watched.check_stopped_and_killed(1)


def test_a_rank_that_fails_alone_is_reported_although_rank_0_waits_for_its_tokens(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = watched.loss_by_a_wrong_batch(monkeypatch)
    assert "Rank 1 failed in a step in which other ranks did not: IndexError" in told


@pytest.mark.parametrize("place", ["before its tokens are sent", "before its results are"])
def test_rank_0_failing_alone_is_reported_although_the_others_wait_for_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    watched.run()
    experts = watched.executor._worker.runner._model._stack.layers[1]._mlp._experts
    assert isinstance(experts, AllToAllExperts)
    monkeypatch.setattr(experts, *(("_local", fail) if "results" in place else ("_communicator", None)))
    with pytest.raises(RankError, match=r"Rank 0 failed in a step in which other ranks did not"):
        watched.run()
    watched.loss()
