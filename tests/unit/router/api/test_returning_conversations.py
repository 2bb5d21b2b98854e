"""A conversation that comes back is the same conversation, over every API; what began elsewhere goes on here, and what
the model does not see of it is named.
"""

import json
from types import NoneType
from typing import get_args, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlockParam
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from quire.v1 import inference_pb2 as pb
from quire_engine.llm.arguments import read_conversations
from quire_proto.text.chat_template import ChatTemplate
from quire_router.api.auth import ANONYMOUS
from quire_router.api.rpc.messages import message_fields
from quire_router.api.schemas.anthropic import MessagesRequest
from quire_router.api.schemas.openai import ChatRequest
from quire_router.api.schemas.response_items import History, read_items
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import ResponsesRequest
from quire_router.api.validation import Validator

from tests.support.scripted_api import MODEL, Limits, ask, open_stage
from tests.support.tool_models import HERMES_TEMPLATE, tokenizer_with

IGNORED = "x-quire-ignored-parameters"
REASONS = HERMES_TEMPLATE.replace("{{ message.content }}", "<{{ message.thinking }}>{{ message.content }}")
USER, SO = {"role": "user", "content": "Weather?"}, {"role": "user", "content": "So?"}
TEXT = {"type": "text", "text": "I looked."}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "web_search_result"}]}

FUNCTION = {"name": "get", "arguments": '{"city": "Rome"}'}
CHAT = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning": "I call it.",
        "tool_calls": [{"id": "get", "type": "function", "function": FUNCTION}],
    },
    {"role": "tool", "tool_call_id": "get", "content": "cold"},
    {"role": "assistant", "content": "Cold.", "reasoning_content": "It is winter."},
    SO,
]
OLD = [
    USER,
    {"role": "assistant", "content": None, "thinking": "I call it.", "function_call": FUNCTION},
    {"role": "function", "name": "get", "content": "cold"},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "It is winter."}, {"type": "text", "text": "Cold."}],
    },
    SO,
]
MESSAGES = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I call it.", "signature": "s"},
            {"type": "tool_use", "id": "get", "name": "get", "input": {"city": "Rome"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "get", "content": "cold"}]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "It is winter."}, {"type": "text", "text": "Cold."}],
    },
    SO,
]
ITEMS = [
    USER,
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I call it."}]},
    {"type": "function_call", "call_id": "get", **FUNCTION},
    {"type": "function_call_output", "call_id": "get", "output": "cold"},
    {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "It is winter."}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Cold.", "annotations": []}]},
    SO,
]
GRPC = [
    pb.ChatMessage(role="user", content="Weather?"),
    pb.ChatMessage(role="assistant", reasoning="I call it.", tool_calls=[pb.ToolCall(id="get", **FUNCTION)]),
    pb.ChatMessage(role="tool", tool_call_id="get", content="cold"),
    pb.ChatMessage(role="assistant", content="Cold.", reasoning="It is winter."),
    pb.ChatMessage(role="user", content="So?"),
]


def chat_of(messages):
    return ChatRequest.from_fields({"model": MODEL, "messages": messages})


def message_chat(messages, **fields):
    body = {"model": MODEL, "max_tokens": 9, "messages": messages, **fields}
    return MessagesRequest.chat_from_json(json.dumps(body).encode())


def response_chat(items, **fields):
    body = {"model": MODEL, "input": items, **fields}
    return ResponsesRequest.from_json(json.dumps(body).encode()).to_chat(History(), "resp_1")


def seen(request, template=REASONS):
    """What the model reads of a request, and the names of what is ignored."""
    tokenizer = tokenizer_with(template)
    validator = Validator({MODEL: tokenizer}, lambda _: Limits(2**20, tokenizer.vocab_size))
    request, ignored = validator.drop_ignored(request, MODEL)
    (generation,) = validator.generations(request, "id", ANONYMOUS)
    return tokenizer.decode(list(generation.prompt_token_ids)), ignored


