"""Calls of a real model under a template that it was not trained on: what is forced holds by its grammar alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.service.conftest import DEMO, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.grammars import encode

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
# So that a small model comes to an end.
ENDINGS = {str(token_id): 25 for mark in '"]}' for token_id in encode(mark)}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
    "tools": TOOLS,
    "max_tokens": 200,
    "logit_bias": ENDINGS,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """The demo model with a template that shows whole schemas."""
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("tools") / DEMO.name))
    shutil.copy(DEMO.parent / "templates" / "hermes.jinja", folder / "chat_template.jinja")
    engine = ForkedEngine(folder, folder.parent, *SMALL_POOLS)
    router = ForkedRouter(folder, [engine.address], folder.parent)
    try:
        for process in (engine, router):
            process.wait_ready()
        yield OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        router.stop()
        engine.stop()


@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "now"}), (NAMED, {"weather"})])
def test_forced_calls_follow_their_schemas(client: OpenAI, choice: Any, names: set[str]) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(**ASKED, tool_choice=choice, parallel_tool_calls=False, seed=seed)
        (chosen,) = answer.choices
        (call,) = chosen.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in names
        assert chosen.message.content is None
        assert chosen.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "weather" else {})


def test_a_stream_has_the_same_calls(client: OpenAI) -> None:
    fields = {**ASKED, "tool_choice": NAMED, "seed": 5}
    whole = client.chat.completions.create(**fields)
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**fields, stream=True):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion()
    calls = [
        [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls or ()]
        for answer in (whole, streamed)
    ]
    assert calls[0] == calls[1] != []
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_schema_that_cannot_be_used_is_refused(client: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "bad", "parameters": {"not": {}}}}]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**{**ASKED, "tools": tools}, tool_choice="required")
    assert caught.value.param == "tools"
    assert "The parameters of the tool bad cannot be used: not is not supported." in caught.value.message


REPLY: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "mood",
        "schema": {
            "type": "object",
            "properties": {"mood": {"enum": ["good", "bad"]}, "tags": {"type": "array", "uniqueItems": False}},
            "required": ["mood"],
            "additionalProperties": False,
        },
    },
}
CALLED_BY = ("auto", "required", "none")


@pytest.mark.parametrize("choice", CALLED_BY)
def test_tools_and_a_response_format_go_together(client: OpenAI, choice: Any) -> None:
    """An answer is calls, where there may be some, or JSON of the schema, where it may be that; never both or else."""
    bias = [{**ENDINGS, str(encode(mark)[0]): 30} for mark in "<{"]
    kinds = set()
    for seed in range(6):
        asked = {**ASKED, "tool_choice": choice, "response_format": REPLY, "logit_bias": bias[seed % 2], "seed": seed}
        whole = client.chat.completions.create(**asked)
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**asked, stream=True):
            state.handle_chunk(chunk)
        (chosen,), (streamed,) = whole.choices, state.get_final_completion().choices
        calls = [(call.function.name, call.function.arguments) for call in chosen.message.tool_calls or ()]
        assert calls == [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
        assert (chosen.message.content or None) == (streamed.message.content or None)
        assert bool(calls) != bool(chosen.message.content)
        kinds.add(bool(calls))
        if chosen.finish_reason == "stop":
            jsonschema.validate(json.loads(chosen.message.content or ""), REPLY["json_schema"]["schema"])
        elif chosen.finish_reason == "tool_calls":
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert kinds == {"auto": {True, False}, "required": {True}, "none": {False}}[choice]
