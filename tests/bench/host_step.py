"""What a decode step costs beside the model, here and in vLLM: ``python -m tests.bench.host_step``.

The model has one layer of 64 numbers, so that nearly all of a step is the engine's own work: what the host has to do
while a GPU computes. Printed are milliseconds a step, greedy and sampled (temperature 1, top_p 0.95), with so many
sequences and with one. vLLM is measured where ``make peers`` has made its environment. The engines run in turns, each
in a process of its own. A step is the difference of two lengths of output, each the least of two measurements.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(".run/host-step")
VLLM = Path(".peers/vllm/bin/python")
VOCABULARY = 4096
TOKENS = 64
KV_BYTES = 2 * 32 * 4  # of a token
BLOCK = 16
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
}


def main() -> None:
    options = parse_options()
    if options.engine:  # this is the process of one engine, and in vLLM's environment there is nothing of ours
        print(json.dumps(measure(options.engine, options.sequences[0], options.context)))
        return
    if not (FOLDER / "config.json").exists():
        write_model(FOLDER)
    interpreters = {"quire": sys.executable} | ({"vllm": str(VLLM)} if VLLM.exists() else {})
    print("| sequences | engine | greedy | sampled | one, greedy | one, sampled |\n|---|---|---|---|---|---|")
    for count in options.sequences:
        for engine, python in interpreters.items():
            words = [python, __file__, "--engine", engine, "--context", str(options.context), "--sequences", str(count)]
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=options.log, text=True, check=True)
            figures = " | ".join(f"{each:.2f} ms" for each in json.loads(done.stdout.splitlines()[-1]))
            print(f"| {count:,} | {engine} | {figures} |", flush=True)


def write_model(folder: Path) -> None:
    """Writes random weights, and a tokenizer with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def measure(engine: str, sequences: int, context: int) -> list[float]:
    """Milliseconds a step: greedy and sampled with all ``sequences``, then with one."""
    length = context + TOKENS + BLOCK
    common: dict[str, Any] = {"max_num_seqs": sequences, "max_model_len": length, "max_num_batched_tokens": 8192}
    common |= {"dtype": "float32", "enable_prefix_caching": False}
    if engine == "quire":
        from quire_engine import LLM, SamplingParams

        kv_cache_memory = sequences * (length + 2 * BLOCK) * KV_BYTES + (64 << 20)
        llm = LLM(str(FOLDER), kv_cache_memory=kv_cache_memory, swap_space=0, max_step_seconds=0, **common)
    else:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the figures are the last line of our output
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found, no-redef]

        llm = LLM(str(FOLDER), disable_log_stats=True, **common)
    draw = random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(2, VOCABULARY) for _ in range(context)]} for _ in range(sequences)]

    def seconds(count: int, tokens: int, settings: dict[str, float]) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **settings)
        began = time.perf_counter()
        llm.generate(prompts[:count], params, use_tqdm=False)
        return time.perf_counter() - began

    figures = []
    for count in (sequences, 1):
        for settings in SAMPLING.values():
            seconds(count, 4, settings)
            half, whole = (min(seconds(count, tokens, settings) for _ in range(2)) for tokens in (TOKENS // 2, TOKENS))
            figures.append(1000 * (whole - half) / (TOKENS - TOKENS // 2))
    return figures


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--context", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--log", type=argparse.FileType("w"), default=subprocess.DEVNULL, help="what the engines log")
    parser.add_argument("--engine", choices=("quire", "vllm"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