@pytest.mark.parametrize(
    "same",
    [
        lambda: chat_of(OLD),
        lambda: message_chat(MESSAGES),
        lambda: response_chat(ITEMS),
        lambda: chat_of(message_fields(GRPC)),
    ],
    ids=["former fields", "Messages", "Responses", "gRPC"],
)
def test_a_conversation_has_one_prompt_over_every_api(same):
    prompt, ignored = seen(chat_of(CHAT))

    assert ("<I call it.>" in prompt, "<It is winter.>Cold." in prompt, ignored) == (True, True, ())
    assert seen(same()) == (prompt, ())


@pytest.mark.parametrize("messages", [CHAT, OLD])
def test_it_has_the_same_prompt_offline(messages):
    (conversation,) = read_conversations(messages, None, None, add_generation_prompt=True)

    assert ChatTemplate(REASONS, {}, "the test").render(conversation.messages) == seen(chat_of(CHAT))[0]


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (SEARCH, ["server_tool_use"]),
        (FOUND, ["web_search_tool_result"]),
        (
            {"type": "code_execution_tool_result", "tool_use_id": "x", "content": {"stdout": "1"}},
            ["code_execution_tool_result"],
        ),
        ({"type": "mcp_tool_use", "id": "m", "name": "a b", "server_name": "s", "input": {}}, ["mcp_tool_use"]),
        ({"type": "redacted_thinking", "data": "x"}, ["redacted_thinking"]),
        ({"type": "what comes next", "text": 7, "id": 5, "content": [5]}, ["what?comes?next"]),
        ({**TEXT, "citations": [{"type": "web_search_result_location"}]}, ["citations"]),
        ({"type": "compaction", "content": "I looked."}, []),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_blocks_of_tools_that_a_server_ran_are_named_and_the_text_stays(block, names):
    answer = {"role": "assistant", "content": [block, TEXT] if block.get("type") != "compaction" else [block]}
    prompt, ignored = seen(message_chat([USER, answer, SO]))

    assert "I looked." in prompt
    assert list(ignored) == [f"messages[1].content[0].{name}" for name in names]
    if block["type"] != "text":
        assert seen(chat_of([USER, {**answer, "content": [block, TEXT]}, SO]))[0] == prompt


def test_a_failed_result_is_named_and_results_of_a_server_are_no_messages_of_the_user():
    call = {"type": "tool_use", "id": "t", "name": "get", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}
    prompt, ignored = seen(
        message_chat(
            [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [FOUND, result, TEXT]}]
        )
    )

    assert ignored == ("messages[2].content[0].web_search_tool_result", "messages[2].content[1].is_error")
    assert prompt.count("user\n") == 2


def words_of(hint):
    """The words of a literal, also where it is optional."""
    return [word for each in get_args(hint) for word in (words_of(each) if get_args(each) else [each])]


KINDS = {word for item in get_args(ResponseInputItemParam) for word in words_of(get_type_hints(item)["type"])} - {
    NoneType
}
READ = {
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "item_reference",
    "custom_tool_call",
    "custom_tool_call_output",
}


TYPED = [block for block in get_args(BetaContentBlockParam) if isinstance(block, type)]  # and not that of answers
BLOCKS = {word for block in TYPED for word in words_of(get_type_hints(block)["type"])}
CLIENTS = {"text", "thinking", "tool_use", "tool_result"}


@pytest.mark.parametrize("kind", sorted(BLOCKS - CLIENTS))
def test_every_block_that_anthropic_describes_is_taken_in_an_answer_and_named(kind):
    block = {
        "type": kind,
        "id": "x",
        "server_name": 5,
        "content": [{"type": "x"}],
        "data": "x",
        "tool_use_id": "t",
    }
    prompt, ignored = seen(message_chat([USER, {"role": "assistant", "content": [TEXT, block]}, SO]))

    assert ("I looked." in prompt, ignored) == (True, (f"messages[1].content[1].{kind}",))


