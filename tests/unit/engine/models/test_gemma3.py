"""The configuration of Gemma 3 is read as transformers reads it, in the forms in which it is published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine.checkpoint.config import DecoderConfig, ModelConfig
from quire_engine.errors import ModelError
from quire_engine.models.loader import read_decoder_config, read_model_config
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

# The keys of google/gemma-3-4b-it's text_config, which leaves heads and vocabulary to transformers.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **changes}))
    return read_model_config(folder)


def test_what_the_file_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    read(tmp_path)
    config = read_decoder_config(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.max_length, config.tie_word_embeddings, config.attention_scale) == (131072, True, 1 / 16)
    assert config.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert config.sliding_windows[5::6] == (None,) * 5


@pytest.mark.parametrize(
    "changes", [{}, {"rope_scaling": None}, {"rope_theta": 5e5, "rope_local_base_freq": 2e4}, {"head_dim": 128}]
)
def test_local_and_global_layers_turn_as_transformers_turns_them(tmp_path: Path, changes: dict[str, Any]) -> None:
    read(tmp_path, **changes)
    config = read_decoder_config(tmp_path)
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig.from_dict({**PUBLISHED, **changes}))
    assert torch.equal(torch.tensor(config.rope_frequencies), theirs.full_attention_inv_freq)
    assert torch.equal(torch.tensor(config.local_rope_frequencies), theirs.sliding_attention_inv_freq)


@pytest.mark.parametrize("changes", [{"hidden_activation": "gelu"}, {"hidden_activation": "silu"}])
def test_another_activation_runs_through_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not isinstance(read(tmp_path, **changes), DecoderConfig)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar of 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"hidden_size": None}, "hidden_size is None"),
    ],
)
def test_an_invalid_config_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read(tmp_path, **changes)
