"""What writing down costs a router: processor time of the journal for each token and each request, in memory, in a
SQLite file and in a real Redis, in turns. Nothing else runs in the process, so it is less than beside a router's other
work. The file's journal works in a thread of its own; what the event loop's thread has of it is given as well.

    python -m tests.bench.journal [--streams 256] [--tokens 60] [--pause 0.04] [--rounds 5]
"""

import argparse
import asyncio
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import uvloop
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import RecordedDelta
from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.redis_server import redis_server

AnyJournal = MemoryJournal | BufferedJournal


async def measure(journal: AnyJournal, options: argparse.Namespace) -> tuple[float, float, float]:
    """Processor time in µs of a token while all streams run, the part of it in the loop's thread, and that of the rest
    of a request.
    """
    requests = [
        GenerationRequest(uuid4().hex, "m", array("i", range(32)), SamplingParams(seed=1))
        for _ in range(options.streams)
    ]
    gc.collect()
    began = time.process_time()
    leases = [journal.open(request) for request in requests]
    await journal.flush()
    opened, in_loop = time.process_time(), time.thread_time()
    for position in range(options.tokens):
        for lease in leases:
            journal.append(lease, position, RecordedDelta(0, [position]))
        await asyncio.sleep(options.pause)
    await journal.flush()
    streamed, in_loop = time.process_time(), time.thread_time() - in_loop
    for lease in leases:
        journal.finish(lease, FinishReason.STOP)
    await journal.flush()
    ended = time.process_time()
    await journal.close()
    others = (ended - streamed + opened - began) / len(leases)
    tokens = len(leases) * options.tokens
    return 1e6 * (streamed - opened) / tokens, 1e6 * in_loop / tokens, 1e6 * others


def main() -> None:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.04, help="seconds between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as a router does
    numbers = count()
    with redis_server() as server, TemporaryDirectory() as folder:
        kinds: dict[str, Callable[[], AnyJournal]] = {
            "memory": MemoryJournal,
            "SQLite": lambda: SqliteJournal(Path(folder) / f"journal-{next(numbers)}"),
            "Redis": lambda: RedisJournal(server.url),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
        for _ in range(options.rounds):
            for name, make in kinds.items():
                found[name].append(uvloop.run(measure(make(), options)))
    for name, rounds in found.items():
        token, in_loop, others = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"{name:8} {token:6.1f} us a token ({in_loop:.1f} in the loop) {others:8.1f} us for the rest of a request"
        )


if __name__ == "__main__":
    main()
