"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, Anthropic's Messages API, as pydantic
models, and the chat that each means (``MessagesRequest.to_chat``): it is validated, rendered, run and recorded as if it
had come as one. What Anthropic's servers would run, and what is no text, is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from quire_proto.errors import invalid
from quire_proto.pooling import Task
from quire_proto.text.conversation import Hidden, part_name, unsupported_part
from typing_extensions import TypedDict

from quire_router.api.schemas import parameters
from quire_router.api.schemas.base import (
    Content,
    Effort,
    Integer,
    Label,
    LenientModel,
    ModelName,
    StopSequences,
    StopTokenIds,
    StrictModel,
    ToolOutput,
    Whole,
)
from quire_router.api.schemas.conversation import (
    MAX_DESCRIPTION_CHARACTERS,
    MAX_TOOLS,
    CallChecker,
    CalledFunction,
    CallId,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    Function,
    Name,
    Tool,
    ToolCall,
    ToolChoice,
)
from quire_router.api.schemas.openai import (
    MAX_MESSAGES,
    ChatRequest,
    NamedSchema,
    ResponseFormat,
    SamplingBody,
    TemplateOptions,
)
from quire_router.api.schemas.parameters import Table, counting
from quire_router.api.schemas.translation import FIELDS_OF_EXECUTION, FieldNames, TranslatedRequest, fields_of_chats
from quire_router.core.response_options import Api

_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The blocks of a message by their types, with the fields that each must have."""
_BLOCKS = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}
_ATTRIBUTION = "x-anthropic-billing-header:"


_RESULT_OF_SERVER = "_tool_result"
"""How the types of blocks end that hold what a tool of a server found."""
_SHOWN_AS = {"content": "text", "reasoning_content": "thinking", "tool_calls": "tool_use"}


class Block(LenientModel):
    """A part of a message, with the fields of its ``type``. Blocks of other types are what a server wrote into an
    answer: of those only the text of a ``compaction`` can be shown. ``signature`` and ``data`` of thinking are not
    looked at, and templates have no place for ``is_error``.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: CallId | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: CallId | None = None
    content: ToolOutput | None = None
    is_error: bool | None = None
    citations: SkipJsonSchema[Any] = None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """Leaves out the fields of blocks that are not read, of which each type has its own."""
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in _FIELDS:
            return value
        if kind == "compaction" and isinstance(value.get("content"), str):
            return {"type": "text", "text": value["content"]}
        return {"type": kind}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in _FIELDS.get(self.type, ()):
            if getattr(self, field) is None:
                raise ValueError(f"a part of type {self.type} has the field {field}, which is missing")
        return self

    def to_call(self) -> ToolCall:
        """Returns a ``tool_use`` as the call of a chat."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        return ToolCall(id=self.id or "", function=CalledFunction(name=self.name or "", arguments=arguments))

    def names_of_lost(self) -> Iterator[str]:
        """Yields the names of what no template can show."""
        if self.type not in _FIELDS or self.type == "redacted_thinking":
            yield self.type
        if self.is_error:
            yield "is_error"
        if self.citations:
            yield "citations"


def _blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(LenientModel):
    """One message of a conversation. Its content is a text, or blocks. A ``system`` message may come anywhere."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]

    @property
    def text(self) -> str:
        """Its text alone."""
        return "".join(block.text or "" for block in self.content if block.type == "text")

    def to_chat(self) -> Iterator[ChatMessage]:
        """Yields the messages of a chat that say the same: each result of a tool is one of its own there."""
        if self.role == "assistant":
            yield self._from_assistant()
            return
        texts: list[str] = []
        for block in self.content:
            if block.type == "text":
                texts.append(block.text or "")
            if block.type != "tool_result":
                continue
            if texts:
                yield ChatMessage(role=self.role, content="".join(texts))
            texts = []
            yield ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=block.content or "")
        if texts or not self.content:
            yield ChatMessage(role=self.role, content="".join(texts))

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``."""
        types: set[str] = set()
        for message in self.to_chat():
            is_tool = message.role == "tool"
            fields = hidden(message.role, message.fields)
            types.update("tool_result" if is_tool else _SHOWN_AS[name] for name in fields)
        for number, block in enumerate(self.content):
            for name in [*block.names_of_lost(), *({block.type} & types)]:
                yield part_name("content", number, name)

    def _from_assistant(self) -> ChatMessage:
        calls = [block.to_call() for block in self.content if block.type == "tool_use"]
        thinking = "".join(block.thinking or "" for block in self.content)
        return ChatMessage(
            role="assistant", content=self.text, tool_calls=calls or None, reasoning_content=thinking or None
        )


def _check_conversation(messages: Sequence[Message]) -> None:
    """Raises ``QuireError`` for blocks in a message of the wrong role, results of no call, and a conversation that ends
    with an answer, which would have to be continued.
    """
    calls = CallChecker()
    for number, message in enumerate(messages):
        for place, block in enumerate(message.content):
            where = f"messages[{number}].content[{place}]"
            _check_block(block, message.role, where)
            if block.type == "tool_result":
                calls.output(block.tool_use_id, f"{where}.tool_use_id")
            if block.type == "tool_use":
                calls.call(block.id, f"{where}.id")
        calls.end_message()
    if messages[-1].role == "assistant":
        raise invalid(
            "messages",
            "The last message is the assistant's, and continuing one is not supported here: "
            "use /v1/completions with the prompt that /tokenize makes.",
        )


def _check_block(block: Block, role: str, where: str) -> None:
    """Raises ``QuireError`` for a block that is in no message of this role. An assistant's may be of any server."""
    if block.type in _BLOCKS[role]:
        return
    if block.type in _FIELDS:
        raise invalid(where, f"{where}: a part of type {block.type} is in no message of the {role}.")
    if role != "assistant" and not block.type.endswith(_RESULT_OF_SERVER):
        raise invalid(f"{where}.type", f"{where}.type: {unsupported_part(block.type)}.")


