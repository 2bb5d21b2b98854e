"""``PreparedRequest``: a validated request, new or stored, with all that writing its response needs; and the protocols
through which the API sees what is below it: the engine pool and the runner of requests.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from quire_proto.errors import internal
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.schemas.openai import ChatRequest, GenerationBody
from quire_router.core.generation import Delta, GenerationRequest, PromptGroup, StreamCursor
from quire_router.engines.settings import ServedModelLimits
from quire_router.journal.base import RequestRecord

log = logging.getLogger(__name__)


class ReasoningPlacement(StrEnum):
    """Where a response shows the model's reasoning: in a field of its own, nowhere, or inline in the content with its
    marks.
    """

    SEPARATE = "apart"
    HIDDEN = "hidden"
    INLINE = "inside"


class ResponseOptions(BaseModel):
    """What writing a response needs of its request. Stored with the record (``GenerationRequest.shape``), so that
    another router can write the response again; it never holds what was asked.

    ``include_usage`` ends a stream with the usage, and with ``continuous_usage`` each chunk before has it too.
    ``logprobs`` and ``prompt_logprobs`` are how many most probable tokens are shown beside each token of the output and
    of the prompt; None shows no log-probabilities. ``tools`` are the names of the tools that a chat's model may call,
    and ``thoughts`` is where the reasoning is shown.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer router may know more

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tools: tuple[str, ...] = ()
    thoughts: ReasoningPlacement = ReasoningPlacement.SEPARATE

    @classmethod
    def from_request(cls, request: GenerationBody) -> Self:
        """Returns the options that a request asks for. A response that is not streamed always has its usage."""
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
        """Returns the options that are stored with a request. Raises ``QuireError`` INTERNAL when they are damaged."""
        if not generation.shape:
            return cls()
        try:
            return cls.model_validate_json(generation.shape)
        except ValidationError:
            log.error("request %s has a damaged record", generation.request_id)
            raise internal() from None

    def to_json(self) -> str:
        """Returns what ``from_record`` reads."""
        return self.model_dump_json(exclude_defaults=True)


def _callable_tool_names(request: GenerationBody) -> tuple[str, ...]:
    return tuple(tool.function.name for tool in request.callable_tools) if isinstance(request, ChatRequest) else ()


def _reasoning_placement(request: GenerationBody) -> ReasoningPlacement:
    """Output that is constrained by the client's own grammar has no reasoning before it."""
    if not isinstance(request, ChatRequest) or request.structured is not None or request.separate_reasoning is False:
        return ReasoningPlacement.INLINE
    return ReasoningPlacement.HIDDEN if request.include_reasoning is False else ReasoningPlacement.SEPARATE


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One generation for each of the request's prompts (at least one), how its response is written, and the tokenizer
    of its model. With ``event_ids`` the events of its stream have ids. ``ignored`` are the parameters that it named and
    that change nothing.
    """

    generations: tuple[GenerationRequest, ...]
    response_options: ResponseOptions
    text: ModelTokenizer
    event_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def first(self) -> GenerationRequest:
        """The generation of the first prompt; the others differ from it in prompt, id and seed."""
        return self.generations[0]

    @property
    def num_choices(self) -> int:
        """The number of choices of the response: those of all prompts, in order."""
        return len(self.generations) * self.first.params.n

    @property
    def has_logprobs(self) -> bool:
        """Whether the response shows log-probabilities, of its output or of its prompts."""
        return self.response_options.logprobs is not None or self.response_options.prompt_logprobs is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether a choice's text may have reasoning in it that is to be separated from its content."""
        inline = self.response_options.thoughts is ReasoningPlacement.INLINE
        return self.first.operation == "chat" and self.text.has_reasoning and not inline

    @property
    def is_parsed(self) -> bool:
        """Whether a choice's text is more than its content: there may be reasoning or tool calls in it."""
        return self.has_reasoning or (bool(self.response_options.tools) and self.text.tool_format is not None)


class EnginePoolView(Protocol):
    """What is known of the engines now."""

    def limits(self, model: str) -> ServedModelLimits | None:
        """Returns the limits of a configured model; None while they are unknown."""
        ...

    def ready(self, model: str) -> int:
        """Returns the number of engines that can run the model now."""
        ...


class Runner(Protocol):
    """Runs validated requests; see ``requests.runner.RequestRunner``. Every method raises ``QuireError``."""

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yields the deltas; the last of each choice has its finish reason, and the last of all the usage. Closing or
        cancelling the generator cancels the request.
        """
        ...

    async def run_once(
        self, generation: GenerationRequest, prompt_group: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``, but returns None when there is a record of this id already, which can be resumed. For requests
        whose id follows from an idempotency key, and for one of several prompts, which share ``prompt_group``.
        """
        ...

    async def start(self, generation: GenerationRequest) -> bool:
        """Runs a background request to its end without a consumer. Returns once its record is written, False when there
        is one of this id already.
        """
        ...

    async def record(self, request_id: str) -> RequestRecord | None:
        """Returns the record of a request, running anywhere or ended; None when there is none."""
        ...

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[RequestRecord | None]:
        """Returns the records of several requests without prompts and deltas; see ``Journal.statuses``. A background
        request without a lease is claimed.
        """
        ...

    def resume(
        self, record: RequestRecord, cursor: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        """Yields the response to an earlier request from its first delta on; deltas before ``cursor`` are ``replayed``.
        Follows the router that runs the request, and claims a request that none runs. Raises ``QuireError``, DEADLINE
        among others at ``deadline``, in seconds since 1970. Closing the generator, as that error, only ends the request
        if it was claimed here, and then leaves it to be resumed again.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Forgets a request that has ended. One that runs is ended as by ``cancel`` and forgotten soon after. Returns
        False when there is no record of it.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends a request that runs, here or anywhere, with ``FinishReason.ABORT``. Returns False when none runs."""
        ...
