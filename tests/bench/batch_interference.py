"""What a batch does to interactive requests: their p95 time to the first token beside one, over that without.

A router and engines as real processes. Interactive requests come as a Poisson process, whatever is answered, and are
as many, as long and at the same times in each phase of a round. Rounds alternate: calm, and with a batch that was begun
before and is cancelled after. What is told is the median over the rounds of the ratio of both. The bar: at most 1.05,
beside 10,000 lines that fill the fleet.

    .venv/bin/python -m tests.bench.batch_interference --simulated a100-8b --engines 2 --rate 4 --lines 10000
    .venv/bin/python -m tests.bench.batch_interference --model FOLDER --rate 0.4 --prompt 300 --output 16

A model needs a tokenizer with text for each of its tokens: one without text is not seen, and what is taken for the
first token is a later one.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import httpx

from tests.support.ports import free_port
from tests.support.processes import Engine, Process, Router, wait_healthy

DEMO = Path(__file__).parents[2] / "demo" / "model"
MODEL = "quire-demo"
WORDS = (
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "was",
    "he",
    "her",
    "with",
    "for",
    "day",
    "house",
    "tree",
    "river",
    "boat",
)
BAR = 1.05
WARM_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Interactive requests: ``rate`` a second for ``seconds``, prompts of about ``prompt`` words (lognormal, capped at
    four times as many) and ``output`` tokens; and the batch's lines, of ``line_prompt`` words and ``line_output``
    tokens, exponentially distributed.
    """

    rate: float
    seconds: float
    prompt: int
    output: int
    lines: int
    line_prompt: int
    line_output: int


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds until each first token and between tokens on average, in order of size, and the lines done meanwhile, a
    second.
    """

    ttft: list[float]
    gaps: list[float]
    lines: float

    @property
    def p95(self) -> float:
        return self.ttft[int(0.95 * (len(self.ttft) - 1))]

    def __str__(self) -> str:
        p50, gap = statistics.median(self.ttft), statistics.median(self.gaps)
        return (
            f"{len(self.ttft):5d} requests, TTFT p50 {1e3 * p50:6.1f} ms, p95 {1e3 * self.p95:6.1f} ms; "
            f"between tokens {1e3 * gap:5.1f} ms; {self.lines:5.1f} lines/s"
        )


class SimulatedEngine(Process):
    """A process of ``tests.bench.simulated_engine``."""

    def __init__(self, model: Path, folder: Path, preset: str, *, name: str = MODEL) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        command = [sys.executable, "-m", "tests.bench.simulated_engine", "--model", str(model), "--preset", preset]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port), "--served-model-name", name]
        super().__init__(command, folder / f"engine-{self.port}.log")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        wait_healthy(self, self.metrics_port)


def text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(WORDS, k=max(1, words)))


def body(prompt: str, output: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max(1, output), "ignore_eos": True, "temperature": 0}


def arrivals(shape: Shape, seed: int, phase: str) -> list[tuple[float, dict[str, object]]]:
    """When each interactive request comes, and its body; equal seeds, equal times and lengths. No prompt is that of
    another phase, which would be cached.
    """
    chance, now, found = random.Random(seed), 0.0, list[tuple[float, dict[str, object]]]()
    while (now := now + chance.expovariate(shape.rate)) < shape.seconds:
        words = min(4 * shape.prompt, int(shape.prompt * chance.lognormvariate(-0.32, 0.8)))
        found.append((now, body(f"{phase} {seed} {len(found)} " + text(chance, words), shape.output)))
    return found


def lines(shape: Shape, seed: int) -> bytes:
    """The batch's file; no line's prompt is another's."""
    chance, found = random.Random(-seed - 1), list[str]()
    for number in range(shape.lines):
        words, output = chance.expovariate(1 / shape.line_prompt), chance.expovariate(1 / shape.line_output)
        request = body(f"line {seed} {number} " + text(chance, int(words)), int(output))
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": request}
        found.append(json.dumps(line))
    return "\n".join(found).encode()


