"""``ResponseOptions``: what writing a response needs of its request. Stored with the record, so that the response can
be written again at another router; it never holds what was asked.
"""

import logging
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from quire_proto.errors import internal

from quire_router.api.schemas import ChatRequest, GenerationBody
from quire_router.generation import GenerationRequest

log = logging.getLogger(__name__)


class ReasoningPlacement(StrEnum):
    """Where an answer shows what its model thought: beside its content, nowhere, or inside of it, marks and all."""

    APART = "apart"
    HIDDEN = "hidden"
    INSIDE = "inside"


class ResponseOptions(BaseModel):
    """``include_usage`` ends a stream with the usage, and with ``continuous_usage`` each chunk before has it too.
    ``logprobs`` and ``prompt_logprobs`` are how many most probable tokens are shown beside each token of the output and
    of the prompt; None shows nothing of them. ``tools`` are the names of those that a chat's model may call, and
    ``thoughts`` says where it shows what its model thought.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer router may know more

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tools: tuple[str, ...] = ()
    thoughts: ReasoningPlacement = ReasoningPlacement.APART

    @classmethod
    def from_request(cls, request: GenerationBody) -> Self:
        """The shape that a request asks for. An answer that is not streamed always tells its usage."""
        return cls(
            include_usage=request.include_usage or not request.stream,
            continuous_usage=request.continuous_usage,
            logprobs=request.output_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            tools=_callable_tool_names(request),
            thoughts=_reasoning_placement(request),
        )

    @classmethod
    def from_record(cls, generation: GenerationRequest) -> Self:
        """The shape that is kept with a request. Raises ``QuireError`` INTERNAL when it is damaged."""
        if not generation.shape:
            return cls()
        try:
            return cls.model_validate_json(generation.shape)
        except ValidationError:
            log.error("request %s has a damaged record", generation.request_id)
            raise internal() from None

    def to_json(self) -> str:
        """As ``kept`` reads it."""
        return self.model_dump_json(exclude_defaults=True)


def _callable_tool_names(request: GenerationBody) -> tuple[str, ...]:
    return tuple(tool.function.name for tool in request.callable) if isinstance(request, ChatRequest) else ()


def _reasoning_placement(request: GenerationBody) -> ReasoningPlacement:
    """What is held to a grammar of the client's has no thoughts before it."""
    if not isinstance(request, ChatRequest) or request.structured is not None or request.separate_reasoning is False:
        return ReasoningPlacement.INSIDE
    return ReasoningPlacement.HIDDEN if request.include_reasoning is False else ReasoningPlacement.APART
