"""Quire's engine: runs one model with paged KV memory and continuous batching.

The pure core (``request``, ``kv``, ``scheduling``, ``core``) imports neither torch nor grpc; ``executor``,
``models``, ``attention`` and ``sampling`` are the only rooms that know torch, and ``service`` the only one that knows
grpc. ``llm`` is the same engine without a server: ``from quire_engine import LLM, SamplingParams``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.llm import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    """Imports the offline API at its first use, so that a program that imports the core alone does not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire_engine import llm

    return getattr(llm, name)
