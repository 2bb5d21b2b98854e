"""What the processes hold in memory, and that they give everything back."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from openai import OpenAI

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS, Stack
from tests.support.http2 import repeated_headers
from tests.support.processes import Engine, Router, eventually, fetch

POOLS_MIB = 64 + 64
ENGINE_ALLOWANCE_MIB = 700
ROUTER_LIMIT_MIB = 250
BODIES, BODY_BYTES = 500, 4 << 20


def load(stack_url: str, requests: int) -> None:
    client = OpenAI(base_url=f"{stack_url}/v1", api_key="none", max_retries=0)
    streams = [
        client.completions.create(model=MODEL, prompt=f"{index} " * 200, max_tokens=64, stream=True)
        for index in range(requests)
    ]
    for stream in streams:
        list(stream)


@pytest.fixture(scope="module")
def router(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router as it is started: one that is forked from the tests has their libraries mapped."""
    folder = tmp_path_factory.mktemp("router")
    router = Router(DEMO, [engine.address for engine in stack.engines], folder, "--redis-url", stack.redis.url)
    try:
        router.wait_ready()
        yield router
    finally:
        router.stop()


def test_engine_and_router_stay_within_their_limits_after_work(stack: Stack, router: Router) -> None:
    load(router.url, 24)
    weights = sum(path.stat().st_size for path in DEMO.glob("*.safetensors")) / (1 << 20)
    for engine in stack.engines:
        assert engine.resident_mib < weights + POOLS_MIB + ENGINE_ALLOWANCE_MIB
    assert router.resident_mib < ROUTER_LIMIT_MIB


def test_the_router_has_no_torch_loaded(router: Router) -> None:
    mapped = Path(f"/proc/{router.popen.pid}/maps").read_text()
    assert "torch" not in mapped


def test_work_under_pressure_swaps_and_every_block_comes_back(tmp_path: Path) -> None:
    """Real requests on a pool far too small for them: they swap, all answers come, no block is lost."""
    engine = Engine(DEMO, tmp_path, "--kv-cache-memory", str(6 << 20), "--swap-space", "0.125", *FLOAT32)
    router = Router(DEMO, [engine.address], tmp_path)
    try:
        engine.wait_ready()
        router.wait_ready()
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        settings = {"model": MODEL, "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
        alone = client.completions.create(prompt="Once upon a time", **settings).choices[0].text
        together = client.completions.create(prompt=["Once upon a time"] * 12, **settings)  # which begin at once
        assert {choice.text for choice in together.choices} == {alone}
        assert engine.metric("quire_engine_preemptions_total", mode="swap") > 0
        assert engine.metric("quire_engine_swapped_blocks_total", direction="in") > 0
        for tier in ("device", "host"):
            assert engine.metric("quire_engine_free_blocks", tier=tier) == engine.metric(
                "quire_engine_blocks", tier=tier
            )
    finally:
        assert [router.stop(), engine.stop()] == [0, 0]


def test_small_pools_have_the_configured_sizes(stack: Stack) -> None:
    assert SMALL_POOLS[1] == str(64 << 20)
    for engine in stack.engines:
        device = engine.metric("quire_engine_blocks", tier="device")
        assert device > 0
        assert engine.metric("quire_engine_blocks", tier="host") == device + 1, "equal bytes hold equally many blocks"


async def offer(port: int, request: bytes, sent: asyncio.Barrier) -> tuple[int, bytes]:
    """The answer's status and body to a ``request`` whose last byte is sent when all clients have sent the rest, or
    have their answers.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        reading = asyncio.ensure_future(read_whole(client))
        sending = asyncio.ensure_future(loop.sock_sendall(client, memoryview(request)[:-1]))
        await asyncio.wait((reading, sending), return_when=asyncio.FIRST_COMPLETED)
        await sent.wait()
        if not reading.done():
            with suppress(ConnectionError):
                await sending
                await loop.sock_sendall(client, request[-1:])
        sending.cancel()
        return await reading


async def read_whole(client: socket.socket) -> tuple[int, bytes]:
    loop, data = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in data:
        part = await loop.sock_recv(client, 1 << 16)
        assert part, "the connection ended without an answer"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += await loop.sock_recv(client, 1 << 16)
    return int(head.split()[1]), body


def test_many_large_bodies_at_once_are_refused_with_errors_and_kept_out_of_memory(tmp_path: Path) -> None:
    """The largest bodies that are allowed, all of them held before any is complete."""
    start, end = f'{{"model":"{MODEL}","prompt":"'.encode(), b'"}'
    body = start + b"word " * ((BODY_BYTES - len(start) - len(end)) // 5) + end
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def offer_all(port: int) -> list[tuple[int, bytes]]:
        sent = asyncio.Barrier(BODIES)
        async with asyncio.timeout(240):
            return await asyncio.gather(*(offer(port, request, sent) for _ in range(BODIES)))

    engine = Engine(DEMO, tmp_path, *SMALL_POOLS, *FLOAT32)
    router = Router(DEMO, [engine.address], tmp_path)
    try:
        router.wait_ready()
        answers = asyncio.run(offer_all(router.http_port))
        status = Path(f"/proc/{router.popen.pid}/status").read_text()
        (peak,) = (int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM"))
        errors = Counter((code, json.loads(text).get("error", {}).get("code")) for code, text in answers)
        assert {code for code, _ in errors} <= {400, 413, 429}, errors
        assert errors[429, "body_bytes"] > BODIES // 2, errors
        assert 400 in {code for code, _ in errors}, "no body was read"
        assert all(json.loads(text)["error"]["message"] for _, text in answers)
        assert peak < 1024, f"{peak} MiB"
        assert router.popen.poll() is None
    finally:
        router.stop()
        engine.stop()


def test_memory_taken_by_hostile_grpc_headers_is_freed(tmp_path: Path) -> None:
    """A few hundred kilobytes of them, without a key, stand for gigabytes of headers. Such calls are refused; what they
    took must not stay.
    """
    router = Router(DEMO, ["127.0.0.1:1"], tmp_path)
    attack = repeated_headers("/quire.v1.Inference/ListModels", 50)

    def costs_much() -> bool:
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", router.grpc_port), 10) as connection:
            connection.sendall(attack)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        return router.resident_mib > before + 100

    try:
        eventually(lambda: fetch(router.http_port, "/live")[0] == 200, 60)
        before = router.resident_mib
        eventually(costs_much, 60, "the attack does nothing any more")
        eventually(lambda: router.resident_mib < before + 60, 60, "the memory is not given back")
        assert fetch(router.http_port, "/live")[0] == 200
    finally:
        assert router.stop() == 0
