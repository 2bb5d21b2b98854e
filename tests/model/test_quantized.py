"""Weights in int8 and int4 through the whole engine: the same tokens however the work is cut, right answers, and
refusals.
"""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from quire_engine.config import EngineArgs, Quantization
from quire_engine.errors import ModelError
from quire_engine.executor.start_checks import check_start
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.kernels.bindings import library
from quire_engine.models.loader import read_model_config
from quire_proto.sampling import SamplingParams
from transformers import AutoTokenizer

from tests.model.engine import Run, load, run
from tests.model.models import OWN, SmallModels, tight
from tests.model.test_demo import CONVERSATIONS, DEMO, prompts_of
from tests.model.test_schedules import PRESSURES, SCHEDULES, UNLIMITED
from tests.support.executors import load_executor
from tests.support.kernels import PATHS, cpu_path
from tests.support.variants import one_in

BITWISE = (("mixtral", "bfloat16", "int8"), ("qwen3", "float32", "int8"), ("mixtral", "bfloat16", "int4"))
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)
needs_kernel = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")


@cache
def executor_of(
    folder: Path, pressure: str, dtype: str = "float32", quantization: Quantization = "int8"
) -> TorchExecutor:
    device, host = PRESSURES[pressure]
    return load(folder, tight(folder, device), host, dtype=dtype, quantization=quantization, deterministic=True)


def outputs_of(made: Run) -> list[tuple[list[int], list[object]]]:
    """Tokens and log-probabilities of each prompt."""
    return [(choices[0].token_ids, choices[0].logprobs) for choices in made.choices]


@cache
def alone(
    folder: Path, prompts: tuple[tuple[int, ...], ...], dtype: str, quantization: Quantization
) -> list[tuple[list[int], list[object]]]:
    """What each prompt leads to with nothing next to it."""
    executor = executor_of(folder, "no pressure", dtype, quantization)
    return [outputs_of(run(executor, [list(prompt)], [PARAMS], prefix_caching=False))[0] for prompt in prompts]


@needs_kernel
@pytest.mark.parametrize(
    ("model_name", "dtype", "quantization", "pressure", "caching"), list(one_in(3, BITWISE, SCHEDULES))
)
def test_tokens_and_logprobs_are_the_same_bits_however_the_work_is_cut(
    small_models: SmallModels, model_name: str, pressure: str, caching: str, dtype: str, quantization: Quantization
) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts
    expected = alone(folder, tuple(map(tuple, prompts)), dtype, quantization)
    for chunk in (7, UNLIMITED):
        made = run(
            executor_of(folder, pressure, dtype, quantization),
            prompts,
            [PARAMS] * len(prompts),
            chunk=chunk,
            prefix_caching=caching != "none",
            host_caching=caching == "host",
            max_num_seqs=12,
        )
        assert outputs_of(made) == expected
        counted = made.statistics
        assert (counted.preemptions_by_recompute > 0) == (pressure == "recompute")
        assert (counted.preemptions_by_swap > 0) == (pressure == "swap")


@pytest.mark.soak
@needs_kernel
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("model_name", OWN)
def test_every_model_with_code_of_its_own_makes_the_same_tokens_under_pressure(
    small_models: SmallModels, model_name: str, quantization: Quantization
) -> None:
    folder, prompts = small_models.folder(model_name), small_models.prompts
    expected = run(
        executor_of(folder, "no pressure", quantization=quantization),
        prompts,
        [PARAMS] * len(prompts),
        prefix_caching=False,
    )
    made = run(
        executor_of(folder, "swap", quantization=quantization),
        prompts,
        [PARAMS] * len(prompts),
        chunk=7,
        max_num_seqs=12,
    )
    assert made.outputs == expected.outputs
    assert made.statistics.preemptions_by_swap > 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_still_answers_right(dtype: str, quantization: Quantization, path: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    prompts = prompts_of(tokenizer)
    with cpu_path(path):
        executor = load_executor(DEMO, dtype=dtype, quantization=quantization, kv_cache_memory=32 << 20, swap_bytes=0)
        made = run(executor, prompts, [SamplingParams(temperature=0, max_tokens=40)] * len(prompts))
    texts = [tokenizer.decode(output) for output in made.outputs]
    assert texts[:-1] == list(CONVERSATIONS)
    assert texts[-1].startswith("Once upon a time")


@pytest.mark.parametrize(
    ("model_name", "device", "complaint"),
    [
        ("llama3", "cuda", "is for the CPU, and the device is cuda"),
        ("gpt2", "cpu", "GPT2LMHeadModel runs through transformers"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_before_weights_are_read(
    small_models: SmallModels, tmp_path: Path, model_name: str, device: str, complaint: str
) -> None:
    shutil.copytree(small_models.folder(model_name), tmp_path, dirs_exist_ok=True)
    config = read_model_config(tmp_path)
    for weights in tmp_path.glob("*.safetensors*"):
        weights.unlink()
    with pytest.raises(ModelError, match=complaint):
        check_start(EngineArgs(model=tmp_path, quantization="int8"), config, torch.device(device))
