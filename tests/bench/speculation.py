"""What guessing tokens brings where text repeats itself, and what it costs elsewhere:
`python -m tests.bench.speculation`.

The 135 M model of ``model``, with each ``--speculative-method`` and without, in turns; tokens a second, medians. Its
weights are random, so that grammars make its text: one that says the prompt again, one that does so with a change now
and then, one that leaves it after a few tokens each time, and none. All engines fill the same bitmasks.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from quire_engine.config import EngineArgs
from quire_engine.core.engine_core import EngineCore, EngineCoreOutputs
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.factory import load_executor, make_scheduler
from quire_proto.sampling import SamplingParams

from tests.bench.model import SHAPE, make_model

INPUT, OUTPUT = 200, 200
BARS = {"repeats": 1.8}
ELSEWHERE = 0.97
METHODS = ("ngram", "suffix")


class Script:
    """A grammar, and the matcher of its one output, that allows one text."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._position = 0

    def new_matcher(self) -> "Script":
        return Script(self._text)

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self._position += len(token_ids)

    def fill_bitmask(self, mask: memoryview) -> None:
        self._allow(self._position, mask)

    def fill_bitmask_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> None:
        self._allow(self._position + len(draft_token_ids), mask)

    def _allow(self, position: int, mask: memoryview) -> None:
        token_id = self._text[position]
        np.frombuffer(mask, np.uint32)[token_id // 32] = 1 << token_id % 32


def some_text(source: random.Random, length: int) -> list[int]:
    return [source.randrange(3, SHAPE["vocab_size"]) for _ in range(length)]


def repeats(source: random.Random) -> tuple[list[int], list[int]]:
    """The output says the prompt again."""
    prompt = some_text(source, INPUT)
    return prompt, (prompt * (1 + OUTPUT // INPUT))[:OUTPUT]


def edits(source: random.Random) -> tuple[list[int], list[int]]:
    """The output says the prompt again, and every twelfth token is another."""
    prompt, output = repeats(source)
    for position in range(11, OUTPUT, 12):
        output[position] = source.randrange(3, SHAPE["vocab_size"])
    return prompt, output


def misleads(source: random.Random) -> tuple[list[int], list[int]]:
    """The output has three tokens of the prompt, and goes on otherwise, again and again."""
    prompt, output = some_text(source, INPUT), list[int]()
    while len(output) < OUTPUT:
        start = source.randrange(INPUT - 3)
        output += [*prompt[start : start + 3], source.randrange(3, SHAPE["vocab_size"])]
    return prompt, output[:OUTPUT]


def wanders(source: random.Random) -> tuple[list[int], None]:
    """The output is what the model draws."""
    return some_text(source, INPUT), None


class Work(NamedTuple):
    name: str
    make: Callable[[random.Random], tuple[list[int], list[int] | None]]
    streams: int


WORK = (
    Work("repeats", repeats, 1),
    Work("repeats", repeats, 4),
    Work("edits", edits, 1),
    Work("misleads", misleads, 1),
    Work("misleads", misleads, 8),
    Work("wanders", wanders, 1),
    Work("wanders", wanders, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--work", nargs="+", default=[work.name for work in WORK])
    parser.add_argument("--folder", type=Path, default=Path(".run/bench-135m"))
    options = parser.parse_args()
    config = EngineArgs(model=make_model(options.folder), kv_cache_memory=1 << 29, swap_space=0)
    executor = load_executor(config)
    for work in [each for each in WORK if each.name in options.work]:
        times: dict[str, list[float]] = {method: [] for method in ("none", *options.methods)}
        for number in range(options.rounds + 1):
            for method, seconds in times.items():
                scheduler = make_scheduler(config.model_copy(update={"speculative_method": method}), executor)
                took = run(executor, scheduler, work, number)
                if number:  # the first captures graphs
                    seconds.append(took)
        bar, tokens = BARS.get(work.name, ELSEWHERE), work.streams * OUTPUT
        plain, *guessed = (statistics.median(seconds) for seconds in times.values())
        print(f"{work.name:9} {work.streams} at once (bar {bar}): {tokens / plain:6.1f} tok/s", end="")
        for method, seconds in zip(options.methods, guessed, strict=True):
            print(f"; {method} {tokens / seconds:6.1f}, {plain / seconds:.2f} times", end="")
        print(flush=True)


def run(executor: TorchExecutor, scheduler: Scheduler, work: Work, seed: int) -> float:
    """Seconds of decoding, from the first token of the last stream on."""
    source, outputs = random.Random(seed), 0

    def receive(step: EngineCoreOutputs) -> None:
        nonlocal outputs
        outputs += len(step.all_outputs())

    core = EngineCore(scheduler, executor, receive)
    for number in range(work.streams):
        prompt, output = work.make(source)
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=OUTPUT, ignore_eos=True)
        scheduler.add_request(
            Request(f"{seed}-{number}", prompt, params, grammar=None if output is None else Script(output))
        )
    while outputs < work.streams:
        core.step()
    begin = perf_counter()
    while scheduler.has_work:
        core.step()
    return perf_counter() - begin


if __name__ == "__main__":
    main()
