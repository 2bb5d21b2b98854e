"""How long an engine that sleeps takes to be awake again, and what memory it has meanwhile: a process, asked by gRPC as
its routers ask. The bar: at most a second for a shape of 0.6 B on the CPU.

    .venv/bin/python -m tests.bench.wake --shape qwen3-0.6b --rounds 5
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import grpc
from quire.v1 import engine_pb2 as pb
from quire.v1.engine_pb2_grpc import EngineStub
from quire_engine.bench.workload import model_of_shape

from tests.support.processes import Engine

BAR = 1.0


def main() -> None:
    """Prints a line for each round, and the median. Exits with 1 if that is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", help="random weights of this shape, as quire-engine bench has")
    parser.add_argument("--model", type=Path, help="a model's folder instead")
    parser.add_argument("--device", default="auto", choices=("cpu", "cuda", "auto"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, seconds = options.model or model_of_shape(options.shape, 0), list[float]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--kv-cache-memory", str(1 << 30), "--device", options.device)
        engine = Engine(model, folder, *flags, OMP_NUM_THREADS="2")
        stack.callback(engine.kill)
        engine.wait_ready()
        asked = EngineStub(stack.enter_context(grpc.insecure_channel(engine.address)))
        for number in range(options.rounds):
            awake = engine.resident_mib
            began = perf_counter()
            asked.Sleep(pb.SleepRequest(wait_seconds=10), timeout=120)
            slept, asleep = perf_counter() - began, engine.resident_mib
            began = perf_counter()
            asked.WakeUp(pb.WakeUpRequest(), timeout=120)
            seconds.append(perf_counter() - began)
            print(
                f"round {number + 1}: asleep after {slept:.2f} s with {asleep:.0f} MiB of {awake:.0f}, "
                f"awake after {seconds[-1]:.2f} s"
            )
    median = statistics.median(seconds)
    print(f"awake after {median:.2f} s, {max(seconds):.2f} s at most (bar {BAR:g} s)")
    sys.exit(median > BAR)


if __name__ == "__main__":
    main()
