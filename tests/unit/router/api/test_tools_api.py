"""Chats with tools and thoughts, over both APIs and with the real client."""

import json
from dataclasses import replace

import grpc
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_proto.structured_output import StructuredKind
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_formats import HARMONY, TOOL_FORMATS
from quire_router.api.auth import ANONYMOUS
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.validation import Validator
from quire_router.core.generation import Delta
from quire_router.engines.attempt import Output
from quire_router.requests.choice import create_choices

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.scripted_api import MODEL, Limits, ask, chat, open_stage, script_of
from tests.support.tool_models import (
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    OPENING_TEMPLATE,
    OTHER_TEMPLATE,
    THINKING_TEMPLATE,
    compiled,
    family_template,
    tokenizer_with,
    tool,
    with_marks,
    written,
)

CHAT = "/v1/chat/completions"
IGNORED = "x-quire-ignored-parameters"
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO_CALLS = f'hello\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
TOOLS = [tool("get", description="The weather."), tool("now")]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}


def stage_with(text, template=HERMES_TEMPLATE):
    """A service whose engine answers ``text``, as the router reads it from tokens."""
    tokenizer = tokenizer_with(template)
    output = tokenizer.new_output_stream([], (), keep_markers=True)
    script = [Delta(output.push([each]), [each]) for each in tokenizer.encode_plain(text)]
    return open_stage([*script, FinishReason.STOP], template=template)


def client(stage):
    stage.fleet.model_limits = Limits(4096)
    return stage.openai().chat.completions


async def streamed(stage, **fields):
    """The chunks of a stream, and what the client's own accumulator makes of them."""
    state = ChatCompletionStreamState()
    chunks = []
    async for chunk in await client(stage).create(**ASKED, **fields, stream=True):
        state.handle_chunk(chunk)
        chunks.append(chunk)
    return chunks, state.get_final_completion()


def parts_of(message):
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content or "", calls, getattr(message, "reasoning_content", None) or ""


FAMILIES = {each.name: each for each in TOOL_FORMATS}
GET = ("", [("get", '{"city": "Rome"}')], "")
CHANNELS = (
    "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>commentary to=functions.get "
    '<|constrain|>json<|message|>{"city": "Rome"}<|call|>'
)


def said_in(name):
    """One call in the format of that name."""
    return family_template(FAMILIES[name]), written(FAMILIES[name], [("get", {"city": "Rome"})]), GET, "tool_calls"


SAID = {
    **{
        name: said_in(name)
        for name in ("qwen3-coder", "glm", "kimi-k2", "mistral-7b", "lfm2", "gemma-4", "deepseek-v3.2")
    },
    "harmony": (family_template(HARMONY) + "{# analysis #}", CHANNELS, (*GET[:2], "well"), "tool_calls"),
    "plain": (HERMES_TEMPLATE, "hello world", ("hello world", [], ""), "stop"),
    "calls": (HERMES_TEMPLATE, TWO_CALLS, ("hello", [("get", '{"city": "Rome"}'), ("now", "{}")], ""), "tool_calls"),
    "only a call": (HERMES_TEMPLATE, CALL, ("", [("get", '{"city": "Rome"}')], ""), "tool_calls"),
    "no call": (HERMES_TEMPLATE, "<tool_call>{}", ("<tool_call>{}", [], ""), "stop"),
    "llama": (LLAMA_TEMPLATE, '{"name": "now", "parameters": {}}', ("", [("now", "{}")], ""), "tool_calls"),
    "thoughts": (THINKING_TEMPLATE, "<think>\nwell\n</think>\n\nhello", ("hello", [], "well"), "stop"),
    "opened": (OPENING_TEMPLATE, f"well\n</think>\n{CALL}", ("", [("get", '{"city": "Rome"}')], "well"), "tool_calls"),
    "only thoughts": (OPENING_TEMPLATE, "well <tool_call>", ("", [], "well <tool_call>"), "stop"),
}


