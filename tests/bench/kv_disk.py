"""Seconds to the first token of a long prompt: cold, found on the device, on the host, and on disk after a restart.

    .venv/bin/python -m tests.bench.kv_disk --model FOLDER [--tokens 1500] [--runs 5]

The disk's blocks are dropped from the system's memory before each run, so that they are read from the disk.
"""

import argparse
import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from quire_engine.config import EngineArgs
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.request import Request
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import make_scheduler
from quire_proto.sampling import SamplingParams


class Engine:
    """An engine, and the requests that it was given."""

    def __init__(self, args: EngineArgs) -> None:
        self.executor = TorchExecutor.load(args)
        self.core = EngineCore(make_scheduler(args, self.executor), self.executor, self._receive)
        self._first_token = 0.0
        self._requests = 0

    def _receive(self, step: EngineCoreOutputs) -> None:
        assert not any(output.error for output in step.all_outputs())
        if any(output.token_ids for output in step.all_outputs()):
            self._first_token = perf_counter()

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds to the first token. Returns when nothing is left to do."""
        self._requests += 1
        request = Request(str(self._requests), prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        begun = perf_counter()
        self.core.scheduler.add_request(request)
        while self.core.scheduler.has_work:
            self.core.step()
        return (self._first_token - begun) * 1000

    def clear_device(self) -> None:
        """The device's pool gives up all that it has, what was used twice to the host."""
        pool = self.core.scheduler.kv_cache_manager.device_pool
        for block_id in [pool.allocate() for _ in range(pool.num_free)]:
            pool.decref(block_id)
        self.core.step()


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--path", type=Path, help="a folder on the disk to measure; by default one in the system's")
    options = parser.parse_args()
    measured: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "disk, after a restart": []}
    with TemporaryDirectory(dir=options.path) as folder:
        args = EngineArgs(
            model=options.model, kv_cache_memory=1 << 29, swap_space=1, kv_disk_path=Path(folder), kv_disk_space=2
        )
        prompts = [
            [(token * 31 + run) % 200 + 10 for token in range(options.tokens)] for run in range(options.runs + 1)
        ]
        engine = Engine(args)
        engine.first_token(prompts.pop())  # what is built or read once
        for prompt in prompts:
            measured["cold"].append(engine.first_token(prompt))
            engine.first_token(prompt)  # at its second use a block is copied to the host, to go to disk
            measured["device"].append(engine.first_token(prompt))
            engine.clear_device()
            measured["host"].append(engine.first_token(prompt))
        engine.executor.close()
        engine = Engine(args)
        engine.first_token([5] * options.tokens)
        for prompt in prompts:
            drop_pages(Path(folder))
            measured["disk, after a restart"].append(engine.first_token(prompt))
        found = engine.core.scheduler.stats.prefix_disk_tokens
        engine.executor.close()
    print(f"{options.tokens} tokens, {options.runs} runs; {found} tokens were loaded from disk")
    print("| prompt found | first token, ms, median | least | most |\n|---|---|---|---|")
    for where, times in measured.items():
        print(f"| {where} | {median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main()