async def ask(http: httpx.AsyncClient, request: dict[str, object]) -> tuple[float, float]:
    """Seconds until the first token, and between tokens on average."""
    began, first, last, events = perf_counter(), 0.0, 0.0, 0
    async with http.stream("POST", "/v1/completions", json={**request, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = perf_counter()
                first, events = first or last, events + 1
    return first - began, (last - first) / max(1, events - 1)


async def interactive(
    http: httpx.AsyncClient, requests: Sequence[tuple[float, dict[str, object]]]
) -> list[tuple[float, float]]:
    async def one(after: float, request: dict[str, object]) -> tuple[float, float]:
        await asyncio.sleep(after)
        return await ask(http, request)

    return list(await asyncio.gather(*(one(*each) for each in requests)))


async def status_of(http: httpx.AsyncClient, batch_id: str) -> dict[str, object]:
    return dict((await http.get(f"/v1/batches/{batch_id}")).json())


async def begin_batch(http: httpx.AsyncClient, content: bytes) -> str:
    """Begins a batch, and waits until it has filled the fleet."""
    file = (await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = str((await http.post("/v1/batches", json=wanted)).json()["id"])
    while (await status_of(http, batch_id))["status"] != "in_progress":  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(WARM_SECONDS)
    return batch_id


async def end_batch(http: httpx.AsyncClient, batch_id: str) -> None:
    await http.post(f"/v1/batches/{batch_id}/cancel")
    while (await status_of(http, batch_id))["status"] in ("in_progress", "cancelling", "finalizing"):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def completed(http: httpx.AsyncClient, batch_id: str) -> int:
    counts = (await status_of(http, batch_id))["request_counts"]
    assert isinstance(counts, dict)
    return int(counts["completed"])


async def measure(http: httpx.AsyncClient, shape: Shape, seed: int, *, with_batch: bool) -> Round:
    batch_id = await begin_batch(http, lines(shape, seed)) if with_batch else ""
    before = await completed(http, batch_id) if with_batch else 0
    began = perf_counter()
    found = await interactive(http, arrivals(shape, seed, "beside" if with_batch else "calm"))
    done = (await completed(http, batch_id) - before) / (perf_counter() - began) if with_batch else 0.0
    if with_batch:
        status = (await status_of(http, batch_id))["status"]
        if status != "in_progress":
            print(f"the batch is {status} before the round has ended: give it more --lines", flush=True)
        await end_batch(http, batch_id)
    ttft, gaps = (sorted(each) for each in zip(*found, strict=True))
    return Round(ttft, gaps, done)


async def run(url: str, shape: Shape, rounds: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await interactive(http, arrivals(shape, -1, "first")[:8])  # what is built once is built
        ratios = []
        for number in range(rounds):
            pair = {}
            for with_batch in (False, True) if number % 2 == 0 else (True, False):
                pair[with_batch] = await measure(http, shape, number, with_batch=with_batch)
                print(
                    f"round {number + 1} {'with a batch' if with_batch else 'calm':>13}  {pair[with_batch]}", flush=True
                )
            ratios.append(pair[True].p95 / pair[False].p95)
            print(f"round {number + 1}               p95 with it is {ratios[-1]:.3f} of that without", flush=True)
    median = statistics.median(ratios)
    verdict = "met" if median <= BAR else "MISSED"
    print(f"\n{verdict}: median of {rounds} ratios of p95 TTFT {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model, or of the tokenizer")
    parser.add_argument("--simulated", metavar="PRESET", help="no model, but the latency of a100-8b, h100-8b or cpu")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--engine-flags", nargs="*", default=[], help="of real engines, without the leading --")
    parser.add_argument("--rate", type=float, default=2.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=800, help="words of an interactive prompt, on average")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--line-prompt", type=int, default=300, help="words, on average")
    parser.add_argument("--line-output", type=int, default=100, help="tokens, on average")
    options = parser.parse_args()
    shape = Shape(
        options.rate, options.seconds, options.prompt, options.output,
        options.lines, options.line_prompt, options.line_output,
    )  # fmt: skip
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="quire-interference-")))
        flags = [f"--{flag}" if flag[:1].isalpha() else flag for flag in options.engine_flags]
        engines: list[SimulatedEngine | Engine] = []
        for _ in range(options.engines):
            engines.append(
                SimulatedEngine(options.model, folder, options.simulated)
                if options.simulated
                else Engine(options.model, folder, *flags, name=MODEL)
            )
            ending.callback(engines[-1].kill)
        router = Router(options.model, [engine.address for engine in engines], folder, name=MODEL)
        ending.callback(router.kill)
        for process in (*engines, router):
            process.wait_ready()
        asyncio.run(run(router.url, shape, options.rounds))


if __name__ == "__main__":
    main()
