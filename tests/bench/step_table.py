"""Decode steps of several batches, and prompts of several lengths, of one model, beside their roofline.

    python -m tests.bench.step_table --model FOLDER --form fp8 --device cuda --json FILE

Decode steps are differences of whole runs, measured in the same way for Quire and for vLLM (``--system vllm``). The
roofline reads weights in the bits that the checkpoint has, whatever a system makes of them, at the highest rate at
which anything here reads memory; ``--json`` has the seconds since the epoch in which each figure was measured.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
from quire_engine.bench.config import BenchConfig
from quire_engine.bench.measure import PeerProcess, System
from quire_engine.bench.quire import Quire
from quire_engine.bench.roofline import Ceilings, Costs, Machine, Widths, least_seconds
from quire_engine.bench.workload import Workload, random_prompt
from quire_engine.checkpoint.config import DecoderConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.device.accelerator import configure_threads, resolve_device
from quire_engine.models.loader import read_decoder_config
from quire_proto.cli import read_settings

from tests.bench.gpu_run import Figure
from tests.bench.random_checkpoint import BYTES_A_WEIGHT, FORMS

PROMPT, WARM_UP = 128, 16
TRIES, DTYPE = 2, torch.bfloat16


class Bench:
    """One system with one model, and the least time that each workload takes on this device."""

    def __init__(self, system: System, model: DecoderConfig, costs: Costs, ceilings: Ceilings) -> None:
        self._system, self._vocab, self._costs, self._ceilings = system, model.vocab_size, costs, ceilings
        self._source = random.Random(0)

    def decode(self, sequences: int, steps: int) -> Sequence[Figure]:
        """A step of ``sequences`` sequences behind prompts of 128 tokens, and tokens a second."""
        prompts = [random_prompt(self._source, PROMPT, self._vocab) for _ in range(sequences)]
        short, long = (Workload(prompts, [size] * sequences) for size in (WARM_UP, WARM_UP + steps))
        self._system.seconds(short)
        begun = min(self._system.seconds(short) for _ in range(TRIES))
        began = time.time()
        seconds = (min(self._system.seconds(long) for _ in range(TRIES)) - begun) / steps
        ended = time.time()
        if seconds <= 0:
            print(f"{sequences} sequences: {steps} steps take less than this machine's times differ", flush=True)
            return ()
        share = (self._least(long) - self._least(short)) / steps / seconds
        name = f"decode, {sequences} sequence{'s' * (sequences > 1)}"
        return (
            Figure(name, 1e3 * seconds, "ms a step", share, began, ended),
            Figure(name, sequences / seconds, "tokens/s", share, began, ended),
        )

    def prompt(self, size: int) -> Figure:
        """The time of a prompt of ``size`` tokens to its first token, the best of several."""
        workloads = [Workload([random_prompt(self._source, size, self._vocab)], [1]) for _ in range(TRIES + 1)]
        self._system.seconds(workloads.pop())
        began = time.time()
        seconds = min(map(self._system.seconds, workloads))
        share = self._least(workloads[0]) / seconds
        return Figure(f"a prompt of {size:,} tokens", 1e3 * seconds, "ms", share, began, time.time())

    def _least(self, workload: Workload) -> float:
        return least_seconds(workload, self._costs, self._ceilings)


def main() -> None:
    options = parse_options()
    model, device, threads = read_decoder_config(options.model), resolve_device(options.device), configure_threads()
    costs = Costs.of(model, Widths(BYTES_A_WEIGHT[options.form], DTYPE.itemsize, DTYPE.itemsize))
    config = settings(options, costs)
    # Before the system starts: a peer takes most of the memory.
    ceilings = measure_ceilings(LoadOptions(config, device), costs)
    began, figures = time.perf_counter(), list[Figure]()
    with closing(start(options, config, threads)) as system:
        print(f"{getattr(system, 'name', 'quire')} started in {time.perf_counter() - began:.1f} s", flush=True)
        bench = Bench(system, model, costs, ceilings)

        def add(*measured: Figure) -> None:
            figures.extend(measured)
            for each in measured:
                print(f"{each.name}: {each.value:,.4g} {each.unit}, {each.share:.0%} of the roofline", flush=True)
            if options.json:
                options.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))

        for sequences in options.sequences:
            add(*bench.decode(sequences, options.steps))
        for size in options.prompts:
            add(bench.prompt(size))


def settings(options: argparse.Namespace, costs: Costs) -> BenchConfig:
    """The engine's settings. A KV pool of a given size spares it a second capture of its graphs."""
    stream, most = PROMPT + WARM_UP + options.steps + 1, max(options.sequences)
    longest = max(stream, *(size + 1 for size in options.prompts))
    kv_bytes = 2 * max(stream * most, longest) * costs.context * DTYPE.itemsize
    flags = {
        "--model": options.model,
        "--device": options.device,
        "--max-num-seqs": most,
        "--max-model-len": longest,
        "--kv-cache-memory": kv_bytes,
        "--swap-space": 0,
        "--scheduling-policy": "fcfs",
    }
    config = read_settings(BenchConfig, [str(part) for flag in flags.items() for part in flag])
    return config.model_copy(update={"enable_prefix_caching": False})


def measure_ceilings(options: LoadOptions, costs: Costs) -> Ceilings:
    """The device's limits. Gives back the memory that measuring took."""
    machine = Machine(DTYPE, options, costs.weights)
    machine.measure()
    ceilings = machine.ceilings
    del machine
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"reads {ceilings.bytes / 1e12:.2f} TB/s, products {ceilings.operations / 1e12:.0f} TFLOP/s", flush=True)
    return ceilings


def start(options: argparse.Namespace, config: BenchConfig, threads: int) -> System:
    """Our engine, or vLLM in a process and an environment of its own."""
    if options.system == "quire":
        return Quire(config)
    peer = {
        "model": str(config.model.resolve()),
        "device": config.device,
        # AWQ's kernels are for float16, and its scales are.
        "dtype": "float16" if options.form == "int4" else "bfloat16",
        "threads": threads,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_tokens": 1 << 18,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    return PeerProcess(options.vllm_python, "run_vllm.py", peer, os.environ)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="its folder, such as random_checkpoint writes")
    parser.add_argument("--form", default="bf16", choices=FORMS, help="of its weights")
    parser.add_argument("--device", default="auto", choices=("cpu", "cuda", "auto"))
    parser.add_argument("--system", default="quire", choices=("quire", "vllm"))
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(sys.executable), help="the interpreter of its environment"
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="where the figures go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
