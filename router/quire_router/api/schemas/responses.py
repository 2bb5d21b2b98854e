"""The bodies of ``POST /v1/responses`` and ``POST /v1/responses/input_tokens``, OpenAI's Responses API, as pydantic
models, and the chat that each means (``ResponsesRequest.to_chat``): it is validated, rendered, run and recorded as if
it had come as one. What OpenAI's servers would run, and what is no text, is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr
from quire_proto.errors import invalid
from quire_proto.pooling import Task
from quire_proto.sampling import MAX_LOGPROBS
from quire_proto.text.conversation import Hidden
from typing_extensions import TypedDict

from quire_router.api.schemas import parameters
from quire_router.api.schemas.base import (
    WHOLE,
    Content,
    Effort,
    Integer,
    Label,
    Metadata,
    ModelName,
    Stops,
    StopTokenIds,
    StrictModel,
)
from quire_router.api.schemas.conversation import (
    MAX_TOOLS,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    Tool,
    ToolChoice,
)
from quire_router.api.schemas.openai import (
    MAX_MESSAGES,
    ChatRequest,
    NamedSchema,
    ResponseFormat,
    SamplingBody,
    StreamOptions,
    TemplateOptions,
)
from quire_router.api.schemas.parameters import Table, counting
from quire_router.api.schemas.response_items import (
    REFERENCE,
    History,
    InputItem,
    ItemId,
    check_conversation,
    list_items,
    name_in_template,
    to_messages,
    unseen_in_items,
)
from quire_router.api.schemas.response_state import INCLUDES_ENCRYPTED_CONTENT, ResponseState
from quire_router.api.schemas.response_tools import (
    AllowedTools,
    ChoiceOfTools,
    FunctionTool,
    NamedFunction,
    NamedNamespace,
)
from quire_router.api.schemas.translation import FIELDS_OF_EXECUTION, FieldNames, TranslatedRequest, fields_of_chats
from quire_router.core.errors import item_not_found
from quire_router.core.generation import MAX_CONVERSATION_CHARACTERS
from quire_router.core.response_options import Api

MAX_INCLUDED = 32
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class TextFormat(StrictModel):
    """The form of the text: any, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def to_chat(self) -> ResponseFormat:
        """Returns the form of a chat's answer. Raises ``QuireError``."""
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise invalid("text.format.schema", "text.format.schema and the type json_schema go together.")
        if self.schema_ is None:
            return ResponseFormat(type=self.type)
        named = NamedSchema.model_validate({"schema": self.schema_})
        return ResponseFormat(type="json_schema", json_schema=named)


class TextOptions(StrictModel):
    """What the text is to look like. No template reads ``verbosity``."""

    foreign: ClassVar[Table] = parameters.RESPONSES_TEXT

    format: TextFormat | None = None


class ReasoningOptions(StrictModel):
    """How hard the model thinks, where its template reads that. With a ``summary`` its reasoning comes as its own
    summary: many clients show only that.
    """

    foreign: ClassVar[Table] = parameters.RESPONSES_REASONING

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def is_summarized(self) -> bool:
        """Whether a summary is asked for, by its name or by its former one."""
        return (self.summary or self.generate_summary) is not None


_FOREIGN: Final[Table] = {**fields_of_chats(parameters.RESPONSES), **parameters.RESPONSES}


def _items(value: object) -> object:
    if value is None:
        return []
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _conversation_id(value: object) -> object:
    return value["id"] if isinstance(value, dict) and "id" in value else value


class _Named(TypedDict):
    """A conversation as an object."""

    id: ItemId


ConversationId = Annotated[ItemId, BeforeValidator(_conversation_id, json_schema_input_type=ItemId | _Named)]


