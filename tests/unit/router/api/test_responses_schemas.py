"""Requests of the Responses API, and the chats that they mean."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import QuireError
from quire_router.api.schemas.base import ignored_parameters
from quire_router.api.schemas.conversation import ChatMessage
from quire_router.api.schemas.response_items import (
    History,
    InputItem,
    decode_encrypted_content,
    encode_encrypted_content,
    list_items,
    read_items,
    to_messages,
)
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import (
    FIELD_NAMES,
    InputTokensRequest,
    ResponsesChat,
    ResponsesRequest,
)
from quire_router.core.generation import MAX_CONVERSATION_CHARACTERS

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("get", "now")]


def answer(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": kind, "text": text, "annotations": []}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def chat_of(**fields: Any) -> ResponsesChat:
    body = json.dumps({"model": "m", "input": "hello", **fields}).encode()
    return ResponsesRequest.from_json(body).to_chat(History(), "r")


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    chat = chat_of(input=[USER, *items])
    return [message.model_dump(exclude_none=True) for message in chat.messages[1:]]


def call(call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}


def refused(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(QuireError) as caught:
        chat_of(**fields)
    error = FIELD_NAMES.translate_error(caught.value)
    return error.param, error.message


@pytest.mark.parametrize(
    "given",
    [
        "hello",
        [USER],
        [{**USER, "type": "message", "status": "completed", "id": "msg_1"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]}],
    ],
)
def test_input_is_a_text_or_items(given):
    assert chat_of(input=given).messages == [ChatMessage(role="user", content="hello")]


def test_instructions_come_first():
    messages = chat_of(instructions="Be brief.", input=[{"role": "developer", "content": "d"}, USER]).messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be brief."),
        ("developer", "d"),
        ("user", "hello"),
    ]


def test_what_was_written_in_one_answer_is_one_message():
    other = {**CALL, "call_id": "c2"}
    assert messages_of(
        thought("hm"),
        answer("so"),
        CALL,
        other,
        answer(" then"),
        RESULT,
        {**RESULT, "call_id": "c2"},
    ) == [
        {"role": "assistant", "content": "so then", "reasoning_content": "hm", "tool_calls": [call(), call("c2")]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "sunny", "tool_call_id": "c2"},
    ]


def test_answers_that_follow_each_other_are_messages_of_their_own():
    one, two = {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}
    assert messages_of(answer("one"), answer("two")) == [one, two]
    assert messages_of(answer("one"), thought("hm"), answer("two")) == [
        one,
        {**two, "reasoning_content": "hm"},
    ]
    assert messages_of(thought("h"), thought("m"), answer("one")) == [{**one, "reasoning_content": "hm"}]
    assert messages_of(CALL, RESULT, CALL, RESULT) == [
        {"role": "assistant", "content": "", "tool_calls": [call()]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        (thought("hm"), "hm"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, "hm"),
        ({"type": "reasoning", "summary": [], "encrypted_content": encode_encrypted_content("hm")}, "hm"),
        ({"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA of another server"}, ""),
        ({"type": "reasoning", "summary": [], "encrypted_content": "quire-reasoning-1.%%%"}, ""),
    ],
)
def test_reasoning_is_given_back_in_any_form(item, reasoning):
    (message,) = messages_of(item, answer("so"))
    assert message.get("reasoning_content", "") == reasoning


@given(st.text())
@settings(max_examples=30)
def test_encrypted_content_is_read_again(text: str) -> None:
    assert decode_encrypted_content(encode_encrypted_content(text)) == text


items = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=5)),
    st.builds(answer, st.text(max_size=5)),
    st.builds(thought, st.text(max_size=5)),
    st.just(CALL),
)


@given(st.lists(items, max_size=8))
@settings(max_examples=40, deadline=None)
def test_items_that_are_stored_mean_the_same_when_they_are_read(given_items: list[dict[str, Any]]) -> None:
    read = [InputItem.model_validate(item) for item in given_items]
    listed = list_items(read, "r")
    assert [*to_messages(read_items(listed))] == [*to_messages(read)]
    assert list_items(read_items(listed), "s") == listed
    state = ResponseState({"a": 1}, listed)
    assert ResponseState.read(state.to_text()) == state


def test_tools_and_their_choice_are_those_of_a_chat():
    chat = chat_of(tools=[{**TOOLS[0], "description": "d", "strict": True}, TOOLS[1]], parallel_tool_calls=False)
    function = chat.tools[0].function
    assert (function.name, function.description, function.strict) == ("get", "d", True)
    assert (chat.parallel_tool_calls, chat.tool_choice, chat.is_guided) == (False, None, True)
    for choice in ("none", "auto", "required"):
        assert chat_of(tools=TOOLS, tool_choice=choice).tool_choice == choice
    chosen = chat_of(tools=TOOLS, tool_choice={"type": "function", "name": "now"})
    assert [tool.function.name for tool in chosen.callable_tools] == ["now"]
    assert chosen.call_required


def test_functions_of_a_namespace_have_its_name_before_their_own_in_the_template():
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": TOOLS}
    called = {**CALL, "namespace": "agents"}
    chat = chat_of(input=[USER, called, RESULT], tools=[space, TOOLS[0]])
    assert [tool.function.name for tool in chat.tools] == ["agents__get", "agents__now", "get"]
    assert chat.messages[1].tool_calls[0].function.name == "agents__get"
    state = ResponseState.read(chat.conversation)
    assert state.namespaces == {"agents__get": ("agents", "get"), "agents__now": ("agents", "now")}
    assert state.items[1]["namespace"] == read_items(state.items)[1].namespace == "agents"
    assert [tool["name"] for tool in state.repeated["tools"][0]["tools"]] == ["get", "now"]
    assert refused(tools=[{**space, "tools": [{"type": "custom", "name": "x"}]}])[0] == "tools[0].tools[0].type"
    assert "namespace" in refused(tools=[{**TOOLS[0], "tools": []}])[1]
    for other in (space, {"type": "web_search"}):
        assert "functions alone" in refused(tools=[{**space, "tools": [other]}])[1]
    assert "the field name" in refused(tools=[{"type": "function"}])[1]
    assert "at most 126 characters" in refused(tools=[{**space, "name": "n" * 124, "tools": TOOLS}])[1]
    assert len(chat_of(tools=[{**space, "name": "n" * 123, "tools": TOOLS}]).tools[0].function.name) == 128


def test_choices_name_functions_of_namespaces():
    spaces = [{"type": "namespace", "name": name, "tools": TOOLS} for name in ("a", "b")]

    def callable_with(choice: dict[str, Any]) -> list[str]:
        chat = chat_of(tools=[*spaces, {**TOOLS[0], "name": "own"}], tool_choice=choice)
        return [tool.function.name for tool in chat.callable_tools]

    def allowed(*tools: dict[str, Any]) -> dict[str, Any]:
        return {"type": "allowed_tools", "mode": "auto", "tools": list(tools)}

    get = {"type": "function", "name": "get"}
    assert callable_with({**get, "namespace": "b"}) == ["b__get"]
    assert callable_with({"type": "function", "name": "a__now"}) == ["a__now"]
    assert callable_with(allowed({**get, "namespace": "a"}, {"type": "function", "name": "own"})) == ["a__get", "own"]
    assert callable_with(allowed(get)) == ["a__get", "b__get"]
    assert callable_with(allowed({"type": "namespace", "name": "b"})) == ["b__get", "b__now"]
    unknown = (
        {**get, "namespace": "c"},
        allowed({"type": "namespace", "name": "c"}),
        allowed({**get, "namespace": "c"}),
    )
    for choice, words in (*((each, "not among the tools") for each in unknown), (get, "several namespaces")):
        param, message = refused(tools=spaces, tool_choice=choice)
        assert param == "tool_choice"
        assert words in message


@pytest.mark.parametrize("kind", ["web_search", "web_search_2025_08_26", "web_search_preview_2025_03_11"])
def test_a_search_of_the_web_that_is_only_offered_is_ignored(kind):
    """Agents offer it without being asked to."""
    search = {"type": kind, "search_context_size": "low", "external_web_access": False}
    chat = chat_of(tools=[search, *TOOLS])
    assert [tool.function.name for tool in chat.tools] == ["get", "now"]
    assert [*ignored_parameters(chat)] == [("tools[0]", True)]
    assert [tool["name"] for tool in ResponseState.read(chat.conversation).repeated["tools"]] == ["get", "now"]
    assert refused(tools=[search], tool_choice="required")[0] == "tool_choice"
    assert refused(tools=[search], tool_choice={"type": kind})[0] == "tool_choice"


def test_what_is_no_text_in_the_output_of_a_tool_is_replaced_by_words():
    parts = [{"type": "input_text", "text": "see: "}, {"type": "input_image", "image_url": "data:x"}]
    (_, message) = messages_of(CALL, {**RESULT, "output": parts})
    assert message["content"] == "see: [input_image omitted: this model reads text only]"


def test_an_output_is_one_whatever_role_it_has():
    (_, message) = messages_of(CALL, {**RESULT, "role": "assistant"})
    assert message == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_and_all_are_in_the_prompt(mode):
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "now"}]}
    chat = chat_of(tools=TOOLS, tool_choice=allowed)
    assert [tool.function.name for tool in chat.offered_tools] == ["get", "now"]
    assert [tool.function.name for tool in chat.callable_tools] == ["now"]
    assert (chat.call_required, chat.is_guided) == (mode == "required", True)
    unknown = {**allowed, "tools": [{"type": "function", "name": "other"}]}
    assert refused(tools=TOOLS, tool_choice=unknown)[0] == "tool_choice"


def test_the_form_of_the_text_is_that_of_a_chat():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    chat = chat_of(text={"format": form})
    assert json.loads(chat.structured.text) == schema
    assert chat_of(text={"format": {"type": "text"}}).structured is None
    assert chat_of(text={"format": {"type": "json_object"}}).structured is not None
    assert json.loads(chat.conversation.partition("\n")[0])["text"]["format"] == form


def test_reasoning_effort_and_limits_go_to_the_chat():
    switch = {"enable_thinking": False}
    chat = chat_of(
        reasoning={"effort": "high"},
        chat_template_kwargs=switch,
        max_output_tokens=7,
        top_k=3,
        seed=5,
        prompt_cache_key="k",
    )
    assert chat.chat_template_kwargs.model_dump(exclude_none=True) == switch
    assert (chat.reasoning_effort, chat.output_limit, chat.top_k, chat.seed) == ("high", 7, 3, 5)
    assert (chat.prompt_cache_key, chat.output_logprobs, chat.fits_output) == ("k", None, True)
    assert chat_of(include=["message.output_text.logprobs"]).output_logprobs == 0
    assert chat_of(top_logprobs=4).output_logprobs == 4


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "only text is"),
        ({"input": [{"type": "web_search_call"}]}, "input", "all of type web_search_call"),
        ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0]", "have no role"),
        ({"input": [{"type": ["message"]}]}, "input[0].type", "a string"),
        ({"input": [{"type": 5}]}, "input[0].type", "a string"),
        ({"input": [USER, {**CALL, "namespace": "n" * 100, "name": "f" * 27}]}, "input[1]", "at most 126 characters"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "assistant"),
        ({"input": [{"type": "function_call"}]}, "input[0]", "call_id"),
        ({"input": [USER, RESULT]}, "input[1].call_id", "answers no call"),
        ({"input": [USER, CALL, CALL]}, "input[2].call_id", "another call"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "not found"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type", "no tool runs on this server"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "describe it as a function"),
        ({"truncation": "some"}, "truncation", "'auto' or 'disabled'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name", "two tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
        ({"messages": [USER]}, "messages", "use input"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"n": 2}, "n", "/v1/chat/completions"),
        ({"prompt": {"id": "x"}}, "prompt", "prompts are not stored"),
        ({"moderation": {"model": "x"}}, "moderation", "no moderation"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_its_place(fields, param, words):
    assert refused(**fields)[0] == param
    assert words in refused(**fields)[1]


def test_what_changes_nothing_is_accepted_and_named_where_it_is_not_known():
    neutral = {"n": 1, "truncation": "disabled", "service_tier": "auto", "context_management": [], "logprobs": False}
    assert [*ignored_parameters(chat_of(**neutral))] == []
    named = {"prompt_cache_retention": "24h", "access_programs": {"cyber": "x"}, "other": 1}
    assert {name for name, _ in ignored_parameters(chat_of(**named))} == set(named)
    tools = [{**TOOLS[0], "defer_loading": True}]
    assert [*ignored_parameters(chat_of(tools=tools))] == [("tools[0].defer_loading", True)]


def test_a_conversation_that_is_too_long_to_be_stored_is_refused_unless_it_is_not_to_be():
    long = "x" * MAX_CONVERSATION_CHARACTERS
    assert refused(input=long)[0] == "input"
    assert len(chat_of(input=long, store=False).conversation) < 10_000


def test_counting_takes_the_same_body():
    body = {"model": "m", "input": [USER], "stream": True, "max_output_tokens": 3, "store": False, "other": 1}
    request = InputTokensRequest.from_json(json.dumps(body).encode())
    assert [name for name, _ in ignored_parameters(request) if name == "other"] == ["other"]
