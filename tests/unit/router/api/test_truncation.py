"""Which messages of a conversation that is too long stay."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import QuireError, invalid
from quire_router.api.truncation import Message, encode_truncated

MARKS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
FAR_TOO_LONG = 400


def encode(messages: Sequence[Message]) -> list[int]:
    """A token for each character, and more than can be counted for long texts, as in a tokenizer."""
    tokens = [ord(mark) for message in messages for mark in message["content"]]
    if len(tokens) > FAR_TOO_LONG:
        raise invalid("prompt", "The prompt is too long.")
    return tokens


def conversation(marks: str, size: int = 10) -> list[Message]:
    roles = {mark: role for role, mark in MARKS.items()}
    return [{"role": roles[mark], "content": mark * size} for mark in marks]


def kept(marks: str, context: int, max_tokens: int | None = None) -> str:
    """The roles of the messages that stay, of ten tokens each."""
    return bytes(encode_truncated(conversation(marks), encode, context, max_tokens)[::10]).decode()


@pytest.mark.parametrize(
    ("marks", "context", "max_tokens", "left"),
    [
        ("uaua", 41, None, "uaua"),
        ("uauau", 50, None, "uau"),
        ("uauau", 50, 20, "uau"),
        ("uauau", 50, 30, "u"),
        ("uauau", 60, 10, "uauau"),
        ("suauau", 50, None, "su"),
        ("ssuau", 50, None, "ssu"),
        ("uatatatau", 60, None, "u"),
        ("uatatat", 60, None, "atat"),
        ("suatatat", 60, None, "sat"),
        ("uatatat", 30, None, "at"),
    ],
)
def test_the_earliest_turns_are_dropped_until_the_rest_has_room_for_the_output(marks, context, max_tokens, left):
    assert kept(marks, context, max_tokens) == left


def test_what_can_never_fit_is_refused_as_without_it():
    with pytest.raises(QuireError, match="too long"):
        encode_truncated(conversation("u", FAR_TOO_LONG + 1), encode, 100, None)
    whole = encode_truncated(conversation("u", 120), encode, 100, None)
    assert len(whole) == 120, "the error of a prompt that is counted names its length"


def test_other_errors_are_those_of_the_template():
    def refuse(_messages: Sequence[Message]) -> list[int]:
        raise invalid("messages", "Roles must alternate.")

    with pytest.raises(QuireError, match="alternate"):
        encode_truncated(conversation("ua"), refuse, 100, None)


@given(st.text(alphabet="uat", min_size=1, max_size=60), st.integers(20, 300), st.none() | st.integers(1, 100))
def test_what_stays_is_an_end_of_the_conversation_and_the_longest_that_fits(marks, context, max_tokens):
    left = kept(marks, context, max_tokens)
    assert marks.endswith(left)
    if left == marks:
        return
    assert left[0] != "t"
    room = context - min(max_tokens or context // 4, context // 2)
    assert 10 * len(left) <= room
    starts = [number for number in range(1, len(marks)) if marks[number] == left[0]]
    if left[0] == "u":
        assert not [number for number in starts if len(left) < len(marks) - number <= room // 10]
