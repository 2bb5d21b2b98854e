"""The table of rows, the client's own sums, and what the skips say: all that needs no cluster."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.cluster import client, rows
from tests.cluster.client import Client, Seen, order
from tests.cluster.cluster import CONSENT, HOOKS, Hooks, missing

TEXT = {"0": ["ab", "length", 2]}


def test_rows_that_ran_take_their_places_and_the_others_stay() -> None:
    before = {"one": "| one | 1 |", "three": "| three | 3 |", "gone": "| gone | 9 |"}
    lines = rows.merged(before, {"two": "| two | 2 |", "one": "| one | 0 |"}, ["one", "two", "three", "four"])
    assert lines == ["| one | 0 |", "| two | 2 |", "| three | 3 |", "| gone | 9 |"]


def test_a_whole_run_puts_the_rows_into_the_order_of_the_tests() -> None:
    assert rows.merged({"b": "| b |", "a": "| a |"}, {"c": "| c |"}, ["a", "b", "c", "d"]) == [
        "| a |",
        "| b |",
        "| c |",
    ]


def test_the_page_has_a_table_of_rows() -> None:
    lines = rows.rows_of(rows.PAGE.read_text())
    assert lines
    columns = rows.HEAD[0].count("|")
    assert all(line.count("|") == columns for line in lines.values())


def test_a_line_has_the_worst_of_all_clients() -> None:
    row = rows.Row("`kill -9`", {}, "node", took=2.2)
    assert row.line() == "| `kill -9` | 2 s | | | | | | | |"
    row.seen = [Seen(answers=3, pause=0.5, first=2.0, errors={"a": 2}), Seen(answers=4, pause=1.25, lost=["x"])]
    assert row.line() == "| `kill -9` | 2 s | 7 | 1.2 s | 2.0 s | 2 | 1 | 0 | 0 |"


def test_event_ids_have_the_order_of_a_stream() -> None:
    ids = ["0", "1", "2", "10", "10e", "10eu"]
    assert sorted(ids, key=order) == ids


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "KUBECONFIG is not set"),
        ({"KUBECONFIG": "x"}, "is left alone"),
    ],
)
def test_the_skip_says_how_to_get_a_cluster(environment: dict[str, str], why: str) -> None:
    said = missing(environment) or ""
    assert why in said
    assert "k8s/kind" in said
    assert CONSENT in said


def test_hooks_say_what_they_cannot_do(tmp_path: Path) -> None:
    assert HOOKS in (Hooks().missing("cut", "node") or "")
    program = tmp_path / "hooks"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "can cut" ]\n')
    program.chmod(0o755)
    assert Hooks(str(program)).missing("cut", "node") is None
    assert "end node" in (Hooks(str(program)).missing("end", "node") or "")


class Routers:
    """Answers with two tokens, each time as ``script`` has it: events, and ``None`` where the connection breaks."""

    def __init__(self, *script: list[tuple[str, Any] | None]) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, str]] = []
        self.at_last: Callable[[], None] = lambda: None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.headers.get("Last-Event-ID", "")))
        response = web.StreamResponse()
        await response.prepare(request)
        events = self.script.pop(0)
        if not self.script:
            self.at_last()
        for event in events:
            if event is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(f"id: {event[0]}\ndata: {json.dumps(event[1])}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def token(text: str, end: str | None = None) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"text": text, "finish_reason": end}]}


USAGE = ("2eu", {"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 2}})
WHOLE = [("1", token("a")), ("2e", token("b", "length")), USAGE]


async def seen_of(routers: Routers) -> Seen:
    """What a client saw of one answer."""
    app = web.Application()
    app.router.add_post("/v1/completions", routers.answer)
    app.router.add_get("/v1/requests/cmpl-1/events", routers.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    plan = {
        "url": f"http://127.0.0.1:{port}", "key": "key", "model": "m", "workers": 1, "requests": [{}], "known": TEXT,
    }  # fmt: skip
    try:
        async with aiohttp.ClientSession() as http:
            asks = Client(plan, http)
            routers.at_last = asks.ending.set
            await asks.run()
            return asks.seen
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AGAIN", 0.0)


async def test_a_client_reads_on_where_its_answer_broke_off() -> None:
    routers = Routers([WHOLE[0], None], WHOLE[1:])
    seen = await seen_of(routers)
    assert routers.asked == [("POST", ""), ("GET", "1")]
    assert (seen.answers, seen.resumed, sum(seen.errors.values())) == (1, 1, 1)
    assert not seen.lost + seen.repeated + seen.changed


async def test_a_client_notices_what_is_repeated_and_changed() -> None:
    seen = await seen_of(Routers([WHOLE[0], None], WHOLE))
    assert seen.repeated == ["1 after 1"]
    assert len(seen.changed) == 1


async def test_a_client_notices_what_is_lost() -> None:
    error = {"error": {"code": "internal", "resumable": False}}
    seen = await seen_of(Routers([WHOLE[0], ("", error)]))
    assert len(seen.lost) == 1
    assert seen.answers == 0


async def test_an_error_that_passes_is_seen_and_resumed() -> None:
    error = {"error": {"code": "stopping", "resumable": True}}
    seen = await seen_of(Routers([WHOLE[0], ("1", error)], WHOLE[1:]))
    assert seen.errors == {"ClientPayloadError: an error in the stream: stopping": 1}
    assert not seen.lost + seen.changed