def _tool_type(kind: str | None) -> str | None:
    if kind == "function":
        raise ValueError("this is the form of OpenAI's APIs; here name, description and input_schema stand in the tool")
    if kind not in (None, "custom"):
        raise ValueError(
            f"tools of type {kind[:32]!r} are Anthropic's own; only those with a name and an input_schema are supported"
        )
    return kind


class ToolDefinition(StrictModel):
    """A tool that the client runs; ``input_schema`` is a JSON Schema of an object."""

    foreign: ClassVar[Table] = parameters.MESSAGES_TOOL

    type: Annotated[str | None, AfterValidator(_tool_type), Field(json_schema_extra={"enum": ["custom", None]})] = None
    name: Name
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None  # prefixes are kept anyway

    def to_chat(self) -> Tool:
        """Returns the tool of a chat."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class ToolUseChoice(StrictModel):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name is None) == (self.type == "tool"):
            raise ValueError("name and the type tool go together")
        return self

    def to_chat(self) -> ToolChoice:
        """Returns the choice of a chat."""
        if self.name is not None:
            return ChosenTool(type="function", function=ChosenFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class Thinking(StrictModel):
    """Whether the model thinks before it answers: ``adaptive`` leaves that to its template, as no ``thinking`` does.
    Of the words of ``display`` only ``omitted`` changes anything.
    """

    foreign: ClassVar[Table] = parameters.MESSAGES_THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    display: Label = None


class OutputFormat(StrictModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(StrictModel):
    """How hard the model thinks, where its template reads that, and the form of its answer."""

    foreign: ClassVar[Table] = parameters.MESSAGES_OUTPUT

    effort: Effort | None = None
    format: OutputFormat | None = None


class RequestMetadata(StrictModel):
    """Labels, which change nothing."""

    user_id: Label = None


def _system(value: object) -> object:
    """Returns a system prompt without the line that Claude Code puts before it: it is no instruction, and another with
    each request, so that nothing behind it could be found in a prefix cache.
    """
    if isinstance(value, list):
        return [part if not isinstance(part, dict) else {**part, "text": _system(part.get("text"))} for part in value]
    return value.partition("\n")[2] if isinstance(value, str) and value.startswith(_ATTRIBUTION) else value


_FOREIGN: Final[Table] = {**fields_of_chats(parameters.MESSAGES), **parameters.MESSAGES}


class _SystemPart(TypedDict):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class MessagesBody(StrictModel):
    """What a request to answer a conversation and one to count its tokens have in common."""

    foreign: ClassVar[Table] = _FOREIGN

    tasks: ClassVar[Sequence[Task]] = (Task.GENERATE,)

    model: ModelName = ""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[
        Content | None, BeforeValidator(_system, json_schema_input_type=str | list[_SystemPart] | None)
    ] = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the former name of output_config.format
    cache_control: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_conversation(self.messages)
        return self

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``."""
        if self.system and hidden("system", frozenset({"content"})):
            yield "system"
        for number, message in enumerate(self.messages):
            yield from (f"messages[{number}].{name}" for name in message.unseen(hidden))

    def template_fields(self) -> dict[str, Any]:
        """Returns the fields of a chat that its template reads. A template has one switch of thinking, of either
        name.
        """
        thinking, switch = self.thinking, None
        if thinking is not None and thinking.type != "adaptive":
            on = thinking.type == "enabled"
            switch = TemplateOptions(enable_thinking=on, thinking=on)
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return {
            "model": self.model,
            "messages": [*system, *(each for message in self.messages for each in message.to_chat())],
            "tools": None if self.tools is None else [tool.to_chat() for tool in self.tools],
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            "chat_template_kwargs": switch,
        }


