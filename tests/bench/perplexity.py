"""What quantised weights and KV memory cost in accuracy: `python -m tests.bench.perplexity`.

The engine scores held-out conversations of the demo model's generator by their prompt log-probabilities, in each dtype
plain, with each quantization and with KV memory in int8. The perplexity of the tokens that the model was trained to say
(answers, and text after its beginning) is what it is good at; the perplexity of all tokens counts the users' words too,
which it never learned. The margin of error is that of the difference of two means over the same tokens, one standard
error. ``--random FOLDER`` also compares logits of a model of random weights, which has no answers to be sure of.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any, get_args

import torch
from quire_engine.attention.base import AttentionBatch
from quire_engine.attention.cpu import CpuAttention
from quire_engine.attention.kv_cache_spec import BlockLayout
from quire_engine.attention.mixed import attention_of
from quire_engine.checkpoint.weights import LoadOptions
from quire_engine.config import ExecutorConfig, Quantization
from quire_engine.models.loader import load_model, read_model_config
from quire_proto.sampling import SamplingParams
from tokenizers import Tokenizer

from tests.model.engine import run
from tests.support.executors import load_executor

DEMO = Path(__file__).parents[2] / "demo"
HELD_OUT_SEED = 161_803_398
RANDOM_TOKENS = 128
DTYPES = ("float32", "bfloat16")
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
VARIANTS: dict[str, dict[str, str]] = {
    **{name: {"quantization": name} for name in QUANTIZATIONS},
    "KV in int8": {"kv_cache_dtype": "int8"},
    "weights and KV in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
MIB = 1 << 20
Document = tuple[list[int], list[bool]]


def main() -> None:
    options = parse_options()
    documents = held_out(options.documents)
    figures: dict[str, Any] = {}
    for dtype in DTYPES:
        plain = score(DEMO / "model", documents, dtype)
        for name, settings in VARIANTS.items():
            held = score(DEMO / "model", documents, dtype, **settings)
            figures[f"{name}, {dtype}"] = compare(plain, held, learned_of(documents))
    report(figures)
    if options.random:
        figures["random weights"] = compare_logits(options.random)
        for form, error in figures["random weights"].items():
            print(f"random weights, {form}: logits {100 * error:.2f} % off those of plain float32, in the median")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--random", type=Path, help="a model folder, such as the one that tests.bench.model makes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def held_out(count: int) -> list[Document]:
    """Tokens of so many documents, and for each token whether the model was trained to say it."""
    sys.path.insert(0, str(DEMO))  # the generator is a set of scripts, not a package
    from corpus import documents
    from rows import encode

    tokenizer = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    stream = islice(documents(HELD_OUT_SEED, (1, 16), 0.1), count)
    items = [encode(tokenizer, document, start=True) for document in stream]
    return [(item.tokens, item.learned) for item in items if len(item.tokens) < 2048]


def learned_of(documents: Sequence[Document]) -> torch.Tensor:
    """Of every token but each document's first, one after the other."""
    return torch.tensor([each for _, learned in documents for each in learned[1:]])


def score(folder: Path, documents: Sequence[Document], dtype: str, **settings: str) -> torch.Tensor:
    """[T, 2] in float64, of every token but each document's first: the log-probability, and 1 where no token is
    likelier.
    """
    executor = load_executor(folder, dtype=dtype, kv_cache_memory=256 * MIB, swap_bytes=0, **settings)
    prompts = [tokens for tokens, _ in documents]
    made = run(executor, prompts, [SCORED] * len(prompts), prefix_caching=False)
    executor.close()
    told = [each for document in made.prompt_logprobs for each in document]
    return torch.tensor([(each.logprob, each.logprob >= each.top[0][1]) for each in told], dtype=torch.float64)


def compare(plain: torch.Tensor, held: torch.Tensor, learned: torch.Tensor) -> dict[str, dict[str, float]]:
    """Perplexities of the learned tokens and of all, and what the second costs over the first."""
    return {
        "learned": _compare(plain[learned], held[learned]),
        "all": _compare(plain, held),
    }


def _compare(plain: torch.Tensor, held: torch.Tensor) -> dict[str, float]:
    difference = plain[:, 0] - held[:, 0]
    (before, first_before), (after, first_after) = plain.mean(0).tolist(), held.mean(0).tolist()
    return {
        "tokens": len(plain),
        "plain": math.exp(-before),
        "quantised": math.exp(-after),
        "difference_percent": 100 * math.expm1(before - after),
        "error_percent": 100 * float(difference.std()) / math.sqrt(len(difference)),
        "plain_first_percent": 100 * first_before,
        "quantised_first_percent": 100 * first_after,
    }


def report(figures: dict[str, Any]) -> None:
    print("| held in | tokens | plain | quantised | difference | ranked first, plain | quantised |")
    print("|---|---|---|---|---|---|---|")
    for form, kinds in figures.items():
        for kind, each in kinds.items():
            difference = f"{each['difference_percent']:+.3f} % ± {each['error_percent']:.3f} %"
            perplexities = f"{each['plain']:.5f} | {each['quantised']:.5f} | {difference}"
            first = f"{each['plain_first_percent']:.3f} % | {each['quantised_first_percent']:.3f} %"
            print(f"| {form} | {kind}, {each['tokens']} | {perplexities} | {first} |")


def compare_logits(folder: Path) -> dict[str, float]:
    """The median over tokens of how far logits are off those of plain float32, relative to their size."""
    truth = logits_of(folder, "float32", None)
    errors = {}
    for dtype, quantization in (("bfloat16", None), *product(DTYPES, QUANTIZATIONS)):
        off = (logits_of(folder, dtype, quantization) - truth).norm(dim=-1) / truth.norm(dim=-1)
        errors[" ".join(filter(None, (dtype, quantization)))] = float(off.median())
    return errors


@torch.inference_mode()
def logits_of(folder: Path, dtype: str, quantization: Quantization | None) -> torch.Tensor:
    """Logits [T, vocabulary] of a sequence of random tokens."""
    config = read_model_config(folder)
    model = load_model(config, folder, LoadOptions(ExecutorConfig(dtype=dtype, quantization=quantization)))
    attention = attention_of(model.attention_layers, 16, CpuAttention)
    batch = one_sequence(RANDOM_TOKENS)
    attention.prepare(batch)
    layout = BlockLayout.of(model.attention_layers, 16, model.dtype)
    kv = layout.views(torch.zeros(len(batch.page_ids) + 1, layout.elements, dtype=model.dtype))
    tokens = torch.randint(config.vocab_size, (RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return model.logits(model.forward(tokens, batch.positions, kv, attention)).float()


def one_sequence(tokens: int) -> AttentionBatch:
    """So many tokens of one sequence, in blocks of 16 from block 1 on."""
    pages = -(-tokens // 16)
    return AttentionBatch(
        query_indptr=torch.tensor([0, tokens], dtype=torch.int32),
        page_indptr=torch.tensor([0, pages], dtype=torch.int32),
        page_ids=torch.arange(1, pages + 1, dtype=torch.int32),
        last_page_len=torch.tensor([(tokens - 1) % 16 + 1], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        positions=torch.arange(tokens, dtype=torch.int32),
    )


if __name__ == "__main__":
    main()
