"""SmolLM3 has a window only if its switch is on, and says of each layer whether it rotates."""

import json
from pathlib import Path
from typing import Any

import pytest
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.errors import ModelError
from quire_engine.models.loader import read_decoder_config

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}


def read(folder: Path, **changes: Any) -> DecoderConfig:
    raw = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 256, **SIZES, **changes}
    (folder / "config.json").write_text(json.dumps({"pad_token_id": None, **raw}))
    return read_decoder_config(folder)


def test_by_default_each_fourth_layer_does_not_rotate(tmp_path: Path) -> None:
    assert read(tmp_path).nope_layers == (3,)


@pytest.mark.parametrize(("use_sliding_window", "windows"), [(False, (None,) * 4), (True, (None, 20, None, 20))])
def test_a_switch_turns_windows_on(tmp_path: Path, use_sliding_window: bool, windows: tuple[int | None, ...]) -> None:
    changes = {"no_rope_layers": [1, 0, 1, 0], "sliding_window": 20, "use_sliding_window": use_sliding_window}
    assert read(tmp_path, **changes).sliding_windows == windows


def test_a_layer_that_is_left_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has 3 no_rope_layers for 4 layers"):
        read(tmp_path, no_rope_layers=[1, 0, 1], layer_types=["full_attention"] * 4)
