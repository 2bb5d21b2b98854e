"""The engine's settings that mean something without a server. Their defaults and ranges are ``EngineConfig``'s."""

from pathlib import Path
from typing import Literal, TypedDict, cast

from pydantic import ValidationError
from quire_proto.errors import invalid

from quire_engine.config import Batching, EngineConfig, Policy, Quantization


class LLMArgs(TypedDict, total=False):
    """Keyword arguments of ``LLM``, named and meant as the engine's flags; ``quire-engine --help`` explains each."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Quantization | None
    tensor_parallel_size: int
    enforce_eager: bool
    async_scheduling: bool | None
    deterministic: bool
    attention: Literal["auto", "cpu", "flashinfer", "reference"]
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_overtakes: int
    max_swapped: int
    scheduling_policy: Policy
    batching: Batching
    block_size: int
    kv_cache_memory: int | None
    gpu_memory_utilization: float | None
    swap_space: float
    enable_prefix_caching: bool
    enable_host_caching: bool


def engine_config(model: str | Path, settings: LLMArgs) -> EngineConfig:
    """The settings, checked; what is not given comes from ``QUIRE_ENGINE_…`` in the environment, or the defaults.
    Raises ``QuireError`` INVALID with the first one at fault.
    """
    given = cast("dict[str, object]", settings)
    for name in given:
        if name not in LLMArgs.__annotations__:
            raise invalid(name, f"LLM has no setting named {name}.")
    try:
        return EngineConfig.model_validate({"model": Path(model), **given})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "settings"
        raise invalid(name, f"{name}: {problem['msg']}.") from None