class InputBody(StrictModel):
    """What a request for a response and one that counts its input's tokens have in common."""

    foreign: ClassVar[Table] = _FOREIGN

    tasks: ClassVar[Sequence[Task]] = (Task.GENERATE,)
    may_be_empty: ClassVar[bool] = False

    model: ModelName = ""
    input: Annotated[
        Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)],
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem] | None),
    ] = []  # noqa: RUF012 - pydantic copies it
    instructions: Content | None = None
    previous_response_id: ItemId | None = None
    conversation: ConversationId | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ChoiceOfTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def size(self) -> int:
        """Its characters, about."""
        return sum(item.size for item in self.input) + len(self.instructions or "")

    @property
    def references(self) -> list[str]:
        """The ids of items that it names instead of repeating them."""
        return [item.id or "" for item in self.input if item.type == REFERENCE]

    def all_items(self, history: History) -> list[InputItem]:
        """Returns the whole conversation: what the request goes on from, and the input. Raises ``QuireError`` for an
        item that is not found.
        """
        if self.conversation is not None and self.previous_response_id is not None:
            raise invalid("conversation", "conversation and previous_response_id exclude each other.")
        items = list(history.items)
        for number, item in enumerate(self.input):
            if item.type == REFERENCE and item.id not in history.referenced:
                raise item_not_found(f"input[{number}].id", item.id or "")
            items.append(history.referenced[item.id or ""] if item.type == REFERENCE else item)
        if not items and not self.may_be_empty:
            raise invalid("input", "input is missing.")
        if not (self.may_be_empty or self.instructions) and all(item.other is not None for item in items):
            kinds = ", ".join(sorted({item.type[:32] for item in items})[:4])
            raise invalid("input", f"input has nothing that a model is shown: its items are all of type {kinds}.")
        check_conversation(items, len(history.items))
        return items

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``. What an earlier request said is not named again."""
        if self.instructions and hidden("system", frozenset({"content"})):
            yield "instructions"
        yield from unseen_in_items(self.input, hidden)

    def template_fields(self, items: Sequence[InputItem]) -> dict[str, Any]:
        """Returns the fields of a chat that its template reads."""
        system = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        return {
            "model": self.model,
            "messages": [*system, *to_messages(items)],
            "tools": None if self.tools is None else [each for tool in self.tools for each in tool.to_chat()],
            "tool_choice": self._tool_choice(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def allowed(self) -> frozenset[str] | None:
        """The names in the template of the tools that may be called; None for all."""
        choice = self.tool_choice
        if not isinstance(choice, AllowedTools):
            return None
        return frozenset(name for each in choice.tools for name in self._named(each))

    def _named(self, named: NamedFunction | NamedNamespace) -> list[str]:
        """Returns the names in the template of the functions that a choice names. Raises ``QuireError`` for none."""
        functions = [(space, each.name or "") for tool in self.tools or () for space, each in tool.functions()]
        names = [name_in_template(space, name) for space, name in functions if named.matches(space, name)]
        if not names:
            raise invalid("tool_choice", f"tool_choice names {named.name}, which is not among the tools.")
        return names

    def _tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            assert self.allowed  # or it is refused
            return choice.mode
        if isinstance(choice, NamedFunction):
            names = self._named(choice)
            if len(names) > 1:
                raise invalid("tool_choice", f"tool_choice names {choice.name}, which several namespaces have.")
            return ChosenTool(type="function", function=ChosenFunction(name=names[0]))
        return choice


_LABELS = ("metadata", "user", "safety_identifier", "prompt_cache_key")
_REPEATED = (
    "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
    "safety_identifier", "temperature", "top_p", "user",
)  # fmt: skip
"""What a response repeats of its request as it was sent, null where it was not."""


class ResponsesRequest(SamplingBody, InputBody):
    """The body of ``POST /v1/responses``. Besides the fields of the Responses API it has the sampling parameters of
    chats, and some more of theirs (``FIELDS_OF_EXECUTION``).
    """

    include: Annotated[list[str], Field(max_length=MAX_INCLUDED)] | None = None
    max_output_tokens: Integer = None
    max_tool_calls: Integer = None  # of tools that the server runs, of which there are none
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None

    min_tokens: Integer = None
    stop: Stops = Field(default=[], validate_default=True)
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    priority: Integer = None

    def to_chat(self, history: History, request_id: str) -> "ResponsesChat":
        """Returns the chat that this request means. Raises ``QuireError`` INVALID for what no chat may be."""
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise invalid("max_output_tokens", "max_output_tokens must be at least 1.")
        if self.conversation is not None and self.store is False:
            raise invalid("store", "A response is a turn of its conversation: store cannot be false.")
        items = self.all_items(history)
        form = None if self.text is None else self.text.format
        copied = (
            *SamplingBody.model_fields,
            *FIELDS_OF_EXECUTION,
            *_LABELS,
            "stop",
            "stream",
            "stream_options",
            "parallel_tool_calls",
        )
        shown = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        chat = ResponsesChat.from_fields(
            {
                **self.template_fields(items),
                **{name: getattr(self, name) for name in copied},
                "max_tokens": self.max_output_tokens,
                "response_format": None if form is None else form.to_chat(),
                "logprobs": shown or None,
                "top_logprobs": (self.top_logprobs or 0) if shown else None,
            }
        )
        kept = len(history.items) if self.conversation is not None else None
        listed = list_items(items, request_id, kept) if self.store is not False else None
        state = ResponseState(self._repeated(), listed)
        chat = chat.made_from(self).continuing(history.token_ids).storing(state)
        if len(chat.conversation) > MAX_CONVERSATION_CHARACTERS:
            raise invalid("input", "The conversation is too long to be stored; it can be answered with store: false.")
        return chat

    def _repeated(self) -> dict[str, Any]:
        """Returns what its response repeats of it."""
        options, included = self.reasoning or ReasoningOptions(), self.include or ()
        form = None if self.text is None or self.text.format is None else self.text.format
        choice = self.tool_choice
        return {
            **{name: getattr(self, name) for name in _REPEATED},
            "background": bool(self.background),
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": options.effort, "summary": options.summary or options.generate_summary},
            "service_tier": "default",
            "store": self.store is not False,
            "text": {
                "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True),
                "verbosity": "medium",
            },
            "tool_choice": "auto"
            if choice is None
            else choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": [tool.repeated() for tool in self.tools or () if not tool.is_ignored],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
            INCLUDES_ENCRYPTED_CONTENT: ENCRYPTED in included,
        }


class InputTokensRequest(InputBody):
    """The body of ``POST /v1/responses/input_tokens``. What else a request for a response has does not change its
    tokens, and is ignored.
    """

    may_be_empty: ClassVar[bool] = True

    foreign: ClassVar[Table] = counting(_FOREIGN, ResponsesRequest.model_fields)


FIELD_NAMES: Final = FieldNames(
    {
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    },
    pattern=re.compile(
        r"\b(?:max_tokens|reasoning_effort|response_format)\b|"
        r"(?:^|(?<=in ))messages\b(?!\[)|\bmessages\[\d+\](?:\.\w+)*"  # and not where it is only a word
    ),
)
"""What the fields of a chat are called in the Responses request that it was made from."""


class TranslatedResponses(TranslatedRequest):
    """A request that was made from one of the Responses API."""

    names: ClassVar[Mapping[str, str]] = FIELD_NAMES.names
    _token_ids: Sequence[int] = PrivateAttr(())

    @property
    def earlier_token_ids(self) -> Sequence[int]:
        """See ``TemplatedBody``."""
        return self._token_ids

    def continuing(self, token_ids: Sequence[int]) -> Self:
        """Returns this request, whose conversation had these tokens before."""
        self._token_ids = token_ids
        return self


class ResponsesChat(TranslatedResponses, ChatRequest):
    """A chat whose answer is written as a response. Where only some of its tools are allowed, all are in its prompt."""

    _state: str = PrivateAttr("")

    def storing(self, state: ResponseState) -> Self:
        """Returns this chat, whose response is stored with ``state``."""
        self._state = state.to_text()
        return self

    @property
    def api(self) -> Api:
        """See ``GenerationBody``."""
        return Api.RESPONSES

    @property
    def conversation(self) -> str:
        """See ``GenerationBody``."""
        return self._state

    @property
    def fits_output(self) -> bool:
        """See ``GenerationBody``. Its answer is incomplete then, and says so."""
        return True

    @property
    def drops_earliest_messages(self) -> bool:
        """See ``GenerationBody``."""
        return isinstance(self._source, ResponsesRequest) and self._source.truncation == "auto"

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """See ``ChatRequest``."""
        allowed = self._source.allowed if isinstance(self._source, InputBody) else None
        tools = super().callable_tools
        return tools if allowed is None else [tool for tool in tools if tool.function.name in allowed]
