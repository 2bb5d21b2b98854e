"""Streams as clients read them by hand: each way of reading that works with events of ``data: {…}`` and an empty line
works here, however the bytes are cut; and which of them a comment disturbs is written down.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import httpx
import openai
import pytest
from quire_proto.errors import ErrorCode, QuireError

from tests.support.scripted_api import ANSWER, Script, Stage, chat, completion, open_stage
from tests.support.waiting import until

DONE = "[DONE]"
ROUTES = {"chat": ("/v1/chat/completions", chat), "completions": ("/v1/completions", completion)}
ENGINES = ("steady", "slow", "silent")
WITH_IDS = {"stream_options": {"include_event_ids": True, "include_usage": True}}
PLAIN = {"stream_options": {"include_usage": True}}
FAILURE = QuireError(ErrorCode.INTERNAL, "The engine failed.")


# Streams


def script_of(engine: str, gate: asyncio.Event, *, fails: bool) -> Script:
    """What an engine says, that is silent until ``gate`` opens: never, in the middle, or before its first piece."""
    end: Script = (FAILURE,) if fails else ANSWER[2:]
    parts: dict[str, Script] = {
        "steady": (*ANSWER[:2], *end),
        "slow": (*ANSWER[:2], gate, *end),
        "silent": (gate, *ANSWER[:2], *end),
    }
    return parts[engine]


async def record(
    engine: str, route: str = "chat", *, fails: bool = False, keepalive: float = 0.01, ids: bool = False
) -> tuple[bytes, httpx.Headers]:
    """The body of one stream, and its headers. An engine that pauses does so until comments came, where they come."""
    gate, (path, build) = asyncio.Event(), ROUTES[route]
    body = build(stream=True, **(WITH_IDS if ids else PLAIN))
    script = script_of(engine, gate, fails=fails)
    async with (
        open_stage(script, heartbeat=0.01, keepalive=keepalive) as stage,
        httpx.AsyncClient(timeout=60) as client,
    ):
        if engine == "steady" or not keepalive:
            asyncio.get_running_loop().call_later(0.1, gate.set)
        async with client.stream("POST", f"{stage.url}{path}", json=body, timeout=20) as response:
            data = b""
            async for part in response.aiter_raw():
                data += part
                if b"\n:" in b"\n" + data:
                    gate.set()
    return data, response.headers


@cache
def recorded(engine: str, route: str, *, fails: bool, keepalive: float = 0.01, ids: bool = False) -> bytes:
    """See ``record``. A steady engine is never silent for long enough."""
    keepalive = 60 if engine == "steady" else keepalive
    return asyncio.run(record(engine, route, fails=fails, keepalive=keepalive, ids=ids))[0]


def cuts(body: bytes) -> dict[str, list[bytes]]:
    """The same bytes as they may arrive: whole, an event at a time, seven bytes at a time."""
    events = [part + b"\n\n" for part in body.split(b"\n\n")[:-1]]
    return {
        "whole": [body],
        "by events": events,
        "by 7 bytes": [body[start : start + 7] for start in range(0, len(body), 7)],
    }


# Readers: each gives the texts that it would hand to ``json.loads``, and stops at the end mark


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """As HTTP libraries give lines."""
    waiting = b""
    for chunk in chunks:
        *lines, waiting = (waiting + chunk).split(b"\n")
        yield from (line.decode() for line in lines)
    if waiting:
        yield waiting.decode()


def events_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """What stands between empty lines."""
    waiting = ""
    for chunk in chunks:
        *events, waiting = (waiting + chunk.decode()).split("\n\n")
        yield from events


def events_without_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """As ``vllm bench serve``: between empty lines, comments passed over, and the prefix taken off."""
    for event in events_of(chunks):
        if event and not event.startswith(":"):
            yield event.removeprefix("data: ")


def events_with_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """Between empty lines, and only what begins as data."""
    return (event.removeprefix("data: ") for event in events_of(chunks) if event.startswith("data: "))


def any_event_without_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """Between empty lines, whatever it is."""
    return (event.removeprefix("data: ") for event in events_of(chunks) if event)


def first_line_of_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The first line of each event is taken for its data."""
    return (event.split("\n")[0].removeprefix("data: ") for event in events_of(chunks) if event)


