"""A mixture of experts as one grouped product beside a loop over the experts: `python -m tests.bench.experts`.

For each way to hold the weights and each number of tokens: milliseconds of one layer, by a loop over the experts whose
layers are held as dense ones are, and by the grouped kernel where layers are packed for it. There are as many layers as
do not fit the caches. The ways take turns, and the least of many calls counts, on one thread of its processor time.
"""

import argparse
import time

import torch
from quire_engine.checkpoint.config import MoEConfig
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig
from quire_engine.kernels.experts_kernel import route
from quire_engine.layers.mlp import ExpertLoop, Experts, GatedMLP, make_experts
from quire_engine.quantization.schemes import make_quantization

TOKENS = (1, 4, 16, 64, 256, 1024)
BEYOND_CACHES = 1 << 27  # bytes
TURNS = 5
SECONDS = 0.1


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    sizes = f"{options.experts} experts of {options.inner}, {options.chosen} of them a token, hidden {options.hidden}"
    print(f"{sizes}, {options.threads} threads; milliseconds of a layer")
    for held in ("float32", "bfloat16", "int8", "int4"):
        loops, grouped = make_layers(options, held)
        for tokens in TOKENS:
            ours, theirs = measure(options, tokens, held, loops, grouped)
            print(
                f"{held:9} x {tokens:<5} loop {theirs:8.3f}  grouped {ours:8.3f}  {theirs / ours:5.2f} times",
                flush=True,
            )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("experts", 64), ("chosen", 8), ("hidden", 1024), ("inner", 384), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def make_layers(options: argparse.Namespace, held: str) -> tuple[list[Experts], list[Experts]]:
    """The same experts in a loop and in one kernel, as many layers as do not fit the caches."""
    quantization = held if held.startswith("int") else None
    dtype = torch.float32 if held == "float32" else torch.bfloat16
    method = make_quantization(LoadOptions(ExecutorConfig(quantization=quantization)), dtype).linear
    config = MoEConfig(options.experts, options.chosen, options.inner, True, True, (True,))
    shapes = (2 * options.inner, options.hidden), (options.hidden, options.inner)
    numbers = options.experts * 3 * options.inner * options.hidden
    copies = max(1, BEYOND_CACHES // numbers)
    own = slice(0, options.experts)
    loops: list[Experts] = []
    grouped: list[Experts] = []
    for _ in range(copies):
        weights = [[torch.randn(shape).to(dtype) / 30 for _ in range(options.experts)] for shape in shapes]
        parts = [GatedMLP(method.pack(up, None), method.pack(down, None)) for up, down in zip(*weights, strict=True)]
        loops.append(ExpertLoop(parts, own, options.experts, round_weights=True))
        grouped.append(make_experts(config, method, weights.__getitem__, own, dtype))
    return loops, grouped


def measure(
    options: argparse.Namespace, tokens: int, held: str, loops: list[Experts], grouped: list[Experts]
) -> tuple[float, float]:
    """The least mean milliseconds of a call of the kernel and of the loop."""
    dtype = torch.float32 if held == "float32" else torch.bfloat16
    states = torch.randn(tokens, options.hidden).to(dtype)
    logits = torch.randn(tokens, options.experts).to(dtype)
    weights, chosen = route(logits, options.chosen, normalise=True, round_weights=True)
    least = [float("inf"), float("inf")]
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with torch.inference_mode():
        for _ in range(TURNS):
            for way, layers in enumerate((grouped, loops)):
                begin, calls = clock(), 0
                while clock() - begin < SECONDS / TURNS or not calls:
                    layers[calls % len(layers)](states, weights, chosen)
                    calls += 1
                least[way] = min(least[way], 1e3 * (clock() - begin) / calls)
    return least[0], least[1]


if __name__ == "__main__":
    main()
