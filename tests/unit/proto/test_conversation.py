"""Messages that come back: reasoning under each of its names, calls of former forms, and what no template shows."""

import json
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import QuireError
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.conversation import REASONING_NAMES, hidden_fields, parsed_arguments, read_conversation
from quire_router.api.schemas.openai import ChatRequest

from tests.support.tool_models import HERMES_TEMPLATE

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
TEXT, WRONG = {"type": "text", "text": "x"}, {"name": "get", "arguments": "[1]"}
LOOP = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"
EITHER = (
    LOOP + "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "[{{ m.content }}{{ m.thinking }}" + CALLS + "]{% endfor %}"
)
NONE_BESIDE_CALLS = LOOP + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
IN_PARTS = (
    LOOP + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def template(source):
    return ChatTemplate(source, {}, "the test")


def seen(source, *messages):
    """What a template writes of a conversation, and the names of what the model does not see of it."""
    made = template(source)
    read, lost = read_conversation(messages)
    return made.render(read), [*lost, *hidden_fields(read, made.hidden)]


@pytest.mark.parametrize("read", REASONING_NAMES)
@pytest.mark.parametrize("sent", REASONING_NAMES)
@pytest.mark.parametrize("calls", [{}, {"tool_calls": [CALL]}], ids=["before an answer", "before a call"])
def test_reasoning_is_seen_whatever_its_client_and_its_template_call_it(sent, read, calls):
    source = LOOP + "{{ m.content }}{{ m." + read + " }}" + CALLS + "{% endfor %}"
    prompt, unseen = seen(source, USER, {"role": "assistant", "content": "", sent: "hmm", **calls})

    assert ("hmm" in prompt, unseen) == (True, [])


@pytest.mark.parametrize(
    "message",
    [
        {"content": [{"type": "thinking", "thinking": "hmm", "signature": "s"}, {"type": "text", "text": "yes"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hmm"}]},
                {"type": "text", "text": "yes"},
            ]
        },
        {"content": [{"type": "reasoning", "text": "hmm"}, {"type": "text", "text": "yes"}]},
        {"content": "yes", "thinking_blocks": [{"type": "thinking", "thinking": "hmm", "signature": "s"}]},
        {"content": "yes", "reasoning_details": [{"type": "reasoning.text", "text": "hmm"}]},
        {"content": "yes", "reasoning": "hmm", "reasoning_details": [{"type": "reasoning.text", "text": "hmm"}]},
    ],
    ids=str,
)
def test_reasoning_is_found_where_other_servers_put_it(message):
    source = LOOP + "{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"

    assert seen(source, USER, {"role": "assistant", **message}) == ("|hello;hmm|yes;", [])


def test_of_two_that_differ_one_is_named():
    message = {"role": "assistant", "content": "", "reasoning_content": "one", "reasoning": "two"}
    source = LOOP + "{{ m.content }}{{ m.reasoning_content }}{% endfor %}"

    assert seen(source, USER, message) == ("helloone", ["messages[1].reasoning"])


def test_a_template_that_takes_either_text_or_reasoning_beside_calls_gets_the_reasoning_and_the_text_is_named():
    said = {"role": "assistant", "content": "I look.", "reasoning": "hmm", "tool_calls": [CALL]}
    prompt, unseen = seen(EITHER, USER, said, RESULT)

    assert ("hmm" in prompt, "Rome" in prompt, "I look." in prompt) == (True, True, False)
    assert unseen == ["messages[1].content"]
    assert seen(EITHER, USER, {**said, "reasoning": None}, RESULT)[1] == []
    assert seen(EITHER, USER, {**said, "content": None}, RESULT)[1] == []


def test_a_template_that_shows_calls_only_without_a_content_is_given_none():
    said = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt, unseen = seen(NONE_BESIDE_CALLS, USER, said, RESULT)

    assert ("Rome" in prompt, unseen) == (True, [])
    assert seen(NONE_BESIDE_CALLS, USER, {**said, "content": "yes"}, RESULT)[1] == ["messages[1].tool_calls"]


def test_a_template_that_reads_parts_alone_is_given_parts():
    assert seen(IN_PARTS, USER, {"role": "assistant", "content": "yes"}, USER) == ("helloyeshello", [])


def test_a_template_that_reads_texts_is_given_texts():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]

    assert seen(LOOP + "{{ m.content }}{% endfor %}", {"role": "user", "content": parts}) == ("hello", [])


def test_an_old_call_and_its_output_are_a_call_and_its_output():
    old = [
        {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "get", "content": "sun"},
    ]
    source = LOOP + "{{ m.role }}{{ m.name }}{{ m.content }}{{ m.tool_call_id }}" + CALLS + "{% endfor %}"

    assert seen(source, USER, *old) == ("userhelloassistantget{'city': 'Rome'}toolgetsunget", [])


@pytest.mark.parametrize("empty", [{}, {"id": None}, {"id": ""}])
def test_calls_without_ids_and_of_custom_tools_are_calls(empty):
    custom = {"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    bare = {"function": {"name": "get", "arguments": {"city": "Rome"}}, **empty}
    answers = [
        {"role": "tool", "tool_name": "get", "content": "sun", **{f"tool_call_{name}": "" for name in empty}},
        {"role": "tool", "tool_call_id": "c2", "content": "a"},
    ]
    source = LOOP + "{{ m.name }}{{ m.content }}" + CALLS + "{% endfor %}"
    prompt, unseen = seen(source, USER, {"role": "assistant", "tool_calls": [bare, custom]}, *answers)

    assert (prompt, unseen) == ("helloget{'city': 'Rome'}shell{'input': 'ls'}getsunshella", [])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"content": "x", "annotations": [{"type": "url_citation"}]}, "annotations"),
        ({"content": "x", "annotations": []}, None),
        ({"audio": {"id": "a"}}, "audio"),
        ({"content": "x", "refusal": "no"}, "refusal"),
        ({"refusal": "no"}, None),
        ({"content": [{"type": "server_tool_use", "id": "s"}, TEXT]}, "content[0].server_tool_use"),
        ({"content": [{"type": "text", "text": "x", "citations": [1]}]}, "content[0].citations"),
        ({"content": "x", "tool_calls": [{"id": "w", "type": "web_search"}]}, "tool_calls[0].web_search"),
        ({"content": "x", "tool_calls": [CALL], "function_call": CALL["function"]}, "function_call"),
        ({"tool_calls": [{"id": "c", "function": WRONG}]}, "tool_calls[0].function.arguments"),
        ({"content": "x", "id": "m", "status": "completed", "parsed": {"a": 1}}, None),
        ({"content": "x", "reasoning_details": [{"type": "reasoning.encrypted", "data": "z"}]},
         "reasoning_details[0].reasoning.encrypted"),
        ({"content": "x", "thinking_blocks": [{"type": "redacted_thinking", "data": "z"}]},
         "thinking_blocks[0].redacted_thinking"),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_template_shows_is_named(message, named):
    source = LOOP + "{{ m.content }}" + CALLS + "{% endfor %}"

    assert seen(source, USER, {"role": "assistant", **message})[1] == ([f"messages[1].{named}"] if named else [])


