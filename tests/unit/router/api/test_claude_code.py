"""Requests in the shapes that Claude Code sends: several turns with calls between, each with what changes from request
to request, and the counts of tokens beside them.
"""

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.support.message_streams import message_events, message_of
from tests.support.scripted_api import MODEL, TOKENIZER, Limits, ask, open_stage, script_of
from tests.support.tool_models import THINKING_TEMPLATE

KEEP = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "authorization": "Bearer none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "x-app": "cli",
}
USER = json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "195dc185-0b5a-4ee7-930d-4772fa780de9"})


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def tool(name: str, description: str, *required: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": f"The {field}."} for field in required}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"}
    return {
        "name": name,
        "description": description,
        "input_schema": {**schema, "properties": properties, "required": list(required), "additionalProperties": False},
    }


TOOLS = [
    tool("Bash", "Runs a command.\n" * 20, "command", "description"),
    tool("Workflow", "A long description. " * 950, "script"),
    tool("mcp__a_server_with_a_long_name__a_tool_whose_name_is_longer_than_sixty_four_characters", "Of a server.", "x"),
]


def body(number: int, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The ``number``-th request of a session. The last block of a user is marked, and with it what was sent before."""
    attribution = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch=fa69{number};"
    return {
        "model": MODEL,
        "system": [
            text(attribution),
            text("You are an agent at the command line.", **KEEP),
            text("\nYou help with software.", **KEEP),
        ],
        "messages": messages,
        "tools": TOOLS,
        "metadata": {"user_id": USER},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


FIRST = [
    {
        "role": "user",
        "content": [
            text("<system-reminder>\nToday is Thursday.\n</system-reminder>\n\n"),
            text("Which files?", **KEEP),
        ],
    },
    {"role": "system", "content": "Skills: none."},
]


def turn(number: int) -> list[dict[str, Any]]:
    """Two calls at once with thinking and text before, their results, and what the client says behind them."""
    calls = [f"toolu_{number}{letter}" for letter in "ab"]
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I shall look.", "signature": "c2lnbmVk"},
                text("Let me see."),
                *(
                    {"type": "tool_use", "id": call, "name": "Bash", "input": {"command": "ls", "description": call}}
                    for call in calls
                ),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": calls[0], "content": "README.md", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": calls[1],
                    "content": [text("<tool_use_error>ls: denied</tool_use_error>")],
                    "is_error": True,
                    **KEEP,
                },
            ],
        },
        {"role": "system", "content": f"<total_tokens>{90_000 - number} tokens left</total_tokens>"},
    ]


OUTPUT = '<think>so</think>Now this.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "pwd"}}\n</tool_call>'


async def test_each_turn_of_a_session_continues_the_prompt_of_the_one_before():
    """So all of it is found in the prefix cache, although every request differs from the others before its messages."""
    async with open_stage(script_of(OUTPUT), template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(40_000)
        for number in range(4):
            messages = [*FIRST, *(message for before in range(number) for message in turn(before))]
            answer = await ask(stage.port, "POST", "/v1/messages?beta=true", body(number, messages), HEADERS)
            assert answer.status == 200, answer.body
            named = answer.headers["x-quire-ignored-parameters"].split(", ")
            assert named[:2] == ["context_management", "output_config.effort"]
            unseen = {name.rpartition(".")[2] for name in named[2:]}  # the template has no place for either
            assert unseen == ({"thinking", "is_error"} if number else set())
            message = message_of(message_events(answer.body))
            assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
            assert message["content"][2]["input"] == {"command": "pwd"}
            assert message["stop_reason"] == "tool_use"
        prompts = [list(generation.prompt_token_ids) for generation in stage.runner.generations]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


EVERYWHERE = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
NEWEST = {
    "billing_policy": {"type": "x"},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallback_credit_token": "x",
    "fallbacks": [{"model": "other"}],
    "inference_geo": "eu",
    "output_config.task_budget": {"type": "tokens", "total": 50_000},
    "service_tier": "priority",
    "speed": "fast",
    "thinking.block_binding": {"type": "x"},
    "user_profile_id": "u",
    "workspace_id": "w",
}
"""Fields of Anthropic's newest packages that change nothing here, and are named in a header."""


async def test_what_the_newest_packages_send_is_taken_and_what_has_no_effect_is_named():
    read = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "Read",
        "input": {},
        **EVERYWHERE,
        "caller": {"type": "direct"},
    }
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("a.png", **EVERYWHERE), image]}
    asked = body(
        0,
        [
            {"role": "user", "content": [text("Look.", **EVERYWHERE)]},
            {"role": "assistant", "content": [text("I look.", citations=None), read]},
            {"role": "user", "content": [{**result, "toolset_name": None, **EVERYWHERE}]},
        ],
        tools=[{**TOOLS[0], "type": "custom", "eager_input_streaming": True, "defer_loading": False, **EVERYWHERE}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        container=None,
        mcp_servers=[],
        thinking={"type": "adaptive", "display": "updates", "block_binding": NEWEST["thinking.block_binding"]},
        output_config={"effort": None, "task_budget": NEWEST["output_config.task_budget"]},
        **{name: value for name, value in NEWEST.items() if "." not in name},
    )
    async with open_stage(script_of("<think>so</think>yes"), template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(40_000)
        betas = {**HEADERS, "anthropic-beta": "fine-grained-tool-streaming-2025-05-14,token-efficient-tools-2099-01-01"}
        answer = await ask(stage.port, "POST", "/v1/messages?beta=true", asked, betas)
        (generation,) = stage.runner.generations
    assert answer.status == 200, answer.body
    assert set(answer.headers["x-quire-ignored-parameters"].split(", ")) == {*NEWEST, "context_management"}
    assert "a.png[image omitted: this model reads text only]" in TOKENIZER.decode(generation.prompt_token_ids)
    message = message_of(message_events(answer.body))
    assert (message["stop_details"], message["container"]) == (None, None)
    assert message["usage"]["service_tier"] == "standard"


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["with tools", "without"])
async def test_tokens_are_counted_before_anything_is_asked(tools):
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "foo"}], "tools": tools}
    async with open_stage(script_of("x"), template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(40_000)
        counted = await ask(stage.port, "POST", "/v1/messages/count_tokens?beta=true", fields, HEADERS)
        await ask(stage.port, "POST", "/v1/messages", {**fields, "max_tokens": 1}, HEADERS)
        (generation,) = stage.runner.generations
    assert counted.json == {"input_tokens": len(generation.prompt_token_ids)}


async def test_a_model_of_another_name_is_refused_with_the_names_that_there_are():
    """Its settings name models for its background work too, which have to be served."""
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/messages?beta=true", body(0, FIRST, model="claude-haiku"), HEADERS)
    assert (answer.status, answer.error["type"]) == (404, "not_found_error")
    assert f"only '{MODEL}'" in answer.error["message"]
