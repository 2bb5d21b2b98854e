"""A batch of a real stack whose router is killed, and its Redis restarted, in the middle: each line is answered once,
and every fifth is compared with the answer when it is sent directly. So with a journal in Redis and with one in a file.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.ports import free_port
from tests.support.processes import Router, eventually
from tests.support.redis_server import RedisServer, redis_server

LINES = 100
ASKED = range(0, LINES, 5)  # whose answers are compared with those to the same requests, sent directly
OUTPUT_TOKENS = 40
PATIENCE = 120.0  # seconds for what takes a few on a machine that has nothing else to do


@dataclass
class Machine:
    """An engine, a Redis or a file, and a router that can be killed and started again where it was."""

    folder: Path
    ports: tuple[int, int, int]
    engine: ForkedEngine
    redis: RedisServer | None

    def __post_init__(self) -> None:
        self.router = self.start_router()

    def start_router(self) -> Router:
        journal = (
            ["--redis-url", self.redis.router_url]
            if self.redis
            else ["--journal-file", str(self.folder / "journal.db")]
        )
        return ForkedRouter(DEMO, [self.engine.address], self.folder, *journal, ports=self.ports)

    def restart_router(self) -> None:
        self.router.kill()
        self.router = self.start_router()
        self.router.wait_ready()


@pytest.fixture(params=["redis", pytest.param("file", marks=pytest.mark.soak)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder, ports = tmp_path_factory.mktemp("batches"), (free_port(), free_port(), free_port())
    with ExitStack() as ending:
        server = ending.enter_context(redis_server(persistent=True)) if request.param == "redis" else None
        engine = ForkedEngine(DEMO, folder, *SMALL_POOLS, *FLOAT32)
        machine = Machine(folder, ports, engine, server)
        try:
            engine.wait_ready()
            machine.router.wait_ready()
            yield machine
        finally:
            codes = machine.router.stop(), engine.stop()
    assert codes == (0, 0), (machine.router.text, engine.text)


def body(number: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"{number}: once upon a time",
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
    }


def test_each_line_is_answered_once_whatever_is_restarted(machine: Machine) -> None:
    lines = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body(number)}
        for number in range(LINES)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    api = openai.OpenAI(base_url=f"{machine.router.url}/v1", api_key="none", max_retries=20)
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

    def written() -> float:
        """Lines whose result this router wrote."""
        return machine.router.metric("quire_batch_lines_total", result="completed")

    eventually(lambda: written() >= LINES // 20, PATIENCE)
    machine.restart_router()
    assert api.batches.retrieve(batch.id).status == "in_progress"
    eventually(lambda: written() >= LINES // 20, PATIENCE)
    if machine.redis is not None:
        machine.redis.restart()
    else:
        machine.restart_router()
    eventually(lambda: api.batches.retrieve(batch.id).status == "completed", PATIENCE)

    done = api.batches.retrieve(batch.id)
    assert done.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
    output = [json.loads(each) for each in api.files.content(done.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in output] == [line["custom_id"] for line in lines]
    requests = [each["response"]["request_id"] for each in output]
    assert machine.redis is None or stored_requests(machine.redis) == set(requests)
    assert len(set(requests)) == LINES
    assert [each.id for each in api.batches.list()] == [batch.id]
    assert [each.id for each in api.files.list()] == [done.output_file_id, file.id]
    assert [each.id for each in api.files.list(purpose="batch", limit=1)] == [file.id]
    assert api.files.content(file.id).content == content
    assert machine.router.metric("quire_batches_ended_total", status="completed") == 1
    assert machine.router.metric("quire_batch_lines_in_flight") == 0
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == OUTPUT_TOKENS for each in output)
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=machine.router.url, timeout=60) as client:
        direct = list(pool.map(lambda number: ask(client, number), ASKED))
    assert [answer_of(output[number]["response"]["body"]) for number in ASKED] == [answer_of(each) for each in direct]
    api.close()


def ask(client: httpx.Client, number: int) -> dict[str, Any]:
    return dict(client.post("/v1/completions", json=body(number)).json())


def answer_of(found: dict[str, Any]) -> tuple[Any, Any]:
    return found["choices"], {name: found["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


def stored_requests(server: RedisServer) -> set[str]:
    client = redis.Redis(port=server.port)
    names = {key.decode() for key in client.scan_iter("quire:*:record")}
    client.close()
    return {name.partition("{")[2].partition("}")[0] for name in names}
