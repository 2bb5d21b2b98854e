"""Text to tokens and back: the requests and results of ``/tokenize`` and ``/detokenize``, in vLLM's words, and what the
Messages and the Responses API ask for the same with (``to_tokenize``, ``input_to_tokenize``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from quire_proto.errors import QuireError, invalid
from quire_proto.text.conversation import Hidden
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.api.schemas import parameters
from quire_router.api.schemas.anthropic import CountTokensRequest, TranslatedMessages
from quire_router.api.schemas.base import MAX_PROMPT_TOKENS, ModelName, StrictModel, TokenIds
from quire_router.api.schemas.conversation import (
    ChatMessage,
    check_messages,
    check_tools,
    to_template_messages,
    unseen_in_messages,
)
from quire_router.api.schemas.openai import MAX_MESSAGES, TemplatedBody
from quire_router.api.schemas.parameters import Table
from quire_router.api.schemas.response_items import History
from quire_router.api.schemas.responses import InputTokensRequest, TranslatedResponses
from quire_router.api.tools_and_reasoning import template_options


class TokenizeRequest(TemplatedBody):
    """Either a text or a conversation."""

    foreign: ClassVar[Table] = parameters.TOKENIZE

    model: ModelName = ""
    prompt: str | None = parameters.named(parameters.TOKENIZE, "prompt", None)
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.messages is None and self.prompt is None:
            raise invalid("prompt", "prompt or messages is missing.")
        if self.messages is None:
            self._exclude("prompt", "tools", "add_generation_prompt", "reasoning_effort", "chat_template_kwargs")
        else:
            self._exclude("messages", "prompt", "add_special_tokens")
            check_messages(self.messages)
            check_tools(self.tools or (), None)
        return self

    @property
    def size(self) -> int:
        """Its characters, about."""
        tools = sum(tool.size for tool in self.tools or ())
        return len(self.prompt or "") + sum(message.size for message in self.messages or ()) + tools

    def unseen(self, hidden: Hidden) -> Iterator[str]:
        """See ``StrictModel``."""
        return unseen_in_messages(self.messages or (), hidden)

    def _exclude(self, given: str, *others: str) -> None:
        """A template writes its own special tokens, and a text has no template."""
        for other in others:
            if getattr(self, other):
                raise invalid(other, f"{other} and {given} exclude each other.")


class _Counted(TranslatedMessages, TokenizeRequest):
    """A conversation of the Messages API whose tokens are counted."""


def to_tokenize(request: CountTokensRequest) -> TokenizeRequest:
    """Returns a request for the tokens of the prompt that a Messages request has. Raises ``QuireError``."""
    fields = request.template_fields()
    if request.tool_choice is not None and request.tool_choice.type == "none":
        fields["tools"] = None
    return _Counted.from_fields(fields).made_from(request)


class _CountedInput(TranslatedResponses, TokenizeRequest):
    """A conversation of the Responses API whose tokens are counted."""


def input_to_tokenize(request: InputTokensRequest, history: History) -> TokenizeRequest:
    """Returns a request for the tokens of the prompt that a Responses request has. Raises ``QuireError``."""
    fields = request.template_fields(request.all_items(history))
    if not fields["messages"]:  # no prompt
        fields = {"model": request.model, "prompt": "", "add_special_tokens": False, "tool_choice": None}
    if fields.pop("tool_choice") == "none":
        fields["tools"] = None
    return _CountedInput.from_fields(fields).made_from(request).continuing(history.token_ids)


class DetokenizeRequest(StrictModel):
    """Tokens of a model."""

    foreign: ClassVar[Table] = parameters.DETOKENIZE

    model: ModelName = ""
    tokens: TokenIds

    @property
    def size(self) -> int:
        """Its tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """``token_strs`` are the tokens' names in the tokenizer, None where they were not requested. ``max_model_len`` is 0
    while it is unknown. ``ignored`` are the parameters that changed nothing.
    """

    tokens: Sequence[int]
    token_strs: Sequence[str] | None
    max_model_len: int
    ignored: Sequence[str] = ()


def tokenize(
    request: TokenizeRequest, tokenizer: ModelTokenizer, max_model_len: int, ignored: Sequence[str] = ()
) -> TokenizeResult:
    """Returns the tokens that the same text or conversation has as a prompt. Raises ``QuireError`` as a request with it
    would, except that there may be more tokens than the model takes.
    """
    try:
        tokens = _tokens_of(request, tokenizer)
    except QuireError as error:
        raise _too_many(request) if error.param == "prompt" else error from None
    if len(tokens) > MAX_PROMPT_TOKENS:
        raise _too_many(request)
    strings = [tokenizer.name_of(token_id) for token_id in tokens] if request.return_token_strs else None
    return TokenizeResult(tokens, strings, max_model_len, ignored)


def detokenize(request: DetokenizeRequest, tokenizer: ModelTokenizer) -> str:
    """Returns the text of tokens, with special ones. Raises ``QuireError`` for a token that the model does not have."""
    if request.tokens and max(request.tokens) >= tokenizer.vocab_size:
        raise invalid(
            "tokens", f"tokens holds a token id outside of this model's vocabulary of {tokenizer.vocab_size}."
        )
    return tokenizer.decode(request.tokens)


def _tokens_of(request: TokenizeRequest, tokenizer: ModelTokenizer) -> list[int]:
    if request.messages is None:
        special = request.add_special_tokens is not False
        return tokenizer.encode_text(request.prompt or "", MAX_PROMPT_TOKENS, add_special_tokens=special)
    tools = [tool.to_template() for tool in request.offered_tools]
    return tokenizer.encode_chat(
        to_template_messages(request.messages),
        MAX_PROMPT_TOKENS,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        options=template_options(
            request.chat_template_kwargs, request.reasoning_effort, tokenizer, with_tools=bool(tools)
        ),
        earlier=request.earlier_token_ids,
    )


def _too_many(request: TokenizeRequest) -> QuireError:
    param = "prompt" if request.messages is None else "messages"
    return invalid(param, f"{param} has more than {MAX_PROMPT_TOKENS} tokens, which is the limit here.")
