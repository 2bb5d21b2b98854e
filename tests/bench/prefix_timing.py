"""Whether the time to an answer tells a tenant what another one has cached.

    python -m tests.bench.prefix_timing [--prefixes 200] [--tokens 1500]

Of each pair of random prompts a tenant sends one, so that it is cached. Then an observer asks for both once, in an
order of chance, and guesses by the times which one was sent before. A stranger is to be right in half of the pairs; the
tenant itself shows that there was something to measure. Two engines and one router, all of them real; placement may
differ for what is cached as well, and is part of what is timed.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.support.processes import Engine, Router

DEMO = Path(__file__).parents[2] / "demo" / "model"
MODEL, VOCABULARY = "quire-demo", range(300, 1000)
TENANT, STRANGER = "the-key-of-the-tenant", "the-key-of-a-stranger"


@contextmanager
def running(folder: Path) -> Iterator[dict[str, httpx.Client]]:
    """A client of each key, at a router before two engines."""
    with ExitStack() as stack:
        engines = [Engine(DEMO, folder, "--dtype", "float32") for _ in range(2)]
        for engine in engines:
            stack.callback(engine.stop)
        addresses = [engine.wait_ready().address for engine in engines]
        router = Router(DEMO, addresses, folder, "--api-key", TENANT, "--api-key", STRANGER)
        stack.callback(router.stop)
        router.wait_ready()
        keys = {key: {"authorization": f"Bearer {key}"} for key in (TENANT, STRANGER)}
        yield {key: stack.enter_context(httpx.Client(base_url=router.url, headers=keys[key])) for key in keys}


def seconds(client: httpx.Client, prompt: list[int]) -> float:
    """From asking for one token to having it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    began = time.perf_counter()
    client.post("/v1/completions", json=body, timeout=60).raise_for_status()
    return time.perf_counter() - began


def compare(clients: dict[str, httpx.Client], prefixes: int, tokens: int, seed: int) -> dict[str, list[float]]:
    """For each key and pair: how much longer the prompt took that nobody had sent, as a part of what both took."""
    rng = random.Random(seed)
    gains: dict[str, list[float]] = {key: [] for key in clients}
    for _ in range(prefixes):
        for key, client in clients.items():  # prompts of its own, because asking caches them
            sent, fresh = ([rng.choice(VOCABULARY) for _ in range(tokens)] for _ in range(2))
            seconds(clients[TENANT], sent)
            times = dict.fromkeys(rng.sample(["sent", "fresh"], 2), 0.0)
            for name in times:
                times[name] = seconds(client, sent if name == "sent" else fresh)
            gains[key].append((times["fresh"] - times["sent"]) / sum(times.values()))
    return gains


def report(name: str, gains: list[float]) -> None:
    """How often the shorter time was that of the prompt which had been sent before, and what chance allows."""
    right = sum(gain > 0 for gain in gains) / len(gains)
    chance = 1.96 * math.sqrt(0.25 / len(gains))
    print(
        f"{name:9} guesses right in {right:6.1%} of {len(gains)} pairs (chance: 50 % ± {chance:.1%}); "
        f"a fresh prompt takes {2 * statistics.median(gains):+.1%} longer"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as clients:
        compare(clients, 5, options.tokens, options.seed + 1)
        gains = compare(clients, options.prefixes, options.tokens, options.seed)
    report("stranger", gains[STRANGER])
    report("tenant", gains[TENANT])


if __name__ == "__main__":
    main()
