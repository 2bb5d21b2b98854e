"""On a GPU, steps that overlap make what steps make one after the other."""

from pathlib import Path

import pytest
from quire_proto.sampling import SamplingParams

from tests.model.engine import load, run
from tests.model.models import VOCAB_SIZE, SmallModels
from tests.model.overlapping import Loop, assert_equal, came_of, some_sequences
from tests.support.executors import load_executor
from tests.support.sampling_inputs import ModuloGrammar

pytestmark = pytest.mark.gpu
PRESSURES = {"no pressure": (200, 0), "recompute": (24, 0), "swap": (24, 200)}


@pytest.mark.parametrize("seed", range(3))
def test_overlapped_steps_make_what_steps_make_one_after_the_other(small_models: SmallModels, seed: int) -> None:
    executor = load_executor(
        small_models.folder("llama3"),
        device="cuda",
        dtype="float32",
        attention="reference",
        kv_cache_memory=4 << 20,
        swap_bytes=0,
    )
    prompts = [prompt[:60] for prompt in small_models.prompts]
    apart, overlapped = some_sequences(prompts), some_sequences(prompts)
    Loop(executor, apart, seed=99).run()
    Loop(executor, overlapped, seed).run_overlapped()
    executor.close()
    assert came_of(overlapped) == came_of(apart)
    for one, other in zip(overlapped, apart, strict=True):
        assert_equal(one.logprobs, other.logprobs)
        assert_equal(one.prompt_logprobs, other.prompt_logprobs)


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_the_engine_makes_the_same_tokens_with_overlap_and_without(
    model_folders: dict[str, Path], small_models: SmallModels, pressure: str, enforce_eager: bool
) -> None:
    """Deterministic, as with overlap other sequences share a step."""
    prompts = small_models.prompts[:12]
    params = [
        SamplingParams(temperature=(0.0, 0.8)[index % 2], seed=index, max_tokens=40, logprobs=1, ignore_eos=True)
        for index in range(len(prompts))
    ]
    grammars = [ModuloGrammar(3, VOCAB_SIZE) if index % 4 == 3 else None for index in range(len(prompts))]
    made = []
    for overlaps in (False, True):
        executor = load(
            *(model_folders["qwen3"], *PRESSURES[pressure], "bfloat16"),
            device="cuda",
            deterministic=True,
            enforce_eager=enforce_eager,
            async_scheduling=overlaps,
        )
        made.append(run(executor, prompts, params, chunk=64, grammars=grammars, max_num_seqs=8))
        executor.close()
    assert made[0].choices == made[1].choices
    assert (made[1].statistics.preemptions_by_swap > 0) == (pressure == "swap")