@pytest.mark.parametrize("case", SAID)
async def test_parsed_output_is_the_same_whole_streamed_and_over_grpc(case):
    template, text, expected, reason = SAID[case]
    async with stage_with(text, template) as stage:
        whole = await client(stage).create(**ASKED)
        chunks, completion = await streamed(stage)
        grpc = await over_grpc(stage)
    for choice in (whole.choices[0], completion.choices[0]):
        assert parts_of(choice.message) == expected
        assert choice.finish_reason == reason
    assert (whole.choices[0].message.content is None) == bool(expected[1] and not expected[0])
    assert grpc == (*expected, reason)
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]) == 1


async def over_grpc(stage):
    tools = [pb.Tool(name=name, parameters_json=json.dumps({"type": "object"})) for name in ("get", "now")]
    request = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="hello")], tools=tools)
    content, thoughts, calls, reason = "", "", {}, 0
    async with stage.channel() as channel:
        async for message in InferenceStub(channel).Chat(request):
            content, thoughts, reason = content + message.text, thoughts + message.reasoning, message.finish_reason
            for part in message.tool_calls:
                name, arguments = calls.get(part.index, ("", ""))
                calls[part.index] = (name + part.name, arguments + part.arguments)
    names = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls"}
    return content, list(calls.values()), thoughts, names[reason]


async def test_a_call_streams_its_name_first_and_then_its_arguments():
    async with stage_with(CALL) as stage:
        chunks, _ = await streamed(stage)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert (parts[0].index, parts[0].type, parts[0].function.name) == (0, "function", "get")
    assert parts[0].id.startswith("call_")
    assert len(parts) > 3
    assert all(part.id is None and part.function.name is None for part in parts[1:])


async def test_each_choice_has_its_calls_and_ids():
    async with stage_with(TWO_CALLS) as stage:
        answer = await client(stage).create(**ASKED, n=3)
        again = await client(stage).create(**ASKED, n=3)
    ids = [call.id for each in (answer, again) for choice in each.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 12


TYPED = tool(
    "get", parameters={"type": "object", "properties": {"days": {"type": "integer"}, "flag": {"type": "boolean"}}}
)
TAGS = written(FAMILIES["qwen3-coder"], [("get", {"city": "Rome", "days": 3, "flag": True})])


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        (THINKING_TEMPLATE, f"<think>well</think>hello {CALL}", '{"city": "Rome"}'),
        (family_template(FAMILIES["qwen3-coder"]), f"hello {TAGS}", '{"city": "Rome", "days": 3, "flag": true}'),
    ],
)
async def test_a_resumed_stream_has_the_rest_and_the_same_call_ids(template, text, end):
    async with stage_with(text, template) as stage:
        stage.fleet.model_limits = Limits(4096)
        body = {**ASKED, "tools": [TYPED], "stream": True, "stream_options": {"include_event_ids": True}}
        whole = await ask(stage.port, "POST", CHAT, body)
        chunks = [json.loads(event.partition("data: ")[2]) for event in events_of(whole.body)]
        parts = [part for chunk in chunks for each in chunk["choices"] for part in each["delta"].get("tool_calls", ())]
        assert "".join(part["function"].get("arguments", "") for part in parts) == end
        events = events_of(whole.body)
        request_id = json.loads(events[0].partition("data: ")[2])["id"]
        assert len(events) > 8
        for position, event in enumerate(events):
            mark = event.partition("id: ")[2].partition("\n")[0]
            headers = {"last-event-id": mark}
            rest = await ask(stage.port, "GET", f"/v1/requests/{request_id}/events", headers=headers)
            assert events_of(rest.body) == events[position + 1 :]


def events_of(body):
    """Ids and data of a stream's events, without its end mark."""
    events = [
        "\n".join(line for line in event.split("\n") if not line.startswith(("retry:", ":")))
        for event in body.decode().split("\n\n")
    ]
    return [event for event in events if event.startswith("id: ")]


async def test_a_call_cut_off_by_max_tokens_finishes_with_length():
    async with open_stage([*script_of(CALL)[:-1], FinishReason.LENGTH], template=HERMES_TEMPLATE) as stage:
        answer = await client(stage).create(**ASKED)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.name == "get"