def last_line_of_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The last line of each event is taken for its data."""
    return (event.split("\n")[-1].removeprefix("data: ") for event in events_of(chunks) if event)


def lines_with_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """``iter_lines`` and only what begins as data: the most usual way."""
    return (line[6:] for line in lines_of(chunks) if line.startswith("data: "))


def lines_with_bare_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """The same with ``data:`` alone."""
    return (line[5:].strip() for line in lines_of(chunks) if line.startswith("data:"))


def sixth_character_on(chunks: Iterable[bytes]) -> Iterator[str]:
    """Of each line what is behind its first six characters."""
    return (line[6:] for line in lines_of(chunks) if line)


def replaced_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """Of each line everything but the prefix, wherever that is."""
    return (line.replace("data: ", "") for line in lines_of(chunks) if line)


def all_but_comments(chunks: Iterable[bytes]) -> Iterator[str]:
    """Comments are passed over, and each other line is data."""
    return (line.replace("data: ", "", 1) for line in lines_of(chunks) if line and not line.startswith(":"))


def lines_without_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """As older benchmarks of vLLM: a line at a time."""
    for line in lines_of(chunks):
        text = line.strip()
        if text:
            yield text.removeprefix("data: ")


def lines_without_bare_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """As SGLang's benchmark."""
    for line in lines_of(chunks):
        if line.strip():
            yield line.removeprefix("data:").strip()


def parts_behind_prefix(chunks: Iterable[bytes]) -> Iterator[str]:
    """All that arrived, split at the prefix."""
    return (part.strip() for part in b"".join(chunks).decode().split("data: ") if part.strip())


def lines_of_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
    """Each chunk is taken for some whole lines."""
    for chunk in chunks:
        for line in chunk.decode().splitlines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def all_lines_of_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
    """The same, with every line taken for data."""
    for chunk in chunks:
        for line in chunk.decode().splitlines():
            if line:
                yield line.removeprefix("data: ")


def matches(chunks: Iterable[bytes]) -> Iterator[str]:
    """Whatever looks like data."""
    return iter(re.findall(r"^data: (.*)$", b"".join(chunks).decode(), re.MULTILINE))


def fields_before_colon(chunks: Iterable[bytes]) -> Iterator[str]:
    """Each line is a name and a value, of which the name does not matter."""
    return (line.partition(":")[2].strip() for line in lines_of(chunks) if line)


def as_standard(chunks: Iterable[bytes]) -> Iterator[str]:
    """As the standard of server-sent events has it, and httpx-sse: also an id, if one was said, makes an event."""
    data: list[str] = []
    last_id = ""
    seen = False
    for line in lines_of(chunks):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and (seen or last_id):
            yield "\n".join(data)
            data, seen = [], False
        elif name == "data":
            data.append(value)
            seen = True
        elif name == "id":
            last_id, seen = value, True
        elif name in {"event", "retry"}:
            seen = True


def as_go_openai(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines that are no data are collected, and read as one JSON together with an error."""
    collected = ""
    for line in lines_of(chunks):
        text = line.strip()
        if re.match(r'data:\s*{"error":', text):
            yield collected + re.sub(r"^data:\s*", "", text)
            return
        if text.startswith("data:"):
            yield text[5:].strip()
        else:
            collected += text


def as_litellm(chunks: Iterable[bytes]) -> Iterator[str]:
    """A line that is no data is an empty chunk, and one behind the finish reason ends the stream."""
    ended = False
    for line in lines_of(chunks):
        if line.startswith("data:"):
            text = line[5:].strip()
            ended = ended or '"finish_reason":"' in text
            yield text
        elif line and ended:
            return


@dataclass(frozen=True)
class Reader:
    """A way of reading, and what it bears: comments between events, lines of ids and ``retry``, chunks that are cut
    anywhere, and an error somewhere behind a comment.
    """

    texts: Callable[[Iterable[bytes]], Iterator[str]]
    bears_comments: bool = True
    bears_ids: bool = True
    bears_cuts: bool = True
    bears_comments_before_errors: bool = True


READERS = [
    Reader(events_without_prefix, bears_ids=False),
    Reader(events_with_prefix, bears_ids=False),
    Reader(any_event_without_prefix, bears_comments=False, bears_ids=False),
    Reader(first_line_of_events, bears_comments=False, bears_ids=False),
    Reader(last_line_of_events, bears_comments=False),
    Reader(lines_with_prefix),
    Reader(lines_with_bare_prefix),
    Reader(sixth_character_on, bears_comments=False, bears_ids=False),
    Reader(replaced_prefix, bears_comments=False, bears_ids=False),
    Reader(all_but_comments, bears_ids=False),
    Reader(lines_without_prefix, bears_comments=False, bears_ids=False),
    Reader(lines_without_bare_prefix, bears_comments=False, bears_ids=False),
    Reader(parts_behind_prefix, bears_comments=False, bears_ids=False),
    Reader(lines_of_chunks, bears_cuts=False),
    Reader(all_lines_of_chunks, bears_comments=False, bears_ids=False, bears_cuts=False),
    Reader(matches),
    Reader(fields_before_colon, bears_comments=False, bears_ids=False),
    Reader(as_standard),
    Reader(as_go_openai, bears_comments_before_errors=False),
    Reader(as_litellm, bears_ids=False),
]
NAMES = [reader.texts.__name__ for reader in READERS]


def objects(reader: Reader, chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """What a client of this kind has, the end mark left out."""
    found = []
    for text in reader.texts(chunks):
        if text == DONE:
            break
        found.append(json.loads(text))
        assert isinstance(found[-1], dict)
    return found


def reads(reader: Reader, chunks: list[bytes], expected: list[dict[str, Any]]) -> bool:
    try:
        return objects(reader, chunks) == expected
    except (ValueError, AssertionError):
        return False


def json_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream in the shortest form that there is."""
    data = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(each) for each in data if each != DONE.encode()]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


