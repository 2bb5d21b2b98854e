"""What one hostile or merely heavy client does to the streams of others: the time between two tokens of a few streams,
alone and beside clients that send the heads that are worst to parse, or long texts to tokenise, or both.

    python -m tests.bench.hostile_clients [--rounds 3] [--heads-per-second 50]

The heads are CONNECT and offers to upgrade, each with as many headers as fit. Rounds of each kind come in turns.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from multiprocessing import get_context

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


async def send_texts(port: int, _: float) -> None:
    """Has one long text after the other tokenised, until it is cancelled."""
    data = json.dumps({"model": "quire-demo", "prompt": TEXT}).encode()
    head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            await reader.read()
            writer.close()


Client = Callable[[int, float], Awaitable[None]]
KINDS: dict[str, list[Client]] = {
    "nothing": [],
    "heads": [send_heads],
    "texts": [send_texts],
    "heads and texts": [send_heads, send_texts],
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
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    with a_router() as port:
        for _ in range(options.rounds):
            for kind, clients in KINDS.items():
                gaps = gaps_beside(port, clients, options.heads_per_second)
                found[kind].append((statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1]))
    alone = statistics.median(p99 for _, p99, _ in found["nothing"])
    for kind, figures in found.items():
        p50, p99, most = (1e3 * statistics.median(each) for each in zip(*figures, strict=True))
        ratio = 1e-3 * p99 / alone
        print(f"beside {kind}: p50 {p50:.1f} ms, p99 {p99:.1f} ms ({ratio:.2f} of alone), longest {most:.0f} ms")


if __name__ == "__main__":
    main()
