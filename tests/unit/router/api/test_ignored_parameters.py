"""What clients send beyond this API: messages as their libraries hand them back, and parameters of other servers."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.api.auth import ANONYMOUS
from quire_router.api.output_parser import ParsedDelta, ToolCallDelta
from quire_router.api.rest.openai_format import message_object
from quire_router.api.schemas.base import as_header_value
from quire_router.api.schemas.conversation import CalledFunction, ChatMessage, ToolCall
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.validation import Validator

from tests.support.scripted_api import MODEL, Limits, ask, chat, completion, open_stage, script_of
from tests.support.tool_models import HERMES_TEMPLATE, tokenizer_with, tool

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IGNORED = "x-quire-ignored-parameters"
SEES_ALL = HERMES_TEMPLATE + "{{ messages | tojson }}"
USER = {"role": "user", "content": "hello"}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KNOWN = {*ChatMessage.model_fields, *ToolCall.model_fields, *CalledFunction.model_fields}
EXTRA = st.dictionaries(
    st.sampled_from(
        ["index", "parsed", "parsed_arguments", "provider_specific_fields", "cache_control", "audio", "annotations"]
    )
    | st.text(max_size=9).filter(lambda name: name not in {*KNOWN, "type", "text"}),
    JSON,
    max_size=3,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3).map(json.dumps)
ARGUMENTS = OBJECTS | st.text(max_size=20) | st.sampled_from(["", "{", "[1]", "null", '{"a": NaN}', '{"\\ud800": 1}'])


@st.composite
def answers(draw):
    """A message as an answer has it: text, thoughts and calls, whose arguments a model may have got wrong."""
    calls = tuple(
        ToolCallDelta(index, f"call_{index}", "get", draw(ARGUMENTS)) for index in range(draw(st.integers(0, 2)))
    )
    return message_object([ParsedDelta(draw(st.text(max_size=9)), draw(st.text(max_size=9)), calls)])


@st.composite
def decorated(draw, value):
    """The same with further keys in each object."""
    if isinstance(value, list):
        return [draw(decorated(each)) for each in value]
    if isinstance(value, dict):
        return draw(EXTRA) | {name: draw(decorated(each)) for name, each in value.items()}
    return value


@st.composite
def handed_back(draw):
    """An answer's message, and how a client library hands it back."""
    message = draw(answers())
    returned = dict(message)
    if isinstance(returned["content"], str) and draw(st.booleans()):
        returned["content"] = [{"type": "text", "text": returned["content"], "role": "assistant", "refusal": None}]
    return message, draw(decorated(returned))


def prompt_with(*messages, template=SEES_ALL):
    """What the model reads of a conversation."""
    tokenizer = tokenizer_with(template)
    validator = Validator({MODEL: tokenizer}, lambda _: Limits(2**20, tokenizer.vocab_size))
    body = json.dumps({"model": MODEL, "messages": messages, "tools": [tool()]}).encode()
    request, ignored = validator.drop_ignored(ChatRequest.from_json(body), MODEL)
    assert all(name.startswith("messages[") for name in ignored)
    (generation,) = validator.generations(request, "id", ANONYMOUS)
    return tokenizer.decode(list(generation.prompt_token_ids))


@settings(deadline=None, max_examples=60)
@given(handed_back())
def test_a_response_message_with_extra_fields_is_accepted_and_the_template_gets_none_of_them(case):
    message, returned = case
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in message.get("tool_calls", [])]

    assert prompt_with(USER, returned, *results, USER) == prompt_with(USER, message, *results, USER)


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"city": "Rome"}', '{"city": "Rome"}'),
        ({"city": "Rome"}, '{"city": "Rome"}'),
        *((text, "{}") for text in ("", "{", "no", "[1]", "null", "7", '{"a": "\\ud800"}', "[" * 9999)),
        (None, "{}"),
    ],
)
def test_arguments_that_are_no_object_are_none_to_the_template(arguments, seen):
    prompt = prompt_with(USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]})

    assert f'"arguments": {seen}}}' in prompt


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]}, "ab"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "yes", "refusal": None}, "yes"),
        ({"content": "yes", "refusal": {"any": "thing"}}, "yes"),
    ],
)
def test_an_assistants_message_may_be_empty_or_a_refusal(message, text):
    returned = prompt_with(USER, {"role": "assistant", **message}, USER)

    assert returned == prompt_with(USER, {"role": "assistant", "content": text}, USER)


