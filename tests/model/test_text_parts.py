"""The text part of a model of more than text makes the tokens that the whole model makes of a text."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.models.decoder import DecoderModel
from quire_engine.models.transformers_backend import TransformersModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.model.driver import Driver, Sequence
from tests.model.models import OUTPUT_TOKENS, VOCAB_SIZE, small_prompts
from tests.support.executors import load_executor

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
PLACES: dict[str, Any] = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252}
MODELS: dict[str, tuple[type, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        DecoderModel,
        {"rope_parameters": {**SECTIONS, "mrope_section": [2, 3, 3]}, "head_dim": 16},
        QWEN_VISION,
        PLACES,
    ),
    "qwen3_vl": (DecoderModel, {"rope_parameters": SECTIONS}, QWEN_VISION, PLACES),
    "qwen3_vl_moe": (DecoderModel, {"rope_parameters": SECTIONS, **EXPERTS}, QWEN_VISION, PLACES),
    "qwen3_5": (
        TransformersModel,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        {**QWEN_VISION, "deepstack_visual_indexes": []},
        PLACES,
    ),
    "mistral3": (DecoderModel, {"model_type": "mistral", "sliding_window": 24}, VISION, {"image_token_index": 250}),
    "gemma3": (
        DecoderModel,
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        VISION,
        {"image_token_index": 250, "mm_tokens_per_image": 4},
    ),
    "gemma4": (
        TransformersModel,
        {
            "global_head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
        {**VISION, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
        # Beyond what can be drawn: the whole model hides the embeddings of such tokens.
        {"image_token_id": 300, "video_token_id": 301, "audio_token_id": 302, "audio_config": None},
    ),
    "llama4": (
        TransformersModel,
        {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "attention_chunk_size": 128},
        {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        {"image_token_index": 250},
    ),
}


@cache
def model_folder(tmp: Path, model_type: str) -> Path:
    _, text, vision, others = MODELS[model_type]
    parts = {"text_config": {**TEXT, **text}, "vision_config": vision, **others}
    config = AutoConfig.for_model(model_type, **parts, tie_word_embeddings=False)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    folder = tmp / model_type
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@torch.inference_mode()
def expected_tokens(folder: Path, prompt: list[int]) -> list[int]:
    """What the whole model finds most probable after a text."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids, past, tokens = torch.tensor([prompt]), None, []
    for _ in range(OUTPUT_TOKENS):
        output = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = output.past_key_values
        tokens.append(int(output.logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens


@pytest.mark.parametrize("model_type", MODELS)
def test_the_text_part_makes_the_tokens_of_the_whole_model(tmp: Path, model_type: str) -> None:
    folder = model_folder(tmp, model_type)
    executor = load_executor(folder, kv_cache_memory=4 << 20, swap_bytes=4 << 20, attention="auto")
    assert isinstance(executor._worker.runner._model, MODELS[model_type][0])
    prompts = [[token % 250 for token in prompt] for prompt in small_prompts()[2:5]]
    made = Driver(executor, seed=1, max_chunk=13).run(
        [Sequence(index, prompt, OUTPUT_TOKENS) for index, prompt in enumerate(prompts)]
    )
    assert made == [expected_tokens(folder, prompt) for prompt in prompts]


def test_what_sees_is_left_unread(tmp: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even its files have to be whole."""
    folder = model_folder(tmp, "qwen3_vl")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seen = sorted(name for name in weights if "visual" in name)
    assert seen
    from safetensors.torch import save_file

    save_file({n: w for n, w in weights.items() if n not in seen}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with caplog.at_level("INFO"):
        load_executor(folder, kv_cache_memory=1 << 20, swap_bytes=0)
        load_executor(tmp_path, kv_cache_memory=1 << 20, swap_bytes=0)
    assert f"skipping {len(seen)} tensors that are not of the text part" in caplog.text
    assert "does not use" not in caplog.text


def test_end_tokens_of_the_whole_model_are_those_of_its_text_part(tmp: Path, tmp_path: Path) -> None:
    from quire_engine.models.loader import read_model_config

    folder = model_folder(tmp, "qwen3_vl")
    raw = json.loads((folder / "config.json").read_text())
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": [5, 6]}))
    assert read_model_config(tmp_path).eos_token_ids == (5, 6)
