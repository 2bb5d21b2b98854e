"""``/v1/responses`` over HTTP: responses are streamed, read again, resumed, gone on from, cancelled and deleted."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.api.schemas.response_state import ResponseState

from tests.support.response_streams import response_events, response_of
from tests.support.scripted_api import MODEL, TOKENIZER, Limits, ask, chat, open_stage, script_of
from tests.support.tool_models import THINKING_TEMPLATE

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
KEYS = ["k" * 16, "l" * 16]
ONCE = {"idempotency-key": "once"}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>hm</think>so {CALL} then"
TOOLS = [{"type": "function", "name": "get", "parameters": {"type": "object"}}]
ASKED: dict[str, Any] = {"model": MODEL, "input": "hello", "tools": TOOLS}


@asynccontextmanager
async def stage_with(output: str = OUTPUT, **more: Any):
    async with open_stage(script_of(output), template=THINKING_TEMPLATE, **more) as stage:
        stage.fleet.model_limits = Limits(4096)
        yield stage


def prompt_of(stage, number: int = -1) -> str:
    return TOKENIZER.decode(stage.runner.generations[number].prompt_token_ids)


# Answers


async def test_a_response_is_the_same_whole_streamed_and_read_again():
    async with stage_with() as stage:
        whole = await ask(stage.port, "POST", PATH, ASKED)
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
        events = response_events(stream.body)
        streamed = response_of(events)
        read = await ask(stage.port, "GET", f"{PATH}/{streamed['id']}")
        again = await ask(stage.port, "GET", f"{PATH}/{streamed['id']}?stream=true")
        stored = await ask(stage.port, "GET", f"/v1/requests/{streamed['id']}")
        unseen = await ask(stage.port, "GET", f"/v1/requests/{streamed['id']}/events")
    assert [item["type"] for item in whole.json["output"]] == ["reasoning", "message", "function_call", "message"]
    assert [event.event_id for event in events] == [None] * len(events)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert read.json == stored.json["response"] == response_of(response_events(again.body)) == streamed
    assert response_of(response_events(unseen.body)) == streamed
    for field in ("status", "model", "usage", "tools", "tool_choice", "text"):
        assert whole.json[field] == streamed[field]
    assert streamed["id"] == f"resp_{stream.headers['x-request-id']}"


async def test_a_stream_resumes_after_any_number():
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE)
        events = response_events(stream.body)
        response_id = response_of(events)["id"]
        for count, event in enumerate(events, 1):
            path = f"{PATH}/{response_id}?stream=true&starting_after={event.number}"
            assert response_events((await ask(stage.port, "GET", path)).body) == events[count:]
            header = {"last-event-id": event.event_id}
            for path in (f"{PATH}/{response_id}?stream=true", f"/v1/requests/{response_id}/events"):
                assert response_events((await ask(stage.port, "GET", path, headers=header)).body) == events[count:]


@pytest.mark.parametrize("after", ["x", "-1", "1_1", "1e"])
async def test_a_number_that_is_none_is_refused(after):
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
        request_id = stream.headers["x-request-id"]
        answer = await ask(stage.port, "GET", f"{PATH}/resp_{request_id}?stream=true&starting_after={after}")
        other = await ask(stage.port, "GET", f"/v1/requests/{request_id}/events?after={after}")
    assert (answer.status, answer.error["param"]) == (400, "starting_after")
    assert (other.status, other.error["param"]) == (400, "after")


async def test_a_response_repeats_its_request():
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 30,
        "tool_choice": {"type": "function", "name": "get"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "user": "me",
    }
    async with stage_with(CALL) as stage:
        response = (await ask(stage.port, "POST", PATH, {**ASKED, **fields})).json
        later = (await ask(stage.port, "GET", f"{PATH}/{response['id']}")).json
        minimal = (await ask(stage.port, "POST", PATH, {"model": MODEL, "input": "hi"})).json
        prompt = prompt_of(stage, 0)
    assert later == response
    for name, value in fields.items():
        assert response[name] == value
    assert prompt.index("Be brief.") < prompt.index("hello")
    for name in ("instructions", "temperature", "top_p", "max_output_tokens", "previous_response_id", "user"):
        assert minimal[name] is None
    assert (minimal["tools"], minimal["tool_choice"], minimal["parallel_tool_calls"]) == ([], "auto", True)
    assert (minimal["metadata"], minimal["store"], minimal["background"]) == ({}, True, False)


async def test_openais_client_reads_whole_streamed_and_stored_responses():
    async with stage_with() as stage:
        client = stage.openai()
        whole = await client.responses.create(**ASKED)
        async with client.responses.stream(**ASKED) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        stored = await client.responses.retrieve(whole.id)
        rest = [event async for event in await client.responses.retrieve(whole.id, stream=True, starting_after=5)]
        items = [item async for item in client.responses.input_items.list(whole.id, order="asc")]
        counted = await client.responses.input_tokens.count(**ASKED)
        await client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(whole.id)
    assert whole.output_text == final.output_text == stored.output_text == "so then"
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "message"]
    assert events[-1].type == "response.completed"
    assert min(event.sequence_number for event in rest) > 5
    assert [item.type for item in items] == ["message"]
    assert counted.input_tokens == whole.usage.input_tokens


# Conversations


async def test_a_conversation_goes_on_from_its_response():
    async with stage_with() as stage:
        first = (await ask(stage.port, "POST", PATH, {**ASKED, "instructions": "Be brief."})).json
        call = first["output"][2]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
        more = {**ASKED, "input": [result], "previous_response_id": first["id"]}
        second = (await ask(stage.port, "POST", PATH, more)).json
        begun, gone_on = stage.runner.generations
        given_back = [{"role": "user", "content": "hello"}, *first["output"], result]
        third = (await ask(stage.port, "POST", PATH, {**ASKED, "input": given_back})).json
        alike = stage.runner.generations[-1]
        listed = (await ask(stage.port, "GET", f"{PATH}/{second['id']}/input_items?order=asc")).json
    assert second["previous_response_id"] == first["id"]
    assert third["previous_response_id"] is None
    assert "Be brief." in TOKENIZER.decode(begun.prompt_token_ids)
    assert "Be brief." not in TOKENIZER.decode(gone_on.prompt_token_ids), "instructions are of one request"
    assert TOKENIZER.decode(gone_on.prompt_token_ids) == TOKENIZER.decode(alike.prompt_token_ids)
    assert [item["type"] for item in listed["data"]] == [
        "message", "reasoning", "message", "function_call", "message", "function_call_output",
    ]  # fmt: skip
    for item, given in zip(listed["data"][1:5], first["output"], strict=True):
        for name in ("id", "type", "call_id", "name", "arguments"):
            assert item.get(name) == given.get(name)
        assert [part["text"] for part in item.get("content", [])] == [part["text"] for part in given.get("content", [])]


async def test_tokens_that_the_model_chose_are_kept_where_their_text_is():
    """The script answers letter by letter, as the tokenizer would not."""
    async with open_stage(["H", "e", "l", "l", "o", FinishReason.STOP], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        first = (await ask(stage.port, "POST", PATH, {"model": MODEL, "input": "hello"})).json
        run = stage.runner.runs[first["id"].removeprefix("resp_")]
        letters = [*b"Hello"]
        for delta, letter in zip(run.deltas, letters, strict=False):
            delta.token_ids[:] = TOKENIZER.encode_plain(chr(letter))
        more = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
        counted = await ask(stage.port, "POST", f"{PATH}/input_tokens", more)
        await ask(stage.port, "POST", PATH, more)
        begun, gone_on = stage.runner.generations
    had = [*begun.prompt_token_ids, *(token for letter in letters for token in TOKENIZER.encode_plain(chr(letter)))]
    assert [*gone_on.prompt_token_ids[: len(had)]] == had
    assert counted.json == {"object": "response.input_tokens", "input_tokens": len(gone_on.prompt_token_ids)}


async def test_items_may_be_named_instead_of_repeated():
    async with stage_with() as stage:
        first = (await ask(stage.port, "POST", PATH, ASKED)).json
        names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
        asked = [{"role": "user", "content": "hello"}, *names, result]
        second = (await ask(stage.port, "POST", PATH, {**ASKED, "input": asked})).json
        more = [*asked, *({"type": "item_reference", "id": item["id"]} for item in second["output"][:1])]
        third = await ask(stage.port, "POST", PATH, {**ASKED, "input": [*more, {"role": "user", "content": "and?"}]})
        repeated = [{"role": "user", "content": "hello"}, *first["output"], result]
        await ask(stage.port, "POST", PATH, {**ASKED, "input": repeated})
        prompts = [prompt_of(stage, number) for number in range(4)]
        unknown = {"type": "item_reference", "id": "msg_nothing_3"}
        missing = await ask(stage.port, "POST", PATH, {**ASKED, "input": [*asked, unknown]})
    assert third.status == 200
    assert prompts[1] == prompts[3]
    assert (missing.status, missing.error["code"], missing.error["param"]) == (404, "item_not_found", "input[6].id")


@pytest.mark.parametrize(
    "previous", ["resp_nothing", "nothing", "x" * 150, "resp_%", "the chat", "not stored", "deleted"]
)
async def test_a_response_that_is_not_stored_cannot_be_gone_on_from(previous):
    async with stage_with() as stage:
        fields = {"store": False} if previous == "not stored" else {}
        response = (await ask(stage.port, "POST", PATH, {**ASKED, **fields})).json
        if previous in ("not stored", "deleted"):
            await ask(stage.port, "DELETE", f"{PATH}/{response['id']}") if previous == "deleted" else None
            previous = response["id"]
        elif previous == "the chat":
            previous = (await ask(stage.port, "POST", "/v1/chat/completions", chat())).json["id"].partition("-")[2]
        answer = await ask(stage.port, "POST", PATH, {**ASKED, "previous_response_id": previous})
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")
    assert answer.error["param"] == "previous_response_id"
    assert answer.error["message"] == f"Previous response with id {previous[:128]!r} not found."


async def test_responses_of_other_tenants_are_not_there():
    mine, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
    async with stage_with(keys=KEYS) as stage:
        response = (await ask(stage.port, "POST", PATH, ASKED, mine)).json
        path = f"{PATH}/{response['id']}"
        unseen = [
            await ask(stage.port, method, f"{path}{more}", headers=other)
            for method, more in (
                ("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"),
            )
        ]  # fmt: skip
        unknown = await ask(stage.port, "GET", f"{PATH}/resp_unknown", headers=other)
        gone_on = await ask(stage.port, "POST", PATH, {**ASKED, "previous_response_id": response["id"]}, other)
        named = {"type": "item_reference", "id": response["output"][1]["id"]}
        referenced = await ask(stage.port, "POST", PATH, {**ASKED, "input": [named]}, other)
        assert (await ask(stage.port, "GET", path, headers=mine)).json == response
    assert {answer.status for answer in unseen} == {unknown.status} == {referenced.status} == {404}
    assert (gone_on.status, gone_on.error["code"]) == (400, "previous_response_not_found")
    assert unknown.error["message"] == "Response with id 'resp_unknown' not found."


async def test_a_response_that_failed_cannot_be_gone_on_from():
    async with open_stage(["one", QuireError(ErrorCode.DEADLINE, "Too long.")], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
        response_id = f"resp_{stream.headers['x-request-id']}"
        read = await ask(stage.port, "GET", f"{PATH}/{response_id}")
        answer = await ask(stage.port, "POST", PATH, {**ASKED, "previous_response_id": response_id})
    kinds = [event.kind for event in response_events(stream.body)]
    assert kinds[-2:] == ["error", "response.failed"]
    assert (read.json["status"], read.json["error"]["message"]) == ("failed", "Too long.")
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")


async def test_a_response_that_runs_is_gone_on_from_once_it_has_ended():
    release = asyncio.Event()
    async with open_stage(["one", release, "two", FinishReason.STOP], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        begun = asyncio.create_task(ask(stage.port, "POST", PATH, {"model": MODEL, "input": "hi"}))
        await stage.runner.started.wait()
        (generation,) = stage.runner.generations
        previous = {"previous_response_id": f"resp_{generation.request_id}"}
        more = asyncio.create_task(ask(stage.port, "POST", PATH, {"model": MODEL, "input": "and?", **previous}))
        await asyncio.sleep(0.05)
        assert len(stage.runner.generations) == 1
        release.set()
        assert (await more).status == (await begun).status == 200
        assert "onetwo" in prompt_of(stage)


async def test_a_response_that_does_not_end_cannot_be_gone_on_from(monkeypatch):
    monkeypatch.setattr("quire_router.api.rest.response_history._WAIT", 0.05)

    async with open_stage(["one", asyncio.Event()], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        resume = stage.runner.resume

        def until_deadline(record, cursor, deadline=None):
            answer = resume(record, cursor, deadline)
            return _expiring(answer) if deadline is not None else answer

        stage.runner.resume = until_deadline
        begun = asyncio.create_task(ask(stage.port, "POST", PATH, {**ASKED, "stream": True}))
        await stage.runner.started.wait()
        (generation,) = stage.runner.generations
        previous = {"previous_response_id": f"resp_{generation.request_id}"}
        answer = await ask(stage.port, "POST", PATH, {**ASKED, **previous})
        begun.cancel()
    assert (answer.status, answer.error["code"]) == (400, "previous_response_in_progress")


async def _expiring(answer):
    yield await anext(answer)
    await answer.aclose()
    raise QuireError(ErrorCode.DEADLINE, "The time to read this answer was over before it had ended.")


async def test_without_store_nothing_is_kept_of_the_conversation():
    async with stage_with() as stage:
        response = (await ask(stage.port, "POST", PATH, {**ASKED, "store": False})).json
        (generation,) = stage.runner.generations
        items = await ask(stage.port, "GET", f"{PATH}/{response['id']}/input_items")
    assert (generation.retention, response["store"]) == (0, False)
    assert ResponseState.read(generation.conversation).items is None
    assert items.status == 404


@pytest.mark.parametrize(("stored", "expected"), [(True, 77), (False, 0)])
async def test_responses_have_a_retention_of_their_own(stored, expected):
    async with stage_with(responses_retention=77) as stage:
        await ask(stage.port, "POST", PATH, {**ASKED, "store": stored})
        await ask(stage.port, "POST", "/v1/chat/completions", chat())
        assert [generation.retention for generation in stage.runner.generations] == [expected, None]


async def test_input_items_come_in_pages():
    asked = [{"role": "user", "content": str(number)} for number in range(5)]
    async with stage_with() as stage:
        response = (await ask(stage.port, "POST", PATH, {**ASKED, "input": asked})).json
        path = f"{PATH}/{response['id']}/input_items"
        first = (await ask(stage.port, "GET", f"{path}?limit=2")).json
        second = (await ask(stage.port, "GET", f"{path}?limit=9&after={first['last_id']}")).json
        refused = [
            await ask(stage.port, "GET", f"{path}?{query}") for query in ("limit=0", "limit=101", "limit=x", "order=x")
        ]
        unknown = await ask(stage.port, "GET", f"{path}?after=nothing")
    texts = [item["content"][0]["text"] for page in (first, second) for item in page["data"]]
    assert texts == ["4", "3", "2", "1", "0"]
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert {answer.status for answer in refused} == {400}
    assert unknown.status == 404


# In the background


async def test_input_items_have_ids_of_their_own_where_the_clients_repeat():
    repeated = [{"role": "user", "content": text, "id": "msg_1"} for text in ("a", "b")]
    async with stage_with() as stage:
        first = (await ask(stage.port, "POST", PATH, {**ASKED, "input": repeated})).json
        goes_on = {**ASKED, "input": repeated[:1], "previous_response_id": first["id"]}
        second = (await ask(stage.port, "POST", PATH, goes_on)).json
        items = (await ask(stage.port, "GET", f"{PATH}/{second['id']}/input_items?order=asc")).json["data"]
        after = f"{PATH}/{second['id']}/input_items?order=asc&after={items[1]['id']}"
        rest = (await ask(stage.port, "GET", after)).json["data"]
    assert [item["id"] for item in items].count("msg_1") == 1
    assert len({item["id"] for item in items}) == len(items)
    assert rest == items[2:]
    assert [items[0]["content"][0]["text"], items[1]["content"][0]["text"]] == ["a", "b"]


async def test_a_conversation_that_is_too_long_loses_its_earliest_messages_where_it_may():
    turns = [
        {"role": role, "content": f"no. {number}; {'word ' * 30}"}
        for number in range(40)
        for role in ("user", "assistant")
    ]
    asked = {**ASKED, "instructions": "Be brief.", "input": [*turns, {"role": "user", "content": "The last."}]}
    async with stage_with() as stage:
        refused = await ask(stage.port, "POST", PATH, asked)
        taken = await ask(stage.port, "POST", PATH, {**asked, "truncation": "auto"})
        prompt = prompt_of(stage)
        goes_on = {**ASKED, "truncation": "auto", "previous_response_id": taken.json["id"]}
        more = await ask(stage.port, "POST", PATH, goes_on)
        items = (await ask(stage.port, "GET", f"{PATH}/{taken.json['id']}/input_items?limit=100")).json["data"]
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert (taken.status, taken.json["truncation"], more.status) == (200, "auto", 200)
    assert "Be brief." in prompt
    assert "The last." in prompt
    assert prompt.count("no. 39;") == 2
    assert "no. 0;" not in prompt
    assert taken.json["usage"]["input_tokens"] <= 4096 - 4096 // 4
    assert len(items) == 81


async def test_a_response_in_the_background_is_queued_then_read():
    release = asyncio.Event()
    async with open_stage([release, "one", FinishReason.STOP], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        started = await ask(stage.port, "POST", PATH, {**ASKED, "background": True})
        path = f"{PATH}/{started.json['id']}"
        assert (started.status, started.json["status"], started.json["output"]) == (200, "queued", [])
        reading = asyncio.create_task(ask(stage.port, "GET", f"{path}?stream=true"))
        await asyncio.sleep(0.01)
        release.set()
        streamed = response_of(response_events((await reading).body))
        await asyncio.gather(*stage.runner.background)
        assert (await ask(stage.port, "GET", path)).json == streamed
    assert (streamed["status"], streamed["background"]) == ("completed", True)


async def test_a_response_in_the_background_may_be_streamed_from_its_beginning():
    async with stage_with() as stage:
        stream = await ask(stage.port, "POST", PATH, {**ASKED, "background": True, "stream": True})
        response = response_of(response_events(stream.body))
        assert (await ask(stage.port, "GET", f"{PATH}/{response['id']}")).json == response
    assert response["status"] == "completed"


async def test_a_running_response_is_shown_and_cancelled():
    async with open_stage(["one", asyncio.Event()], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        started = (await ask(stage.port, "POST", PATH, {**ASKED, "background": True})).json
        path = f"{PATH}/{started['id']}"
        run = stage.runner.runs[started["id"].removeprefix("resp_")]
        async with run.changed:
            await run.changed.wait_for(lambda: run.deltas)
        shown = (await ask(stage.port, "GET", path)).json
        assert (shown["status"], shown["output"]) == ("in_progress", [])
        cancelled = (await ask(stage.port, "POST", f"{path}/cancel")).json
        again = (await ask(stage.port, "POST", f"{path}/cancel")).json
        stream = response_of(response_events((await ask(stage.port, "GET", f"{path}?stream=true")).body))
    assert cancelled["status"] == "cancelled"
    assert cancelled["output"][0]["content"][0]["text"] == "one"
    assert cancelled == again == stream


async def test_a_repeated_key_has_the_first_response():
    async with stage_with() as stage:
        first = await ask(stage.port, "POST", PATH, ASKED, ONCE)
        again = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True}, ONCE)
        changed = await ask(stage.port, "POST", PATH, {**ASKED, "input": "other"}, ONCE)
        assert len(stage.runner.generations) == 1
    assert response_of(response_events(again.body)) == first.json
    assert again.headers["x-quire-idempotent-replay"] == "true"
    assert (changed.status, changed.error["type"]) == (409, "conflict_error")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_a_key_that_came_by_another_route_is_a_conflict(more):
    """What is stored of a chat is no response, and could not be read as one."""
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 20, **more}
    same = chat(max_tokens=20, **more)
    async with stage_with() as stage:
        for first, second in (((PATH, asked), (CHAT, same)), ((CHAT, same), (PATH, asked))):
            key = {"idempotency-key": first[0]}
            await ask(stage.port, "POST", *first, key)
            refused = await ask(stage.port, "POST", *second, key)
            assert (refused.status, refused.error["type"]) == (409, "conflict_error")
        assert len(stage.runner.generations) == 2


@pytest.mark.parametrize("changed", [{"metadata": {"a": "c"}}, {"store": False}, {"user": "u"}], ids=str)
async def test_what_a_response_repeats_is_a_part_of_the_request_of_a_key(changed):
    asked = {**ASKED, "metadata": {"a": "b"}}
    async with stage_with() as stage:
        await ask(stage.port, "POST", PATH, asked, ONCE)
        refused = await ask(stage.port, "POST", PATH, {**asked, **changed}, ONCE)
    assert (refused.status, refused.headers["x-should-retry"]) == (409, "false")


# Errors


async def test_a_response_that_failed_has_its_error_and_what_was_written():
    error = QuireError(ErrorCode.INTERNAL, "It broke.")
    async with open_stage(["one", error], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        streamed = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
        *_, last = response_events(streamed.body)
        read = await ask(stage.port, "GET", f"{PATH}/{last.data['response']['id']}")
    assert (read.status, read.json["status"]) == (200, "failed")
    assert read.json["error"] == {"code": "server_error", "message": "It broke.", "param": None}
    (item,) = read.json["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "one")
    assert (last.kind, last.data["response"]) == ("response.failed", read.json)


async def test_a_stream_that_can_be_resumed_says_so():
    error = QuireError(ErrorCode.UNAVAILABLE, "This router is shutting down.", reason="stopping")
    async with open_stage(["one", error], template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        answer = await ask(stage.port, "POST", PATH, {**ASKED, "stream": True})
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in await stage.openai().responses.create(**ASKED, stream=True):
                pass
    *_, last = response_events(answer.body)
    assert (last.kind, last.data["code"], last.data["error"]["resumable"]) == ("error", "stopping", True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"background": True, "store": False}, "store"),
        ({"input": "x" * 9000}, "input"),
    ],
)
async def test_what_is_wrong_is_named_in_the_words_of_the_api(fields, param):
    async with stage_with() as stage:
        answer = await ask(stage.port, "POST", PATH, {**ASKED, **fields})
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert "messages" not in str(answer.error["message"]) or answer.error["code"] == "context_length_exceeded"


async def test_ignored_parameters_are_named_in_a_header():
    async with stage_with() as stage:
        fields = {"service_tier": "flex", "text": {"verbosity": "low"}, "other": 1}
        answer = await ask(stage.port, "POST", PATH, {**ASKED, **fields})
        neutral = {"truncation": "disabled", "service_tier": "auto", "text": {"verbosity": "medium"}}
        silent = await ask(stage.port, "POST", PATH, {**ASKED, **neutral})
    named = answer.headers["x-quire-ignored-parameters"].split(", ")
    assert sorted(named) == ["other", "service_tier", "text.verbosity"]
    assert "x-quire-ignored-parameters" not in silent.headers


async def test_a_damaged_conversation_is_an_internal_error():
    async with stage_with() as stage:
        response = (await ask(stage.port, "POST", PATH, ASKED)).json
        run = stage.runner.runs[response["id"].removeprefix("resp_")]
        fields = run.generation.conversation.partition("\n")[0]
        for damaged in (fields + "\nx", fields + '\n[{"type": 3}]', fields + "\n3"):
            object.__setattr__(run.generation, "conversation", damaged)
            answer = await ask(stage.port, "POST", PATH, {**ASKED, "previous_response_id": response["id"]})
            assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert json.loads(json.dumps(response)) == response
