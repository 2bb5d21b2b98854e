"""What the page costs a router: processor time with so many viewers of the fleet, in parts of a core.

``.venv/bin/python -m tests.bench.page`` prints, for no viewer and for some, the medians of rounds in turns, on two
engines and an otherwise idle router.
"""

import argparse
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import psutil

from tests.support.processes import Engine, Router

DEMO = Path(__file__).parents[2] / "demo" / "model"
VIEWERS = (0, 1, 8)


@contextmanager
def viewer(router: Router) -> Iterator[None]:
    """A client that reads the stream of the fleet until the block ends."""
    response = urllib.request.urlopen(f"{router.url}/v1/fleet/events", timeout=60)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            response.readline()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        response.close()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def share_of_a_core(router: Router, viewers: int, seconds: float) -> float:
    """The router's processor time in a second, with so many viewers."""
    process = psutil.Process(router.popen.pid)
    with ExitStack() as stack:
        for _ in range(viewers):
            stack.enter_context(viewer(router))
        time.sleep(1)
        began, before = time.monotonic(), cpu_seconds(process)
        time.sleep(seconds)
        return (cpu_seconds(process) - before) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engines = [Engine(DEMO, folder, "--kv-cache-memory", str(64 << 20)) for _ in range(2)]
        router = Router(DEMO, [engine.address for engine in engines], folder)
        try:
            for process in (*engines, router):
                process.wait_ready()
            rounds = [[share_of_a_core(router, count, args.seconds) for count in VIEWERS] for _ in range(args.rounds)]
        finally:
            for process in (router, *engines):
                process.stop()
    for count, shares in zip(VIEWERS, zip(*rounds, strict=True), strict=True):
        each = ", ".join(f"{100 * share:.2f}" for share in shares)
        print(f"{count} viewers: {100 * median(shares):.2f} % of a core ({each})")


if __name__ == "__main__":
    main()
