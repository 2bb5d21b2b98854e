"""gpt-oss as it is published: experts in MXFP4, made plain numbers when they are loaded."""

import json
from pathlib import Path

import pytest
import torch
from quire_engine.errors import ModelError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from tests.model.driver import Driver, Sequence
from tests.model.models import small_model, small_prompts
from tests.support.executors import load_executor

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small gpt-oss, with experts of random numbers in MXFP4."""
    folder = small_model("gpt-oss", tmp_path_factory.mktemp("mxfp4"))
    weights, noise = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[name + "_blocks"] = torch.randint(256, (*shape, 16), generator=noise, dtype=torch.uint8)
        weights[name + "_scales"] = torch.randint(122, 126, shape, generator=noise, dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(raw))
    return folder


@torch.inference_mode()
def test_tokens_are_those_of_transformers_with_the_same_numbers(folder: Path) -> None:
    executor = load_executor(folder, dtype="float32", kv_cache_memory=4 << 20, swap_bytes=4 << 20)
    prompts = small_prompts()[2:6]
    sequences = [Sequence(index, prompt, NUM_TOKENS) for index, prompt in enumerate(prompts)]
    made = Driver(executor, seed=1, max_chunk=13).run(sequences)
    plain = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=plain).eval()
    for prompt, tokens in zip(prompts, made, strict=True):
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokens == ids[len(prompt) :]


def test_the_model_is_of_the_type_of_what_is_not_quantised(folder: Path) -> None:
    assert load_executor(folder, dtype="auto", kv_cache_memory=1 << 20, swap_bytes=0).dtype_name == "float32"


def test_scales_that_do_not_fit_their_blocks_are_named(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    weights[f"{name}_scales"] = weights[f"{name}_scales"][:, :, 1:].contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="which is not MXFP4"):
        load_executor(tmp_path, kv_cache_memory=1 << 20, swap_bytes=0)


def test_experts_in_mxfp4_are_read_for_gpt_oss_alone(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "architectures": ["GraniteForCausalLM"], "model_type": "granite"})
    )
    with pytest.raises(ModelError, match="quantised by 'mxfp4'"):
        load_executor(tmp_path, kv_cache_memory=1 << 20, swap_bytes=0)
