"""What a request may say, as pydantic models: the OpenAI API's fields, and those that vLLM or this service add to it.

Both APIs build these objects, so that what one refuses the other refuses. A field of the OpenAI API that is not
supported yet is accepted where it changes nothing and refused otherwise; a field that nobody knows is refused.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from quire_proto.errors import invalid
from quire_proto.sampling import MAX_LOGPROBS

from quire_router.api.conversation import Message, check_messages
from quire_router.api.fields import (
    BadWords,
    EarlyStopping,
    Integer,
    Label,
    LogitBias,
    Metadata,
    Number,
    Prompts,
    Stops,
    StopTokenIds,
    only,
)
from quire_router.api.strict import Strict
from quire_router.api.structured import Guided
from quire_router.api.tools import MAX_TOOLS, ChosenTool, Tool, ToolChoice, check_tools

MAX_MESSAGES = 4096


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool | None = None
    include_event_ids: bool | None = None
    include_obfuscation: Annotated[None, only(False)] = None


class GenerationRequest(Guided):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=128)]

    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    seed: Integer = None

    n: Integer = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    use_beam_search: bool | None = None
    beam_width: Integer = None
    length_penalty: Number = None
    early_stopping: EarlyStopping | None = None

    max_tokens: Integer = None
    min_tokens: Integer = None
    stop: Stops = Field(default=[], validate_default=True)
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None

    prompt_logprobs: Integer = None
    skip_special_tokens: bool | None = None
    priority: Integer = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None

    user: Label = None
    metadata: Metadata | None = None
    store: bool | None = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    allowed_token_ids: Annotated[None, only()] = None
    service_tier: Annotated[None, only("auto", "default")] = None
    spaces_between_special_tokens: Annotated[None, only(True)] = None
    truncate_prompt_tokens: Annotated[None, only()] = None

    @property
    def size(self) -> int:
        """Characters of its prompts, about."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def include_event_ids(self) -> bool:
        """Whether the events of a stream have ids, after which it can be read on."""
        return self.stream_options is not None and bool(self.stream_options.include_event_ids)

    @property
    def output_limit(self) -> int | None:
        """The most tokens that the client asked for; None when it did not say."""
        return self.max_tokens

    @property
    def output_logprobs(self) -> int | None:
        """How many most probable tokens come beside each of the output; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def all_prompt_logprobs(self) -> int | None:
        """The same for the prompt, also where another field needs them."""
        return self.prompt_logprobs

    @property
    def width(self) -> int:
        """The beams of the search that is asked for, 0 for none. vLLM's ``use_beam_search`` takes ``n`` or ``best_of``
        for it. Raises ``QuireError``.
        """
        if self.use_beam_search is False and self.beam_width:
            raise invalid("beam_width", "beam_width and use_beam_search set to false exclude each other.")
        if not self.use_beam_search:
            return self.beam_width or 0
        width = self.beam_width or self.best_of or self.n or 1
        if width == 1:
            raise invalid("use_beam_search", "use_beam_search needs n, best_of or beam_width of at least 2.")
        return width

    @property
    def drawn(self) -> int | None:
        """``best_of``, where it does not mean the width of a search."""
        return None if self.use_beam_search and not self.beam_width else self.best_of


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts

    echo: bool | None = None
    logprobs: Integer = None

    add_special_tokens: Annotated[None, only(True)] = None
    suffix: Annotated[None, only("")] = None

    @property
    def size(self) -> int:
        """Characters and tokens of its prompts."""
        return sum(map(len, self.prompt))

    @property
    def output_logprobs(self) -> int | None:
        """As it is said."""
        return self.logprobs

    @property
    def all_prompt_logprobs(self) -> int | None:
        """Those of a prompt that is echoed come with the output's."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


class TemplateOptions(Strict):
    """vLLM's ``chat_template_kwargs``: switches of thinking, and nothing that could take the place of a message."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

    logprobs: bool | None = None
    max_completion_tokens: Integer = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    add_generation_prompt: Annotated[None, only(True)] = None
    add_special_tokens: Annotated[None, only(False)] = None
    audio: Annotated[None, only()] = None
    echo: Annotated[None, only(False)] = None
    function_call: Annotated[None, only("none", "auto")] = None
    functions: Annotated[None, only([])] = None
    modalities: Annotated[None, only(["text"])] = None
    prediction: Annotated[None, only()] = None
    prompt_cache_retention: Annotated[None, only()] = None
    verbosity: Annotated[None, only("medium")] = None
    web_search_options: Annotated[None, only()] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_messages(self.messages)
        check_tools(self.tools or (), self.tool_choice)
        if self.offered and self.separate_reasoning is False:
            raise invalid("separate_reasoning", "separate_reasoning set to false and tools exclude each other.")
        return self

    @property
    def size(self) -> int:
        """Characters that a template makes of it, about."""
        return sum(message.size for message in self.messages) + sum(tool.size for tool in self.offered)

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the model is told of: none where it may call none."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def callable(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        if not isinstance(self.tool_choice, ChosenTool):
            return self.offered
        return [tool for tool in self.offered if tool.function.name == self.tool_choice.function.name]

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    @property
    def is_guided(self) -> bool:
        """Whether something about calls must hold, so that a grammar has to see to it."""
        strict = any(tool.function.strict for tool in self.offered)
        return bool(self.offered) and (self.forced or strict or self.parallel_tool_calls is False)

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens`` or its older name ``max_tokens``. Raises ``QuireError`` when they differ."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same but differ.")
        return older if newer is None else newer

    @property
    def output_logprobs(self) -> int | None:
        """``top_logprobs``, where ``logprobs`` is true. Raises ``QuireError`` when it is not."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
        return (self.top_logprobs or 0) if self.logprobs else None
