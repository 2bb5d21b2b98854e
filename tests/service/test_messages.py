"""The Messages API on real engines, behind two routers that share a Redis: what it answers is what a chat does, and a
stream that breaks at one router goes on at the other.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import jsonschema
import pytest

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.grammars import encode
from tests.support.message_streams import message_events, message_of
from tests.support.redis_server import redis_server

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}
# So that a small model comes to an end.
ENDINGS = {str(token_id): 25 for mark in '"]}' for token_id in encode(mark)}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 60,
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
}


@dataclass(frozen=True)
class Routers:
    """Two of them, with engines of a model whose template shows whole schemas."""

    urls: tuple[str, str]

    def post(self, path: str, body: dict[str, Any], *, router: int = 0, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.urls[router]}{path}", json=body, headers=headers, timeout=60)

    def message(self, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/messages", {**ASKED, **fields})
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()
        return message

    def chat(self, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/chat/completions", {**ASKED, **fields})
        answer.raise_for_status()
        completion: dict[str, Any] = answer.json()
        return completion

    def events(self, request_id: str, after: str, *, router: int) -> bytes:
        address = f"{self.urls[router]}/v1/requests/{request_id}/events"
        answer = httpx.get(address, headers={"last-event-id": after}, timeout=60)
        answer.raise_for_status()
        return answer.content


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("messages") / DEMO.name))
    shutil.copy(DEMO.parent / "templates" / "hermes.jinja", folder / "chat_template.jinja")
    with redis_server() as redis:
        engine = ForkedEngine(folder, folder.parent, *SMALL_POOLS, *FLOAT32)
        both = [ForkedRouter(folder, [engine.address], folder.parent, "--redis-url", redis.url) for _ in range(2)]
        try:
            for process in (engine, *both):
                process.wait_ready()
            yield Routers((both[0].url, both[1].url))
        finally:
            for process in (*both, engine):
                process.stop()


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def test_a_message_says_what_the_chat_says(routers: Routers) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = routers.message(system=system)
    chat = routers.chat(messages=[{"role": "system", "content": "Be brief."}, *ASKED["messages"]])
    assert text_of(message) == chat["choices"][0]["message"]["content"] != ""
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert message["stop_reason"] == "end_turn"
    counted = routers.post(
        "/v1/messages/count_tokens", {"model": MODEL, "messages": ASKED["messages"], "system": system}
    )
    assert counted.json() == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_stream_is_the_whole_message(routers: Routers) -> None:
    whole = routers.message()
    events = message_events(routers.post("/v1/messages?beta=true", {**ASKED, "stream": True}).content)
    streamed = message_of(events)
    assert len(events) > 6, "the text did not come piece by piece"
    for field in ("content", "stop_reason", "stop_sequence", "model"):
        assert streamed[field] == whole[field]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_long_prompt_that_comes_again_is_read_from_the_cache(routers: Routers) -> None:
    messages = [{"role": "user", "content": f"{uuid4().hex} " * 8}]
    first, second = (routers.message(messages=messages)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < second["cache_read_input_tokens"]
    total = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in (first, second)]
    assert total[0] == total[1]


def test_a_stop_sequence_ends_the_message_and_is_named(routers: Routers) -> None:
    said = text_of(routers.message())
    stop = said[5:8]
    message = routers.message(stop_sequences=["never said", stop])
    assert text_of(message) == said[: said.index(stop)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert routers.message(max_tokens=3)["stop_reason"] == "max_tokens"


@pytest.mark.soak
def test_an_answer_ends_where_the_models_context_does(routers: Routers) -> None:
    limit = routers.post("/tokenize", {"model": MODEL, "prompt": "x"}).json()["max_model_len"]
    prompt = routers.chat()["usage"]["prompt_tokens"]
    endless = {"ignore_eos": True, "max_tokens": 10 * limit}
    message = routers.message(**endless)
    usage = message["usage"]
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert usage["output_tokens"] == limit - prompt
    assert routers.post("/v1/chat/completions", {**ASKED, **endless}).status_code == 400


def test_a_forced_call_its_result_and_the_answer_behind_it(routers: Routers) -> None:
    asked = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}], "tools": TOOLS}
    message = routers.message(**asked, tool_choice=FORCED["tool_choice"], logit_bias=ENDINGS)
    (call,) = message["content"]
    assert (message["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "weather")
    jsonschema.validate(call["input"], SCHEMA)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "It is sunny."}]}
    turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    answer = routers.message(**{**asked, "messages": [*asked["messages"], *turns]})
    function = {"name": "weather", "arguments": json.dumps(call["input"])}
    chat = routers.chat(
        messages=[
            *asked["messages"],
            {"role": "assistant", "tool_calls": [{"id": call["id"], "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call["id"], "content": "It is sunny."},
        ],
        tools=[
            {
                "type": "function",
                "function": {"name": "weather", "description": TOOLS[0]["description"], "parameters": SCHEMA},
            }
        ],
    )
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_an_answer_in_a_form(routers: Routers) -> None:
    message = routers.message(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, logit_bias=ENDINGS)
    jsonschema.validate(json.loads(text_of(message)), SCHEMA)


@pytest.mark.parametrize("fields", [{}, {**FORCED, "logit_bias": ENDINGS}], ids=["text", "a call"])
def test_a_stream_goes_on_at_another_router_after_any_event(routers: Routers, fields: dict[str, Any]) -> None:
    body = {**ASKED, **fields, "stream": True}
    key = {"idempotency-key": uuid4().hex}
    answer = routers.post("/v1/messages", body, **key)
    events = message_events(answer.content)
    whole, request_id = message_of(events), answer.headers["request-id"]
    for count, event in enumerate(events[:-1], 1):
        rest = message_events(routers.events(request_id, event.event_id or "", router=1))
        assert message_of([*events[:count], *rest]) == whole
    repeated = routers.post("/v1/messages", {**body, "stream": False}, router=1, **key)
    assert repeated.headers["x-quire-idempotent-replay"] == "true"
    assert repeated.json() == whole
    stored = httpx.get(f"{routers.urls[1]}/v1/requests/{whole['id']}", timeout=60).json()
    assert (stored["status"], stored["response"]) == ("completed", whole)


def test_a_client_that_leaves_in_the_middle_comes_back_at_another_router(routers: Routers) -> None:
    body = {**ASKED, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "max_tokens": 100}
    data, headers = b"", {"idempotency-key": uuid4().hex}
    with httpx.stream("POST", f"{routers.urls[0]}/v1/messages", json=body, headers=headers, timeout=60) as answer:
        request_id = answer.headers["request-id"]
        for piece in answer.iter_bytes():
            data += piece
            if data.count(b"text_delta") >= 5:
                break
    had = message_events(data[: data.rindex(b"\n\n") + 2])
    rest = message_events(routers.events(request_id, had[-1].event_id or "", router=1))
    message = message_of([*had, *rest])
    unbroken = routers.message(**{**body, "stream": False, "seed": 1})
    assert text_of(message) == text_of(unbroken)


def test_errors_have_the_form_of_the_api(routers: Routers) -> None:
    unknown = routers.post("/v1/messages", {**ASKED, "model": "claude"})
    image = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x.example"}}]}
    refused = routers.post("/v1/messages", {**ASKED, "messages": [image]})
    late = routers.post(
        "/v1/messages",
        {**ASKED, "ignore_eos": True, "max_tokens": 1000, "stream": True},
        **{"x-request-timeout": "0.2"},
    )
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "only text is" in refused.json()["error"]["message"]
    error = message_events(late.content)[-1].data if late.status_code == 200 else late.json()
    assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
