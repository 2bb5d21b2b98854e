"""What structured output costs: output tokens a second with and without a JSON schema, in one run.

The 135 M model of ``model`` runs the same requests twice in alternation, free and held to a schema, with the same
parameters. Random weights draw almost evenly among what a grammar allows, so that outputs differ as much as they can
and each has masks of its own; the schema asks for a list so long that no output ends early. The tokenizer is a
byte-level BPE of the model's vocabulary size, trained on the source text of Python's own library. The bar is a loss
below 10 %.
"""

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs, StepTrace
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import Grammar
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.structured_output.compiler import ModelGrammars
from quire_proto.sampling import SamplingParams
from quire_proto.structured_output import Structured, StructuredKind

from tests.bench.model import MIB, SHAPE, make_model, make_prompts, measure
from tests.support.executors import load_executor

EOS = 2
TEXT_BYTES = 12 * MIB
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "state": {"enum": ["new", "active", "gone"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,12}$"}, "maxItems": 4},
        },
        "required": ["name", "age", "state"],
        "additionalProperties": False,
    },
}
STRUCTURED = Structured(StructuredKind.JSON_SCHEMA, json.dumps(SCHEMA))


def main() -> None:
    options = parse_options()
    folder = make_model(options.model)
    make_tokenizer(folder / "tokenizer.json")
    grammars = ModelGrammars(folder, SHAPE["vocab_size"], [EOS])
    begin = time.perf_counter()
    grammar = grammars.compile(STRUCTURED)
    compiled = time.perf_counter() - begin
    grammars.close()
    prompts = make_prompts(options.requests, options.input)
    executor = load_executor(folder, kv_cache_memory=options.kv_mib * MIB, swap_bytes=0)
    steps: dict[str, list[StepTrace]] = {"free": [], "schema": []}
    systems = {
        "free": partial(run, executor, prompts, options.output, None, steps["free"]),
        "schema": partial(run, executor, prompts, options.output, grammar, steps["schema"]),
    }
    for once in systems.values():
        once()  # warm-up: threads, caches, lazily packed weights
    for seen in steps.values():
        seen.clear()
    report(options, measure(systems, options.rounds), steps, compiled)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--model", type=Path, default=Path(".run/bench-135m"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def make_tokenizer(path: Path) -> None:
    """A tokenizer as real ones are, written once."""
    if path.is_file():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))


def texts() -> Iterator[str]:
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        size += len(text)
        if size > TEXT_BYTES:
            return


def run(
    executor: TorchExecutor, prompts: list[list[int]], output: int, grammar: Grammar | None, steps: list[StepTrace]
) -> int:
    """Runs all prompts to the end; returns the output tokens."""
    made = 0

    def receive(step: EngineCoreOutputs) -> None:
        nonlocal made
        assert not any(item.error for item in step.all_outputs())
        made += sum(len(item.token_ids) for item in step.all_outputs())
        steps.append(step.trace)

    config = SchedulerConfig(
        max_num_seqs=len(prompts), max_model_len=executor.max_model_len, eos_token_ids=frozenset([EOS])
    )
    core = EngineCore(
        Scheduler(config, KVCacheManager(executor.kv_cache_config, prefix_caching=False)), executor, receive
    )
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            seed=index,
            max_tokens=output,
            ignore_eos=grammar is None,
            structured=None if grammar is None else STRUCTURED,
        )
        core.scheduler.add_request(Request(str(index), prompt, params, grammar=grammar))
    while core.scheduler.has_work:
        core.step()
    assert made == len(prompts) * output
    return made


def report(
    options: argparse.Namespace, rates: dict[str, list[float]], steps: dict[str, list[StepTrace]], compiled: float
) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    decode = {
        name: 1e3 * statistics.median(step.duration for step in seen if step.num_prefill == 0)
        for name, seen in steps.items()
    }
    figures = {
        "requests": options.requests,
        "input": options.input,
        "output": options.output,
        "threads": torch.get_num_threads(),
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "all_rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "decode_step_ms": {name: round(value, 2) for name, value in decode.items()},
        "loss_percent": round(100 * (1 - medians["schema"] / medians["free"]), 1),
        "compile_seconds": round(compiled, 2),
    }
    shape = f"{options.requests} requests, {options.input} tokens in, {options.output} out"
    print(f"{shape}, bf16, {figures['threads']} threads")
    for name, value in medians.items():
        print(f"  {name:<14}{value:8.1f} output tokens/s, decode step {decode[name]:6.2f} ms   {rates[name]}")
    print(f"  loss          {figures['loss_percent']:8.1f} %   (first grammar compiled in {compiled:.2f} s)")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
