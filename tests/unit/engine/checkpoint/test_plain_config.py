"""A ``config.json`` that is read without transformers means what transformers reads in it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.checkpoint import config as config_module
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.checkpoint.plain_config import plain_config
from quire_engine.errors import ModelError
from quire_engine.models.loader import read_decoder_config
from quire_engine.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[4]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(raw: Mapping[str, Any], *, plain: bool) -> DecoderConfig | None:
    """What the file says, or None where it is refused."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not plain:
            patch.setattr(config_module, "plain_config", lambda *_: None)
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        try:
            return read_decoder_config(Path(folder))
        except ModelError:
            return None


def rope(scaling: Mapping[str, Any] | None, theta: float, spelling: str) -> dict[str, Any]:
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}
    return {"rope_theta": theta} | ({} if spelling == "short" and scaling is None else {"rope_scaling": scaling})


FACTORS = st.sampled_from([0.5, 1, 2.0, 4.0, 8])
SCALINGS = st.one_of(
    st.none(),
    st.builds(lambda f, low, high: LLAMA3 | {"factor": f, "low_freq_factor": low, "high_freq_factor": high},
              FACTORS, FACTORS, FACTORS),
    st.sampled_from([
        {"rope_type": "default"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        {key: value for key, value in LLAMA3.items() if key != "factor"},
        {},
    ]),
)  # fmt: skip
CONFIGS = st.fixed_dictionaries(
    {
        "architectures": st.sampled_from([[name] for name in ARCHITECTURES]),
        "hidden_size": st.sampled_from([64, 96]),
        "intermediate_size": st.just(128),
        "num_hidden_layers": st.integers(1, 3),
        "num_attention_heads": st.sampled_from([4, 6]),
        "vocab_size": st.just(100),
    },
    optional={
        "num_key_value_heads": st.sampled_from([1, 2, None, 5]),
        "head_dim": st.sampled_from([16, 32, None]),
        "max_position_embeddings": st.sampled_from([512, 8192]),
        "rms_norm_eps": st.sampled_from([1e-5, 1e-6, 1, None]),
        "attention_bias": st.sampled_from([True, False, 1]),
        "mlp_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "use_sliding_window": st.booleans(),
        "sliding_window": st.sampled_from([None, 32]),
        "max_window_layers": st.integers(0, 3),
        "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
    },
)


@settings(max_examples=50)
@given(
    raw=CONFIGS,
    scaling=SCALINGS,
    theta=st.sampled_from([10000, 500000.0]),
    spelling=st.sampled_from(["long", "short", "rope_parameters"]),
)
def test_it_is_what_transformers_reads(
    raw: dict[str, Any], scaling: dict[str, Any] | None, theta: float, spelling: str
) -> None:
    whole = raw | rope(scaling, theta, spelling)
    assert read(whole, plain=True) == read(whole, plain=False)


@pytest.mark.parametrize(
    "raw",
    [
        QWEN3,
        {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": LLAMA3},
        {**QWEN3, "architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        json.loads((ROOT / "demo/model/config.json").read_text()),
    ],
    ids=["qwen3", "qwen2", "llama3", "mistral", "demo"],
)
def test_files_as_they_are_published_are_read_without_transformers(raw: dict[str, Any]) -> None:
    assert plain_config(raw["model_type"], raw) is not None
    assert read(raw, plain=True) == read(raw, plain=False)


def test_an_engine_of_such_a_model_never_imports_transformers() -> None:
    """Which takes half of its start."""
    script = (
        "import sys\n"
        "from quire_engine import LLM, SamplingParams\n"
        f"with LLM({str(ROOT / 'demo/model')!r}, kv_cache_memory=1 << 24) as llm:\n"
        "    assert llm.generate(['Once'], SamplingParams(max_tokens=2))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
