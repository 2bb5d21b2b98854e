"""A model that two GPUs share: NCCL's sums, in graphs and outside of them, and what happens when a rank dies."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from quire_engine.executor.rank_processes import RankError
from quire_proto.sampling import SamplingParams

from tests.model.engine import run
from tests.model.models import OUTPUT_TOKENS, SmallModels
from tests.model.ranks import Watched, record_split
from tests.model.test_bfloat16 import PARAMS, check_close, theirs
from tests.model.test_tensor_parallel import load

pytestmark = pytest.mark.gpu
NEEDS_FLASHINFER = False
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, and there are fewer")


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral", "qwen3-moe"])
def test_two_gpus_make_transformers_tokens(small_models: SmallModels, name: str, overlaps: bool) -> None:
    settings = {"device": "cuda", "attention": "reference", "async_scheduling": overlaps}
    with closing(load(small_models.folder(name), 2, 24, 200, **settings)) as shared:
        made = run(shared, small_models.prompts, [GREEDY] * len(small_models.prompts), chunk=7, max_num_seqs=8)
    assert made.outputs == small_models.outputs(name)
    assert made.statistics.preemptions_by_swap > 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_two_gpus_send_tokens_to_their_experts(small_models: SmallModels, name: str) -> None:
    settings = {"device": "cuda", "attention": "reference", "all2all_backend": "alltoall"}
    with closing(load(small_models.folder(name), 2, 24, 200, **settings)) as shared:
        made = run(shared, small_models.prompts, [GREEDY] * len(small_models.prompts), chunk=7, max_num_seqs=8)
    assert made.outputs == small_models.outputs(name)


@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_two_gpus_have_sums_beside_products(
    small_models: SmallModels, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All prompts at once are a step of more than 512 tokens."""
    split = record_split(monkeypatch)
    settings = {"device": "cuda", "attention": "reference", "enable_dbo": True}
    with closing(load(small_models.folder(name), 2, 200, **settings)) as shared:
        split.clear()
        made = run(shared, small_models.prompts, [GREEDY] * len(small_models.prompts))
    assert made.outputs == small_models.outputs(name)
    assert split


def test_sums_beside_products_change_no_bit_of_deterministic_results(
    model_folders: dict[str, Path], small_models: SmallModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flashinfer", reason="needs flashinfer, which is not installed")
    split, made = record_split(monkeypatch), []
    for enable_dbo in (False, True):
        assert not split
        settings = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "enable_dbo": enable_dbo}
        with closing(load(model_folders["qwen3"], 2, 200, **settings)) as shared:
            split.clear()
            made.append(run(shared, small_models.prompts, [GREEDY] * len(small_models.prompts)).choices)
    assert made[0] == made[1]
    assert split


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_two_gpus_part_from_transformers_only_where_both_are_probable(
    model_folders: dict[str, Path], small_models: SmallModels, enforce_eager: bool
) -> None:
    pytest.importorskip("flashinfer", reason="needs flashinfer, which is not installed")
    folder, prompts = model_folders["qwen3"], small_models.prompts[:6]
    settings = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": enforce_eager}
    with closing(load(folder, 2, **settings)) as shared:
        made = run(shared, prompts, [PARAMS] * len(prompts))
    for (choice,), their_steps in zip(made.choices, theirs(folder, tuple(map(tuple, prompts))), strict=True):
        check_close(choice, their_steps)


@pytest.fixture
def watched(small_models: SmallModels) -> Iterator[Watched]:
    settings = {"device": "cuda", "attention": "reference"}
    with closing(Watched(partial(load, small_models.folder("llama3"), 2, **settings))) as watched:
        yield watched


def run_often(watched: Watched) -> None:
    for _ in range(10_000):
        watched.run()


def test_a_killed_rank_is_reported_even_where_nccl_waits_for_it(watched: Watched) -> None:
    watched.run()
    watched.others[0].kill()
    with pytest.raises(RankError):
        run_often(watched)
    assert "was killed by SIGKILL" in watched.loss()
