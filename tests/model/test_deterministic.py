"""With ``--deterministic``, what a request gets depends on nothing but the request: tokens and log-probabilities, bit
for bit, whatever shares its steps and however its own work is cut, cached, preempted or swapped.
"""

import random
from functools import cache
from pathlib import Path

import pytest
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import SamplingParams

from tests.model.engine import Choice, load, run
from tests.model.models import FAMILIES, VOCAB_SIZE, SmallModels, tight
from tests.support.variants import one_in

NEEDLE = [7 * place % (VOCAB_SIZE - 3) + 3 for place in range(75)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, logprobs=5, ignore_eos=True)
# Blocks of both pools, tokens of a step, and whether blocks are found again.
SCHEDULES = {
    "whole prompts": (400, 0, 1 << 20, True),
    "small chunks": (400, 0, 23, True),
    "nothing cached": (400, 0, 64, False),
    "recompute": (22, 0, 64, True),
    "swap": (22, 400, 64, True),
}


@cache
def executor_of(folder: Path, blocks: int, host_blocks: int, quantization: str | None) -> TorchExecutor:
    return load(folder, tight(folder, blocks), host_blocks, "bfloat16", deterministic=True, quantization=quantization)


@cache
def alone(folder: Path, quantization: str | None) -> Choice:
    made = run(executor_of(folder, 400, 0, quantization), [NEEDLE], [PARAMS], prefix_caching=False)
    return made.choices[0][0]


def haystack(seed: int) -> tuple[list[list[int]], list[SamplingParams], int]:
    """Random prompts with the needle at a random place, and others that begin as it does."""
    source = random.Random(seed)
    prompts = [[source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(1, 90))] for _ in range(13)]
    prompts += [[*NEEDLE[: source.randint(16, 70)], source.randrange(3, VOCAB_SIZE)] for _ in range(3)]
    source.shuffle(prompts)
    place = source.randint(0, len(prompts))
    prompts.insert(place, NEEDLE)
    params = [SamplingParams(seed=each, max_tokens=40, ignore_eos=True) for each in range(len(prompts))]
    params[place] = PARAMS
    return prompts, params, place


@pytest.mark.parametrize(("model_name", "schedule"), list(one_in(3, FAMILIES, list(SCHEDULES))))
def test_a_needle_is_the_same_in_every_haystack(small_models: SmallModels, model_name: str, schedule: str) -> None:
    check(small_models.folder(model_name), schedule, None)


@pytest.mark.parametrize("schedule", ["small chunks", "swap"])
def test_a_needle_is_the_same_with_int8_weights(small_models: SmallModels, schedule: str) -> None:
    check(small_models.folder("llama3"), schedule, "int8")


def check(folder: Path, schedule: str, quantization: str | None) -> None:
    blocks, host_blocks, chunk, caching = SCHEDULES[schedule]
    executor = executor_of(folder, blocks, host_blocks, quantization)
    expected = alone(folder, quantization)
    for seed in range(3):
        prompts, params, place = haystack(seed)
        made = run(executor, prompts, params, chunk=chunk, prefix_caching=caching, host_caching=host_blocks > 0)
        choice = made.choices[place][0]
        assert choice.token_ids == expected.token_ids
        assert choice.logprobs == expected.logprobs, "bit for bit"
        counted = made.statistics
        assert (counted.preemptions_by_recompute > 0) == (schedule == "recompute")
        assert (counted.preemptions_by_swap > 0) == (schedule == "swap")
        assert caching or counted.prefix_hit_tokens == 0
