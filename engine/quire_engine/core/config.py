"""The configuration of one scheduler: the engine's settings, and what it must know of the model."""

from typing import Any, Self

from pydantic import Field
from quire_proto.pooling import Task

from quire_engine.config import SchedulerArgs
from quire_engine.core.pooling import PoolerConfig


class SchedulerConfig(SchedulerArgs):
    """Limits of one step and of one sequence, and facts of the model.

    ``max_model_len``: tokens of one sequence. ``watermark``: part of the device blocks that an admission leaves free,
    so that running sequences can grow for a while. ``max_step_seconds`` is 0 here unless it is given, so that what a
    step computes does not depend on a clock. ``num_stages``: stages of the pipeline that the model is divided into. As
    many steps are in flight then, and none has a token of a sequence before the one before it is known.
    ``supported_tasks``: what requests may ask for. ``pooler_config``: how prompts are pooled, None where none are.
    Without ``enable_chunked_prefill`` a step computes a prompt as a whole or not at all.
    """

    max_model_len: int = Field(default=2048, ge=1)
    max_step_seconds: float | None = 0.0
    watermark: float = 0.01
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int = 2**31 - 1
    model_revision: str = ""
    num_stages: int = 1
    supported_tasks: frozenset[Task] = frozenset({Task.GENERATE})
    pooler_config: PoolerConfig | None = None
    enable_chunked_prefill: bool = True

    @classmethod
    def of(cls, args: SchedulerArgs, **facts: Any) -> Self:
        """The scheduler's settings among ``args``, with the ``facts`` that they do not have, or instead of them."""
        return cls(**{**args.model_dump(include=set(SchedulerArgs.model_fields)), **facts})
