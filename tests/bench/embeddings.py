"""Embeddings beside sentence-transformers: `python -m tests.bench.embeddings --rounds 7`.

A decoder and an encoder of random weights, each loaded by both into one process with the same number of threads, embed
the same texts of different lengths in turns; medians of the texts a second. Their results are compared once.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from quire_engine import LLM
from quire_engine.device.accelerator import usable_threads
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, PreTrainedConfig, Qwen3Config

from tests.support.model_folders import byte_level
from tests.support.sentence_folders import WORDS, decoder_folder, encoder_folder, word_level

# all-MiniLM-L6-v2, and a decoder of about as many parameters a layer as Qwen3-Embedding-0.6B has in a third.
MODELS: dict[str, tuple[Callable[[Path], Path], Callable[[], PreTrainedConfig]]] = {
    "encoder": (
        encoder_folder,
        lambda: BertConfig(
            vocab_size=word_level().get_vocab_size(),
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=12,
            max_position_embeddings=512,
        ),
    ),
    "decoder": (
        decoder_folder,
        lambda: Qwen3Config(
            vocab_size=byte_level().get_vocab_size(),
            hidden_size=640,
            intermediate_size=1920,
            num_hidden_layers=12,
            num_attention_heads=10,
            num_key_value_heads=5,
            head_dim=64,
            max_position_embeddings=1024,
        ),
    ),
}


def main() -> None:
    options = parse_options()
    torch.set_num_threads(usable_threads())
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, make_model(name, Path(folder) / name), options)


def make_model(name: str, folder: Path) -> Path:
    """The folder of small parts, with a larger model in it."""
    write, config = MODELS[name]
    write(folder)
    torch.manual_seed(1)
    AutoModel.from_config(config(), dtype=torch.float32).save_pretrained(folder)
    (folder / "sentence_bert_config.json").unlink()
    return folder


def compare(name: str, folder: Path, options: argparse.Namespace) -> None:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, options.words))) for _ in range(options.texts)]
    settings = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, options.dtype)}}
    other = SentenceTransformer(str(folder), **settings)
    other.max_seq_length = 1024
    # The texts are the same in each round: with prefix caching a decoder would only look them up.
    memory: dict[str, Any] = {"kv_cache_memory": 256 << 20, "swap_space": 0.0, "enable_prefix_caching": False}
    with LLM(folder, dtype=options.dtype, max_num_seqs=options.batch, **memory) as llm:

        def ours() -> np.ndarray:
            return np.array([each.outputs.embedding for each in llm.embed(texts, use_tqdm=False) if each.outputs])

        def theirs() -> np.ndarray:
            return np.asarray(other.encode(texts, batch_size=options.batch, show_progress_bar=False))

        difference = float(np.abs(ours() - theirs()).max())
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(options.rounds):
            for way, embed in (("ours", ours), ("theirs", theirs)):
                begun = perf_counter()
                embed()
                seconds[way].append(perf_counter() - begun)
    rates = {way: len(texts) / statistics.median(each) for way, each in seconds.items()}
    print(
        f"{name} {options.dtype}, batches of {options.batch}: {rates['ours']:.1f} texts/s, sentence-transformers "
        f"{rates['theirs']:.1f}: {rates['ours'] / rates['theirs']:.2f} times; they differ by {difference:.1e}"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--words", type=int, default=96, help="of the longest text")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


if __name__ == "__main__":
    main()
