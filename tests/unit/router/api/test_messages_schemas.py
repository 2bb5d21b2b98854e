"""Messages requests become chats: the prompt and the sampling are those of the chat that says the same, and what is
refused is named as the client named it.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.structured_output import Structured, StructuredKind
from quire_router.api.auth import ANONYMOUS
from quire_router.api.prepared_request import build_response_options
from quire_router.api.schemas.anthropic import FIELD_NAMES, CountTokensRequest, MessagesRequest
from quire_router.api.schemas.base import ignored_parameters
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.tokenize import to_tokenize, tokenize
from quire_router.api.validation import Validator
from quire_router.core.response_options import Api, ReasoningPlacement

from tests.support.scripted_api import MODEL, Limits
from tests.support.tool_models import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    OPENING_TEMPLATE,
    OTHER_TEMPLATE,
    THINKING_TEMPLATE,
    tokenizer_with,
)

KEPT = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
EFFORT_TEMPLATE = HERMES_TEMPLATE + "effort={{ reasoning_effort }}"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL_ID = "toolu_1"


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def call(call_id: str = CALL_ID, name: str = "get", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(content: Any, call_id: str = CALL_ID, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], **fields}


def made(body: dict[str, Any], template: str = HERMES_TEMPLATE, *, messages: bool = True) -> tuple[Any, Any, Any]:
    """The generation of a request, how its response is written, and what is ignored of it."""
    tokenizer = tokenizer_with(template)
    validator = Validator({MODEL: tokenizer}, lambda _: Limits(2**20, tokenizer.vocab_size))
    data = json.dumps(body).encode()
    request, ignored = validator.drop_ignored(
        MessagesRequest.chat_from_json(data) if messages else ChatRequest.from_json(data), MODEL
    )
    (generation,) = validator.generations(request, "id", ANONYMOUS)
    return generation, build_response_options(request, generation.params.max_tokens), ignored


def called(call_id: str = CALL_ID, arguments: str = "{}", name: str = "get") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function(name: str = "get", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({}, {}),
    "a text in blocks": (
        {"messages": [user(text("hel", **KEPT), text("lo", citations=None))]},
        {},
    ),
    "a system prompt": (
        {"system": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]},
    ),
    "a system prompt in blocks": (
        {"system": [text("Be "), text("brief.", **KEPT)], "cache_control": {"type": "ephemeral"}},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]},
    ),
    "a system prompt that is empty": ({"system": ""}, {}),
    "a system message anywhere": (
        {"messages": [user(text("hello")), {"role": "system", "content": [text("12 tokens left")]}]},
        {"messages": [{"role": "user", "content": "hello"}, {"role": "system", "content": "12 tokens left"}]},
    ),
    "a conversation with thinking": (
        {
            "messages": [
                user(text("hello")),
                assistant(
                    {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "c2ln"},
                    text("What?"),
                ),
                user(text("go on")),
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "What?", "reasoning_content": "hm"},
                {"role": "user", "content": "go on"},
            ]
        },
    ),
    "calls, their results and a text behind them": (
        {
            "tools": [{"name": "get", "description": "The weather.", "input_schema": WEATHER, **KEPT}],
            "messages": [
                user(text("hello")),
                assistant(text("so"), call(city="Röm"), call("toolu_2", caller=None)),
                user(result([text("su"), text("n")], **KEPT), result("rain", "toolu_2", is_error=True), text("so?")),
                assistant(call("toolu_3")),
                user(result(None, "toolu_3")),
            ],
        },
        {
            "tools": [function(description="The weather.", parameters=WEATHER)],
            "messages": [
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": "so",
                    "tool_calls": [
                        called(arguments='{"city": "Röm"}'),
                        called("toolu_2", arguments='{"caller": null}'),
                    ],
                },
                {"role": "tool", "tool_call_id": CALL_ID, "content": "sun"},
                {"role": "tool", "tool_call_id": "toolu_2", "content": "rain"},
                {"role": "user", "content": "so?"},
                {"role": "assistant", "content": "", "tool_calls": [called("toolu_3")]},
                {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
            ],
        },
    ),
    "tools that must be called": (
        {"tools": [{"type": "custom", "name": "get", "input_schema": WEATHER}], "tool_choice": {"type": "any"}},
        {"tools": [function(parameters=WEATHER)], "tool_choice": "required"},
    ),
    "the tool that must be called": (
        {
            "tools": [{"name": name, "input_schema": WEATHER, "strict": True} for name in ("get", "now")],
            "tool_choice": {"type": "tool", "name": "now"},
        },
        {
            "tools": [function(name, parameters=WEATHER, strict=True) for name in ("get", "now")],
            "tool_choice": {"type": "function", "function": {"name": "now"}},
        },
    ),
    "one call at most": (
        {
            "tools": [{"name": "get", "input_schema": WEATHER}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        {"tools": [function(parameters=WEATHER)], "parallel_tool_calls": False},
    ),
    "tools that may not be called": (
        {"tools": [{"name": "get", "input_schema": WEATHER}], "tool_choice": {"type": "none"}},
        {"tools": [function(parameters=WEATHER)], "tool_choice": "none"},
    ),
    "an answer in a form": (
        {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": WEATHER}}},
    ),
    "an answer in a form, by its former name": (
        {"output_format": {"type": "json_schema", "schema": WEATHER}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": WEATHER}}},
    ),
    "no thinking": ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
    "thinking": ({"thinking": {"type": "enabled"}}, {"chat_template_kwargs": {"enable_thinking": True}}),
    "thinking if the template says so": ({"thinking": {"type": "adaptive", "display": "summarized"}}, {}),
    "thinking in updates": (
        {"thinking": {"type": "enabled", "display": "updates"}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "thinking that is not shown": (
        {"thinking": {"type": "enabled", "display": "omitted"}},
        {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False},
    ),
    "sampling": (
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "logit_bias": {"5": 1}},
        {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "logit_bias": {"5": 1}},
    ),
    "ends": (
        {"min_tokens": 3, "stop_token_ids": [7], "ignore_eos": True, "priority": 0},
        {"min_tokens": 3, "stop_token_ids": [7], "ignore_eos": True, "priority": 0},
    ),
    "stop sequences": ({"stop_sequences": ["END", "\n"]}, {"stop": ["END", "\n"]}),
    "a stream": ({"stream": True}, {"stream": True}),
    "labels": ({"metadata": {"user_id": "user_1_session_2"}, "service_tier": "auto", "speed": "standard"}, {}),
    "neutral values": ({"n": 1, "logprobs": False, "stop": None, "mcp_servers": [], "thread": None}, {}),
}


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, LLAMA_TEMPLATE, THINKING_TEMPLATE, EFFORT_TEMPLATE])
@pytest.mark.parametrize("case", SAME)
def test_a_request_is_the_chat_that_says_the_same(case, template):
    messages, chat = SAME[case]
    mine, options, _ = made({"seed": 1, **asked(**messages)}, template)
    theirs, expected, _ = made({"seed": 1, **asked(**chat)}, template, messages=False)
    assert list(mine.prompt_token_ids) == list(theirs.prompt_token_ids)
    for name in ("params", "stop", "stream", "model", "priority", "operation", "include_stop", "skip_special_tokens"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert options == expected.model_copy(update={"api": Api.MESSAGES})


@pytest.mark.parametrize("case", SAME)
def test_the_tokens_that_are_counted_are_those_of_the_prompt(case):
    fields = asked(**SAME[case][0])
    body = {name: fields[name] for name in CountTokensRequest.model_fields if name in fields}
    for template in (HERMES_TEMPLATE, THINKING_TEMPLATE):
        tokenizer = tokenizer_with(template)
        request = to_tokenize(CountTokensRequest.from_json(json.dumps(body).encode()))
        counted = tokenize(request, tokenizer, 0)
        assert list(counted.tokens) == list(made(fields, template)[0].prompt_token_ids)


def test_what_does_not_change_the_tokens_is_ignored_where_they_are_counted():
    fields = asked(stream=True, temperature=0.5, stop_sequences=["x"], metadata={"user_id": "u"}, compaction={})
    request = to_tokenize(CountTokensRequest.from_json(json.dumps(fields).encode()))
    ignored = {"max_tokens", "stream", "temperature", "stop_sequences", "metadata", "compaction"}
    assert {name for name, known in ignored_parameters(request) if known} == ignored
    for name in ("response_format", "chat_template_kwargs", "thread", "mcp_servers"):
        with pytest.raises(QuireError) as caught:
            CountTokensRequest.from_json(json.dumps({**fields, name: {"type": "create"}}).encode())
        assert caught.value.param == name


ATTRIBUTION = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize(
    "system", [[text(ATTRIBUTION), text("Be brief.")], [text(f"{ATTRIBUTION}\nBe brief.")], f"{ATTRIBUTION}\nBe brief."]
)
def test_a_line_that_differs_with_each_request_does_not_reach_the_prompt(system):
    bodies = [json.loads(json.dumps(asked(system=system)).replace("{}", each)) for each in ("fa690", "eb6c6")]
    plain = list(made(asked(system="Be brief."))[0].prompt_token_ids)
    for body in bodies:
        assert list(made(body)[0].prompt_token_ids) == plain


@pytest.mark.parametrize(
    ("template", "fields", "ignored"),
    [
        (HERMES_TEMPLATE, {"thinking": {"type": "disabled"}}, []),
        (HERMES_TEMPLATE, {"thinking": {"type": "enabled"}}, ["thinking"]),
        (THINKING_TEMPLATE, {"thinking": {"type": "enabled"}}, []),
        (THINKING_TEMPLATE, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, ["thinking.budget_tokens"]),
        (OPENING_TEMPLATE, {"thinking": {"type": "disabled"}}, ["thinking"]),
        (HERMES_TEMPLATE, {"output_config": {"effort": "high"}}, ["output_config.effort"]),
        (EFFORT_TEMPLATE, {"output_config": {"effort": "max"}}, []),
        (
            HERMES_TEMPLATE,
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            ["context_management"],
        ),
        (HERMES_TEMPLATE, {"context_management": {"edits": []}}, []),
        (HERMES_TEMPLATE, {"speed": "fast", "keep_alive": 3}, ["speed", "keep_alive"]),
        (HERMES_TEMPLATE, {"metadata": {"user_id": "u", "team": "t"}}, ["metadata.team"]),
        (
            HERMES_TEMPLATE,
            {"tools": [{"name": "get", "input_schema": {}, "defer_loading": True, "input_examples": []}]},
            ["tools[0].defer_loading"],
        ),
        (
            OTHER_TEMPLATE,
            {
                "tools": [{"name": "get", "input_schema": {}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            ["tools", "tool_choice", "tool_choice.disable_parallel_tool_use"],
        ),
    ],
)
def test_what_is_ignored_is_named_as_the_client_named_it(template, fields, ignored):
    assert list(made(asked(**fields), template)[2]) == ignored


def refused(fields: dict[str, Any], template: str = HERMES_TEMPLATE) -> QuireError:
    with pytest.raises(QuireError) as caught:
        made({**asked(), **fields}, template)
    assert caught.value.code is ErrorCode.INVALID
    return FIELD_NAMES.translate_error(caught.value)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
TOOL = {"name": "get", "input_schema": {}}
CONTENT = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (IMAGE, "[image omitted: this model reads text only]"),
        (
            {"type": "document", "source": {"type": "base64", "data": "aaaa"}},
            "[document omitted: this model reads text only]",
        ),
        ({"type": "document", "source": {"type": "text", "data": "plain"}}, "plain"),
        (
            {"type": "search_result", "title": "A title", "source": "a.md", "content": [text("found")]},
            "A title\na.md\nfound",
        ),
        ({"type": "search_result", "content": None}, ""),
        ({"type": "tool_reference", "tool_name": "x"}, "[tool_reference omitted: this model reads text only]"),
        ({"type": "]\n" + "x" * 99}, f"[]?{'x' * 30} omitted: this model reads text only]"),
    ],
    ids=str,
)
def test_what_is_no_text_in_the_result_of_a_tool_is_replaced_by_words(part, words):
    """A client of an agent reads images by itself, and sends them with each turn from then on."""
    conversation = [user(text("hello")), assistant(call()), user(result([text("see: "), part]))]
    chat = MessagesRequest.chat_from_json(json.dumps(asked(messages=conversation)).encode())
    assert chat.messages[-1].content == f"see: {words}"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [user(IMAGE)]}, f"{CONTENT}.type", "'image' are not supported; only text is"),
        ({"messages": [user({"type": "document"})]}, f"{CONTENT}.type", "only text is"),
        ({"messages": [user({"type": "text"})]}, CONTENT, "text, which is missing"),
        ({"messages": [user({"text": "x"})]}, f"{CONTENT}.type", "is missing"),
        ({"messages": [user(call())]}, CONTENT, "in no message of the user"),
        ({"messages": [user({"type": "thinking", "thinking": "x"})]}, CONTENT, "in no message of the user"),
        ({"messages": [{"role": "system", "content": [call()]}]}, CONTENT, "in no message of the system"),
        ({"messages": [user(result("x"))]}, f"{CONTENT}.tool_use_id", "answers no call"),
        ({"messages": [user(text("a")), assistant(result("x"))]}, "messages[1].content[0]", "of the assistant"),
        (
            {"messages": [assistant(call()), user(result([{"text": "x"}]))]},
            "messages[1].content[0].content",
            "an object with a type",
        ),
        (
            {"messages": [assistant(call()), user(result([{"type": "text", "text": 1}]))]},
            "messages[1].content[0].content",
            "must be a string",
        ),
        (
            {"messages": [assistant(call(), call()), user(text("x"))]},
            "messages[0].content[1].id",
            "another call of this message",
        ),
        (
            {"messages": [assistant(*(call(f"t{n}") for n in range(129))), user(text("x"))]},
            "messages[0].content[128].id",
            "128",
        ),
        ({"messages": [user(text("a")), assistant(text("b"))]}, "messages", "continuing one is not supported here"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [assistant(call(name="a b")), user(text("x"))]}, f"{CONTENT}.name", "pattern"),
        ({"system": [IMAGE]}, "system", "only text is"),
        ({"system": 3}, "system", "string"),
        ({"max_tokens": None}, "max_tokens", "integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stop_sequences": "x"}, "stop_sequences", "stop_sequences must be a list of strings"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "stop_sequences holds 17 strings"),
        ({"stop_sequences": [""]}, "stop_sequences", "1 to 256 characters"),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools[0].type", "Anthropic's own"),
        ({"tools": [{"type": "function", "function": {"name": "get"}}]}, "tools[0].type", "OpenAI's APIs"),
        ({"tools": [{"name": "get"}]}, "tools[0].input_schema", "is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "pattern"),
        (
            {"tools": [{**TOOL, "input_schema": {"type": "array"}}]},
            "tools[0].input_schema",
            "tools[0].input_schema must",
        ),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers", "directly"),
        ({"tools": [{**TOOL, "input_schema": {"enum": ["x" * 70_000]}}]}, "tools[0].input_schema", "input_schema has"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "two tools named get"),
        ({"tools": [TOOL] * 129}, "tools", "128"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}}, "tool_choice", "not among the tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "name and the type tool go together"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "get"}}, "tool_choice", "go together"),
        ({"tool_choice": "auto"}, "tool_choice", "object"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "'enabled', 'disabled' or 'adaptive'"),
        ({"thinking": {"type": "enabled", "display": 5}}, "thinking.display", "a valid string"),
        ({"output_config": {"effort": "Very high"}}, "output_config.effort", "a word"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id", "string"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"stop": ["x"]}, "stop", "use stop_sequences"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use output_config.format"),
        ({"n": 2}, "n", "a field of /v1/chat/completions"),
        ({"logprobs": True}, "logprobs", "a field of /v1/chat/completions"),
        ({"max_new_tokens": 3}, "max_new_tokens", "a field of /v1/chat/completions"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "offer what they have as tools"),
        ({"thread": {"type": "create"}}, "thread", "send the whole conversation"),
    ],
)
def test_what_is_refused_is_named_as_the_client_named_it(fields, param, words):
    error = refused(fields)
    assert error.param == param
    assert words in error.message


def test_errors_about_a_chat_that_was_made_of_it_have_the_requests_own_words():
    schema = {"type": "json_schema", "schema": {"x-guidance": {}}}
    error = refused({"tools": [TOOL], "output_config": {"format": schema}})
    assert (error.param, "x-guidance" in error.message) == ("output_config.format", True)
    error = refused({"tools": [TOOL], "tool_choice": {"type": "any"}}, OTHER_TEMPLATE)
    assert error.param == "tools"
    given = QuireError(ErrorCode.UNAVAILABLE, "response_format cannot be used", retry_after=3, reason="none_ready")
    own = FIELD_NAMES.translate_error(given)
    assert (own.code, own.message, own.param) == (given.code, "output_config.format cannot be used", None)
    assert (own.retry_after, own.reason) == (3, "none_ready")


def test_an_answer_may_end_where_the_models_context_does():
    tokenizer = tokenizer_with(HERMES_TEMPLATE)
    prompt = len(made(asked())[0].prompt_token_ids)
    for asked_for, left, most, limited in ((9, 20, 9, False), (20, 20, 20, False), (32_000, 20, 20, True)):
        validator = Validator({MODEL: tokenizer}, lambda _, left=left: Limits(prompt + left, tokenizer.vocab_size))
        request = MessagesRequest.chat_from_json(json.dumps(asked(max_tokens=asked_for)).encode())
        (generation,) = validator.generations(request, "id", ANONYMOUS)
        assert generation.params.max_tokens == most
        assert build_response_options(request, most).limited_by_context is limited
    validator = Validator({MODEL: tokenizer}, lambda _: Limits(prompt, tokenizer.vocab_size))
    with pytest.raises(QuireError) as caught:
        validator.generations(request, "id", ANONYMOUS)
    assert caught.value.param == "messages"


def test_the_form_of_an_answer_is_a_schema_that_the_engine_gets_as_it_is():
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    generation, _, _ = made(asked(**form), HERMES_TEMPLATE)
    schema = json.dumps(WEATHER, separators=(",", ":"))
    assert generation.params.structured == Structured(StructuredKind.JSON_SCHEMA, schema)


def test_the_form_of_an_answer_holds_after_reasoning():
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    generation, options, _ = made(asked(**form), THINKING_TEMPLATE)
    assert "thought GAP )? answer" in generation.params.structured.text
    assert '"city"' in generation.params.structured.text
    assert options.reasoning is not ReasoningPlacement.INLINE


TEXTS = st.text(max_size=8)
BLOCKS = st.one_of(
    st.builds(text, TEXTS),
    st.builds(call, st.sampled_from(["a", "b", "c"]), st.sampled_from(["get", "now"]), x=TEXTS),
    st.builds(
        result, st.one_of(st.none(), TEXTS, st.lists(st.builds(text, TEXTS), max_size=2)), st.sampled_from("abc")
    ),
    st.builds(lambda words: {"type": "thinking", "thinking": words}, TEXTS),
    st.just({"type": "redacted_thinking"}),
)
MESSAGES = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    st.one_of(TEXTS, st.lists(BLOCKS, max_size=4)),
)


@given(st.lists(MESSAGES, min_size=1, max_size=5), st.one_of(st.none(), TEXTS))
@settings(max_examples=75, deadline=None)
def test_what_the_schema_takes_no_chat_refuses(messages: list[Any], system: str | None) -> None:
    """So that no error speaks of messages which the client has not sent, and no text of theirs is lost."""
    body = asked(messages=messages, system=system)
    try:
        request = MessagesRequest.from_json(json.dumps(body).encode())
    except QuireError:
        return
    chat = request.to_chat()
    said = "".join(message.text + message.reasoning_text for message in chat.messages)
    blocks = [block for message in request.messages for block in message.content]
    given_texts = [block.text or block.thinking or block.content or "" for block in blocks]
    assert sorted(said) == sorted((system or "") + "".join(given_texts))
    assert sum(len(message.tool_calls or ()) for message in chat.messages) == sum(
        block.type == "tool_use" for block in blocks
    )
