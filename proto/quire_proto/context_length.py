"""The error of a prompt that does not fit its model, in the words that clients look for: agents then shorten their
history, and gateways take another model. OpenAI's and vLLM's words are in every API but Anthropic's
(``in_words_of_messages``), and other servers' errors are recognised by theirs (``from_server``).
"""

import re
from typing import Final

from quire_proto.errors import ErrorCode, QuireError, invalid

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
MESSAGES, PROMPT, INPUT = "messages", "prompt", "input prompt"
"""What an error calls the prompt: of a conversation, of a text that is continued, and of one that is pooled."""
_NUMBER = re.compile(r"\d[\d,]*(?= ?tokens?\b)|(?<=context length is )\d[\d,]*|(?<=context size \()\d[\d,]*")
_SERVERS_WORDS = re.compile(
    r"maximum context length|maximum model length|longer than the model's context length|context_length_exceeded|"
    r"exceeds the available context size|greater than max_model_len|maximum allowed length|max_new_tokens. must be|"
    r"prompt is too long",
    re.IGNORECASE,
)
"""Of vLLM, SGLang, llama.cpp and text-generation-inference."""


def check_length(
    prompt_tokens: int, max_tokens: int, max_model_len: int, *, prompt: str = PROMPT, output: str | None = "max_tokens"
) -> None:
    """Raises ``QuireError`` INVALID unless prompt and output fit the model together. ``prompt`` and ``output`` are the
    fields that hold the prompt and ``max_tokens``; no ``output`` means that no client has named the number.
    """
    if prompt_tokens < 1:
        raise invalid(prompt, "The prompt is empty.")
    if prompt_tokens + max_tokens <= max_model_len:
        return
    what = MESSAGES if prompt == MESSAGES else PROMPT
    if output is not None:
        parts = f"{prompt_tokens} in the {what}, {max_tokens} in the completion"
        requested = f"you requested {prompt_tokens + max_tokens} tokens ({parts})"
        param = prompt if prompt_tokens >= max_model_len else output
        raise _error(max_model_len, requested, f"{what} or completion", param)
    if prompt_tokens > max_model_len:
        raise _error(max_model_len, f"your {what} resulted in {prompt_tokens} tokens", what, prompt)
    parts = f"{prompt_tokens} in the {what}, at least 1 in the completion"
    raise _error(max_model_len, f"you requested at least {prompt_tokens + 1} tokens ({parts})", what, prompt)


def check_pooled_length(num_tokens: int, max_model_len: int) -> None:
    """Raises ``QuireError`` INVALID unless a prompt that is pooled fits the model."""
    if num_tokens < 1:
        raise invalid(PROMPT, "The prompt is empty.")
    if num_tokens > max_model_len:
        raise _error(max_model_len, f"your {INPUT} resulted in {num_tokens} tokens", INPUT, PROMPT)


def far_too_long(limit: int, least: int, what: str) -> QuireError:
    """Returns the error of a prompt that has at least ``least`` tokens, of which not all were counted."""
    return _error(limit, f"your {what} resulted in at least {least} tokens", what, PROMPT)


def from_server(message: str) -> QuireError | None:
    """Returns the error of a server that others have written, if its ``message`` says that the prompt is too long."""
    if _SERVERS_WORDS.search(message) is None:
        return None
    counts = _counts(message)
    if counts is not None:
        return _error(counts[1], f"you requested {counts[0]} tokens", "messages or completion", None)
    text = f"This model's maximum context length is exceeded: {message}"
    return QuireError(ErrorCode.INVALID, text, reason=CONTEXT_LENGTH_EXCEEDED)


def in_words_of_messages(message: str) -> str:
    """Returns the ``message`` of such an error as Anthropic's API words it."""
    counts = _counts(message)
    if counts is None:
        return f"prompt is too long: {message}"
    return f"prompt is too long: {counts[0]} tokens > {counts[1]} maximum"


def _counts(message: str) -> tuple[int, int] | None:
    """Returns the tokens that were requested and the smaller number that is allowed; None if a message names less."""
    numbers = [int(found.replace(",", "")) for found in _NUMBER.findall(message)[:2]]
    return (max(numbers), min(numbers)) if len(set(numbers)) > 1 else None


def _error(limit: int, requested: str, shorten: str, param: str | None) -> QuireError:
    return QuireError(
        ErrorCode.INVALID,
        f"This model's maximum context length is {limit} tokens. However, {requested}. "
        f"Please reduce the length of the {shorten}.",
        param=param,
        reason=CONTEXT_LENGTH_EXCEEDED,
    )
