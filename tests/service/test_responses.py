"""The Responses API on real engines, behind two routers that share a Redis: what it answers is what a chat does, its
conversations go on at any router with the tokens that they had, and survive whatever dies between two turns or in one.
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
import openai
import pytest

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.grammars import encode
from tests.support.marked_demo import MARK_ID, write_marked_tokenizer
from tests.support.processes import Engine, Router, eventually
from tests.support.redis_server import RedisServer, redis_server
from tests.support.response_streams import Event, response_events, response_of

PATH = "/v1/responses"
BLOCK = 16  # tokens of a KV block
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}]
# So that a small model comes to an end.
ENDINGS = {str(token_id): 25 for mark in '"]}' for token_id in encode(mark)}
THINKS = "{% if add_generation_prompt and reasoning_effort is defined %}{{- '<think>\\n' }}{% endif %}{# </think> #}"
# So that it comes to the end of its thoughts, too.
THOUGHT = {"reasoning": {"effort": "low"}, "logit_bias": {str(MARK_ID): 15}, "temperature": 1.0, "seed": 7}
FORCED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": ENDINGS}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 60,
    "temperature": 0,
    "input": "What is 3 plus 4?",
}


@dataclass
class Stack:
    """Two routers, with an engine of a model whose template knows tools."""

    folder: Path
    redis: RedisServer
    engine: Engine
    routers: list[Router]

    def post(self, body: dict[str, Any], *, router: int = 0, path: str = PATH, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.routers[router].url}{path}", json=body, headers=headers, timeout=60)

    def respond(self, *, router: int = 0, **fields: Any) -> dict[str, Any]:
        answer = self.post({**ASKED, **fields}, router=router)
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response

    def get(self, path: str, *, router: int = 0) -> httpx.Response:
        return httpx.get(f"{self.routers[router].url}{PATH}/{path}", timeout=60)

    def rest(self, response_id: str, after: int, *, router: int) -> list[Event]:
        answer = self.get(f"{response_id}?stream=true&starting_after={after}", router=router)
        answer.raise_for_status()
        return response_events(answer.content)

    def begin(self, events: int, *, router: int = 0, **fields: Any) -> list[Event]:
        """The first events of a stream that its client leaves."""
        data, body = b"", {**ASKED, **fields, "stream": True}
        url = f"{self.routers[router].url}{PATH}"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for piece in answer.iter_bytes():
                data += piece
                if data.count(b"\n\n") >= events:
                    break
        return response_events(data[: data.rindex(b"\n\n") + 2])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("responses") / DEMO.name))
    template = (DEMO.parent / "templates" / "hermes.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template + THINKS)
    write_marked_tokenizer(folder, "</think>")
    with redis_server(persistent=True) as redis:
        engine = ForkedEngine(folder, folder.parent, *SMALL_POOLS, *FLOAT32)
        routers = [ForkedRouter(folder, [engine.address], folder.parent, "--redis-url", redis.url) for _ in range(2)]
        stack = Stack(folder, redis, engine, routers)
        try:
            for process in (engine, *routers):
                process.wait_ready()
            yield stack
        finally:
            for process in (*stack.routers, stack.engine):
                process.stop()


def text_of(response: dict[str, Any]) -> str:
    messages = (item for item in response["output"] if item["type"] == "message")
    return "".join(part["text"] for message in messages for part in message["content"])


def test_a_response_says_what_the_chat_says(stack: Stack) -> None:
    response = stack.respond(instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED["input"]}]
    asked = {"model": MODEL, "max_tokens": 60, "temperature": 0, "messages": messages}
    chat = stack.post(asked, path="/v1/chat/completions").json()
    assert text_of(response) == chat["choices"][0]["message"]["content"] != ""
    assert (response["status"], response["model"]) == ("completed", MODEL)
    usage = response["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
    assert usage["total_tokens"] == chat["usage"]["total_tokens"]
    counted = stack.post(
        {"model": MODEL, "input": ASKED["input"], "instructions": "Be brief."}, path=f"{PATH}/input_tokens"
    )
    assert counted.json()["input_tokens"] == usage["input_tokens"]


def test_an_answer_that_is_cut_is_incomplete(stack: Stack) -> None:
    response = stack.respond(max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert stack.respond(ignore_eos=True, max_output_tokens=100_000)["status"] == "incomplete", "where the context ends"


@pytest.mark.parametrize("fields", [{}, FORCED], ids=["text", "a call"])
def test_a_stream_goes_on_at_another_router_after_any_event(stack: Stack, fields: dict[str, Any]) -> None:
    events = response_events(stack.post({**ASKED, **fields, "stream": True}).content)
    whole = response_of(events)
    assert len(events) > 8, "the text did not come piece by piece"
    for count in range(1, len(events), 3):
        rest = stack.rest(whole["id"], events[count - 1].number, router=1)
        assert response_of([*events[:count], *rest]) == whole
    assert stack.get(whole["id"], router=1).json() == whole


def test_a_client_that_leaves_in_the_middle_comes_back_at_another_router(stack: Stack) -> None:
    fields = {"input": "Tell me a story.", "max_output_tokens": 100}
    had = stack.begin(8, **fields)
    rest = stack.rest(had[0].data["response"]["id"], had[-1].number, router=1)
    assert text_of(response_of([*had, *rest])) == text_of(stack.respond(**fields))


def test_a_call_its_output_and_the_answer_behind_it(stack: Stack) -> None:
    first = stack.respond(input="What is the weather in Rome?", **FORCED)
    (call,) = first["output"]
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is sunny."}
    gone_on = stack.respond(router=1, input=[result], previous_response_id=first["id"], tools=TOOLS)
    asked = {"role": "user", "content": "What is the weather in Rome?"}
    repeated = stack.respond(input=[asked, call, result], tools=TOOLS)
    named = {"type": "item_reference", "id": call["id"]}
    referred = stack.respond(router=1, input=[asked, named, result], tools=TOOLS)
    assert text_of(gone_on) == text_of(repeated) == text_of(referred) != ""


def test_an_answer_in_a_form_beside_tools(stack: Stack) -> None:
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    at_once = ENDINGS | {str(token_id): 50 for token_id in encode("{")}  # any other text would be thoughts
    response = stack.respond(text=form, logit_bias=at_once)
    jsonschema.validate(json.loads(text_of(response)), SCHEMA)
    (item,) = stack.respond(text=form, tools=TOOLS, logit_bias=at_once)["output"]
    jsonschema.validate(json.loads(item.get("arguments") or item["content"][0]["text"]), SCHEMA)


def test_reasoning_is_returned_sent_back_and_continued(stack: Stack) -> None:
    thinking = {**THOUGHT, "max_output_tokens": 80, "ignore_eos": True}
    first = stack.respond(**thinking, include=["reasoning.encrypted_content"])
    reasoning, message = first["output"]
    assert [item["type"] for item in (reasoning, message)] == ["reasoning", "message"]
    (part,) = reasoning["content"]
    assert part["type"] == "reasoning_text"
    usage = first["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    events = response_events(stack.post({**ASKED, **thinking, "stream": True}).content)
    assert (
        "".join(event.data["delta"] for event in events if event.kind == "response.reasoning_text.delta")
        == part["text"]
    )
    assert text_of(response_of(events)) == text_of(first)
    asked = {"role": "user", "content": ASKED["input"]}
    encrypted = {name: value for name, value in reasoning.items() if name != "content"}
    more = {"role": "user", "content": "And 5?"}
    gone_on = stack.respond(router=1, input="And 5?", previous_response_id=first["id"])
    for given in (reasoning, encrypted):
        assert text_of(stack.respond(input=[asked, given, message, more])) == text_of(gone_on)


def test_a_turn_finds_all_that_was_computed_before_it_in_the_cache(stack: Stack) -> None:
    """Each at the other router, for twenty turns: the model's own tokens are kept, whatever their text would have."""
    previous, computed, shares = None, 0, []
    text_only = {"logit_bias": {"0": -100, "1": -100}}  # the beginnings of texts and of turns are in no answer's text
    for turn in range(20):
        fields = {"temperature": 1.2, "seed": turn, "max_output_tokens": 84, "min_tokens": 84, **text_only}
        words = f"{uuid4().hex} Tell me a story." if previous is None else "And then?"
        response = stack.respond(router=turn % 2, input=words, previous_response_id=previous, **fields)
        usage = response["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        if previous is not None:
            assert cached >= computed // BLOCK * BLOCK, f"turn {turn + 1}: {cached} of {computed} tokens"
            shares.append(cached / (usage["input_tokens"] // BLOCK * BLOCK))
        computed = usage["total_tokens"] - 1  # the last token has no keys and values where the answer was cut
        previous = response["id"]
    assert usage["input_tokens"] > 1000
    assert shares[-1] >= 0.99, f"{shares[-1]:.1%} of the full blocks of the last prompt"


def test_a_response_in_the_background_is_polled_streamed_and_cancelled(stack: Stack) -> None:
    started = stack.respond(background=True)
    assert started["status"] in ("queued", "in_progress")
    streamed = response_of(response_events(stack.get(f"{started['id']}?stream=true", router=1).content))
    assert streamed == stack.get(started["id"]).json()
    assert (streamed["status"], streamed["background"]) == ("completed", True)
    endless = stack.respond(background=True, ignore_eos=True, max_output_tokens=1500)
    url = f"{stack.routers[1].url}{PATH}/{endless['id']}"
    assert httpx.post(f"{url}/cancel", timeout=60).json()["status"] == "cancelled"
    assert httpx.delete(url, timeout=60).json() == {"id": endless["id"], "object": "response", "deleted": True}
    eventually(lambda: stack.get(endless["id"]).status_code == 404)  # Redis may have been slow a moment ago


def test_openais_client_goes_on_at_another_router(stack: Stack) -> None:
    clients = [openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") for router in stack.routers]
    first = clients[0].responses.create(**ASKED)
    with clients[1].responses.stream(**{**ASKED, "input": "And 5?", "previous_response_id": first.id}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text != ""
    assert final.previous_response_id == first.id
    for client in clients:
        client.close()


def test_a_stored_conversation_goes_on_at_another_router(stack: Stack) -> None:
    """As from the response before, with the tokens that were computed for that."""
    clients = [openai.OpenAI(base_url=f"{router.url}/v1", api_key="none") for router in stack.routers]
    made = clients[0].conversations.create()
    first = clients[0].responses.create(**ASKED, conversation=made.id, background=True)
    second = clients[1].responses.create(**{**ASKED, "input": "And 5?"}, conversation=made.id)
    same = clients[0].responses.create(**{**ASKED, "input": "And 5?"}, previous_response_id=first.id)
    assert (second.output_text, second.usage.input_tokens) == (same.output_text, same.usage.input_tokens)
    listed = [[item.id for item in client.conversations.items.list(made.id, order="asc")] for client in clients]
    assert listed[0] == listed[1]
    first = clients[1].responses.retrieve(first.id)
    assert listed[0][1] == first.output[0].id
    clients[1].conversations.items.delete(listed[0][0], conversation_id=made.id)
    clients[0].responses.delete(first.id)
    assert [item.id for item in clients[0].conversations.items.list(made.id, order="asc")] == listed[0][1:]
    clients[1].conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        clients[0].conversations.items.list(made.id)
    for client in clients:
        client.close()


def test_a_conversation_survives_a_router_an_engine_and_redis(stack: Stack) -> None:
    """What dies is killed, in the middle of a stream and between two turns; nothing of an answer is lost or changed."""
    story = {"input": "Tell me a story.", "max_output_tokens": 200, "ignore_eos": True}
    expected = stack.respond(**story)
    more = {**story, "input": "And then?"}
    expected_next = stack.respond(**more, previous_response_id=expected["id"])

    dying = ForkedRouter(stack.folder, [stack.engine.address], stack.folder.parent, "--redis-url", stack.redis.url)
    stack.routers.append(dying.wait_ready())
    had = stack_until_killed(stack, dying, 20, **story)
    stack.routers.pop()
    response_id = had[0].data["response"]["id"]
    stack.redis.restart()
    first = response_of([*had, *stack.rest(response_id, had[-1].number, router=0)])
    assert text_of(first) == text_of(expected)

    going_on = {**more, "previous_response_id": response_id}
    second = response_of(events_over_a_dead_engine(stack, 20, router=1, **going_on))
    assert text_of(second) == text_of(expected_next)


def test_thoughts_and_the_form_behind_them_survive_an_engine(stack: Stack) -> None:
    """The one that goes on has to know how far the grammar is: in a thought, whose end the form follows."""
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    asked = {**THOUGHT, "text": form, "max_output_tokens": 300}
    expected = stack.respond(**asked)
    assert [item["type"] for item in expected["output"]] == ["reasoning", "message"]
    jsonschema.validate(json.loads(text_of(expected)), SCHEMA)
    events = events_over_a_dead_engine(stack, 8, router=0, **asked)
    seen = [event.kind for event in events[:8]]
    assert "response.output_text.delta" not in seen, "it was killed in a thought"
    response = response_of(events)
    assert text_of(response) == text_of(expected)
    assert response["output"][0]["content"] == expected["output"][0]["content"]


def events_over_a_dead_engine(stack: Stack, events: int, *, router: int, **fields: Any) -> list[Event]:
    """The events of a stream whose engine is killed after so many, and replaced."""
    data, killed, body = b"", False, {**ASKED, **fields, "stream": True}
    with httpx.stream("POST", f"{stack.routers[router].url}{PATH}", json=body, timeout=60) as answer:
        for piece in answer.iter_bytes():
            data += piece
            if data.count(b"\n\n") >= events and not killed:
                killed = True
                stack.engine.kill()
                port = int(stack.engine.address.rpartition(":")[2])
                stack.engine = ForkedEngine(stack.folder, stack.folder.parent, *SMALL_POOLS, *FLOAT32, port=port)
    return response_events(data)


def stack_until_killed(stack: Stack, router: Router, events: int, **fields: Any) -> list[Event]:
    """The events of a stream whose router is killed after so many."""
    data = b""
    with httpx.stream("POST", f"{router.url}{PATH}", json={**ASKED, **fields, "stream": True}, timeout=60) as answer:
        try:
            for piece in answer.iter_bytes():
                data += piece
                if data.count(b"\n\n") >= events and router.popen.poll() is None:
                    router.kill()
        except httpx.HTTPError:
            pass
    return response_events(data[: data.rindex(b"\n\n") + 2])
