"""What sampling parameters cost a step, without a model: `python -m tests.bench.sampling`.

One decode step's draws, from ready logits to tokens, for each kind of parameter, as a ratio to plain rows of the same
batch: greedy ones for what changes a greedy draw, and ones drawn at temperature 1 for the rest. Every sequence has a
prompt and an output behind it. The kinds take turns, and medians are compared.

A second table, on the CPU: the compiled sampler at the vocabularies of two families of models, and how many times as
long the torch form takes for the same step.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from tests.support.sampling_inputs import KeepingSampler, Output, make_output, run_step

PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5}
BIAS = {"logit_bias": tuple((token_id, 1.0) for token_id in range(0, 3000, 10))}
BAD_WORDS = {"bad_words": tuple((token_id, token_id + 1) for token_id in range(64))}
FILTERS = {"top_k": 50, "top_p": 0.9, "min_p": 0.05}
EVERYTHING = PENALTIES | BIAS | BAD_WORDS | FILTERS | {"logprobs": 5, "min_tokens": 4000}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "greedy": ("greedy", {"temperature": 0}),
    "random": ("random", {"temperature": 1.0}),
    "filters": ("random", {"temperature": 1.0} | FILTERS),
    "penalties": ("greedy", {"temperature": 0} | PENALTIES),
    "bias": ("greedy", {"temperature": 0} | BIAS),
    "bad words": ("greedy", {"temperature": 0} | BAD_WORDS),
    "grammar": ("greedy", {"temperature": 0, "grammar": True}),
    "logprobs": ("greedy", {"temperature": 0, "logprobs": 5}),
    "beams": ("greedy", {"temperature": 0, "num_candidates": 16}),
    "everything": ("random", {"temperature": 1.0, "grammar": True} | EVERYTHING),
}
COMPILED: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "T=1": {"temperature": 1.0},
    "T=1, top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
VOCABULARIES = (49_152, 151_936)


class EvenTokens:
    """A grammar, and its own matcher, that costs next to nothing to ask: every second token is allowed."""

    def new_matcher(self) -> "EvenTokens":
        return self

    def accept_tokens(self, token_ids: object) -> None:
        del token_ids

    def fill_bitmask(self, mask: memoryview) -> None:
        np.frombuffer(mask, np.int32)[:] = 0x55555555


def main() -> None:
    options = parse_options()
    logits = make_logits(options)
    steps = {name: make_step(options, wanted, logits) for name, (_, wanted) in KINDS.items()}
    figures = measure(steps, options.steps)
    where = f"{options.device}, {torch.get_num_threads()} threads"
    print(f"{options.rows} rows of {options.vocab} {options.dtype} logits, {where}")
    for name, (base, _) in KINDS.items():
        print(f"  {name:<12}{figures[name]:8.3f} ms a step, {figures[name] / figures[base]:6.2f} of {base}")
    if options.device == "cpu":
        for vocab_size in VOCABULARIES:
            options.vocab = vocab_size
            print_compiled(options)


def print_compiled(options: argparse.Namespace) -> None:
    """Each kind's step with the compiled sampler, and what the torch form takes for it."""
    logits = make_logits(options)
    steps = {name: make_step(options, wanted, logits) for name, wanted in COMPILED.items()}
    figures = measure(steps, options.steps)
    with mock.patch("quire_engine.sampling.sample_kernel.library", return_value=None):
        in_torch = measure(steps, max(1, options.steps // 10))
    print(f"{options.rows} rows of {options.vocab} {options.dtype} logits: compiled, and how often as long in torch")
    for name, took in figures.items():
        print(f"  {name:<16}{took:8.3f} ms a step{in_torch[name] / took:8.1f}")


def make_logits(options: argparse.Namespace) -> torch.Tensor:
    """Logits whose distribution is flat: hardly any other costs more."""
    logits = torch.randn(options.rows, options.vocab, generator=torch.Generator().manual_seed(0))
    return logits.to(options.device, getattr(torch, options.dtype))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of each output so far")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def make_step(options: argparse.Namespace, wanted: dict[str, object], logits: torch.Tensor) -> Callable[[], None]:
    """One step of a batch whose rows all want the same, each time with one more token behind it."""
    sampler, outputs = KeepingSampler(options.vocab), [one_output(options, id, wanted) for id in range(options.rows)]

    def step() -> None:
        made = run_step(sampler, outputs, logits)
        assert not made.errors
        for output in outputs:
            output.token_ids.append(made.token_ids.get(output.id, 0))

    return step


def one_output(options: argparse.Namespace, id: int, wanted: dict[str, object]) -> Output:
    tokens = random.Random(id).choices(range(options.vocab), k=options.prompt + options.output)
    prompt, output = tokens[: options.prompt], tokens[options.prompt :]
    grammar = EvenTokens() if "grammar" in wanted else None
    fields = {"temperature": 1.0, "max_tokens": 5000} | wanted | {"grammar": grammar}
    return make_output(id, prompt, output, seed=id, stop_token_ids=frozenset((2,)), **fields)


def measure(steps: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Median milliseconds of each step."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(count + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


if __name__ == "__main__":
    main()