# The streams themselves


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("route", ROUTES)
def test_an_event_is_data_and_an_empty_line_and_nothing_else_comes_but_comments(
    route: str, engine: str, fails: bool
) -> None:
    body = recorded(engine, route, fails=fails)
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == "", "the last event is complete"
    comments = [block for block in blocks if block.startswith(":")]
    data = [block for block in blocks if not block.startswith(":")]
    assert all(re.fullmatch(r": [a-z-]+", each) for each in comments), comments
    assert all(re.fullmatch(r"data: (?:\{.*\}|\[DONE\])", each) for each in data), data
    assert bool(comments) is (engine != "steady")
    assert (data[-1] == f"data: {DONE}") is not fails
    events = json_events(body)
    assert text_of(events) == ("Hello " if fails else "Hello wörld")
    assert ("error" in events[-1]) is fails
    assert fails or events[-1]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_every_kind_of_reader_parses_a_stream_without_comments(reader: Reader, route: str, fails: bool) -> None:
    for engine in ENGINES:
        body = recorded(engine, route, fails=fails, keepalive=0)
        assert b"\n:" not in b"\n" + body, "comments are turned off"
        for cut, chunks in cuts(body).items():
            if reader.bears_cuts or cut != "by 7 bytes":
                assert objects(reader, chunks) == json_events(body), (engine, cut)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_comments_break_the_readers_that_take_every_line_for_data(reader: Reader, route: str) -> None:
    for engine, fails in product(["slow", "silent"], [False, True]):
        body = recorded(engine, route, fails=fails)
        bears = reader.bears_comments and (reader.bears_comments_before_errors or not fails)
        for cut, chunks in cuts(body).items():
            if reader.bears_cuts or cut != "by 7 bytes":
                assert reads(reader, chunks, json_events(body)) is bears, (engine, fails, cut)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("reader", READERS, ids=NAMES)
def test_ids_are_for_readers_that_support_them(reader: Reader, route: str) -> None:
    body = recorded("steady", route, fails=False, ids=True)
    assert reads(reader, [body], json_events(body)) is reader.bears_ids


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("route", ROUTES)
def test_with_ids_a_full_reader_meets_no_event_without_data(route: str, engine: str) -> None:
    body = recorded(engine, route, fails=False, ids=True)
    for chunks in cuts(body).values():
        assert [text for text in as_standard(chunks) if not text] == []
        assert objects(Reader(as_standard), chunks) == json_events(body)


