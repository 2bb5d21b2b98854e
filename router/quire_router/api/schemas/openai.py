"""Request bodies as pydantic models: the OpenAI API's fields, and those that vLLM or this service add to it.

REST and gRPC both build these objects, so that what one refuses the other refuses. Parameters of other servers that
would change the response are refused here too, with what to use instead (``parameters.py``). Structured
output has OpenAI's field names, vLLM's newer and older ones, and SGLang's: all become one ``Structured``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator
from quire_proto.errors import QuireError, invalid
from quire_proto.pooling import Task
from quire_proto.sampling import MAX_BEAM_WIDTH, MAX_LOGPROBS, MIN_BEAM_WIDTH
from quire_proto.structured_output import MAX_OPTIONS, MAX_TEXT, Structured, StructuredKind, choice
from quire_proto.text.conversation import Hidden

from quire_router.api.schemas import parameters
from quire_router.api.schemas.base import (
    WHOLE,
    BadWords,
    EarlyStopping,
    Effort,
    Integer,
    Label,
    LogitBias,
    Metadata,
    ModelName,
    Number,
    Parsed,
    Prompts,
    Seed,
    Stops,
    StopTokenIds,
    StrictModel,
    unknown_parameter,
)
from quire_router.api.schemas.conversation import (
    MAX_TOOLS,
    ChatMessage,
    Tool,
    ToolChoice,
    check_messages,
    check_tools,
    chosen_names,
    requires_call,
    schema_text,
    unseen_in_messages,
)
from quire_router.api.schemas.parameters import Table
from quire_router.core.response_options import Api

_OBJECT = TypeAdapter(dict[str, Any])

JsonSchema = Annotated[
    str | dict[str, Any] | None,
    Parsed(str | dict[str, Any] | None, "it must be a JSON Schema, as an object or as text"),
]
Choices = Annotated[
    list[str] | None,
    Parsed(
        Annotated[list[str], Field(max_length=MAX_OPTIONS)] | None, f"it must be a list of at most {MAX_OPTIONS} texts"
    ),
]


class NamedSchema(StrictModel):
    """OpenAI's envelope of a JSON Schema; without one, any JSON object is meant. ``strict`` changes nothing: the schema
    always holds. llama.cpp does without a ``name`` where there is a schema.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """``response_format``: any text, any JSON object, or JSON of a schema. llama.cpp, Together and Fireworks have the
    schema of an object beside the type ``json_object``.
    """

    foreign: ClassVar[Table] = parameters.RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``: one of its fields. Unknown fields are never ignored here: they would be about the
    form of the output.
    """

    foreign: ClassVar[Table] = parameters.STRUCTURED_OUTPUTS

    json_: Annotated[JsonSchema, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.foreign:
                raise unknown_parameter(f"structured_outputs.{name}")
        return self


class StructuredBody(StrictModel):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema = None
    guided_regex: str | None = None
    guided_choice: Choices = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None  # there is one, for which the words mean the same
    regex: str | None = None
    ebnf: str | None = None

    @property
    def structured(self) -> Structured | None:
        """The constraint; None for free text. Raises ``QuireError`` INVALID with the field at fault, or with the names
        of two that differ.
        """
        asked = [*_from_response_format(self.response_format), *_from_other_fields(self)]
        forms = [field.read() for field in asked]
        for field, form in zip(asked, forms, strict=True):
            if form != forms[0]:  # some clients send one form in the words of several versions of vLLM
                raise invalid(asked[0].param, f"{asked[0].param} and {field.param} exclude each other.")
        return forms[0] if forms else None


@dataclass(frozen=True, slots=True)
class _StructuredField:
    """A constraint as one field states it."""

    param: str
    kind: StructuredKind
    value: Any = ""

    def read(self) -> Structured:
        try:
            if self.kind is StructuredKind.CHOICE:
                return choice(self.value)
            return Structured(self.kind, self._schema() if self.kind is StructuredKind.JSON_SCHEMA else self.value)
        except QuireError as error:
            raise invalid(self.param, error.message) from None

    def _schema(self) -> str:
        """Returns the schema as text, the same for any spacing; keeps its order, which is the order of the output."""
        if isinstance(self.value, str) and len(self.value) > MAX_TEXT:
            return self.value  # refused for its length without parsing it
        try:
            schema = (
                _OBJECT.validate_json(self.value.removeprefix("\ufeff")) if isinstance(self.value, str) else self.value
            )
            return schema_text(schema)
        except (ValidationError, ValueError):
            raise invalid(self.param, f"{self.param} is not a JSON Schema: it must be a JSON object.") from None


def _from_response_format(given: ResponseFormat | None) -> Iterator[_StructuredField]:
    if given is None:
        return
    if (given.json_schema is not None) != (given.type == "json_schema"):
        param = "response_format.json_schema"
        raise invalid(param, f"{param} and the type json_schema go together.")
    if given.json_schema is not None and given.json_schema.name is None and given.json_schema.schema_ is None:
        # It may be a schema without its envelope, which is not to be taken for any JSON object.
        param = "response_format.json_schema.schema"
        raise invalid(param, f"{param} is missing: that is where the JSON Schema belongs.")
    if given.schema_ is not None:
        if given.type != "json_object":
            param = "response_format.schema"
            raise invalid(param, f"{param} and the type json_object go together.")
        yield _StructuredField("response_format", StructuredKind.JSON_SCHEMA, given.schema_)
    elif given.json_schema is not None and given.json_schema.schema_ is not None:
        yield _StructuredField("response_format", StructuredKind.JSON_SCHEMA, given.json_schema.schema_)
    elif given.type != "text":
        yield _StructuredField("response_format", StructuredKind.JSON_OBJECT)


def _from_other_fields(request: StructuredBody) -> Iterator[_StructuredField]:
    newer = request.structured_outputs or StructuredOutputs()
    fields = [
        ("structured_outputs.json", StructuredKind.JSON_SCHEMA, newer.json_),
        ("structured_outputs.regex", StructuredKind.REGEX, newer.regex),
        ("structured_outputs.choice", StructuredKind.CHOICE, newer.choice),
        ("structured_outputs.grammar", StructuredKind.GRAMMAR, newer.grammar),
        ("structured_outputs.json_object", StructuredKind.JSON_OBJECT, "" if newer.json_object else None),
        ("guided_json", StructuredKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", StructuredKind.REGEX, request.guided_regex),
        ("guided_choice", StructuredKind.CHOICE, request.guided_choice),
        ("guided_grammar", StructuredKind.GRAMMAR, request.guided_grammar),
        ("regex", StructuredKind.REGEX, request.regex),
        ("ebnf", StructuredKind.GRAMMAR, request.ebnf),
    ]
    return (_StructuredField(param, kind, value) for param, kind, value in fields if value is not None)


MAX_MESSAGES = 4096


class StreamOptions(StrictModel):
    """How a stream is sent. ``continuous_usage_stats`` is vLLM's: the usage so far in every chunk."""

    foreign: ClassVar[Table] = parameters.STREAM_OPTIONS

    include_usage: bool | None = None
    include_event_ids: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(StrictModel):
    """How tokens are sampled."""

    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    seed: Seed = None


