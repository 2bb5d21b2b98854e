"""What a request may say, as pydantic models: the OpenAI API's fields, and those that this service adds to it.

Both APIs build these objects, so that what one refuses the other refuses. A field of the OpenAI API that is not
supported yet is accepted where it changes nothing and refused otherwise; a field that nobody knows is refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_router.api.fields import (
    Content,
    Integer,
    Label,
    Metadata,
    Number,
    Prompt,
    Stops,
    StopTokenIds,
    only,
)
from quire_router.api.weight import check_weight

MAX_MESSAGES = 4096
T = TypeVar("T")


class Strict(BaseModel):
    """Reads values as they are, without guessing, and refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """The object in a request's body. Raises ``QuireError`` INVALID with the field at fault."""
        check_weight(body)
        return _refusing(lambda: cls.model_validate_json(body))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The object with these fields. Raises as ``from_json`` does."""
        return _refusing(lambda: cls.model_validate(fields))


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None


class GenerationRequest(Strict):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=128)]
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    seed: Integer = None
    max_tokens: Integer = None
    stop: Stops = Field(default=[], validate_default=True)
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: Label = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    n: Annotated[None, only(1)] = None
    presence_penalty: Annotated[None, only(0)] = None
    frequency_penalty: Annotated[None, only(0)] = None
    logit_bias: Annotated[None, only({})] = None
    service_tier: Annotated[None, only("auto", "default")] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        """The most tokens that the client asked for; None when it did not say."""
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Prompt

    best_of: Annotated[None, only(1)] = None
    echo: Annotated[None, only(False)] = None
    logprobs: Annotated[None, only()] = None
    suffix: Annotated[None, only("")] = None


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Label = None

    audio: Annotated[None, only()] = None
    annotations: Annotated[None, only([])] = None
    function_call: Annotated[None, only()] = None
    refusal: Annotated[None, only()] = None
    tool_calls: Annotated[None, only([])] = None

    def as_template_sees_it(self) -> dict[str, str]:
        """Role and content; ``developer`` is the newer word for the system's role, which templates know."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Integer = None

    audio: Annotated[None, only()] = None
    function_call: Annotated[None, only("none", "auto")] = None
    functions: Annotated[None, only([])] = None
    logprobs: Annotated[None, only(False)] = None
    modalities: Annotated[None, only(["text"])] = None
    parallel_tool_calls: bool | None = None
    prediction: Annotated[None, only()] = None
    prompt_cache_retention: Annotated[None, only()] = None
    reasoning_effort: Annotated[None, only("none")] = None
    response_format: Annotated[None, only({"type": "text"})] = None
    tool_choice: Annotated[None, only("none", "auto")] = None
    tools: Annotated[None, only([])] = None
    top_logprobs: Annotated[None, only(0)] = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Annotated[None, only()] = None

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens`` or its older name ``max_tokens``. Raises ``QuireError`` when they differ."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same but differ.")
        return older if newer is None else newer


def _refusing(read: Callable[[], T]) -> T:
    try:
        return read()
    except ValidationError as error:
        raise _explain(error) from None
    except RecursionError:
        raise QuireError(ErrorCode.INVALID, "The body is nested too deeply.") from None


def _explain(error: ValidationError) -> QuireError:
    """The first problem in the words of this API; the input itself is not repeated."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location, kind, text = problem["loc"], problem["type"], problem["msg"]
    if kind == "json_invalid":
        return QuireError(ErrorCode.INVALID, f"The body is not valid JSON: {text.removeprefix('Invalid JSON: ')}.")
    if not location:
        return QuireError(ErrorCode.INVALID, "The body must be a JSON object.")
    param = _param(location)
    if kind == "extra_forbidden":
        return invalid(param, f"{param} is not a known parameter.")
    if kind == "missing":
        return invalid(param, f"{param} is missing.")
    return invalid(param, f"{param}: {text.removeprefix('Value error, ')}.")


def _param(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` as ``messages[0].content``."""
    param = ""
    for part in location:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    return param[:128]