def test_anthropics_description_names_the_blocks_that_are_tried_here():
    assert {"server_tool_use", "web_search_tool_result", "mcp_tool_use", "image", *CLIENTS} <= BLOCKS


def test_openais_description_names_the_items_that_are_tried_here():
    assert {"web_search_call", "mcp_call", "compaction", *READ} <= KINDS
    assert len(KINDS) > 20


@pytest.mark.parametrize("kind", sorted(KINDS - READ))
def test_items_of_tools_that_a_server_ran_are_named_kept_and_listed(kind):
    item = {
        "type": kind,
        "id": "it_1",
        "call_id": "c",
        "action": {"type": "x"},
        "output": [5],
        "name": "a b",
        "status": 5,
    }
    chat = response_chat([USER, item, {"role": "assistant", "content": "I looked."}, SO])
    prompt, ignored = seen(chat)

    assert ignored == (f"input[1].{kind}",)
    assert prompt == seen(chat_of([USER, {"role": "assistant", "content": "I looked."}, SO]))[0]
    listed = ResponseState.read(chat.conversation).items[1]
    assert listed == item
    assert read_items([listed])[0].to_json("it_1") == item


def test_a_custom_tools_call_is_a_call_of_its_text():
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    chat = response_chat([USER, call, output])

    assert [message.to_template({"c": "patch"}) for message in chat.messages[1:]] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "patch", "arguments": {"input": "*** Begin"}}}
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c", "name": "patch"},
    ]
    for item in (call, output):
        assert read_items([item])[0].to_json("x") == {**item, "id": "x", "status": "completed"}


def test_reasoning_that_another_server_encrypted_is_named():
    items = [
        USER,
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": "x"},
        SO,
    ]

    assert seen(response_chat(items))[1] == ("input[1].encrypted_content",)


PLAIN = "{% for message in messages if message.role in ('user', 'assistant') %}{{ message.content }}{% endfor %}"


def test_what_a_template_does_not_show_is_named_as_its_client_sent_it():
    system = {"role": "developer", "content": "Be brief."}
    chats = {
        "messages[0].content": chat_of([system, *CHAT]),
        "system": message_chat(MESSAGES, system="Be brief."),
        "instructions": response_chat(ITEMS, instructions="Be brief."),
    }
    named = {name: seen(chat, PLAIN)[1] for name, chat in chats.items()}

    assert named == {
        "messages[0].content": (
            "messages[0].content",
            "messages[2].reasoning",
            "messages[2].tool_calls",
            "messages[3].content",
            "messages[4].reasoning_content",
        ),
        "system": (
            "system",
            "messages[1].content[0].thinking",
            "messages[1].content[1].tool_use",
            "messages[2].content[0].tool_result",
            "messages[3].content[0].thinking",
        ),
        "instructions": ("instructions", "input[1]", "input[2]", "input[3]", "input[4]"),
    }


async def test_the_header_names_what_is_not_seen_over_rest():
    old = [
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
        {"role": "assistant", "content": [SEARCH, TEXT]},
    ]
    async with open_stage(template=HERMES_TEMPLATE, refuse_unknown=True) as stage:
        stage.fleet.model_limits = Limits(4096)
        chat = await ask(stage.port, "POST", "/v1/chat/completions", {"model": MODEL, "messages": [USER, old[0], SO]})
        message = await ask(
            stage.port, "POST", "/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": [USER, old[1], SO]}
        )
        counted = await ask(
            stage.port, "POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": [USER, old[1], SO]}
        )
    assert (chat.status, chat.headers[IGNORED]) == (200, "messages[1].audio")
    assert (message.status, message.headers[IGNORED]) == (200, "messages[1].content[0].server_tool_use")
    assert (counted.status, counted.headers[IGNORED]) == (200, "messages[1].content[0].server_tool_use")
