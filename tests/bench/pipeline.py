"""What dividing a model into stages costs where the cores are the same: `python -m tests.bench.pipeline`.

The 135 M model of ``model`` in one process with all cores, and in a pipeline whose stages share them, in turns, each in
processes of their own; medians. For each number of requests: tokens a second, the pipeline's over one process's, and
the part of its cores' time that each process leaves unused.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import psutil

from tests.bench.model import make_model, make_prompts

PROMPT, OUTPUT = 32, 64
LONG_PROMPT, LONG_PROMPTS = 512, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--folder", type=Path, default=Path(".run/bench-135m"))
    parser.add_argument("--run", type=int, help="measures so many stages in this process, and prints JSON")
    options = parser.parse_args()
    folder = make_model(options.folder)
    if options.run:
        print(json.dumps(measure(folder, options.run, options.requests)))
        return
    rounds = [
        {stages: measure_apart(folder, stages, options.requests) for stages in (1, options.stages)}
        for _ in range(options.rounds)
    ]
    for name in rounds[0][1]:
        one, many = ([each[stages][name] for each in rounds] for stages in (1, options.stages))
        rates = [statistics.median(tokens for tokens, _ in each) for each in (one, many)]
        idle = [
            [statistics.median(part) for part in zip(*(idle for _, idle in each), strict=True)] for each in (one, many)
        ]
        whole, stages = (", ".join(f"{part:.0%}" for part in each) for each in idle)
        print(
            f"{name:>24}: {rates[0]:7.0f} tokens/s in one process (idle {whole}), {rates[1]:7.0f} in {options.stages} "
            f"stages (idle {stages}): {rates[1] / rates[0]:.2f}"
        )


Measured = dict[str, tuple[float, list[float]]]


def measure_apart(folder: Path, stages: int, requests: list[int]) -> Measured:
    """``measure`` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.pipeline", "--run", str(stages), "--folder", str(folder)]
    done = subprocess.run([*command, "--requests", *map(str, requests)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def measure(folder: Path, stages: int, requests: list[int]) -> Measured:
    """Tokens a second, and the part of the time in which each process is idle, of each workload."""
    from quire_engine.config import EngineArgs
    from quire_engine.factory import load_executor

    config = EngineArgs(
        model=folder, pipeline_parallel_size=stages, kv_cache_memory=1 << 30, swap_space=0.0, max_num_seqs=256
    )
    executor = load_executor(config, owns_process=True)
    processes = [psutil.Process(), *psutil.Process().children()]
    measured: Measured = {}
    for count in requests:
        measured[f"{count} that decode"] = run(config, executor, processes, make_prompts(count, PROMPT), OUTPUT)
    prompts = make_prompts(LONG_PROMPTS, LONG_PROMPT)
    measured[f"prompts of {LONG_PROMPT}"] = run(config, executor, processes, prompts, 1)
    executor.close()
    return measured


def run(config, executor, processes, prompts: list[list[int]], output: int) -> tuple[float, list[float]]:
    from quire_engine.core.engine_core import EngineCore
    from quire_engine.core.request import Request
    from quire_engine.device.host import usable_cores
    from quire_engine.factory import make_scheduler
    from quire_proto.sampling import SamplingParams

    best: tuple[float, list[float]] = (0.0, [])
    for _ in range(3):  # the first one captures
        core = EngineCore(make_scheduler(config, executor), executor, lambda _: None)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            core.scheduler.add_request(Request(str(index), prompt, params))
        busy = [sum(process.cpu_times()[:2]) for process in processes]
        begin = perf_counter()
        while core.scheduler.has_work:
            core.step()
        seconds = perf_counter() - begin
        used = [sum(process.cpu_times()[:2]) - before for process, before in zip(processes, busy, strict=True)]
        cores = usable_cores() / len(processes)
        idle = [max(0.0, 1 - each / seconds / cores) for each in used]
        tokens = len(prompts) * (output if output > 1 else len(prompts[0]))
        best = max(best, (tokens / seconds, idle))
    return best


if __name__ == "__main__":
    main()
