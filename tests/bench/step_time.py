"""What a long prompt does to those who decode: with ``--max-step-seconds`` of each value given, in turns, the seconds
between two tokens of the running streams while the prompt is computed, relative to the promise, and how long the prompt
takes. The 135 M model of ``model``, with room for the prompt.

The bar is a 99th percentile of at most 1.2 times the promise.
"""

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from time import perf_counter

from quire_engine.config import EngineArgs
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.request import Request
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import make_scheduler
from quire_proto.sampling import SamplingParams

from tests.bench.model import SHAPE, make_model, make_prompts

WARM_UP = (40, 100, 200, 400, 700, 1000)  # prompt tokens, each while another request decodes
BAR = 1.2


def main() -> None:
    options = parse_options()
    SHAPE["max_position_embeddings"] = options.prompt + 1024
    folder = make_model(options.model)
    limits = [None if each == "default" else float(each) for each in options.limits.split(",")]
    for number in range(options.rounds):
        for limit in limits:
            report(number, limit, measure_one(folder, options, limit))


def measure_one(
    folder: Path, options: argparse.Namespace, limit: float | None
) -> tuple[list[float], list[float], float]:
    """The gaps between tokens of the running streams while the prompt is computed, what its steps might take, and how
    long it took; all in seconds.
    """
    args = EngineArgs(
        model=folder,
        max_step_seconds=limit,
        enable_prefix_caching=False,
        swap_space=0,
        kv_cache_memory=(options.prompt + 8192)
        * 2
        * SHAPE["num_hidden_layers"]
        * SHAPE["num_key_value_heads"]
        * 64
        * 2,
    )
    executor = TorchExecutor.load(args)
    ends: list[float] = []
    promises: list[float] = []
    long_done = False

    def receive(step: EngineCoreOutputs) -> None:
        nonlocal long_done
        assert not any(item.error for item in step.all_outputs())
        ends.append(perf_counter())
        promises.append(step.trace.max_seconds)
        long_done = long_done or any(item.request_id == "long" and item.token_ids for item in step.all_outputs())

    core = EngineCore(make_scheduler(args, executor), executor, receive)

    def add(name: str, length: int, output: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        core.scheduler.add_request(Request(name, make_prompts(1, length)[0], params))

    add("first", 40, 400)
    for number, length in enumerate(WARM_UP * 2):
        add(f"warm {number}", length, 8)
        for _ in range(10):
            core.step()
    while core.scheduler.has_work:
        core.step()
    for number in range(options.streams):
        add(str(number), 64, 900)
    for _ in range(40):
        core.step()
    ends[:], promises[:] = ends[-1:], []
    add("long", options.prompt, 1)
    while not long_done:
        core.step()
    executor.close()
    gaps = [end - before for before, end in pairwise(ends)]
    return gaps, promises, ends[-1] - ends[0]


def report(number: int, limit: float | None, measured: tuple[list[float], list[float], float]) -> None:
    gaps, promises, seconds = measured
    name = "default" if limit is None else f"{limit:g} s"
    p99 = percentile(gaps, 0.99)
    line = f"round {number + 1}, {name:>8}: gaps p50 {1e3 * statistics.median(gaps):6.1f} p99 {1e3 * p99:7.1f} ms"
    bounded = [(gap, promise) for gap, promise in zip(gaps, promises, strict=True) if promise]
    if bounded:
        ratio = percentile([gap / promise for gap, promise in bounded], 0.99)
        told = statistics.median(promise for _, promise in bounded)
        verdict = "within" if ratio <= BAR else "over"
        line += f", promised {1e3 * told:6.1f} ms, p99 {ratio:.2f} times that ({verdict} {BAR})"
    print(f"{line}; prompt {seconds:.1f} s in {len(gaps)} steps", flush=True)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of the model; it is written where it is empty"
    )
    parser.add_argument("--prompt", type=int, default=16_000, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=8, help="sequences that decode meanwhile")
    parser.add_argument("--limits", default="0,default", help="values of --max-step-seconds, or default")
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
