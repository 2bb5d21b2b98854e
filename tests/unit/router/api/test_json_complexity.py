"""The weight of a body: what costs time to read is bounded, and text is not taken for it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_router.api.schemas.base import MAX_PROMPT_TOKENS
from quire_router.api.schemas.openai import MAX_MESSAGES, ChatRequest, CompletionRequest
from quire_router.core import complexity as weight
from quire_router.core.complexity import MAX_PARTS, MAX_VALUES, check_complexity

from tests.support.scripted_api import MODEL, chat, completion

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\,:[{}\n é', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,:[{x', max_size=4), inner, max_size=4),
    max_leaves=20,
)
PART = {"type": "text", "text": "x"}
TOO_MUCH = {
    "numbers": [1] * (MAX_VALUES + 2),
    "texts": [""] * (2 * MAX_PARTS + 1),
    "lists": [[]] * (MAX_PARTS + 1),
    "objects": [{}] * (MAX_PARTS + 1),
    "fields": {str(i): 1 for i in range(MAX_PARTS + 1)},
}


def marks_of(value: object) -> dict[bytes, int]:
    """The marks that JSON needs for ``value``, without those in its texts."""
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    counts = dict.fromkeys(weight._LIMITS, 0)
    for child in children:
        counts = {mark: count + marks_of(child)[mark] for mark, count in counts.items()}
    counts[b","] += max(0, len(children) - 1)
    counts[b'"'] += 2 * (len(value) if isinstance(value, dict) else isinstance(value, str))
    counts[b":"] += len(value) if isinstance(value, dict) else 0
    counts[b"["] += isinstance(value, list)
    counts[b"{"] += isinstance(value, dict)
    return counts


@settings(deadline=None)
@given(VALUES, st.booleans(), st.data())
def test_a_body_is_refused_for_its_values_and_parts_and_never_for_its_texts(value, ascii_only, data):
    body, counts = json.dumps(value, ensure_ascii=ascii_only).encode(), marks_of(value)
    mark = data.draw(st.sampled_from(sorted(counts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(weight._LIMITS, mark, (counts[mark], "marks"))
        check_complexity(body)
        patch.setitem(weight._LIMITS, mark, (counts[mark] - 1, "marks"))
        with pytest.raises(QuireError, match="marks") as refusal:
            check_complexity(body)
    assert refusal.value.code is ErrorCode.INVALID


@pytest.mark.parametrize("kind", TOO_MUCH)
@pytest.mark.parametrize("field", ["metadata", "tools", "stop", "logit_bias", "nobody_knows_it"])
def test_too_much_of_anything_is_refused_in_whatever_field(kind, field):
    body = json.dumps(chat(**{field: TOO_MUCH[kind]})).encode()

    with pytest.raises(QuireError, match="more than"):
        ChatRequest.from_json(body)


def test_the_longest_conversation_and_the_longest_prompt_are_light_enough():
    messages = [{"role": "user", "content": "x"}] * (MAX_MESSAGES - 1) + [{"role": "user", "content": [PART] * 1000}]

    assert len(ChatRequest.from_json(json.dumps({"model": MODEL, "messages": messages}).encode()).messages) == 4096
    prompt = [7] * MAX_PROMPT_TOKENS
    assert CompletionRequest.from_json(json.dumps(completion(prompt)).encode()).prompt == [prompt]


@pytest.mark.parametrize("text", ['"', "\\", ",:[{", '{"a": [1, "b"]},\n', '\\"'])
def test_a_text_may_hold_as_many_marks_as_it_likes(text):
    content = text * (MAX_VALUES + 1)

    assert ChatRequest.from_json(json.dumps(chat(content)).encode()).messages[0].content == content
