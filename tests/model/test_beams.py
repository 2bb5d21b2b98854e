"""Beam search finds what transformers' beam search finds, tokens and scores, however the beams are cut, swapped or
computed again.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import EarlyStopping, SamplingParams
from transformers import GenerationConfig

from tests.model.engine import Run, load, run
from tests.model.models import SmallModels, oracle_model
from tests.support.variants import one_in

# Several tokens that end an output, so that beams of random models do end at different lengths.
STOPS = (2, 17, 90, 200)
TOKENS = 24
PROMPTS = 6
PRESSURES = {"no pressure": (200, 0), "recompute": (28, 0), "swap": (28, 200)}


@cache
def executor_of(folder: Path, pressure: str) -> TorchExecutor:
    return load(folder, *PRESSURES[pressure])


def beam_params(width: int, penalty: float, early_stopping: EarlyStopping, n: int | None = None) -> SamplingParams:
    return SamplingParams(
        n=n or width,
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early_stopping,
        max_tokens=TOKENS,
        stop_token_ids=STOPS,
        ignore_eos=True,
    )


@cache
def transformers_beams(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[list[int], float]]:
    """Output tokens, without the one that ended them, and score of each beam, best first."""
    settings = GenerationConfig(
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_tokens or None,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(params.stop_token_ids),
        pad_token_id=0,
        do_sample=False,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        made = oracle_model(folder).generate(torch.tensor([prompt]), generation_config=settings)
    beams = []
    for tokens, indices, score in zip(made.sequences, made.beam_indices, made.sequences_scores, strict=True):
        output = tokens[len(prompt) :][: int((indices >= 0).sum())].tolist()
        if output and output[-1] in params.stop_token_ids:
            output.pop()
        beams.append((output, float(score)))
    return beams


def check(made: Run, folder: Path, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    for prompt, wanted, choices in zip(prompts, params, made.choices, strict=True):
        expected = transformers_beams(folder, tuple(prompt), wanted)
        assert [choice.token_ids for choice in choices] == [output for output, _ in expected]
        scores = [choice.score for choice in choices]
        assert scores == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5, 2.0])
def test_beams_are_transformers_own(small_models: SmallModels, penalty: float, early_stopping: EarlyStopping) -> None:
    folder = small_models.folder("llama3")
    prompts = small_models.prompts[:PROMPTS]
    params = [beam_params(2 + index % 3, penalty, early_stopping) for index in range(PROMPTS)]
    check(run(executor_of(folder, "no pressure"), prompts, params), folder, prompts, params)


@pytest.mark.parametrize(
    ("pressure", "chunk", "caching"), list(one_in(2, list(PRESSURES), (19, 64), ("host", "device", "none")))
)
def test_beams_survive_pressure(small_models: SmallModels, pressure: str, chunk: int, caching: str) -> None:
    folder = small_models.folder("qwen3")
    prompts = [prompt for prompt in small_models.prompts if len(prompt) > 16][:PROMPTS]
    longer = replace(beam_params(4, 2.0, "never", n=2), max_tokens=48, stop_token_ids=STOPS[:1])
    params = [longer] * len(prompts)
    made = run(
        executor_of(folder, pressure),
        prompts,
        params,
        chunk=chunk,
        prefix_caching=caching != "none",
        host_caching=caching == "host",
    )
    check(made, folder, prompts, params)
    counted = made.statistics
    assert counted.blocks_parted > 0
    assert pressure != "recompute" or counted.preemptions_by_recompute > 0
    assert (counted.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.parametrize("name", ["mixtral", "gemma3", "mistral"])
def test_beams_of_other_models_are_transformers_own(small_models: SmallModels, name: str) -> None:
    folder = small_models.folder(name)
    prompts = [prompt for prompt in small_models.prompts if len(prompt) > 16][:PROMPTS]
    longer = replace(beam_params(4, 2.0, "never", n=2), max_tokens=48, stop_token_ids=STOPS[:1])
    params = [longer] * len(prompts)
    made = run(executor_of(folder, "swap"), prompts, params, chunk=64)
    check(made, folder, prompts, params)
    assert made.statistics.preemptions_by_swap > 0


def test_penalties_and_least_lengths_shape_beams_as_in_transformers(small_models: SmallModels) -> None:
    folder = small_models.folder("llama2")
    prompts = small_models.prompts[1:4]
    params = [replace(beam_params(3, 1.0, False), repetition_penalty=1.7, min_tokens=least) for least in (0, 5, 12)]
    check(run(executor_of(folder, "no pressure"), prompts, params), folder, prompts, params)
