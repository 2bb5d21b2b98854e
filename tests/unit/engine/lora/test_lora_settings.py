"""Settings of adapters that would have no effect, or contradict each other, are refused."""

from typing import Any

import pytest
from pydantic import ValidationError
from quire_engine.config import EngineArgs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_loras": 2}, "--max-loras would have no effect: add --enable-lora."),
        ({"max_lora_rank": 8}, "--max-lora-rank would have no effect: add --enable-lora."),
        ({"max_cpu_loras": 4}, "--max-cpu-loras would have no effect: add --enable-lora."),
        ({"max_loras": 2, "max_cpu_loras": 4}, "--max-loras and --max-cpu-loras would have no effect"),
        ({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 1}, "--max-cpu-loras is below --max-loras"),
        ({"lora_modules": "a=/a"}, "--lora-modules needs --enable-lora"),
    ],
)
def test_limits_of_adapters_without_adapters_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineArgs.model_validate({"model": "/m", **settings})


def test_the_defaults_of_a_model_without_adapters_may_be_given_and_are_read_again() -> None:
    """As other ranks read them."""
    args = EngineArgs.model_validate({"model": "/m", "max_loras": 1})
    assert EngineArgs.model_validate(args.model_dump()) == args
    EngineArgs.model_validate({"model": "/m", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8})
