"""The shapes of answers, for ``/openapi.json``: what each route answers with a 200 or a 202. The writers of answers do
not use them; the tests hold both together.
"""

from typing import Any, Generic, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

Item = TypeVar("Item")


class ErrorFields(TypedDict):
    """What was wrong. ``param`` is the field at fault; ``resumable`` is only in streams."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str
    resumable: NotRequired[bool]


class Error(TypedDict):
    """An error as OpenAI's APIs write it."""

    error: ErrorFields


class MessagesErrorDetails(TypedDict):
    """What OpenAI's API says of an error besides."""

    error_code: str
    param: str | None
    resumable: NotRequired[bool]


class MessagesErrorFields(TypedDict):
    """What was wrong."""

    type: str
    message: str
    details: MessagesErrorDetails


class MessagesError(TypedDict):
    """An error as Anthropic's API writes it."""

    type: Literal["error"]
    error: MessagesErrorFields
    request_id: str


# Chats and completions


class UsageObject(TypedDict):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]
    completion_tokens_details: NotRequired[dict[str, int]]


class ChatCompletionFunction(TypedDict):
    """A function and its arguments, which are JSON."""

    name: str
    arguments: str


class ChatCompletionToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionMessage(TypedDict):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[ChatCompletionToolCall]]


class ChatCompletionChoice(TypedDict):
    """One answer of a chat."""

    index: int
    message: ChatCompletionMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    score: NotRequired[float]


class ChatCompletion(TypedDict):
    """A whole answer to a chat. Its other fields are null unless the request asks for them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: UsageObject
    prompt_logprobs: list[Any] | None


class CompletionChoice(TypedDict):
    """One continuation of a text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    prompt_logprobs: list[Any] | None
    score: NotRequired[float]


class Completion(TypedDict):
    """A whole completion. Its other fields are null unless the request asks for them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class RequestObject(TypedDict):
    """The state of a request, with the answer once that is complete."""

    id: str
    object: Literal["request"]
    status: str
    model: str
    created: int
    background: bool
    usage: UsageObject | None
    error: NotRequired[ErrorFields]
    response: NotRequired[dict[str, Any]]
    deleted: NotRequired[bool]


# Messages and responses


class WholeMessage(TypedDict):
    """A whole message; its content is a list of blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(TypedDict):
    """The tokens of a conversation."""

    input_tokens: int


class InputTokens(TypedDict):
    """The tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseObject(TypedDict):
    """A response; its output is a list of items."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: Any
    metadata: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    temperature: float | None
    top_p: float | None
    usage: dict[str, Any] | None


class Deleted(TypedDict):
    """What was deleted."""

    id: str
    object: str
    deleted: bool


class ListPage(TypedDict, Generic[Item]):
    """A page of a list."""

    object: Literal["list"]
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


class ConversationItem(TypedDict):
    """An item of a conversation, with the fields of its type."""

    id: str
    type: str


class ConversationObject(TypedDict):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str] | None


# Embeddings and scores


class PooledUsage(TypedDict):
    """Tokens of prompts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """One embedding, in the form that the request asks for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Score(TypedDict):
    """The score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class Pooled(TypedDict, Generic[Item]):
    """What was made of each input."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Item]
    usage: PooledUsage


class RankedDocument(TypedDict):
    """A document's place in the request, and its relevance."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, str]]


class Ranking(TypedDict):
    """The documents, the most relevant first."""

    id: str
    created: int
    model: str
    results: list[RankedDocument]
    usage: PooledUsage
    meta: dict[str, Any]


# Files, batches, models and the rest


class File(TypedDict):
    """Describes a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    status_details: None


class BatchObject(TypedDict):
    """A batch as it is now."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    output_file_id: str | None
    error_file_id: str | None
    request_counts: dict[str, int]
    errors: dict[str, Any] | None
    metadata: dict[str, str] | None


class Model(TypedDict):
    """A model, as OpenAI's API lists it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NotRequired[int]
    supported_tasks: NotRequired[list[str]]


class ModelList(TypedDict):
    """The models that the caller may use."""

    object: Literal["list"]
    data: list[Model]


class ModelInfo(TypedDict):
    """A model, as Anthropic's API lists it: for requests with the header ``anthropic-version``."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelInfos(TypedDict):
    """A page of models, as Anthropic's API lists them."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UsageBucket(TypedDict):
    """What was used in an hour or a day, by model."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[dict[str, Any]]


class UsagePageObject(TypedDict):
    """Buckets, and where the next page begins."""

    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class Tokens(TypedDict):
    """The tokens of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    """The text of tokens."""

    prompt: str


class Version(TypedDict):
    """The router's version."""

    version: str
