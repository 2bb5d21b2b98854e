"""What one hostile or merely heavy client does to the streams of others: the time between two tokens of a few streams,
alone and beside clients that send what is worst to parse.

    python -m tests.bench.hostile_clients [--rounds 3] [--heads-per-second 50] [--kinds heads,texts]

Heads are CONNECT and offers to upgrade, each with as many headers as fit. Texts are a megabyte to tokenise. Pairs are a
query of 4 kB with 2,048 documents. Conversations have 28,000 items, of which one is read at a time. Batches have files
of blank lines, and of lines with more numbers than a request may have. Templates are chats that a template takes the
time that it may have to write. Grammars are schemas and expressions that take as long as any to compile, at the engine.
Servers are of others: they get prompts of 100,000 tokens, and answer what is worst to read. Events are of such a
server's prefix cache. Rounds of each kind come in turns. The 99th percentile should stay within 1.5 times that of the
streams alone.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.bench.hostile_servers import PROMPT_TOKENS, HostileServer, publish_events, serving_on
from tests.bench.router_stage import DEMO, MODEL, running
from tests.bench.slow_clients import PAUSE, WATCHED, watch
from tests.support.http_engines import VllmEngine
from tests.support.ports import free_port

HEADERS = "".join("a:1\r\n" for _ in range(2_700))
HEADS = [
    f"CONNECT / HTTP/1.1\r\nhost: localhost\r\n{HEADERS}\r\n".encode(),
    f"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n{HEADERS}\r\n".encode(),
]
SLOW, OTHERS = "slow-template", "others"  # models beside the one that is watched
TEMPLATE = "{% for a in messages %}{% for b in messages %}{{ b.content | length }}{% endfor %}{% endfor %}"
TEXT = "The quick brown fox jumps over the lazy dog. " * 23_000  # about a megabyte


@dataclass(frozen=True, slots=True)
class Stage:
    """The ports of a router, of the server of others that it knows, and of that server's events."""

    port: int
    server_port: int
    events_port: int
    heads_per_second: float


