"""What an engine says of its settings, which routers store with answers."""

import pytest
from quire_engine.config import EngineArgs
from quire_engine.factory import settings_digest

WRITTEN = {
    ("bfloat16", "auto", None): "15831196113f963d",
    ("bfloat16", "fp8", None): "17af91868a115b4a",
    ("bfloat16", "auto", "int8"): "1cffaea2d628e6bc",
    ("float32", "auto", None): "a162bb8fd2fd3873",
}
"""Records have these: another digest of the same settings would end the answers that an update interrupts."""


@pytest.mark.parametrize(("dtype", "kv_cache_dtype", "quantization"), WRITTEN)
def test_the_digest_of_settings_is_the_same_in_every_release(
    dtype: str, kv_cache_dtype: str, quantization: str | None
) -> None:
    config = EngineArgs.model_validate({"model": "m", "kv_cache_dtype": kv_cache_dtype, "quantization": quantization})
    assert settings_digest(config, dtype).hex() == WRITTEN[dtype, kv_cache_dtype, quantization]


@pytest.mark.parametrize(
    "unlike",
    [
        {"device": "cuda"},
        {"tensor_parallel_size": 2},
        {"max_num_seqs": 8},
        {"attention": "reference"},
        {"enforce_eager": True},
        {"max_model_len": 100},
        {"deterministic": True},
        {"dtype": "bfloat16"},  # what came of it counts
    ],
    ids=str,
)
def test_what_changes_rounding_at_most_is_no_other_version(unlike: dict[str, object]) -> None:
    config = EngineArgs.model_validate({"model": "m"})
    other = EngineArgs.model_validate({"model": "m", **unlike})
    assert settings_digest(other, "bfloat16") == settings_digest(config, "bfloat16")