@pytest.mark.parametrize("ids", [False, True], ids=["without ids", "with ids"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
async def test_the_openai_client_reads_every_stream(engine: str, fails: bool, ids: bool) -> None:
    gate = asyncio.Event()
    async with open_stage(script_of(engine, gate, fails=fails), heartbeat=0.01, keepalive=0.01) as stage:
        asyncio.get_running_loop().call_later(0.1, gate.set)
        text, error = await read_with_openai(stage, WITH_IDS if ids else PLAIN)
    assert text == ("Hello " if fails else "Hello wörld")
    assert (error == FAILURE.message) is fails


async def read_with_openai(stage: Stage, fields: dict[str, Any]) -> tuple[str, str]:
    """The text of a chat, and the error that ends it."""
    text = ""
    async with stage.openai() as client:
        question = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny", messages=question, stream=True, extra_body=fields
        )
        try:
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
        except openai.APIError as error:
            return text, error.message
    return text, ""


# What asks for ids, and what does not


async def test_a_stream_has_ids_only_where_they_are_asked_for() -> None:
    path, asked = "/v1/chat/completions", {"stream_options": {"include_event_ids": True}}
    not_asked = {"stream_options": {"include_event_ids": False}}
    async with open_stage() as stage, httpx.AsyncClient(base_url=stage.url, timeout=60) as client:

        async def ids_of(headers: dict[str, str], **fields: Any) -> list[str]:
            answer = await client.post(path, json=chat(stream=True, **fields), headers=headers)
            assert ("retry: 1" in answer.text) is ("id: " in answer.text)
            return re.findall(r"^id: (.*)$", answer.text, re.MULTILINE)

        assert await ids_of({}) == await ids_of({}, **not_asked) == []
        expected = await ids_of({}, **asked)
        assert len(expected) == len(set(expected)) > 4
        key = {"Idempotency-Key": "once"}
        assert await ids_of(key) == await ids_of(key) == expected, "also when it is answered again"
        first = await client.post(path, json=chat(stream=True))
        read_on = await client.get(f"/v1/requests/{json_events(first.content)[0]['id']}/events")
        assert re.findall(r"^id: (.*)$", read_on.text, re.MULTILINE) == expected


async def test_the_events_of_a_background_request_have_ids() -> None:
    async with open_stage() as stage, httpx.AsyncClient(base_url=stage.url, timeout=60) as client:
        begun = await client.post("/v1/completions", json=completion(background=True))
        events = await client.get(f"{begun.headers['location']}/events")
    assert re.match(r"retry: 1\d\d\d\nid: ", events.text)


@pytest.mark.parametrize("ids", [False, True], ids=["without ids", "with ids"])
async def test_only_an_error_of_a_stream_with_ids_has_a_retry_field(ids: bool) -> None:
    error = QuireError(ErrorCode.UNAVAILABLE, "This router is shutting down.")
    async with open_stage(["one", error]) as stage, httpx.AsyncClient(base_url=stage.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=completion(stream=True, **(WITH_IDS if ids else {})))
    assert json_events(answer.content)[-1]["error"]["resumable"] is True
    assert answer.text.count("retry: ") == 2 * ids


async def test_headers_forbid_proxies_to_cache_or_buffer_a_stream() -> None:
    for engine in ENGINES:
        for ids in (False, True):
            _, headers = await record(engine, ids=ids)
            assert headers["content-type"].startswith("text/event-stream")
            assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


# A place to read on at is for the route that reads on


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("key", [None, "once"], ids=["without a key", "with a key"])
async def test_a_new_request_with_a_last_event_id_is_refused_with_the_address_to_read_on_at(
    route: str, key: str | None
) -> None:
    path, build = ROUTES[route]
    headers = {"authorization": "Bearer the-key-of-a-client"} | ({"idempotency-key": key} if key else {})
    async with (
        open_stage(keys=["the-key-of-a-client"]) as stage,
        httpx.AsyncClient(base_url=stage.url, timeout=60) as client,
    ):
        first = await client.post(path, json=build(stream=True), headers=headers)
        again = await client.post(path, json=build(stream=True), headers={**headers, "Last-Event-ID": "2"})
        empty = await client.post(path, json=build(stream=True), headers={**headers, "Last-Event-ID": ""})
        assert len(stage.runner.generations) == (1 if key else 2), "nothing is run for it"
        address = re.findall(r"/v1/requests/\S+/events", again.json()["error"]["message"])[0]
        address_of_first = address.replace("{id}", first.headers["x-request-id"])
        rest = await client.get(address_of_first, headers={**headers, "last-event-id": "2"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "last-event-id")
    assert ("{id}" in address) is (key is None), "with a key the address is known"
    assert text_of(json_events(rest.content)) == "wörld"
    assert (first.status_code, empty.status_code) == (200, 200)


# When comments come


async def test_comments_of_a_stream_without_ids_have_an_interval_of_their_own() -> None:
    gate, times = asyncio.Event(), list[float]()
    loop = asyncio.get_running_loop()
    async with (
        open_stage((gate, *ANSWER), heartbeat=0.02, keepalive=0.2) as stage,
        httpx.AsyncClient(base_url=stage.url, timeout=60) as client,
    ):
        began = loop.time()
        async with client.stream("POST", "/v1/completions", json=completion(stream=True)) as response:
            async for part in response.aiter_raw():
                times += [loop.time()] * part.count(b": ") * (not gate.is_set())
                if len(times) == 3:
                    gate.set()
    assert all(time - began >= 0.2 * number for number, time in enumerate(times, 1))


async def test_a_stream_whose_comments_are_turned_off_begins_with_its_first_event() -> None:
    gate = asyncio.Event()
    async with (
        open_stage((gate, FAILURE), heartbeat=0.01, keepalive=0) as stage,
        httpx.AsyncClient(timeout=60) as client,
    ):
        asking = asyncio.create_task(client.post(f"{stage.url}/v1/completions", json=completion(stream=True)))
        await until(stage.runner.started.is_set)
        await asyncio.sleep(0.1)
        gate.set()
        answer = await asking
    assert answer.status_code == 500, "nothing was sent before, so the error has its own status"
