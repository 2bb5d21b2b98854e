"""``ResponseOptions``: what writing a response needs of its request, kept with the request's record. It says how the
text of an answer is read, and so also where its stop strings count.
"""

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quire_proto.errors import internal

from quire_router.core.generation import GenerationRequest

log = logging.getLogger(__name__)


class Api(StrEnum):
    """The APIs that an answer can be written in; over gRPC it looks the same in both."""

    OPENAI = "openai"
    MESSAGES = "messages"
    RESPONSES = "responses"


class ReasoningPlacement(StrEnum):
    """Where a response shows the model's reasoning: in a field of its own, nowhere, or inline in the content with its
    marks.
    """

    SEPARATE = "apart"
    HIDDEN = "hidden"
    INLINE = "inside"


class ResponseOptions(BaseModel):
    """What writing a response needs of its request. Stored with the record (``GenerationRequest.response_options``), so
    that another router can write the response again; it never contains the prompt or the messages.

    ``include_usage`` ends a stream with the usage, and with ``continuous_usage`` each chunk before has it too.
    ``logprobs`` and ``prompt_logprobs`` are how many most probable tokens are shown beside each token of the output and
    of the prompt; None shows no log-probabilities. ``token_ids`` shows the tokens of both, and ``tokens_as_ids`` names
    tokens by their ids in the log-probabilities. ``tools`` are the names of the tools that a chat's model may call,
    ``tool_types`` the types of their parameters that are no strings, and ``reasoning`` is where the reasoning is shown.
    ``structured_param`` is the parameter that constrains the answer, empty where there is none or a grammar of the
    client. ``api`` is the API that the response is written in, and its output is ``limited_by_context`` where it may
    have fewer tokens than the client asked for, as the model's context ends. An ``alias`` is the first name of a field,
    which older routers write and read.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)  # a newer router may know more

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    tools: tuple[str, ...] = ()
    tool_types: Mapping[str, Mapping[str, tuple[str, ...]]] = {}
    reasoning: Annotated[ReasoningPlacement, Field(alias="thoughts")] = ReasoningPlacement.SEPARATE
    structured_param: Annotated[str, Field(alias="form")] = ""
    api: Api = Api.OPENAI
    limited_by_context: Annotated[bool, Field(alias="cut")] = False

    @classmethod
    def from_record(cls, generation: GenerationRequest) -> Self:
        """Returns the options that are stored with a request. Raises ``QuireError`` INTERNAL when they are damaged."""
        if not generation.response_options:
            return cls()
        try:
            return cls.model_validate_json(generation.response_options)
        except ValidationError:
            log.error("request %s has a damaged record", generation.request_id)
            raise internal() from None

    def to_json(self) -> str:
        """Returns what ``from_record`` reads."""
        return self.model_dump_json(exclude_defaults=True, by_alias=True)