@contextmanager
def a_stage(heads_per_second: float) -> Iterator[Stage]:
    """A router before a steady engine, and before a server of others that need not be there."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder, server_port, events_port = Path(name), free_port(), free_port()
        slow = shutil.copytree(DEMO, folder / "slow", ignore=shutil.ignore_patterns("*.safetensors"))
        (slow / "chat_template.jinja").write_text(TEMPLATE)
        flags = [f"--model={SLOW}={slow}", f"--model={OTHERS}={DEMO}", f"--engine-kv-events-port={events_port}"]
        flags.append(f"--engine=vllm+http://127.0.0.1:{server_port}")
        with running(folder, PAUSE, *flags) as (_, router):
            yield Stage(router.http_port, server_port, events_port, heads_per_second)


async def send_heads(stage: Stage) -> None:
    """Sends one head after the other, each on a connection of its own, until it is cancelled."""
    number = 0
    while True:
        with suppress(ConnectionError):
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(HEADS[number % len(HEADS)])
            answered = asyncio.ensure_future(reader.read(1 << 16))
            await asyncio.wait([answered], timeout=1 / stage.heads_per_second)
            answered.cancel()
            writer.close()
        number += 1
        await asyncio.sleep(1 / stage.heads_per_second)


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


async def send_texts(stage: Stage) -> None:
    """Has one long text after the other tokenised, until it is cancelled."""
    while True:
        await ask(stage.port, "/tokenize", {"model": MODEL, "prompt": TEXT})


async def send_pairs(stage: Stage) -> None:
    """Compares a long query with as many documents as are allowed, until it is cancelled."""
    while True:
        await ask(stage.port, "/rerank", {"model": MODEL, "query": "a " * 2_048, "documents": ["b"] * 2_048})


async def read_conversations(stage: Stage) -> None:
    """Reads single items of a long conversation over four connections, until it is cancelled."""
    items = [{"role": "user", "content": "x"}] * 4_000
    made = await ask(stage.port, "/v1/conversations", {})
    for _ in range(7):
        await ask(stage.port, f"/v1/conversations/{made['id']}/items", {"items": items})

    async def read() -> None:
        while True:
            await ask(stage.port, f"/v1/conversations/{made['id']}/items?limit=1")

    await asyncio.gather(*(read() for _ in range(4)))


async def send_batches(stage: Stage) -> None:
    """Begins batches of files that hold no requests but much to read, until it is cancelled."""
    numbers = (
        b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":[1' + b",1" * 1_500_000 + b"]}}\n"
    )
    while True:
        for content in (b"\n" * 95_000_000, b"".join(numbers % number for number in range(24))):
            parts = [b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n']
            parts += [b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n', content, b"\r\n--x--\r\n"]
            file = await ask(stage.port, "/v1/files", b"".join(parts), "multipart/form-data; boundary=x")
            fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
            await ask(stage.port, "/v1/batches", {"input_file_id": (file or {}).get("id", ""), **fields})
            await asyncio.sleep(2)


async def send_templates(stage: Stage) -> None:
    """Has chats written by a template that takes long, over four connections, until it is cancelled."""
    messages = [{"role": "user", "content": "x"}] * 500

    async def send() -> None:
        while True:
            await ask(stage.port, "/tokenize", {"model": SLOW, "messages": messages})

    await asyncio.gather(*(send() for _ in range(4)))


async def send_grammars(stage: Stage) -> None:
    """Asks for answers in grammars that take long to compile, each another one, over 24 connections, until it is
    cancelled.
    """
    numbers = count()

    async def send() -> None:
        for number in numbers:
            members: dict[str, object] = {f"p{number}_{each}": {} for each in range(60)}
            grammars = (
                {"guided_regex": ".?" * 30_000 + str(number)},
                {"guided_regex": f"(a{{49}}){{1000}}{number}"},
                {"guided_json": {"type": "object", "properties": members, "maxProperties": 60}},
            )
            request = {"model": MODEL, "prompt": "x", "max_tokens": 1, **grammars[number % len(grammars)]}
            await ask(stage.port, "/v1/completions", request)

    await asyncio.gather(*(send() for _ in range(24)))


async def ask_servers(stage: Stage) -> None:
    """Is a server of others and four clients of it, with long bodies and longer answers, until it is cancelled."""

    async def send() -> None:
        while True:
            await ask(
                stage.port, "/v1/completions", {"model": OTHERS, "prompt": [500] * PROMPT_TOKENS, "max_tokens": 4}
            )

    async with serving_on(stage.server_port, OTHERS, HostileServer):
        await asyncio.gather(*(send() for _ in range(4)))


async def send_events(stage: Stage) -> None:
    """Is a server of others whose prefix cache changes as fast as it can, until it is cancelled."""
    async with serving_on(stage.server_port, OTHERS, VllmEngine):
        await publish_events(stage.events_port)


Client = Callable[[Stage], Coroutine[Any, Any, None]]
KINDS: dict[str, list[Client]] = {
    "nothing": [],
    "heads": [send_heads],
    "texts": [send_texts],
    "heads and texts": [send_heads, send_texts],
    "pairs": [send_pairs],
    "conversations": [read_conversations],
    "batches": [send_batches],
    "templates": [send_templates],
    "grammars": [send_grammars],
    "servers": [ask_servers],
    "events": [send_events],
}


def attack(client: Client, stage: Stage) -> None:
    """A process of its own, so that what the client does costs the watching streams nothing here."""
    asyncio.run(client(stage))


async def _watch_all(port: int) -> list[list[float]]:
    return await asyncio.gather(*(watch(port) for _ in range(WATCHED)))


def gaps_beside(stage: Stage, clients: list[Client]) -> list[float]:
    """Seconds between two tokens of all watched streams, beside these clients; sorted."""
    processes = [get_context("spawn").Process(target=attack, args=(client, stage)) for client in clients]
    for process in processes:
        process.start()
    try:
        time.sleep(2)  # they are at work
        watched = asyncio.run(_watch_all(stage.port))
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
    with a_stage(options.heads_per_second) as stage:
        for _ in range(options.rounds):
            for kind, clients in kinds.items():
                gaps = gaps_beside(stage, clients)
                found[kind].append((statistics.median(gaps), gaps[int(0.99 * len(gaps))], gaps[-1]))
    alone = statistics.median(p99 for _, p99, _ in found["nothing"])
    for kind, figures in found.items():
        p50, p99, most = (1e3 * statistics.median(each) for each in zip(*figures, strict=True))
        ratio = 1e-3 * p99 / alone
        print(f"beside {kind}: p50 {p50:.1f} ms, p99 {p99:.1f} ms ({ratio:.2f} of alone), longest {most:.0f} ms")


if __name__ == "__main__":
    main()
