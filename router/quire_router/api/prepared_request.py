"""``PreparedRequest``: a request whose answer can be written, whether it is new or came earlier."""

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
from quire_router.journal.base import RequestRecord

log = logging.getLogger(__name__)

# ``ResponseOptions``: what writing a response needs of its request. Stored with the record, so that the response can be
# written again at another router; it never holds what was asked.


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


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One generation for each of the request's prompts (at least one), the shape of its answer, and the text side of
    its model. The events of its stream have ids where ``event_ids`` were asked for. ``ignored`` are the parameters that
    it named and that change nothing.
    """

    generations: tuple[GenerationRequest, ...]
    response_options: ResponseOptions
    text: ModelTokenizer
    event_ids: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def first(self) -> GenerationRequest:
        """The first prompt's; the others differ from it in prompt, id and seed."""
        return self.generations[0]

    @property
    def num_choices(self) -> int:
        """How many choices the answer has: those of all prompts, in order."""
        return len(self.generations) * self.first.params.n

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer shows log-probabilities, of its output or of its prompts."""
        return self.response_options.logprobs is not None or self.response_options.prompt_logprobs is not None

    @property
    def has_reasoning(self) -> bool:
        """Whether the text of a choice may have thoughts in it that are to be told apart from its content."""
        inside = self.response_options.thoughts is ReasoningPlacement.INSIDE
        return self.first.operation == "chat" and self.text.has_reasoning and not inside

    @property
    def is_parsed(self) -> bool:
        """Whether a choice's text is more than its content: there may be thoughts or calls of tools in it."""
        return self.has_reasoning or (bool(self.response_options.tools) and self.text.tool_format is not None)


# What the API needs of the rooms behind it, as protocols: the fleet it asks, and the lifecycle that runs requests.


class ModelLimitsView(Protocol):
    """What a model's engines can take."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


class EnginePoolView(Protocol):
    """What is known of the engines now."""

    def limits(self, model: str) -> ModelLimitsView | None:
        """The limits of a configured model; None while no engine has told them."""
        ...

    def ready(self, model: str) -> int:
        """Engines that can run the model now."""
        ...


class Runner(Protocol):
    """Runs requests that passed the validator."""

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        """The answer, piece by piece; the last of each choice has its finish reason, and the last of all the usage.
        Raises ``QuireError``. Closing or cancelling it cancels the request.
        """
        ...

    async def run_once(
        self, generation: GenerationRequest, siblings: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        """As ``run``, but None when there is a record of this id already: it is to be resumed. For requests whose id
        follows from an idempotency key, and for one of several prompts, of which ``siblings`` are the others. Raises
        ``QuireError``.
        """
        ...

    async def start(self, generation: GenerationRequest) -> bool:
        """Runs a background request to its end without a listener; returns once its record is begun, False when there
        is one of this id already. Raises ``QuireError``.
        """
        ...

    async def record(self, request_id: str) -> RequestRecord | None:
        """What is remembered of a request, running anywhere or ended; None when nothing is. Raises ``QuireError``."""
        ...

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[RequestRecord | None]:
        """How it is with each of several requests, without prompts and pieces; see ``Journal.statuses``. One that runs
        in the background under no lease is taken over. Raises ``QuireError``.
        """
        ...

    def resume(self, record: RequestRecord, mark: StreamCursor, deadline: float | None = None) -> AsyncGenerator[Delta]:
        """The answer to an earlier request, from its first piece on; what is before ``mark`` comes as ``told``. Follows
        a router that is still at it, and takes a request up that nobody is at. Raises ``QuireError``, DEADLINE among
        others at ``deadline``, in seconds since 1970. Closing it, as that error, only ends the request if it was taken
        up here, and leaves it to be resumed again.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Forgets a request that has ended, and one that has not soon after the end that it is given, as by ``cancel``;
        False when nothing is remembered of it. Raises ``QuireError``.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends what has not ended of a request with ``FinishReason.ABORT``, wherever it runs; False when there is none
        that has not ended. Raises ``QuireError``.
        """
        ...