WITHOUT_SYSTEM = LOOP + "{% if m.role != 'system' %}{{ m.content }}" + CALLS + "{% endif %}{% endfor %}"
WITHOUT_RESULTS = LOOP + "{% if m.role != 'tool' %}{{ m.content }}" + CALLS + "{% endif %}{% endfor %}"
EITHER_TEXT_OR_CALLS = LOOP + "{% if m.tool_calls %}" + CALLS + "{% else %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (WITHOUT_SYSTEM, {"messages[0].content"}),
        (WITHOUT_RESULTS, {"messages[3].content"}),
        (LOOP + "{{ m.content }}{% endfor %}", {"messages[2].tool_calls"}),
        (EITHER_TEXT_OR_CALLS, {"messages[2].content"}),
        (LOOP + "{{ m.content }}" + CALLS + "{% endfor %}", set()),
        (LOOP + "{{ m.name }}{{ m.content }}{{ m.reasoning }}" + CALLS + "{% endfor %}", None),
    ],
)
def test_what_a_template_does_not_show_is_named(source, named):
    system, user = {"role": "system", "content": "Be brief."}, {**USER, "name": "Ann"}
    said = {"role": "assistant", "content": "I look.", "reasoning": "hmm", "tool_calls": [CALL]}
    unseen = set(seen(source, system, user, said, RESULT)[1])

    assert unseen == (set() if named is None else named | {"messages[1].name", "messages[2].reasoning_content"})


