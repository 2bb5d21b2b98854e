"""What an engine can do beside plain decoding, on a GPU: adapters, experts in graphs, blocks copied ahead, guesses, KV
memory in fp8, checkpoints in fewer bits.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.speculation import Speculator
from quire_proto.sampling import SamplingParams

from tests.model.driver import Driver
from tests.model.engine import load, run
from tests.model.models import OUTPUT_TOKENS, SmallModels
from tests.model.test_bfloat16 import PARAMS, check_close, theirs
from tests.model.test_lora import Adapters, adapters
from tests.model.test_lora import load as load_with_loras
from tests.model.test_speculation import CheapRows, jobs, reminded
from tests.support.grammars import MODEL

__all__ = ["adapters"]

pytestmark = pytest.mark.gpu
REFERENCE: dict[str, Any] = {"device": "cuda", "attention": "reference"}
# A draft follows a token that is known.
ONE_BY_ONE: dict[str, Any] = {"device": "cuda", "deterministic": True, "async_scheduling": False}
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mixtral"])
def test_adapters_in_one_batch_make_the_tokens_of_merged_weights(
    small_models: SmallModels, adapters: Adapters, name: str
) -> None:
    numbers = [1, 0, 2, 3, 4, 1]
    with closing(load_with_loras(small_models.folder(name), **REFERENCE)) as executor:
        outputs = Driver(executor, seed=1, max_chunk=13).run(adapters.sequences(name, numbers))
    assert outputs == adapters.expected(name, numbers)


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapped"])
def test_blocks_that_are_copied_ahead_hold_what_they_held(small_models: SmallModels, overlaps: bool) -> None:
    folder, prompts = small_models.folder("llama3"), small_models.prompts
    with closing(load(folder, 24, 200, async_scheduling=overlaps, **REFERENCE)) as executor:
        made = run(executor, prompts, [GREEDY] * len(prompts), chunk=64, host_caching=False, swap_ahead=0.3)
    assert made.outputs == small_models.outputs("llama3")
    assert made.statistics.preemptions_by_swap > 0
    assert 0 < made.statistics.blocks_used_ahead <= made.statistics.blocks_copied_ahead


@pytest.mark.parametrize("pools", [(300, 0), (40, 300)], ids=["room", "swap"])
def test_guesses_change_nothing(pools: tuple[int, int]) -> None:
    prompts, params, grammars = jobs()
    with closing(load(MODEL, *pools, "bfloat16", **ONE_BY_ONE)) as executor:
        expected = run(executor, prompts, params, grammars=grammars)
        made = run(executor, prompts, params, grammars=grammars, guesses=reminded(expected, 1, executor))
    assert made.choices == expected.choices
    assert 20 < made.statistics.num_accepted_tokens < made.statistics.num_draft_tokens


def test_guesses_that_are_looked_up_change_nothing(model_folders: dict[str, Path], small_models: SmallModels) -> None:
    def always(scheduler: Scheduler) -> None:
        update = {"speculative_method": "suffix", "prompt_lookup_min": 1, "num_speculative_tokens": 5}
        config = scheduler.config.model_copy(update=update)
        speculator = scheduler._batch_scheduler.speculator = Speculator(config, executor.rates)
        speculator.times = CheapRows(executor.rates, 0, warm=0)

    prompts = small_models.prompts[:6]
    params = [SamplingParams(temperature=number % 2, seed=number, max_tokens=48) for number in range(len(prompts))]
    with closing(load(model_folders["qwen3"], 200, 0, "bfloat16", **ONE_BY_ONE)) as executor:
        expected = run(executor, prompts, params)
        made = run(executor, prompts, params, guesses=always)
    assert made.choices == expected.choices
    assert made.statistics.num_draft_tokens > 20


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_experts_part_from_transformers_only_where_both_are_probable(
    model_folders: dict[str, Path], small_models: SmallModels, enforce_eager: bool
) -> None:
    folder, prompts = model_folders["qwen3-moe"], small_models.prompts[:6]
    with closing(load(folder, 200, 0, "bfloat16", device="cuda", enforce_eager=enforce_eager)) as executor:
        assert (executor._worker.runner._cuda_graphs is None) == enforce_eager
        made = run(executor, prompts, [PARAMS] * len(prompts))
    for (choice,), their_steps in zip(made.choices, theirs(folder, tuple(map(tuple, prompts))), strict=True):
        check_close(choice, their_steps)


def test_tokens_are_the_same_however_kv_memory_in_fp8_is_cut(
    model_folders: dict[str, Path], small_models: SmallModels
) -> None:
    """Deterministic, in any batch and after swaps."""
    folder, prompts = model_folders["qwen3"], small_models.prompts
    params = [SamplingParams(temperature=0.8, seed=7, max_tokens=40, logprobs=1, ignore_eos=True)] * len(prompts)
    choices = []
    for blocks, host_blocks, chunk in ((400, 0, 2048), (24, 400, 33)):
        settings = {"device": "cuda", "deterministic": True, "kv_cache_dtype": "fp8"}
        with closing(load(folder, blocks, host_blocks, "bfloat16", **settings)) as executor:
            made = run(executor, prompts, params, chunk=chunk, max_num_seqs=8)
        assert (made.statistics.preemptions_by_swap > 0) == (host_blocks > 0)
        choices.append(made.choices)
    assert choices[0] == choices[1]
