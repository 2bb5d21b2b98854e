"""What one hostile or merely heavy client does to the streams of others: the time between two tokens of a few streams,
alone and beside clients that send what is worst to parse.

    python -m tests.bench.hostile_clients [--rounds 3] [--heads-per-second 50] [--kinds heads,texts]

Heads are CONNECT and offers to upgrade, each with as many headers as fit. Texts are a megabyte to tokenise. Pairs are a
query of 4 kB with 2,048 documents. Conversations have 28,000 items, of which one is read at a time. Batches have files
of blank lines, and of lines with more numbers than a request may have. Rounds of each kind come in turns. The 99th
percentile should stay within 1.5 times that of the streams alone.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

from tests.bench.router_stage import MODEL
from tests.bench.slow_clients import WATCHED, a_router, watch

HEADERS = "".join("a:1\r\n" for _ in range(2_700))
HEADS = [
    f"CONNECT / HTTP/1.1\r\nhost: localhost\r\n{HEADERS}\r\n".encode(),
    f"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n{HEADERS}\r\n".encode(),
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 23_000  # about a megabyte


async def send_heads(port: int, per_second: float) -> None:
    """Sends one head after the other, each on a connection of its own, until it is cancelled."""
    number = 0
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEADS[number % len(HEADS)])
            answered = asyncio.ensure_future(reader.read(1 << 16))
            await asyncio.wait([answered], timeout=1 / per_second)
            answered.cancel()
            writer.close()
        number += 1
        await asyncio.sleep(1 / per_second)


async def ask(port: int, path: str, body: object = None, kind: str = "application/json") -> Any:
    """The JSON of an answer, over a connection of its own; None where there is none."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    with suppress(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2] or b"null")
    return None


async def send_texts(port: int, _: float) -> None:
    """Has one long text after the other tokenised, until it is cancelled."""
    while True:
        await ask(port, "/tokenize", {"model": MODEL, "prompt": TEXT})


async def send_pairs(port: int, _: float) -> None:
    """Compares a long query with as many documents as are allowed, until it is cancelled."""
    while True:
        await ask(port, "/rerank", {"model": MODEL, "query": "a " * 2_048, "documents": ["b"] * 2_048})


async def read_conversations(port: int, _: float) -> None:
    """Reads single items of a long conversation over four connections, until it is cancelled."""
    items = [{"role": "user", "content": "x"}] * 4_000
    made = await ask(port, "/v1/conversations", {})
    for _ in range(7):
        await ask(port, f"/v1/conversations/{made['id']}/items", {"items": items})

    async def read() -> None:
        while True:
            await ask(port, f"/v1/conversations/{made['id']}/items?limit=1")

    await asyncio.gather(*(read() for _ in range(4)))


async def send_batches(port: int, _: float) -> None:
    """Begins batches of files that hold no requests but much to read, until it is cancelled."""
    numbers = (
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":[1' + b",1" * 1_500_000 + b"]}}\n"
    )
    while True:
        for content in (b"\n" * 95_000_000, b"".join(numbers % number for number in range(24))):
            parts = [b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n']
            parts += [b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n', content, b"\r\n--x--\r\n"]
            file = await ask(port, "/v1/files", b"".join(parts), "multipart/form-data; boundary=x")
            fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
            await ask(port, "/v1/batches", {"input_file_id": (file or {}).get("id", ""), **fields})
            await asyncio.sleep(2)


Client = Callable[[int, float], Awaitable[None]]
KINDS: dict[str, list[Client]] = {
    "nothing": [],
    "heads": [send_heads],
    "texts": [send_texts],
    "heads and texts": [send_heads, send_texts],
    "pairs": [send_pairs],
    "conversations": [read_conversations],
    "batches": [send_batches],
}


def attack(client: Client, port: int, per_second: float) -> None:
    """A process of its own, so that what the client does costs the watching streams nothing here."""
    asyncio.run(client(port, per_second))


async def _watch_all(port: int) -> list[list[float]]:
    return await asyncio.gather(*(watch(port) for _ in range(WATCHED)))


def gaps_beside(port: int, clients: list[Client], per_second: float) -> list[float]:
    """Seconds between two tokens of all watched streams, beside these clients; sorted."""
    processes = [get_context("spawn").Process(target=attack, args=(client, port, per_second)) for client in clients]
    for process in processes:
        process.start()
    try:
        time.sleep(2)  # they are at work
        watched = asyncio.run(_watch_all(port))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return sorted(gap for gaps in watched for gap in gaps)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--heads-per-second", type=float, default=50)
    parser.add_argument("--kinds", default=",".join(KINDS), help="those of: %(default)s")
    options = parser.parse_args()
    kinds = {kind: KINDS[kind] for kind in ("nothing", *options.kinds.split(","))}
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with a_router() as port:
        for _ in range(options.rounds):
            for kind, clients in kinds.items():
                gaps = gaps_beside(port, clients, options.heads_per_second)
                found[kind].append((statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1]))
    alone = statistics.median(p99 for _, p99, _ in found["nothing"])
    for kind, figures in found.items():
        p50, p99, most = (1e3 * statistics.median(each) for each in zip(*figures, strict=True))
        ratio = 1e-3 * p99 / alone
        print(f"beside {kind}: p50 {p50:.1f} ms, p99 {p99:.1f} ms ({ratio:.2f} of alone), longest {most:.0f} ms")


if __name__ == "__main__":
    main()
