"""Products with one weight [8192, 2048] in every form that the CPU's kernels hold it in, in turns.

    python -m tests.bench.quantized_products

Each form has several weights, more than caches hold together. Activations are bfloat16.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig, Quantization
from quire_engine.kernels.packed_groups import GroupedWeight
from quire_engine.quantization.quantized_linear import GroupedLinear
from quire_engine.quantization.schemes import make_linear

OUTPUTS, INPUTS, COPIES = 8192, 2048, 6
ROWS = (1, 8, 128)
Product = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    plain = torch.randn(OUTPUTS, INPUTS).bfloat16()
    forms: dict[str, list[Product]] = {
        "bfloat16": made(plain, None),
        "int8": made(plain, "int8"),
        "int8, groups of 32": [grouped(32) for _ in range(COPIES)],
        "int8, groups of 16": [grouped(16) for _ in range(COPIES)],
        "int4": made(plain, "int4"),
    }
    print(f"milliseconds, {torch.get_num_threads()} threads\n| rows | {' | '.join(forms)} |")
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(rounds + 1):
            for name, products in forms.items():
                begin = time.perf_counter()
                for product in products:
                    product(x)
                times[name].append(1e3 * (time.perf_counter() - begin) / COPIES)
        print(f"| {rows} | {' | '.join(f'{median(each[1:]):.2f}' for each in times.values())} |", flush=True)


def made(plain: torch.Tensor, quantization: Quantization | None) -> list[Product]:
    options = LoadOptions(ExecutorConfig(quantization=quantization))
    return [make_linear(plain, None, options) for _ in range(COPIES)]


def grouped(size: int) -> Product:
    q = torch.randint(-128, 128, (OUTPUTS, INPUTS)).to(torch.int8)
    return GroupedLinear(GroupedWeight(q, torch.rand(OUTPUTS, INPUTS // size), None, size), None, torch.bfloat16)


if __name__ == "__main__":
    main()