class MessagesRequest(SamplingBody, MessagesBody):
    """The body of ``POST /v1/messages``. Besides Anthropic's fields it has the sampling parameters of chats, and some
    more of theirs (``FIELDS_OF_EXECUTION``).
    """

    max_tokens: Whole
    stop_sequences: StopSequences = Field(default=[], validate_default=True)
    stream: bool | None = None
    metadata: RequestMetadata | None = None

    min_tokens: Integer = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    background: bool | None = None
    priority: Integer = None
    store: bool | None = None

    @classmethod
    def chat_from_json(cls, body: bytes | bytearray) -> "MessagesChat":
        """Returns the chat that a request's body means. Raises ``QuireError`` as ``from_json`` does."""
        return cls.from_json(body).to_chat()

    def to_chat(self) -> "MessagesChat":
        """Returns the chat that this request means. Raises ``QuireError`` INVALID for what no chat may be."""
        choice = self.tool_choice
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        copied = (*SamplingBody.model_fields, *FIELDS_OF_EXECUTION, "max_tokens", "stream")
        chat = MessagesChat.from_fields(
            {
                **self.template_fields(),
                **{name: getattr(self, name) for name in copied},
                "stop": self.stop_sequences,
                "tool_choice": None if choice is None else choice.to_chat(),
                "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
                "response_format": self._response_format(),
                "include_reasoning": False if omitted else None,
            }
        )
        return chat.made_from(self)

    def _response_format(self) -> ResponseFormat | None:
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if form is None:
            return None
        schema = NamedSchema.model_validate({"schema": form.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class CountTokensRequest(MessagesBody):
    """The body of ``POST /v1/messages/count_tokens``. What else a request to answer the conversation has does not
    change its tokens, and is ignored.
    """

    foreign: ClassVar[Table] = counting(_FOREIGN, (*MessagesRequest.model_fields, "compaction"))


FIELD_NAMES: Final = FieldNames(
    {
        "chat_template_kwargs.enable_thinking": "thinking",
        "chat_template_kwargs.thinking": "thinking",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    },
    tool_fields={"parameters": "input_schema"},
)
"""What the fields of a chat are called in the Messages request that it was made from."""


class TranslatedMessages(TranslatedRequest):
    """A request that was made from one of the Messages API."""

    names: ClassVar[Mapping[str, str]] = FIELD_NAMES.names


class MessagesChat(TranslatedMessages, ChatRequest):
    """A chat whose answer is written as one of the Messages API."""

    @property
    def api(self) -> Api:
        """See ``GenerationBody``."""
        return Api.MESSAGES

    @property
    def fits_output(self) -> bool:
        """See ``GenerationBody``. Its answer has a stop reason for that."""
        return True
