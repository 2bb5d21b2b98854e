"""Of a model of more than text the configuration and the names of its text part are those of a model of text alone."""

from typing import Any

import pytest
from quire_engine.checkpoint.text_part import is_beside_text, text_config, text_name, text_names

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "eos_token_id": 7,
    "tie_word_embeddings": True,
    "vision_config": {"hidden_size": 3},
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 64,
        "eos_token_id": 3,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}


def test_the_text_part_of_qwen_is_a_model_with_code_of_its_own() -> None:
    assert text_config(QWEN) == {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "eos_token_id": 7,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "default"},
    }


def test_older_files_have_the_text_part_beside_the_others() -> None:
    raw = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 64,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 3},
    }
    made = text_config(raw)
    assert (made["architectures"], made["model_type"], made["hidden_size"]) == (["Qwen2ForCausalLM"], "qwen2", 64)
    assert made["rope_scaling"] == {"type": "default"}
    assert "vision_config" not in made


@pytest.mark.parametrize(
    "raw",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "text_config": {"model_type": "llama"}},
        {**QWEN, "text_config": {"model_type": "unheard_of"}},
        {**QWEN, "text_config": None},
        {**QWEN, "is_encoder_decoder": True},
        {**QWEN, "architectures": "Qwen3VLForConditionalGeneration"},
    ],
)
def test_what_has_no_known_text_part_is_left_as_it_is(raw: dict[str, Any]) -> None:
    assert text_config(raw) is raw


@pytest.mark.parametrize(
    ("model_type", "text", "whole", "tied"),
    [
        ("qwen3_vl", True, False, False),
        ("qwen3_vl", False, True, True),
        ("qwen3_vl", True, None, True),
        ("qwen2_5_vl", True, False, True),
        ("llava", False, True, True),
        ("llava", False, False, False),
    ],
)
def test_embeddings_are_tied_as_in_the_whole_model(model_type: str, text: bool, whole: bool | None, tied: bool) -> None:
    raw = {**QWEN, "model_type": model_type, "text_config": {**QWEN["text_config"], "tie_word_embeddings": text}}
    raw["tie_word_embeddings"] = whole
    if whole is None:
        del raw["tie_word_embeddings"]
    assert text_config(raw)["tie_word_embeddings"] == tied


def test_names_of_the_text_part_are_kept_without_what_they_begin_with() -> None:
    names = ["model.visual.blocks.0.weight", "model.language_model.layers.0.mlp.weight", "lm_head.weight"]
    assert text_names(names) == {names[1]: "model.layers.0.mlp.weight", names[2]: "lm_head.weight"}
    older = ["vision_tower.weight", "language_model.model.norm.weight", "language_model.lm_head.weight"]
    assert text_names(older) == {older[1]: "model.norm.weight", older[2]: "lm_head.weight"}


def test_names_of_a_model_of_text_are_its_own() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "transformer.h.0.weight", "visual.weight"]
    assert text_names(names) == dict(zip(names, names, strict=True))


@pytest.mark.parametrize(
    "before",
    [
        "",
        "model.",
        "model.model.",
        "language_model.",
        "language_model.model.",
        "model.language_model.",
        "model.language_model.model.",
        "language_model.model.model.",
        "model.text_model.",
    ],
)
@pytest.mark.parametrize("rest", ["layers.3.mlp.up_proj", "embed_tokens.weight", "norm.weight"])
def test_one_rule_names_tensors_and_modules_of_a_text_part(before: str, rest: str) -> None:
    assert text_name(before + rest) == f"model.{rest}"
    assert text_name(f"{before}lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("name", ["model.visual.blocks.0.attn.qkv", "vision_tower.layers.0", "multi_modal_projector.x"])
def test_what_sees_is_of_no_text_part(name: str) -> None:
    assert is_beside_text(name)
    assert not is_beside_text(f"model.language_model.{name}")


def test_the_body_of_a_model_of_text_may_have_been_saved_alone_or_twice() -> None:
    names = ["embed_tokens.weight", "model.model.layers.0.mlp.up_proj.weight", "model.lm_head.weight"]
    targets = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert text_names(names) == dict(zip(names, targets, strict=True))


def test_a_name_that_needs_no_change_counts_before_others() -> None:
    names = ["norm.weight", "model.norm.weight", "model.embed_tokens.weight"]
    assert text_names(names) == {name: name for name in names[1:]}


def test_names_of_models_with_other_layers_stay_as_they_are() -> None:
    names = ["layers.0.attn.Wqkv.weight", "embeddings.tok_embeddings.weight", "norm.weight"]
    assert text_names(names) == dict(zip(names, names, strict=True))
