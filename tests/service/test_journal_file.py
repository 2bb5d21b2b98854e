"""A router that keeps its journal in a file is killed, alone or with its engine, and started again: streams, background
requests and keys go on as if nothing had been.
"""

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import pytest
from quire_router.journal.sqlite.usage_table import read_usage_file

from tests.service.conftest import DEMO, FLOAT32, MODEL, ROOT, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.ports import free_port
from tests.support.processes import Router, at_rest, eventually

PROMPT = "Once upon a time"
STREAMS = {
    "greedy": {"max_tokens": 400, "temperature": 0, "ignore_eos": True},
    "sampled": {"max_tokens": 400, "temperature": 1.2, "seed": 11, "ignore_eos": True},
}
KILLS = 3  # in each of the two streams
[CLIENT] = re.findall(r"^```python\n(import json.*?)^print\(", (ROOT / "docs/resuming.md").read_text(), re.M | re.S)


@dataclass
class Machine:
    """One engine and one router with one file, which can be killed and started again where they were."""

    folder: Path
    ports: tuple[int, int, int]
    engine: ForkedEngine
    router: Router
    lock: Lock

    @property
    def url(self) -> str:
        return self.router.url

    def restart(self, *, engine: bool) -> None:
        """Kills the router, and maybe the engine, and starts what was killed."""
        with self.lock:
            self.router.kill()
            if engine:
                self.engine.kill()
                self.engine = started_engine(self.folder, self.engine.port)
            self.router = started_router(self.folder, self.ports, self.engine)

    def ask(self, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        body = {"model": MODEL, "prompt": PROMPT, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)

    def undisturbed(self, kind: str) -> str:
        return self.ask(**STREAMS[kind]).json()["choices"][0]["text"]


def started_engine(folder: Path, port: int = 0) -> ForkedEngine:
    return ForkedEngine(DEMO, folder, *SMALL_POOLS, *FLOAT32, port=port)


def started_router(folder: Path, ports: tuple[int, int, int], engine: ForkedEngine) -> Router:
    return ForkedRouter(DEMO, [engine.address], folder, "--journal-file", str(folder / "journal"), ports=ports)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder, ports = tmp_path_factory.mktemp("machine"), (free_port(), free_port(), free_port())
    engine = started_engine(folder)
    machine = Machine(folder, ports, engine, started_router(folder, ports, engine), Lock())
    try:
        machine.engine.wait_ready()
        machine.router.wait_ready()
        yield machine
    finally:
        codes = machine.router.stop(), machine.engine.stop()
    assert codes == (0, 0), (machine.router.text, machine.engine.text)


def documented_client(url: str, on_event: Callable[[int], None]) -> Callable[..., str]:
    """``read`` of docs/resuming.md, at this router; ``on_event`` is called with the number of each event of an answer
    before the client gets it.
    """
    names: dict[str, Any] = {}
    exec(CLIENT.replace("http://127.0.0.1:8000", url), names)
    events, count = names["events"], 0

    def watched(response: httpx.Response) -> Iterator[tuple[str, str]]:
        nonlocal count
        for event in events(response):
            on_event(count)
            count += 1
            yield event

    names["events"] = watched
    return names["read"]


def test_the_documented_client_gets_every_token_once_however_often_the_router_is_killed(machine: Machine) -> None:
    expected = {kind: machine.undisturbed(kind) for kind in STREAMS}
    killed = []

    def read(kind: str) -> str:
        moments = {0}
        while len(moments) < KILLS:  # a stream that is resumed may have fewer events, as each may have more tokens
            moments.add(max(moments) + draw.randint(1, 60))
        last = max(moments)

        def kill(event: int) -> None:
            if event in moments:
                machine.restart(engine=event == last)
                killed.append((kind, event))

        return documented_client(machine.url, kill)(PROMPT, **STREAMS[kind])

    draw = random.Random(7)
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        texts = dict(zip(STREAMS, pool.map(read, STREAMS), strict=True))
    assert texts == expected
    assert len(killed) == KILLS * len(STREAMS)


def test_background_requests_and_keys_outlive_the_router_and_its_engine(machine: Machine) -> None:
    machine.engine.wait_ready()
    machine.router.wait_ready()
    expected, key = machine.undisturbed("sampled"), {"Idempotency-Key": "once"}
    once = machine.ask(**STREAMS["sampled"], headers=key).json()
    at_rest(lambda: usage_of(machine))  # its end is written a moment after it was sent
    started = machine.ask(**STREAMS["sampled"], background=True).raise_for_status().headers["location"]
    machine.restart(engine=True)
    machine.engine.wait_ready()
    machine.router.wait_ready()

    def request() -> dict[str, Any]:
        return httpx.get(f"{machine.url}{started}", timeout=60).raise_for_status().json()

    eventually(lambda: request()["status"] == "completed", timeout=60)
    assert request()["response"]["choices"][0]["text"] == expected
    before = machine.engine.metric("quire_engine_generation_tokens_total")
    again = machine.ask(**STREAMS["sampled"], headers=key)
    assert again.headers["x-quire-idempotent-replay"] == "true"
    assert again.json() == once
    other = machine.ask(**STREAMS["greedy"], headers=key)
    assert other.status_code == 409
    assert machine.engine.metric("quire_engine_generation_tokens_total") == before
    assert httpx.delete(f"{machine.url}{started}", timeout=60).json()["deleted"]
    machine.restart(engine=False)
    machine.router.wait_ready()
    assert httpx.get(f"{machine.url}{started}", timeout=60).status_code == 404


def test_a_second_router_on_the_file_is_refused_in_one_sentence(machine: Machine) -> None:
    second = started_router(machine.folder, (free_port(), free_port(), free_port()), machine.engine)
    assert second.wait() == 1
    sentence = f"error: the journal {machine.folder / 'journal'} is in use by another router (process "
    assert second.text.splitlines()[-1].startswith(sentence)
    second.stop()


def test_what_a_stream_used_is_counted_once_although_its_router_was_killed_within_it_and_at_its_end(
    machine: Machine,
) -> None:
    machine.engine.wait_ready()
    machine.router.wait_ready()
    before = at_rest(lambda: usage_of(machine))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_event_ids": True, "include_usage": True}
    lines: list[str] = []
    with httpx.stream("POST", f"{machine.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 60:
                break
    for _ in range(2):  # the second time as soon as the last event has come, so its end may not be written
        machine.restart(engine=False)
        machine.router.wait_ready()
        lines += resumed(machine, lines)
    usage = json.loads([line for line in lines if '"usage":{' in line][-1].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == 60
    expected = (before[0] + 1, before[1] + usage["prompt_tokens"], before[2] + 60)
    eventually(lambda: usage_of(machine) == expected)
    start = int(time.time()) // 86_400 * 86_400
    page = (
        httpx.get(f"{machine.url}/v1/usage", params={"start_time": start - 86_400}, timeout=60)
        .raise_for_status()
        .json()
    )
    days = [result for bucket in page["data"] for result in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "output_tokens")
    assert tuple(sum(day[name] for day in days) for name in names) == expected
    command = [sys.executable, "-m", "quire_router.main", "usage", "--journal-file", str(machine.folder / "journal")]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [dict(zip(table[0].split(","), line.split(","), strict=True)) for line in table[1:]]
    assert tuple(sum(int(row[name]) for row in rows) for name in COLUMNS) == expected


def resumed(machine: Machine, lines: list[str]) -> list[str]:
    """The lines of the rest of a stream."""
    request_id = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))["id"]
    last = [line for line in lines if line.startswith("id: ")][-1].removeprefix("id: ")
    headers = {"last-event-id": last}
    with httpx.stream("GET", f"{machine.url}/v1/requests/{request_id}/events", headers=headers, timeout=60) as response:
        return list(response.raise_for_status().iter_lines())


COLUMNS = ("requests", "prompt_tokens", "completion_tokens")


def usage_of(machine: Machine) -> tuple[int, ...]:
    """Requests, prompt tokens and output tokens of all."""
    rows = read_usage_file(machine.folder / "journal", 0, 1e11, None)
    return tuple(sum(getattr(row, name) for row in rows) for name in COLUMNS)