class GenerationBody(SamplingBody, StructuredBody):
    """What completions and chat completions have in common."""

    tasks: ClassVar[Sequence[Task]] = (Task.GENERATE,)

    model: ModelName = ""

    n: Integer = None
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
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
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
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

    @property
    def api(self) -> Api:
        """The API that its answer is written in."""
        return Api.OPENAI

    @property
    def sent_names(self) -> dict[str, str]:
        """See ``StrictModel``."""
        others = {} if self.max_tokens is not None else {"max_tokens": self.output_limit_name}
        if self.use_beam_search and not self.beam_width:
            others["beam_width"] = "use_beam_search"
        return {**others, **super().sent_names}

    @property
    def conversation(self) -> str:
        """What is stored beside the tokens of an answer, for a request that goes on from it; empty for nothing."""
        return ""

    @property
    def fits_output(self) -> bool:
        """Whether the output ends where the model's context does, instead of being refused if it could be longer."""
        return False

    @property
    def drops_earliest_messages(self) -> bool:
        """Whether the earliest messages are dropped where the conversation is longer than the model's context."""
        return False

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far. As in vLLM that needs the usage at the end, too."""
        options = self.stream_options
        return options is not None and options.include_usage is not False and bool(options.continuous_usage_stats)

    @property
    def size(self) -> int:
        """The length of its prompts in characters, about."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.continuous_usage or (self.stream_options is not None and bool(self.stream_options.include_usage))

    @property
    def include_event_ids(self) -> bool:
        """Whether the events of a stream have ids, from which it can be resumed."""
        return self.stream_options is not None and bool(self.stream_options.include_event_ids)

    @property
    def output_limit(self) -> int | None:
        """The most output tokens that the client allows; None when it did not say."""
        return self.max_tokens

    @property
    def output_limit_name(self) -> str:
        """The field that says it."""
        return "max_tokens"

    @property
    def output_logprobs(self) -> int | None:
        """The number of most probable tokens shown with each output token; None for no log-probabilities at all."""
        raise NotImplementedError

    @property
    def all_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens, also where another field needs them."""
        return self.prompt_logprobs

    @property
    def search_width(self) -> int:
        """The number of beams of a beam search, 0 for none. vLLM's ``use_beam_search`` takes ``n`` or ``best_of`` for
        it. Raises ``QuireError``.
        """
        if self.use_beam_search is False and self.beam_width:
            raise invalid("beam_width", "beam_width and use_beam_search set to false exclude each other.")
        if not self.use_beam_search:
            return self.beam_width or 0
        fields = ("beam_width", "best_of", "n")
        field = next((name for name in fields if getattr(self, name)), "use_beam_search")
        search_width: int = getattr(self, field) if field != "use_beam_search" else 1
        if search_width == 1:
            raise invalid("use_beam_search", "use_beam_search needs n, best_of or beam_width of at least 2.")
        if not MIN_BEAM_WIDTH <= search_width <= MAX_BEAM_WIDTH:
            allowed = f"between {MIN_BEAM_WIDTH} and {MAX_BEAM_WIDTH}"
            raise invalid(field, f"{field} is {search_width} but must be {allowed} with use_beam_search.")
        return search_width

    @property
    def effective_best_of(self) -> int | None:
        """``best_of``, where it does not mean the number of beams."""
        return None if self.use_beam_search and not self.beam_width else self.best_of


def _prompt(value: object) -> object:
    return [""] if value is None else value


_Prompts = Annotated[Prompts, BeforeValidator(_prompt, json_schema_input_type=Prompts | None)]


class CompletionRequest(GenerationBody):
    """The body of ``POST /v1/completions``."""

    foreign: ClassVar[Table] = parameters.COMPLETIONS

    prompt: _Prompts = [""]  # noqa: RUF012 - pydantic copies it

    echo: bool | None = None
    logprobs: Integer = None

    @property
    def size(self) -> int:
        """The length of its prompts in characters or tokens."""
        return sum(map(len, self.prompt))

    @property
    def output_logprobs(self) -> int | None:
        """See ``GenerationBody``."""
        return self.logprobs

    @property
    def all_prompt_logprobs(self) -> int | None:
        """See ``GenerationBody``; those of a prompt that is echoed come with the output's."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs


