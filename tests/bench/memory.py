"""What an engine's process holds in memory after work: `make bench`.

The 135 M model of ``model`` with small KV pools, 32 requests of 128 tokens in and 64 out over one Session
stream. Resident memory must stay below weights + pools + 700 MiB.
"""

import random
import tempfile
from pathlib import Path

from tests.bench.model import MIB, SHAPE, make_model
from tests.support.engine_session import EngineSession
from tests.support.processes import Engine

POOL_MIB = 128
ALLOWANCE_MIB = 700
REQUESTS, INPUT, OUTPUT = 32, 128, 64


def main() -> None:
    folder = make_model(Path(".run/bench-135m"))
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / MIB
    pools = ("--kv-cache-memory", str(POOL_MIB * MIB), "--swap-space", str(POOL_MIB / 1024))
    with tempfile.TemporaryDirectory() as logs:
        engine = Engine(folder, Path(logs), *pools)
        try:
            engine.wait_ready()
            idle = engine.resident_mib
            work(engine)
            report(weights, idle, engine.resident_mib)
        finally:
            engine.stop()


def work(engine: Engine) -> None:
    generator = random.Random(0)
    with EngineSession(engine, "bench") as link:
        link.snapshot()
        for index in range(REQUESTS):
            prompt = [generator.randrange(3, SHAPE["vocab_size"]) for _ in range(INPUT)]
            link.submit(f"r{index}", prompt, max_tokens=OUTPUT)
        ended = 0
        while ended < REQUESTS:
            ended += sum(output.finish_reason != 0 for output in link.batch().outputs)


def report(weights: float, idle: float, worked: float) -> None:
    limit = weights + 2 * POOL_MIB + ALLOWANCE_MIB
    print(f"  engine process: {idle:.0f} MiB idle, {worked:.0f} MiB after {REQUESTS} requests")
    print(f"  weights {weights:.0f} MiB, KV pools {POOL_MIB} + {POOL_MIB} MiB; the limit is {limit:.0f} MiB")


if __name__ == "__main__":
    main()
