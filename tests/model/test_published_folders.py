"""Unusual model folders, as people publish them, load as in transformers with ``trust_remote_code=False``: each makes
the same tokens with the same log-probabilities, or is refused with a sentence.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.errors import ModelError
from quire_engine.models.loader import load_model, read_model_config
from quire_engine.models.transformers_check import TokenRange, _paged_logits
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.folder_changes import Change, both, file, lost, moved
from tests.support.published_folders import (
    INDEX,
    SINGLE,
    VOCABULARY,
    added,
    config,
    prefixed,
    random_tensor,
    renamed,
    sharded,
    small_folder,
    vision_folder,
    weights,
    without,
)

PROMPT = [5, 60, 100, 300, 33, 47, 9, 81, 200]
NUM_TOKENS = 4
HEAD, EMBEDDING, SHARD = "lm_head.weight", "model.embed_tokens.weight", "model-00002-of-00002.safetensors"
CODE: dict[str, Any] = {"auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}}
FLOAT8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.0, 2.0, 2.0]}
ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 32}
OLD_ROPE: dict[str, Any] = {"rope_parameters": None, "rope_theta": 10000}


class Row(NamedTuple):
    """A folder: what was done to it, and the kind of model in it."""

    change: Change
    kind: str = "llama"


def plain(folder: Path) -> None:
    """Changes nothing."""


def other_head(old: dict[str, torch.Tensor]) -> torch.Tensor:
    return random_tensor(*old[EMBEDDING].shape)


def layers_in(dtype: torch.dtype) -> Change:
    return weights(lambda old: {name: each.to(dtype) if "mlp" in name else each for name, each in old.items()})


LOADED = {
    "as transformers writes it": Row(plain),
    "code in the folder": Row(config(**CODE)),
    "code in the folder of a Phi 3": Row(config(**CODE), "phi3"),
    "code in the folder of a DeepSeek V3": Row(config(**CODE), "deepseek_v3"),
    "code in the folder of a Qwen 2": Row(config(**CODE), "qwen2"),
    "code and a class of its own": Row(config(**CODE, architectures=["MyLlamaForCausalLM"])),
    "code and a class of its own of a Phi 3": Row(config(**CODE, architectures=["MyPhiForCausalLM"]), "phi3"),
    "code and no class": Row(config(**CODE, architectures=None)),
    "code in an old form": Row(config(auto_map=["modeling_x.X"])),
    "no architecture": Row(config(architectures=None)),
    "no architecture of a Phi 3": Row(config(architectures=None), "phi3"),
    "no architecture of a Gemma 2": Row(config(architectures=None), "gemma2"),
    "an empty list of architectures": Row(config(architectures=[])),
    "null among the architectures": Row(config(architectures=[None, "LlamaForCausalLM"])),
    "several architectures": Row(config(architectures=["MyThing", "LlamaForCausalLM"])),
    "an architecture as a text": Row(config(architectures="LlamaForCausalLM")),
    "the architecture of another type": Row(config(architectures=["MistralForCausalLM"])),
    "a native architecture of a Phi 3": Row(config(architectures=["LlamaForCausalLM"]), "phi3"),
    "kinds of layers of a Mistral": Row(config(layer_types=["sliding_attention", "full_attention"]), "mistral"),
    "another activation": Row(config(hidden_act="gelu")),
    "tied, with another head": Row(added(**{HEAD: other_head}), "tied"),
    "tied, with another head, of a Gemma 2": Row(added(**{HEAD: other_head}), "gemma2"),
    "tied, with another head in float16": Row(added(**{HEAD: lambda old: other_head(old).half()}), "tied"),
    "tied, with the same head": Row(added(**{HEAD: lambda old: old[EMBEDDING].clone()}), "tied"),
    "tied, with the head alone": Row(renamed(lambda name: HEAD if name == EMBEDDING else name), "tied"),
    "tied, with another head in a shard": Row(both(added(**{HEAD: other_head}), sharded()), "tied"),
    "an index that names a head that is not there": Row(sharded(claimed={HEAD: SHARD}), "tied"),
    "an index that names an unknown tensor": Row(sharded(claimed={"x.y": SHARD})),
    "an index that does not list a tensor": Row(sharded(unlisted=("model.norm.weight",))),
    "an index that names the wrong shard": Row(sharded(claimed={EMBEDDING: SHARD})),
    "the body alone": Row(renamed(lambda name: name.removeprefix("model."))),
    "the body alone, tied": Row(renamed(lambda name: name.removeprefix("model.")), "tied"),
    "the body alone of a Gemma 2": Row(renamed(lambda name: name.removeprefix("model.")), "gemma2"),
    "the body alone of a Mixtral": Row(renamed(lambda name: name.removeprefix("model.")), "mixtral"),
    "the body alone of a Qwen 3 MoE": Row(renamed(lambda name: name.removeprefix("model.")), "qwen3_moe"),
    "a body in a body": Row(prefixed("model.", "model.model.")),
    "a head in the body": Row(renamed(lambda name: f"model.{name}" if name == HEAD else name)),
    "some names without the body": Row(renamed(lambda name: name.removeprefix("model.") if "norm" in name else name)),
    "LongRoPE of a Llama": Row(
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **ORIGINAL, **FACTORS})
    ),
    "LongRoPE of a Llama in old keys": Row(
        config(**OLD_ROPE, rope_scaling={"type": "longrope", **FACTORS}, **ORIGINAL)
    ),
    "no rope": Row(config(rope_parameters=None)),
    "rope as a whole number": Row(config(**OLD_ROPE)),
    "float16": Row(weights(lambda old: {name: each.half() for name, each in old.items()})),
    "layers in bfloat16": Row(layers_in(torch.bfloat16)),
    "layers in float64": Row(layers_in(torch.float64)),
    "an old buffer": Row(added(**{"model.layers.0.self_attn.rotary_emb.inv_freq": lambda _: torch.zeros(4)})),
    "a tensor without a use": Row(added(**{"model.layers.0.self_attn.q_proj.bias": lambda _: torch.zeros(32)})),
    "fewer layers than are stored": Row(config(num_hidden_layers=1)),
    "no size of heads": Row(config(head_dim=None)),
    "no activation": Row(config(hidden_act=None)),
    "the older name of the dtype": Row(config(dtype=None, torch_dtype="float32")),
    "bounds without an end": Row(config(time_step_limit=[0.0, float("inf")])),
    "keys that change nothing": Row(config(use_cache=False, pretraining_tp=2, _name_or_path="x")),
}  # fmt: skip


class Refused(NamedTuple):
    """A folder, and a part of the sentence that it is refused with."""

    change: Change
    said: str
    kind: str = "llama"


MISSING = "neither model.safetensors nor model.safetensors.index.json"
REFUSED = {
    "code for an unknown type": Refused(
        config(**CODE, architectures=["MyForCausalLM"], model_type="mine"),
        "auto_map, but code from a model folder is never run, and no other class serves MyForCausalLM of type 'mine'",
    ),
    "code for an unknown type of a known class": Refused(config(**CODE, model_type="mine"), "of type 'mine'"),
    "an unknown type": Refused(config(model_type="mine"), "'mine', which is not a causal language model"),
    "neither class nor type": Refused(config(architectures=None, model_type=None), "names no architecture"),
    "a class for another task": Refused(config(architectures=["LlamaForTokenClassification"]), "makes no text"),
    "no head where it is not tied": Refused(without(HEAD), f"has no tensor {HEAD}"),
    "neither head nor embedding": Refused(without(EMBEDDING), f"has no tensor {EMBEDDING}", "tied"),
    "a lost shard": Refused(sharded(lost=2), "has no model-00002-of-00002.safetensors"),
    "a lost shard without an index": Refused(sharded(lost=1, indexed=False), "has no model-00001-of-00002.safetensors"),
    "an index without weights": Refused(both(lost(SINGLE), file(INDEX, {"metadata": {}})), "has no weight_map"),
    "a vocabulary of another size": Refused(config(vocab_size=VOCABULARY + 4), "but config.json asks for"),
    "a size that is not whole": Refused(config(hidden_size=32.5), "hidden_size is 32.5"),
    "a pickle": Refused(moved(SINGLE, "pytorch_model.bin"), f"{MISSING}, and pytorch_model.bin is a pickle"),
    "pickled shards": Refused(moved(SINGLE, "pytorch_model-00001-of-00002.bin"), "is a pickle"),
    "a checkpoint of torch": Refused(moved(SINGLE, "consolidated.00.pth"), "consolidated.00.pth is a pickle"),
    "a model of TensorFlow": Refused(moved(SINGLE, "tf_model.h5"), "tf_model.h5 is not read"),
    "weights quantised by what is unknown": Refused(config(quantization_config={"quant_method": "mine"}), "'mine'"),
}

VISION = {
    "as transformers writes it": plain,
    "the text part in the body": prefixed("language_model.model.", "model.language_model."),
    "the text part without a body": prefixed("language_model.model.", "language_model."),
    "the body twice": prefixed("language_model.model.", "model.language_model.model."),
    "the body twice, in another order": prefixed("language_model.model.", "language_model.model.model."),
    "the head beside the text part": renamed(lambda name: name.replace("language_model.lm_head", "lm_head")),
    "the head in the body": renamed(lambda name: name.replace("language_model.lm_head", "model.lm_head")),
    "code in the folder": config(**CODE),
    "no architecture": config(architectures=None),
    "a class of its own": config(architectures=["MyForConditionalGeneration"]),
    "shards": sharded(),
}


@torch.inference_mode()
def expected(folder: Path, auto: Any = AutoModelForCausalLM) -> tuple[list[int], torch.Tensor]:
    """A prompt with what transformers finds most probable behind it, and the log-probabilities at every token."""
    model, report = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, output_loading_info=True)
    assert not report["missing_keys"], "else it has random weights"
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens, model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


@torch.inference_mode()
def log_probabilities(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = load_model(read_model_config(folder), folder, LoadOptions(ExecutorConfig(dtype="float32")))
    logits = _paged_logits(model, [torch.tensor(tokens)], [[TokenRange(0, 0, len(tokens))]], torch.device("cpu"))
    return logits.log_softmax(-1)


def check_same(folder: Path, auto: Any = AutoModelForCausalLM) -> None:
    tokens, theirs = expected(folder, auto)
    ours = log_probabilities(folder, tokens)
    assert ours[len(PROMPT) - 1 : -1].argmax(-1).tolist() == tokens[len(PROMPT) :]
    assert (ours - theirs).abs().max() < 1e-3


@pytest.mark.parametrize("name", LOADED)
def test_a_folder_makes_the_tokens_that_it_makes_in_transformers(tmp_path: Path, name: str) -> None:
    folder = small_folder(tmp_path / "model", LOADED[name].kind)
    LOADED[name].change(folder)
    check_same(folder)


@pytest.mark.parametrize("name", VISION)
def test_a_text_part_is_found_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    folder = vision_folder(tmp_path / "model")
    VISION[name](folder)
    check_same(folder, AutoModelForImageTextToText)


def quantised(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections in float8, with a scale for each block."""
    made = {}
    for name, tensor in old.items():
        if "proj" in name:
            made[name] = tensor.to(torch.float8_e4m3fn)
            made[name.replace(".weight", ".weight_scale_inv")] = torch.ones(1, 1)
        else:
            made[name] = tensor
    return made