def test_reasoning_that_only_a_switch_shows_is_not_hidden():
    source = LOOP + "{{ m.content }}{% if enable_thinking %}{{ m.reasoning_content }}{% endif %}{% endfor %}"

    assert template(source).hidden("assistant", frozenset({"content", "reasoning_content"})) == frozenset()


def test_what_a_template_refuses_it_does_not_hide():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"

    assert template(source).hidden("system", frozenset({"content"})) == frozenset()
    with pytest.raises(QuireError, match="no"):
        template(source).render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1E400}', {"a": "1E400"}),
        ('{"a": [-1e999, 1.5]}', {"a": ["-1e999", 1.5]}),
        ('{"a": NaN, "b": -Infinity}', {"a": "NaN", "b": "-Infinity"}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": "\\ud800"}', None),
        ("[1]", None),
        ("[" * 99999, None),
        ("1" * 9999, None),
    ],
)
def test_arguments_are_json_to_the_template_whatever_the_model_wrote(text, arguments):
    assert parsed_arguments(text) == arguments


@contextmanager
def collecting(refusals):
    """Collects the sentence with which something is refused."""
    try:
        yield
    except QuireError as refusal:
        refusals.append(refusal.message)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "name",
        "tool_calls",
        "function_call",
        "refusal",
        "annotations",
        "tool_call_id",
        *REASONING_NAMES,
    ]
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "thinking", "refusal", "x"])}, optional={"text": JSON})
)
MESSAGES = st.dictionaries(NAMES, JSON | PARTS | st.sampled_from(["assistant", "tool", "function", "user"]), max_size=6)


@given(st.lists(MESSAGES, max_size=3))
def test_any_message_is_read_or_refused_with_a_sentence(messages):
    refusals: list[str] = []
    with collecting(refusals):
        read, lost = read_conversation(messages)
        template(HERMES_TEMPLATE).render(json.loads(json.dumps(read)))
        assert all(name.startswith("messages[") for name in lost)
    assert all(refusal.endswith(".") for refusal in refusals)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_is_no_text_is_refused_by_the_name_that_was_sent(name):
    with pytest.raises(QuireError, match=rf"A message's {name} must be a string"):
        read_conversation([USER, {"role": "assistant", "content": "", name: {"text": "hmm"}}])
    with pytest.raises(QuireError) as refusal:
        ChatRequest.from_fields({"model": "m", "messages": [USER, {"role": "assistant", name: {"text": "hmm"}}]})
    assert refusal.value.param == f"messages[1].{name}"


@pytest.mark.parametrize(
    ("output", "param"),
    [
        ({"role": "function", "name": "get"}, "name"),
        ({"role": "tool", "name": "get"}, "name"),
        ({"role": "tool", "tool_call_id": "c9", "name": "get"}, "tool_call_id"),
    ],
)
def test_an_output_that_answers_no_call_is_refused_by_the_field_that_was_sent(output, param):
    with pytest.raises(QuireError) as refusal:
        ChatRequest.from_fields({"model": "m", "messages": [USER, {**output, "content": "sun"}]})
    assert refusal.value.param == f"messages[1].{param}"
