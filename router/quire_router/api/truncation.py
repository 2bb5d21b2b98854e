"""``encode_truncated``: the prompt of a conversation that may be longer than the model's context, then without the
earliest of its messages: ``truncation: auto`` of the Responses API.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire_proto.errors import QuireError

_OUTPUT_SHARE = 4  # a quarter of the context is left for an output whose length the client did not say

Message = Mapping[str, Any]
"""A message as templates read it."""
Encode = Callable[[Sequence[Message]], list[int]]


def encode_truncated(
    messages: Sequence[Message],
    encode: Encode,
    max_model_len: int,
    max_tokens: int | None,
) -> list[int]:
    """Returns the tokens of a conversation as ``encode`` makes them: of all of it where its prompt and ``max_tokens``
    fit the model's context (at least one token, where the client did not say), or else of as many of its last messages
    as leave room for the output. System messages before all others stay. What stays begins with a message of the user,
    unless even the last of those is too early, and no output of a tool stays without its call. Where nothing is short
    enough the whole conversation is returned. Raises ``QuireError`` as ``encode`` does.
    """
    whole = _encode(messages, encode)
    if whole is not None and len(whole) + (max_tokens or 1) <= max_model_len:
        return whole
    room = max_model_len - min(max_tokens or max_model_len // _OUTPUT_SHARE, max_model_len // 2)
    roles = [message["role"] for message in messages]
    head = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
    users = [number for number in range(head + 1, len(roles)) if roles[number] == "user"]
    others = [number for number in range((users or [head])[-1] + 1, len(roles)) if roles[number] != "tool"]

    def tokens_from(start: int) -> list[int] | None:
        tokens = _encode([*messages[:head], *messages[start:]], encode)
        return tokens if tokens is not None and len(tokens) <= room else None

    for starts in (users, others):
        first = bisect_left(starts, True, key=lambda start: tokens_from(start) is not None)
        if first < len(starts) and (kept := tokens_from(starts[first])) is not None:
            return kept
    return encode(messages)


def _encode(messages: Sequence[Message], encode: Encode) -> list[int] | None:
    """Returns the tokens of messages; None where they are far too many to be counted."""
    try:
        return encode(messages)
    except QuireError as error:
        if error.param != "prompt":
            raise
        return None
