"""What bad clients do to good ones: the time between two tokens of a few streams beside hundreds of others, which read
as they should, or which do not.

    python -m tests.bench.slow_clients [--others 300] [--rounds 3]

A stalled client never reads, a slow one reads a few bytes twenty times a second, a half-closed one shuts its writing
side once it has asked. Their sockets take little, and their answers begin with a long echo, so that they are behind
from the start. Rounds of each kind come in turns.
"""

import argparse
import asyncio
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from tests.bench.router_stage import MODEL, running

PAUSE = 0.04  # seconds between two steps of the engine
WATCHED, TOKENS, ECHO = 8, 125, 20_000
KINDS = ("good", "stalled", "slow", "half-closed")


def request(tokens: int, echo: int) -> bytes:
    """A stream whose prompt, where it is echoed, has so many tokens."""
    fields = {"model": MODEL, "prompt": [500] * max(echo, 32), "max_tokens": tokens, "stream": True, "echo": echo > 0}
    data = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def watch(port: int) -> list[float]:
    """Seconds between the events of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(TOKENS, 0))
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return [after - before for before, after in pairwise(times[1:])]


async def bother(port: int, kind: str, echo: int) -> None:
    """One other client, until it is cancelled."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        if kind != "good":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, request(100_000, echo))
        if kind == "half-closed":
            client.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):  # the router may let go of them
            await read(client, kind)
        await asyncio.Event().wait()


async def read(client: socket.socket, kind: str) -> None:
    """Reads as this kind of client does, until there is no more."""
    data = b"" if kind == "stalled" else b"?"
    while data:
        data = await asyncio.get_running_loop().sock_recv(client, 64 if kind == "slow" else 1 << 16)
        await asyncio.sleep(0.05 if kind == "slow" else 0)


async def gaps_beside(port: int, kind: str, others: int) -> list[float]:
    """Seconds between two tokens of all watched streams, beside so many others of a kind."""
    tasks = [asyncio.create_task(bother(port, kind, 0 if kind == "good" else ECHO)) for _ in range(others)]
    try:
        await asyncio.sleep(2 + others * 0.02)  # the engine and the router have all of them
        watched = await asyncio.gather(*(watch(port) for _ in range(WATCHED)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1)  # they are gone
    return sorted(gap for gaps in watched for gap in gaps)


@contextmanager
def a_router() -> Iterator[int]:
    """The port of a router before a steady engine."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, running(Path(folder), PAUSE) as (_, router):
        yield router.http_port


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with a_router() as port:
        for _ in range(options.rounds):
            for kind in KINDS:
                gaps = asyncio.run(gaps_beside(port, kind, options.others))
                found[kind].append((statistics.median(gaps), gaps[int(0.99 * len(gaps))]))
    good = statistics.median(p99 for _, p99 in found["good"])
    for kind, figures in found.items():
        p50, p99 = (1e3 * statistics.median(each) for each in zip(*figures, strict=True))
        print(f"beside {options.others} {kind} clients: p50 {p50:.1f} ms, p99 {p99:.1f} ms ({1e-3 * p99 / good:.2f})")


if __name__ == "__main__":
    main()