async def test_the_openai_clients_own_objects_are_taken_back():
    text = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
    async with open_stage(script_of(text), template=HERMES_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        api = stage.openai().chat.completions
        fields = {"model": MODEL, "tools": [tool(strict=True)]}
        async with api.stream(**fields, messages=[USER]) as stream:
            answer = (await stream.get_final_completion()).choices[0].message
        assert answer.tool_calls[0].function.parsed_arguments == {"city": "Rome"}
        result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sun"}
        again = await api.create(**fields, messages=[USER, answer.model_dump(), result])
    assert again.choices[0].message.tool_calls[0].function.name == "get"


# Parameters


async def test_unknown_and_ignored_parameters_are_named_in_order():
    fields = {
        "num_ctx": 4096,
        "nothing": None,
        "service_tier": "flex",
        "verbosity": "medium",
        "stream_options": {"include_obfuscation": True, "x": 1},
        "tools": [{**tool(), "cache_control": {"type": "ephemeral"}, "defer": True}],
        "prediction": {"content": "x"},
    }
    named = "stream_options.include_obfuscation, stream_options.x, tools[0].defer"
    async with open_stage(template=HERMES_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        for more in ({}, {"stream": True}, {"background": True}):
            answer = await ask(stage.port, "POST", CHAT, chat(**fields, **more))
            assert answer.status == (202 if "background" in more else 200)
            assert answer.headers[IGNORED] == f"num_ctx, service_tier, prediction, {named}"
        plain = await ask(stage.port, "POST", CHAT, chat())
        tokens = await ask(stage.port, "POST", "/detokenize", {"model": MODEL, "tokens": [], "foo": 1})
    assert IGNORED not in plain.headers
    assert tokens.headers[IGNORED] == "foo"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(num_words=4096), "num_words"),
        (COMPLETIONS, completion(num_words=4096), "num_words"),
        (CHAT, chat(stream_options={"x": 1}), "stream_options.x"),
        (CHAT, chat(response_format={"type": "text", "x": 1}), "response_format.x"),
        (CHAT, chat(tools=[{**tool(), "defer": True}]), "tools[0].defer"),
        (CHAT, chat(**{"x" * 1000: 1}), "x" * 128),
        ("/tokenize", {"model": MODEL, "prompt": "x", "foo": 1}, "foo"),
    ],
)
async def test_an_operator_can_have_unknown_parameters_refused(path, body, param):
    async with open_stage(refuse_unknown=True) as stage:
        answer = await ask(stage.port, "POST", path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["message"] == f"{param} is not a known parameter."


async def test_known_parameters_are_accepted_where_unknown_ones_are_refused():
    fields = {"service_tier": "flex", "num_ctx": 4096, "reasoning_effort": "high", "tools": [tool()]}
    message = {"role": "assistant", "content": "x", "parsed": None, "provider_specific_fields": {}}
    async with open_stage(refuse_unknown=True) as stage:
        answer = await ask(stage.port, "POST", CHAT, {**chat(**fields), "messages": [USER, message, USER]})
    assert (answer.status, answer.headers[IGNORED]) == (200, "service_tier, num_ctx, tools, reasoning_effort")


NAMES = st.text(max_size=200) | st.text("\r\n:, é\x00\x7f", max_size=9)


@settings(max_examples=75)
@given(st.lists(NAMES, min_size=1, max_size=60))
def test_names_of_clients_make_a_short_header_of_plain_letters(names):
    value = as_header_value(names)

    assert len(value) <= 16 * 66 + 8
    assert re.fullmatch(r"[A-Za-z0-9_.?\[\], +-]*", value)
    assert value.count(",") == min(len(names), 17) - 1
    assert (f"+{len(names) - 16}" in value) or len(names) <= 16


async def test_no_name_of_a_parameter_can_write_headers():
    name = "a\r\nx-injected: yes\r\n\r\nHTTP/1.1 200 OK"
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(**{name: 1, "b\u2028é": 1, "": 1}))
    assert answer.status == 200
    assert answer.headers[IGNORED] == "a??x-injected??yes????HTTP?1.1?200?OK, b??, ?"
    assert "x-injected" not in answer.headers


async def test_thousands_of_unknown_parameters_are_counted_and_not_listed():
    async with open_stage(max_body_bytes=2**20) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(**{f"unknown_{number}": number for number in range(16_000)}))
    assert answer.status == 200
    assert answer.headers[IGNORED].endswith("unknown_15, +15984")
    assert len(answer.headers[IGNORED]) < 1100


async def test_the_clients_extra_body_is_taken_as_it_is_elsewhere():
    async with open_stage() as stage:
        api = stage.openai().chat.completions
        answer = await api.with_raw_response.create(
            model=MODEL, messages=[USER], verbosity="low", service_tier="flex", extra_body={"keep_alive": "5m"}
        )
    assert answer.headers[IGNORED] == "service_tier, verbosity, keep_alive"
