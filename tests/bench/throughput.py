"""Output tokens a second beside transformers' static batch, in one run: `make bench`.

A Llama-shaped model with 135 M random bf16 weights runs the same requests, greedy and ignoring end of sequence,
through Quire's engine (continuous batching over paged memory) and through transformers' ``generate`` with one static
batch. The two alternate, and the medians are compared: absolute figures depend on the machine, the ratio much less.
"""

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quire_engine.core import EngineCore, StepOutput, StepTrace
from quire_engine.executor.torch.executor import TorchExecutor
from quire_engine.kv.memory import KvMemory
from quire_engine.request import Request
from quire_engine.scheduling.config import SchedulerConfig
from quire_engine.scheduling.scheduler import Scheduler
from quire_proto.sampling import SamplingParams

MIB = 1 << 20
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}


def main() -> None:
    options = parse_options()
    folder = make_model(options.model)
    prompts = make_prompts(options.requests, options.input)
    executor = TorchExecutor.load(folder, kv_cache_bytes=options.kv_mib * MIB, swap_bytes=0)
    steps: list[StepTrace] = []
    systems: dict[str, Callable[[], int]] = {
        "quire": lambda: run_quire(executor, prompts, options.output, steps),
        "transformers": make_transformers(folder, prompts, options.output),
    }
    for run in systems.values():
        run()  # warm-up: threads, caches, lazily packed weights
    steps.clear()
    rates = measure(systems, options.rounds)
    report(options, rates, steps)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--model", type=Path, default=Path(".run/bench-135m"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def make_model(folder: Path) -> Path:
    """The 135 M model, written once."""
    if not (folder / "config.json").is_file():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_prompts(count: int, length: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(3, SHAPE["vocab_size"]) for _ in range(length)] for _ in range(count)]


def run_quire(executor: TorchExecutor, prompts: list[list[int]], output: int, steps: list[StepTrace]) -> int:
    """Runs all prompts to the end; returns the output tokens."""
    made = 0

    def receive(step: StepOutput) -> None:
        nonlocal made
        made += sum(len(item.token_ids) for item in step.outputs)
        steps.append(step.trace)

    config = SchedulerConfig(max_num_seqs=len(prompts), max_model_len=executor.max_model_len)
    core = EngineCore(Scheduler(config, KvMemory(executor.capacity, prefix_caching=False)), executor, receive)
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.scheduler.add(Request(str(index), prompt, params))
    while core.scheduler.has_work:
        core.step()
    assert made == len(prompts) * output
    return made


def make_transformers(folder: Path, prompts: list[list[int]], output: int) -> Callable[[], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)

    def run() -> int:
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        return int(answer.numel() - ids.numel())

    return run


def measure(systems: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Output tokens a second of each round, the systems in alternation."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            begin = time.perf_counter()
            rates[name].append(run() / (time.perf_counter() - begin))
    return rates


def report(options: argparse.Namespace, rates: dict[str, list[float]], steps: list[StepTrace]) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    decode = [step for step in steps if step.num_prefill == 0]
    figures = {
        "requests": options.requests,
        "input": options.input,
        "output": options.output,
        "threads": torch.get_num_threads(),
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "all_rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "ratio": round(medians["quire"] / medians["transformers"], 2),
        "decode_step_ms": round(1e3 * statistics.median(step.duration for step in decode), 2),
        "bookkeeping_ms": round(1e3 * statistics.median(step.schedule + step.emit for step in decode), 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    shape = f"{options.requests} requests, {options.input} tokens in, {options.output} out"
    print(f"{shape}, bf16, {figures['threads']} threads")
    for name, value in medians.items():
        print(f"  {name:<14}{value:8.1f} output tokens/s   {figures['all_rounds'][name]}")
    print(f"  ratio         {figures['ratio']:8.2f}")
    print(f"  decode step   {figures['decode_step_ms']:8.2f} ms, bookkeeping {figures['bookkeeping_ms']} ms of it")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
