"""What quantised checkpoints of the demo model cost in perplexity, on held-out text of its generator.

    python -m tests.bench.checkpoint_perplexity FOLDER_OR_GGUF [FOLDER_OR_GGUF ...] [--quantization int8]

Each is a checkpoint that some library made of demo/model. The difference is that to the plain model in float32.
"""

import argparse
import math
from pathlib import Path

import torch

from tests.bench.perplexity import DEMO, held_out, learned_of, score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantization", help="hold them so, instead of as they are stored")
    chosen = parser.parse_args()
    documents = held_out(chosen.documents)
    learned = learned_of(documents)
    plain = score(DEMO / "model", documents, "float32")[learned]
    settings = {} if chosen.quantization is None else {"quantization": chosen.quantization}
    print(f"| checkpoint | perplexity ({len(plain)} tokens) | difference | ranked first |\n|---|---|---|---|")
    report("plain, float32", plain, plain)
    for path in chosen.checkpoints:
        report(path.name, plain, score(path, documents, chosen.dtype, **settings)[learned])


def report(name: str, plain: torch.Tensor, made: torch.Tensor) -> None:
    difference = plain[:, 0] - made[:, 0]
    cost = 100 * math.expm1(float(difference.mean()))
    error = 100 * float(difference.std()) / math.sqrt(len(difference))
    perplexity, first = math.exp(-float(made[:, 0].mean())), 100 * float(made[:, 1].mean())
    print(f"| {name} | {perplexity:.5f} | {cost:+.3f} % ± {error:.3f} % | {first:.3f} % |", flush=True)


if __name__ == "__main__":
    main()