@pytest.mark.parametrize("body", ["", "model.language_model.", "language_model.model."])
def test_quantised_layers_of_a_text_part_are_found_by_its_names(tmp_path: Path, body: str) -> None:
    plain_names, other = small_folder(tmp_path / "plain"), small_folder(tmp_path / "other")
    stored = both(weights(quantised), config(quantization_config=FLOAT8))
    stored(plain_names)
    both(stored, prefixed("model.", body))(other)
    assert torch.equal(log_probabilities(other, PROMPT), log_probabilities(plain_names, PROMPT))


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_is_not_served_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    change, said, kind = REFUSED[name]
    folder = small_folder(tmp_path / "model", kind)
    change(folder)
    with pytest.raises(ModelError) as caught:
        log_probabilities(folder, PROMPT)
    sentence = str(caught.value)
    assert said in sentence
    assert sentence.startswith(str(tmp_path)) or str(folder) in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    """transformers refuses them."""
    whole, parts = small_folder(tmp_path / "whole"), small_folder(tmp_path / "parts")
    sharded(indexed=False)(parts)
    tokens, theirs = expected(whole)
    assert (log_probabilities(parts, tokens) - theirs).abs().max() < 1e-3


def test_a_shard_that_nothing_needs_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, parts = small_folder(tmp_path / "whole"), small_folder(tmp_path / "parts")
    sharded(claimed={"visual.x": "model-00003-of-00003.safetensors"})(parts)
    tokens, theirs = expected(whole)
    assert (log_probabilities(parts, tokens) - theirs).abs().max() < 1e-3
    assert "names model-00003-of-00003.safetensors, which is missing" in caplog.text


def test_a_type_may_be_missing_where_the_class_is_known(tmp_path: Path) -> None:
    whole, nameless = small_folder(tmp_path / "whole"), small_folder(tmp_path / "nameless")
    config(model_type=None)(nameless)
    tokens, theirs = expected(whole)
    assert (log_probabilities(nameless, tokens) - theirs).abs().max() < 1e-3


def test_a_head_that_differs_from_a_tied_embedding_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = small_folder(tmp_path / "model", "tied")
    added(**{HEAD: other_head})(folder)
    log_probabilities(folder, PROMPT)
    assert "another head is stored: that one is used" in caplog.text
