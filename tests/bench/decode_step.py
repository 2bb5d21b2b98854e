"""What a decode step is made of: `python -m tests.bench.decode_step --model FOLDER --device cuda`.

Sequences of 128 tokens decode together until they are warm; then the time of a step, what the host does in it, and on a
GPU how long the GPU is busy and with which kernels. ``--shape qwen3-0.6b`` makes a model of random weights.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from quire_engine.bench.workload import SHAPES, model_of_shape, random_prompt
from quire_engine.config import EngineArgs
from quire_engine.core.engine_core import EngineCore, StepTrace
from quire_engine.core.request import Request
from quire_engine.factory import load_executor, make_scheduler
from quire_proto.sampling import SamplingParams
from torch.profiler import ProfilerActivity, profile

PROMPT, WARM_UP, PROFILED = 128, 100, 20
KERNELS = 16  # that are printed


def main() -> None:
    options = parse_options()
    tokens = WARM_UP + options.steps + PROFILED + 8
    args = EngineArgs(
        model=options.model or model_of_shape(options.shape, 0),
        device=options.device,
        max_num_seqs=options.sequences,
        max_model_len=PROMPT + tokens,
        swap_space=0,
        enable_prefix_caching=False,
        enforce_eager=options.enforce_eager,
    )
    executor = load_executor(args, owns_process=True)
    traces: list[StepTrace] = []
    core = EngineCore(make_scheduler(args, executor), executor, lambda step: traces.append(step.trace))
    source = random.Random(0)
    for number in range(options.sequences):
        prompt = random_prompt(source, PROMPT, executor.config.vocab_size)
        params = SamplingParams(temperature=options.temperature, max_tokens=tokens, ignore_eos=True, seed=number)
        core.scheduler.add_request(Request(str(number), prompt, params))
    run(core, WARM_UP, options.device)
    traces.clear()
    seconds = run(core, options.steps, options.device)
    print(f"{options.sequences} sequences: {1e3 * seconds:.3f} ms a step, {options.sequences / seconds:,.0f} tokens/s")
    phases = {
        "forward and wait": [trace.timings.forward for trace in traces],
        "sampling": [trace.timings.sample for trace in traces],
        "scheduling": [trace.schedule for trace in traces],
        "output": [trace.update for trace in traces],
    }
    print("of the host:", ", ".join(f"{name} {1e3 * statistics.median(each):.3f}" for name, each in phases.items()))
    if options.device == "cuda":
        print_kernels(core)
    executor.close()


def run(core: EngineCore, steps: int, device: str) -> float:
    """Seconds a step."""
    begin = time.perf_counter()
    for _ in range(steps):
        core.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def print_kernels(core: EngineCore) -> None:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run(core, PROFILED, "cuda")
    microseconds, launches = Counter[str](), Counter[str]()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            microseconds[event.name] += event.device_time / PROFILED
            launches[event.name] += 1
    busy, count = microseconds.total() / 1e3, launches.total() / PROFILED
    print(f"the GPU is busy for {busy:.3f} ms a step, with {count:.0f} kernels:")
    for name, each in microseconds.most_common(KERNELS):
        print(f"  {each:8.1f} us in {launches[name] / PROFILED:5.1f}  {name[:90]}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder")
    parser.add_argument("--shape", default="qwen3-0.6b", help=f"random weights instead: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="auto", choices=("cpu", "cuda", "auto"))
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--enforce-eager", action="store_true", help="without graphs")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


if __name__ == "__main__":
    main()
