"""Trains the demo model and writes its folder: `python demo/train.py --out demo/model`.

The run is a function of its seed and of its number of steps. `--evaluate` measures a finished folder instead.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from corpus import documents
from decoder import Decoder, Shape
from evaluate import evaluate
from muon import Optimiser
from rows import IGNORED, LONG, MIDDLE, SHORT, TOOLS, Batch, Diet, batches
from safetensors.torch import load_file, save_file
from tokenizer import TEXT_END, TURN_END, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

TOKENS_PER_PART = 1024
TOKENIZER_DOCUMENTS = 12_000
WARMUP_STEPS = 60
CHECKPOINT_STEPS = 200


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--steps", type=int, default=1500, help="optimiser steps")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a step, a multiple of 2048")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the schedule early, after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="processor cores to use")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rate")
    parser.add_argument("--resume", action="store_true", help="begin from the weights found in the folder")
    parser.add_argument("--checkpoints", type=Path, help="folder for the weights of every 200th step")
    parser.add_argument("--new-tokenizer", action="store_true", help="do not keep the tokenizer found in the folder")
    parser.add_argument("--eager", action="store_true", help="do not compile the network (no C++ compiler needed)")
    parser.add_argument("--evaluate", action="store_true", help="print the accuracy table of the folder, train nothing")
    return parser.parse_args()


def tokenizer_for(folder: Path, seed: int, fresh: bool, shape: Shape) -> Tokenizer:
    """The folder's tokenizer, or a new one learned from the corpus."""
    path = folder / "tokenizer.json"
    if path.exists() and not fresh:
        tokenizer = Tokenizer.from_file(str(path))
    else:
        sample = islice(documents(seed, turns=(1, 6), plain_share=0.1), TOKENIZER_DOCUMENTS)
        tokenizer = train_tokenizer(sample, shape.vocabulary)
    save_tokenizer(tokenizer, folder, shape.context)
    return tokenizer


def diet_of(step: int) -> Diet:
    """Two steps in five have tools. Of the others, most have short rows, which are the cheapest to learn from, and one
    in twelve has long ones, often enough to hold the context together.
    """
    if step % 5 in (1, 3):
        return TOOLS
    step = step // 5 * 3 + step % 5 // 2
    if step % 12 == 11:
        return LONG
    return MIDDLE if step % 3 == 2 else SHORT


def batch_stream(tokenizer: Tokenizer, tokens_per_step: int, seed: int) -> Iterator[Batch]:
    """The batch of each step, each kind from a seed of its own."""
    streams = {
        diet: batches(tokenizer, diet, tokens_per_step, seed * 1000 + number)
        for number, diet in enumerate((SHORT, MIDDLE, LONG, TOOLS))
    }
    step = 0
    while True:
        yield next(streams[diet_of(step)])
        step += 1


def rate_scale(step: int, progress: float) -> float:
    """Linear warm-up, then half a cosine down to nothing over `progress` from 0 to 1."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Gradients:
    """Gradients of a batch, whose parts are spread over threads and summed in a fixed order.

    Threads of one core each, rather than one operation on many cores, keep going when a core is taken away.
    """

    def __init__(self, network: Decoder, threads: int, eager: bool) -> None:
        self.parameters = list(network.parameters())
        self.forward = network if eager else torch.compile(network, dynamic=False)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.seen: set[torch.Size] = set()

    def of_part(self, part: Batch) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Summed loss and gradients of one part, with bfloat16 products of float32 parameters."""
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = self.forward(*part)
        return loss.detach(), torch.autograd.grad(loss, self.parameters)

    def of_batch(self, batch: Batch) -> float:
        """Leave the mean gradients in the parameters and return the mean loss."""
        parts = batch.parts(max(1, TOKENS_PER_PART // batch.tokens.shape[1]))
        first = [] if parts[0].tokens.shape in self.seen else [self.of_part(parts[0])]  # compiles in this thread
        self.seen.add(parts[0].tokens.shape)
        results = first + list(self.pool.map(self.of_part, parts[len(first) :]))
        count = (batch.targets != IGNORED).sum()
        for parameter, *gradients in zip(self.parameters, *(gradients for _, gradients in results), strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / count
        return float(sum(loss for loss, _ in results) / count)


def train(network: Decoder, source: Iterator[Batch], options: argparse.Namespace) -> None:
    """Train in place."""
    optimiser = Optimiser(network, matrix_rate=0.02, vector_rate=0.004, decay=0.03)
    gradients = Gradients(network, options.threads, options.eager or shutil.which("g++") is None)
    started, progress, step, average = time.monotonic(), 0.0, 0, 0.0
    while progress < 1:
        loss = gradients.of_batch(next(source))
        optimiser.step(options.rate * rate_scale(step, progress))
        average = 0.98 * average + 0.02 * loss
        step += 1
        elapsed = (time.monotonic() - started) / 60
        progress = max(step / options.steps, elapsed / options.minutes)
        if options.checkpoints and step % CHECKPOINT_STEPS == 0:
            save_weights(network, options.checkpoints / f"step-{step:06d}.safetensors")
        if step % 50 == 0:
            mean = average / (1 - 0.98**step)
            print(f"step {step:5d}  loss {mean:.4f}  {elapsed:5.1f} min  {progress:6.1%}", flush=True)


def generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    """The `generation_config.json` of the folder: greedy, up to the end of turn."""
    end, turn_end = tokenizer.token_to_id(TEXT_END), tokenizer.token_to_id(TURN_END)
    return {"bos_token_id": end, "eos_token_id": turn_end, "pad_token_id": end, "do_sample": False}


def save_weights(network: Decoder, path: Path) -> None:
    """Write the weights as bfloat16; the head is not stored, being the embedding."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().bfloat16().contiguous() for name, value in network.named_parameters()}
    save_file(weights, path, metadata={"format": "pt"})


def save(network: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights as bfloat16, and both configurations."""
    save_weights(network, folder / "model.safetensors")
    generation = generation_config(tokenizer)
    special = {key: value for key, value in generation.items() if key.endswith("_id")}
    for name, content in (("config", network.shape.config() | special), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Train or evaluate, as the command line says."""
    options = arguments()
    torch.manual_seed(options.seed)
    if options.evaluate:
        print(evaluate(options.out))
        return
    torch.set_num_threads(1)
    shape = Shape()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_for(options.out, options.seed, options.new_tokenizer, shape)
    network = Decoder(shape)
    if options.resume:
        network.load_state_dict(load_file(options.out / "model.safetensors"))
    train(network, batch_stream(tokenizer, options.tokens, options.seed), options)
    save(network, tokenizer, options.out)
    print(evaluate(options.out))


if __name__ == "__main__":
    main()
