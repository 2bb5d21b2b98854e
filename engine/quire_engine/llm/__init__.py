"""The offline API: the engine in the caller's own thread, without a server. Text in, text out.

It uses the same scheduler, pools and executor as the service, and tokenises and detokenises like the router. The same
request with the same seed therefore gives the same text. Torch is imported when a model is loaded.
"""

from quire_proto.pooling import PoolingParams

from quire_engine.core.lora import LoRARequest
from quire_engine.llm.async_llm import AsyncLLM
from quire_engine.llm.llm import LLM
from quire_engine.llm.offline_engine import AsyncEngineArgs, destroy_model_parallel
from quire_engine.llm.pooling_outputs import ClassificationRequestOutput, EmbeddingRequestOutput, ScoringRequestOutput
from quire_engine.llm.types import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

# vLLM's other names for these.
EngineArgs = AsyncEngineArgs
AsyncLLMEngine = AsyncLLM

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