class TemplateOptions(StrictModel):
    """vLLM's ``chat_template_kwargs``: switches of thinking, and nothing that could take the place of a message."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class TemplatedBody(StrictModel):
    """What a request gives the model's chat template besides messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the chat template renders into the prompt."""
        return self.tools or ()

    @property
    def earlier_token_ids(self) -> Sequence[int]:
        """The tokens that the conversation had before, prompt and answer; empty where it begins, or is not known."""
        return ()

    @property
    def call_required(self) -> bool:
        """Whether the output must be a tool call."""
        return False


class ChatRequest(TemplatedBody, GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    foreign: ClassVar[Table] = parameters.CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

    logprobs: bool | None = None
    max_completion_tokens: Integer = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None

    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_messages(self.messages)
        check_tools(self.tools or (), self.tool_choice)
        if self.offered_tools and self.separate_reasoning is False:
            raise invalid("separate_reasoning", "separate_reasoning set to false and tools exclude each other.")
        return self

    @property
    def size(self) -> int:
        """The length of its prompt in characters, about."""
        return sum(message.size for message in self.messages) + sum(tool.size for tool in self.offered_tools)

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``."""
        return unseen_in_messages(self.messages, hidden)

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the chat template renders into the prompt: none where the model may call none."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        names = chosen_names(self.tool_choice)
        return [tool for tool in self.offered_tools if names is None or tool.function.name in names]

    @property
    def call_required(self) -> bool:
        """Whether the output must be a tool call."""
        return requires_call(self.tool_choice)

    @property
    def is_guided(self) -> bool:
        """Whether tool calls must be constrained by a grammar. A tool that is not allowed cannot be called."""
        strict = any(tool.function.strict for tool in self.offered_tools)
        limited = len(self.callable_tools) < len(self.offered_tools)
        constrained = self.call_required or strict or limited or self.parallel_tool_calls is False
        return bool(self.offered_tools) and constrained

    @property
    def output_limit(self) -> int | None:
        """``max_completion_tokens`` or its older name ``max_tokens``. Raises ``QuireError`` when they differ."""
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and newer != older:
            raise invalid("max_tokens", "max_tokens and max_completion_tokens mean the same but differ.")
        return older if newer is None else newer

    @property
    def output_limit_name(self) -> str:
        """See ``GenerationBody``."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def output_logprobs(self) -> int | None:
        """``top_logprobs``, where ``logprobs`` is true. Raises ``QuireError`` when it is not."""
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
        return (self.top_logprobs or 0) if self.logprobs else None