async def test_reasoning_can_be_hidden_or_left_in_the_content():
    async with stage_with("<think>well</think>hello", THINKING_TEMPLATE) as stage:
        fields = {"model": MODEL, "messages": ASKED["messages"]}
        hidden = await client(stage).create(**fields, extra_body={"include_reasoning": False})
        inside = await client(stage).create(**fields, extra_body={"separate_reasoning": False})
    assert parts_of(hidden.choices[0].message) == ("hello", [], "")
    assert parts_of(inside.choices[0].message) == ("<think>well</think>hello", [], "")


async def test_log_probabilities_of_all_tokens_come_beside_calls():
    async with stage_with(CALL) as stage:
        chunks, _ = await streamed(stage, logprobs=True)
        whole = await client(stage).create(**ASKED, logprobs=True)
    parts = [each for chunk in chunks for each in (chunk.choices[0].logprobs or whole.choices[0].logprobs).content]
    tokens = [token.token for token in whole.choices[0].logprobs.content]
    assert "".join(tokens) == CALL
    in_stream = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token.token for each in in_stream for token in each.content] == tokens
    assert parts


# What the model is told


def allowing(mode, *names):
    """A choice of some tools, in the form of chats."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def generation_of(template=HERMES_TEMPLATE, tokenizer=None, **fields):
    model_tokenizer = tokenizer_with(template, tokenizer)
    limits = Limits(2**20, model_tokenizer.vocab_size)
    request = ChatRequest.from_json(json.dumps({**ASKED, **fields}).encode())
    validator = Validator({MODEL: model_tokenizer}, lambda _: limits)
    request, _ = validator.drop_ignored(request, MODEL)
    (generation,) = validator.generations(request, "id", ANONYMOUS)
    return generation, model_tokenizer.decode(list(generation.prompt_token_ids))


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_a_model_with_a_template_for_tools_is_shown_them_by_it(tools):
    limits, both = Limits(2**20, 10**6), (compiled(CHAT_TEMPLATE), compiled(HERMES_TEMPLATE))
    tokenizer = ModelTokenizer(byte_level(), *both)
    validator = Validator({MODEL: tokenizer}, lambda _: limits)
    request = ChatRequest.from_json(json.dumps({**ASKED, "tools": tools}).encode())
    request, ignored = validator.drop_ignored(request, MODEL)
    (generation,) = validator.generations(request, "id", ANONYMOUS)
    prompt = tokenizer.decode(list(generation.prompt_token_ids))
    assert ("The weather." in prompt) == (tools is not None)
    assert not ignored
    assert tokenizer.tool_format is FAMILIES["hermes"]


def test_the_template_gets_tools_calls_as_objects_and_tool_messages():
    call = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    _, prompt = generation_of(messages=messages)
    assert '"name": "get", "description": "The weather.", "parameters": {"type": "object"' in prompt
    assert f"<|start|>assistant\n{CALL}<|end|>" in prompt
    assert prompt.endswith("<|start|>tool\nsun<|end|>\n<|start|>assistant\n")


def test_with_tool_choice_none_the_template_gets_no_tools():
    generation, prompt = generation_of(tool_choice="none")
    assert "Tools:" not in prompt
    assert generation.params.structured is None


@pytest.mark.parametrize(
    ("fields", "forced"),
    [
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tool_choice": "required"}, ["get", "now"]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["now"]),
        ({"tool_choice": allowing("auto", "now")}, ["now"]),
        ({"tool_choice": allowing("required", "now")}, ["now"]),
        ({"parallel_tool_calls": False}, ["get", "now"]),
        ({"tools": [tool(strict=True)]}, ["get"]),
    ],
)
def test_required_and_strict_tools_become_a_grammar(fields, forced):
    structured = generation_of(**fields)[0].params.structured
    if forced is None:
        assert structured is None
    else:
        assert structured.kind is StructuredKind.GRAMMAR
        assert [name for name in ("get", "now") if f'"{name}' in structured.text.replace("\\", "")] == forced


def test_tool_markers_that_are_special_tokens_are_kept_as_text_in_chats():
    tokenizer = with_marks(special=True)
    model_tokenizer = tokenizer_with(HERMES_TEMPLATE, tokenizer)
    ids = model_tokenizer.encode_plain(f"{CALL}<|end|>")
    assert model_tokenizer.new_output_stream([], (), keep_markers=True).push(ids) == CALL
    assert "tool_call" not in model_tokenizer.new_output_stream([], ()).push(ids)
    for operation, expected in (
        ("chat", CALL),
        ("text_completion", model_tokenizer.new_output_stream([], ()).push(ids)),
    ):
        generation = replace(generation_of(tokenizer=tokenizer)[0], operation=operation)
        (choice,) = create_choices(generation, model_tokenizer, 1)
        assert choice.process(Output(ids, 0)).text == expected


@pytest.mark.parametrize(
    ("fields", "prompt_end"),
    [
        ({}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
    ],
)
def test_reasoning_can_be_switched_where_the_template_supports_it(fields, prompt_end):
    assert generation_of(THINKING_TEMPLATE, **fields)[1].endswith(prompt_end)


EFFORT_TEMPLATE = HERMES_TEMPLATE + "effort={{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "fields", "ignored"),
    [
        (HERMES_TEMPLATE, {"reasoning_effort": "none"}, ""),  # what does not think need not stop
        (HERMES_TEMPLATE, {"reasoning_effort": "minimal"}, "reasoning_effort"),
        (HERMES_TEMPLATE, {"reasoning_effort": "xhigh"}, "reasoning_effort"),
        (HERMES_TEMPLATE, {"reasoning_effort": "max"}, "reasoning_effort"),
        (THINKING_TEMPLATE, {"reasoning_effort": "medium"}, "reasoning_effort"),
        (THINKING_TEMPLATE, {"reasoning_effort": "none"}, ""),
        (OPENING_TEMPLATE, {"reasoning_effort": "none"}, "reasoning_effort"),
        (EFFORT_TEMPLATE, {"reasoning_effort": "xhigh"}, ""),
        (HERMES_TEMPLATE, {"chat_template_kwargs": {"enable_thinking": False}}, ""),
        (HERMES_TEMPLATE, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        (OPENING_TEMPLATE, {"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs.thinking"),
        (THINKING_TEMPLATE, {"chat_template_kwargs": {"enable_thinking": True}}, ""),
        (HERMES_TEMPLATE, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        (HERMES_TEMPLATE, {"thinking": {"type": "enabled"}}, "thinking"),
        (HERMES_TEMPLATE, {"think": True}, "think"),
        (OPENING_TEMPLATE, {"enable_thinking": False}, "enable_thinking"),
        (HERMES_TEMPLATE, {"reasoning": {"effort": "high"}}, "reasoning"),
    ],
)
async def test_a_reasoning_parameter_that_the_template_ignores_is_named(template, fields, ignored):
    async with stage_with("hello", template) as stage:
        stage.fleet.model_limits = Limits(4096)
        answer = await ask(stage.port, "POST", CHAT, {**ASKED, **fields})
    assert (answer.status, answer.headers.get(IGNORED, "")) == (200, ignored)


def test_a_template_gets_the_reasoning_effort_that_it_reads():
    assert generation_of(EFFORT_TEMPLATE, reasoning_effort="xhigh")[1].endswith("effort=xhigh")
    assert generation_of(EFFORT_TEMPLATE, reasoning_effort="none")[1].endswith("effort=none")


def refused(template=HERMES_TEMPLATE, **fields):
    with pytest.raises(QuireError) as caught:
        generation_of(template, **fields)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value


def json_of(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


LARGE = [tool(f"t{n}", parameters={"enum": ["x" * 50_000]}) for n in range(2)]
CALLED = "messages[0].tool_calls[0]"


def turn(role, **more):
    return {"role": role, "content": "x", **more}


def called(call_id="1", arguments="{}", name="get"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"enum": ["x" * 70_000]})]}, "tools[0].function.parameters"),
        ({"tools": [tool(description="x" * 65_537)]}, "tools[0].function.description"),
        ({"tools": [tool(f"t{n}", parameters={"enum": ["x" * 60_000]}) for n in range(5)]}, "tools"),
        ({"tools": [tool(f"t{n}") for n in range(129)]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": LARGE, "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters={"x-guidance": {}})], "tool_choice": "required"}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "drop"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": allowing("auto", "drop")}, "tool_choice"),
        ({"tool_choice": allowing("auto")}, "tool_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "tools"),
        ({"response_format": json_of({"x-guidance": {}})}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "tool_choice"),
        ({"parallel_tool_calls": False, "min_tokens": 1}, "tools"),
        ({"tool_choice": "required", "beam_width": 2}, "tool_choice"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"messages": [turn("tool", tool_call_id="1")]}, "messages[0].tool_call_id"),
        ({"messages": [turn("user", tool_call_id="1")]}, "messages[0].tool_call_id"),
        ({"messages": [turn("user", tool_calls=[called()])]}, "messages[0].tool_calls"),
        ({"messages": [turn("user", reasoning="x")]}, "messages[0].reasoning"),
        ({"messages": [turn("assistant", tool_calls=[called(arguments=7)])]}, f"{CALLED}.function.arguments"),
        ({"messages": [turn("assistant", tool_calls=[called(arguments=" " * 2**20 + "{}")])]}, "messages"),
        ({"messages": [turn("assistant", tool_calls=[called(), called()])]}, "messages[0].tool_calls[1].id"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages[0].content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "Very high!"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
    ],
)
def test_contradictory_tool_settings_are_refused_with_their_field(fields, param):
    assert refused(**fields).param == param


@pytest.mark.parametrize(("template", "words"), [(CHAT_TEMPLATE, "knows no tools"), (OTHER_TEMPLATE, "not supported")])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_required_call_is_refused_where_the_template_has_no_tools(template, words, choice):
    error = refused(template, tool_choice=choice)
    assert error.param == "tools"
    assert words in error.message


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, OTHER_TEMPLATE])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}])
async def test_tools_are_ignored_and_named_where_the_template_has_none(template, fields, caplog):
    async with stage_with(CALL, template) as stage:
        stage.fleet.model_limits = Limits(4096)
        whole = await ask(stage.port, "POST", CHAT, {**ASKED, **fields})
        streamed = await ask(stage.port, "POST", CHAT, {**ASKED, **fields, "stream": True})
        bare = {name: value for name, value in ASKED.items() if name != "tools"}
        await ask(stage.port, "POST", CHAT, bare)
        tokens = await ask(stage.port, "POST", "/tokenize", ASKED)
    first, second, without = stage.runner.generations
    assert whole.headers[IGNORED] == streamed.headers[IGNORED] == ", ".join(["tools", *fields])
    message = whole.json["choices"][0]["message"]
    assert {name: value for name, value in message.items() if value} == {"role": "assistant", "content": CALL}
    assert first.prompt_token_ids == second.prompt_token_ids == without.prompt_token_ids
    assert first.params.structured is None
    assert (tokens.json["tokens"], tokens.headers[IGNORED]) == (list(without.prompt_token_ids), "tools")
    told = [record.getMessage() for record in caplog.records if "tools in requests are ignored" in record.getMessage()]
    assert len(told) == 1  # and not with each request
    assert told[0].startswith(f"model {MODEL}: ")


def test_parameters_without_effect_are_accepted():
    fields = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "none"}
    assert generation_of(CHAT_TEMPLATE, **fields)[0].params.structured is None


async def test_tools_are_left_out_over_grpc_too():
    messages = [pb.ChatMessage(role="user", content="hello")]
    request = pb.ChatRequest(model=MODEL, messages=messages, tools=[pb.Tool(name="get")], tool_choice="auto")
    async with open_stage() as stage, stage.channel() as channel:
        call = InferenceStub(channel).Chat(request)
        assert [message.text async for message in call]
        assert dict(await call.initial_metadata())["quire-ignored-parameters"] == "tools, tool_choice"
        asked = InferenceStub(channel).Tokenize(pb.TokenizeRequest(model=MODEL, messages=messages, tools=request.tools))
        assert list((await asked).token_ids) == list(stage.runner.generations[0].prompt_token_ids)
        assert dict(await asked.initial_metadata())["quire-ignored-parameters"] == "tools"


async def test_both_apis_refuse_tools_alike():
    async with open_stage() as stage:
        over_rest = await ask(stage.port, "POST", CHAT, chat(tools=TOOLS, tool_choice="required"))
        request = pb.ChatRequest(
            model=MODEL,
            messages=[pb.ChatMessage(role="user", content="hello")],
            tools=[pb.Tool(name="get")],
            tool_choice="required",
        )
        async with stage.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="knows no tools"):
                await anext(aiter(InferenceStub(channel).Chat(request)))
    assert over_rest.status == 400
    assert over_rest.error["param"] == "tools"
    assert "knows no tools" in over_rest.error["message"]


@pytest.mark.parametrize(
    ("choice", "reason", "words", "param"),
    [
        ("auto", "anyOf.0.not is not supported.", "parameters of the tool get cannot be used: anyOf.0.not", "tools"),
        ("required", "look-around is not supported.", "tool get cannot be used: look-around is", "tools"),
        (
            "auto",
            "properties.a.uniqueItems is not supported.",
            "schema cannot be used: properties.a.uniqueItems is not supported",
            "response_format",
        ),
    ],
)
async def test_a_schema_that_the_engine_refuses_is_named_with_its_tool_and_field(choice, reason, words, param):
    """The engine says the line of the grammar; the grammar is what the request was given."""
    tools = [tool("now"), tool("get", parameters={"anyOf": [{"not": {}}]}, strict=True)]
    reply = json_of({"properties": {"a": {"type": "array", "uniqueItems": True}}})
    asked = {**ASKED, "tools": tools, "tool_choice": choice, "response_format": reply}
    given = generation_of(tools=tools, tool_choice=choice, response_format=reply)[0]
    lines = given.params.structured.text.split("\n")
    begin = "reply: " if param == "response_format" else "arguments_1: "
    line = next(number for number, text in enumerate(lines, 1) if text.startswith(begin))
    message = f"The grammar cannot be used, line {line}: failed to compile JSON schema: {reason}"
    async with open_stage([QuireError(ErrorCode.INVALID, message, param="grammar")], template=HERMES_TEMPLATE) as stage:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await client(stage).create(**asked)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "has_reply", "has_call"), [("auto", True, True), ("required", False, True), ("none", True, False)]
)
def test_tools_and_response_format_go_together(choice, has_reply, has_call):
    reply = {"type": "object", "properties": {"mood": {"type": "string"}}}
    structured = generation_of(tool_choice=choice, response_format=json_of(reply))[0].params.structured
    assert ("mood" in structured.text) is has_reply
    assert ("get" in structured.text) is has_call
    assert (structured.kind is StructuredKind.GRAMMAR) is has_call


REPLY = json_of({"type": "object", "properties": {"mood": {"type": "string"}}})


@pytest.mark.parametrize(
    ("template", "fields", "begins"),
    [
        (THINKING_TEMPLATE, {}, " thought GAP )? answer"),
        (OPENING_TEMPLATE, {}, "start: (thought GAP ) answer"),
        (THINKING_TEMPLATE, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        (THINKING_TEMPLATE, {"separate_reasoning": False}, None),
        (HERMES_TEMPLATE, {}, None),
    ],
)
@pytest.mark.parametrize(
    "form",
    [{"response_format": REPLY}, {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"choice": ["a"]}}],
)
def test_a_form_of_the_answer_holds_after_reasoning(template, fields, begins, form):
    structured = generation_of(template, tools=None, **form, **fields)[0].params.structured
    assert (structured.kind is StructuredKind.GRAMMAR) is (begins is not None)
    assert begins is None or begins in structured.text


def test_a_grammar_of_the_client_is_followed_from_the_first_token_on():
    grammar = {"structured_outputs": {"grammar": 'start: "a"'}}
    assert generation_of(THINKING_TEMPLATE, tools=None, **grammar)[0].params.structured.text == 'start: "a"'


async def test_reasoning_and_then_json_are_separated():
    asked = {"model": MODEL, "messages": ASKED["messages"], "response_format": REPLY}
    async with stage_with('<think>\nwell\n</think>\n\n{"mood": "good"}', THINKING_TEMPLATE) as stage:
        answer = await client(stage).create(**asked)
        parts = [
            chunk.choices[0].delta async for chunk in await client(stage).create(**asked, stream=True) if chunk.choices
        ]
    assert parts_of(answer.choices[0].message) == ('{"mood": "good"}', [], "well")
    assert "".join(part.content or "" for part in parts) == '{"mood": "good"}'
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "well"


@pytest.mark.parametrize(
    ("form", "param"), [({"response_format": REPLY}, "response_format"), ({"regex": "a+"}, "regex")]
)
async def test_a_refused_form_after_reasoning_is_named_as_without_it(form, param):
    refusal = QuireError(ErrorCode.INVALID, "The grammar cannot be used: it has a flaw.", param="grammar")
    async with open_stage([refusal], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        answer = await ask(stage.port, "POST", CHAT, {"model": MODEL, "messages": ASKED["messages"], **form})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_schema_that_a_format_cannot_be_held_to_is_refused():
    tools = [tool("get", parameters={"anyOf": [{"required": ["a"]}]}, strict=True)]
    error = refused(family_template(FAMILIES["qwen3-coder"]), tools=tools, tool_choice="required")
    assert (error.param, "anyOf is not supported" in error.message) == ("tools", True)


async def test_a_refused_grammar_of_tools_is_an_error_about_the_tools():
    refusal = QuireError(ErrorCode.INVALID, "The grammar cannot be used: it has a flaw.", param="grammar")
    async with open_stage([refusal], template=HERMES_TEMPLATE) as stage:
        with pytest.raises(openai.BadRequestError, match="it has a flaw") as caught:
            await client(stage).create(**ASKED, tool_choice="required")
    assert caught.value.param == "tools"


async def test_schemas_that_are_too_large_are_not_even_read_over_grpc():
    tools = [pb.Tool(name=f"t{number}", parameters_json=" " * 70_000) for number in range(4)]
    messages = [pb.ChatMessage(role="user", content="hello")]
    async with open_stage(template=HERMES_TEMPLATE, max_body_bytes=2**20) as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="more than 262144 characters"):
            await anext(aiter(InferenceStub(channel).Chat(pb.ChatRequest(model=MODEL, messages=messages, tools=tools))))


@pytest.mark.parametrize("choice", ["none", "required", "function:get"])
async def test_a_choice_of_tools_means_the_same_over_grpc(choice):
    name = choice.removeprefix("function:")
    chosen = choice if name == choice else {"type": "function", "function": {"name": name}}
    messages = [pb.ChatMessage(role="user", content="hello")]
    tools = [pb.Tool(name="get"), pb.Tool(name="now")]
    request = pb.ChatRequest(model=MODEL, messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    bare = [{"type": "function", "function": {"name": each.name}} for each in tools]
    fields = {**ASKED, "tools": bare, "tool_choice": chosen, "parallel_tool_calls": False}
    async with stage_with(CALL) as stage, stage.channel() as channel:
        await client(stage).create(**fields)
        async for _ in InferenceStub(channel).Chat(request):
            pass
        over_rest, over_grpc = stage.runner.generations
    assert over_rest.params.structured == over_grpc.params.structured
    assert (over_rest.params.structured is None) == (choice == "none")
    assert over_rest.prompt_token_ids == over_grpc.prompt_token_ids


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_templates_get_earlier_reasoning(name):
    template = HERMES_TEMPLATE + "{{ messages[0].reasoning_content }}"
    assert generation_of(template, messages=[turn("assistant", **{name: "hmm"})])[1].endswith("hmm")
