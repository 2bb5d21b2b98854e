"""Quire's engine: runs one model with paged KV memory and continuous batching.

``core`` (scheduler, KV memory, the step loop) imports neither torch nor grpc. ``server`` serves an engine over gRPC;
``llm`` is the same engine without a server: ``from quire_engine import LLM, SamplingParams``. ``docs/architecture.md``
lists all packages, and which of them import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.llm import (
        LLM,
        AsyncEngineArgs,
        AsyncLLM,
        AsyncLLMEngine,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        EngineArgs,
        Logprob,
        LoRARequest,
        PoolingParams,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
        destroy_model_parallel,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "destroy_model_parallel",
]


def __getattr__(name: str) -> Any:
    """Imports the offline API at its first use, so that a program that imports the core alone does not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire_engine import llm

    return getattr(llm, name)
