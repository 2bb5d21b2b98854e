"""What a shadow costs the others: the p99 between tokens of requests of which a share is shadowed, over that without.

A router and engines as real processes: one of the model, and one that serves it as the shadow, on the same machine, or
one engine that serves both (``--shared``, the worst case: the shadow's tokens come from the steps of everybody's). With
``--simulated`` the engines take the time of a GPU in place of this machine's processors: each has a machine of its own,
so to say, and what is left is what the router does.
Streams come as a Poisson process, as many and at the same times in each phase of a round. Rounds alternate between a
file of targets without a shadow and one with it; what is told is the median over the rounds of the ratio of both. The
bar: at most 1.02, with a tenth shadowed.

    .venv/bin/python -m tests.bench.shadow --percent 10 --rate 2 --rounds 5
    .venv/bin/python -m tests.bench.shadow --simulated a100-8b --rate 8
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import httpx

from tests.bench.batch_interference import SimulatedEngine
from tests.support.processes import Engine, Router, eventually

DEMO = Path(__file__).parents[2] / "demo" / "model"
BAR = 1.02


def p99(gaps: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(gaps, n=100)[98]


async def stream(client: httpx.AsyncClient, prompt: str, output: int, gaps: list[float]) -> None:
    """One request; adds the seconds between its pieces."""
    body = {"model": "chat", "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
    last = None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now


async def phase(url: str, rate: float, seconds: float, output: int, seed: int) -> list[float]:
    """All gaps of one phase, whose requests are the same for the same seed."""
    draw, gaps = random.Random(seed), list[float]()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client, asyncio.TaskGroup() as tasks:
        end = perf_counter() + seconds
        while perf_counter() < end:
            tasks.create_task(stream(client, f"Story {draw.randrange(10**6)}: once upon a time", output, gaps))
            await asyncio.sleep(draw.expovariate(rate))
    return gaps


def write_targets(path: Path, percent: float | None) -> None:
    """Replaces the file of targets."""
    group: dict[str, object] = {"targets": [{"model": "v1"}]}
    if percent is not None:
        group["shadow"] = {"model": "twin", "percent": percent}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"models": {"chat": group}}))
    new.rename(path)


def main() -> None:
    """Prints a line for each round, and the median of the ratios. Exits with 1 if it is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--percent", type=float, default=10)
    parser.add_argument("--rate", type=float, default=2, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30, help="of each phase")
    parser.add_argument("--output", type=int, default=200, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shared", action="store_true", help="one engine for the model and its shadow")
    parser.add_argument("--simulated", metavar="PRESET", help="no model, but the latency of a100-8b, h100-8b or cpu")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = folder / "targets.json"
        write_targets(targets, None)
        names = ["v1,twin"] if options.shared else ["v1", "twin"]
        engines: list[SimulatedEngine | Engine] = [
            SimulatedEngine(options.model, folder, options.simulated, name=name)
            if options.simulated
            else Engine(options.model, folder, name=name)
            for name in names
        ]
        flags = ("--model", f"twin={options.model}", "--model-targets", str(targets))
        router = Router(options.model, [engine.address for engine in engines], folder, *flags, name="v1")
        for process in (*engines, router):
            stack.callback(process.kill)
            process.wait_ready()
        eventually(lambda: router.metric("quire_engines_ready") == 2)
        asyncio.run(phase(router.url, options.rate, 5, options.output, 0))  # warms up
        ratios = []
        for number in range(options.rounds):
            found = {}
            for percent in (None, options.percent) if number % 2 == 0 else (options.percent, None):
                read = router.text.count("was read again")
                write_targets(targets, percent)
                eventually(lambda read=read: router.text.count("was read again") > read)
                found[percent] = p99(
                    asyncio.run(phase(router.url, options.rate, options.seconds, options.output, number))
                )
            ratios.append(found[options.percent] / found[None])
            print(
                f"round {number + 1}: p99 between tokens {found[None] * 1e3:.2f} ms without, "
                f"{found[options.percent] * 1e3:.2f} ms with a shadow of {options.percent:g} %: {ratios[-1]:.3f}"
            )
        begun = {
            result: router.metric("quire_shadow_requests_total", result=result)
            for result in ("equal", "different", "failed", "dropped")
        }
        print("shadows:", ", ".join(f"{count:.0f} {result}" for result, count in begun.items()))
        ratio = statistics.median(ratios)
        print(f"ratio {ratio:.3f} (bar {BAR})")
    sys.exit(ratio > BAR)


if __name__ == "__main__":
    main()
