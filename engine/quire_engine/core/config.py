"""The configuration of one scheduler: the engine's settings, and the facts of the model that it needs."""

from typing import Any, Self

from pydantic import Field
from quire_proto.pooling import Task

from quire_engine.config import SchedulerArgs
from quire_engine.core.pooling import PoolerConfig


class SchedulerConfig(SchedulerArgs):
    """Limits of one step and of one sequence, and facts of the model.

    ``max_model_len``: tokens of one sequence. ``watermark``: fraction of the device blocks that an admission leaves
    free, so that running sequences can grow for a while. ``max_step_seconds`` defaults to 0 here, so that a step does
    not depend on a clock. ``num_stages``: pipeline stages of the model. As many steps are in flight, and none computes
    a token of a sequence before the previous token is known.

    ``supported_tasks``: what requests may ask for. ``pooler_config``: how prompts are pooled; None if the engine does
    not pool. Without ``enable_chunked_prefill``, a step computes a prompt as a whole or not at all.
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
        """Returns the scheduler's settings from ``args``, with ``facts`` added or overriding them."""
        return cls(**{**args.model_dump(include=set(SchedulerArgs.model_fields)), **facts})
