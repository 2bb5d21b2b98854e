"""The protocol of a peer's script: JSON lines on what was its standard output. Needs nothing but Python."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Run = Callable[[list[list[int]], list[int], int], tuple[int, int]]
"""From prompts, the lengths of their outputs and how many outputs each has: the tokens that were made, and the token
positions that were computed, padding included.
"""


def take_output() -> TextIO:
    """The standard output as a file of our own; whatever a library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, name: str, run: Run) -> None:
    """Answers each workload with the seconds that ``run`` takes and the part of what it computed that was padding,
    until there are no more.
    """
    say(answers, ready=name)
    for line in sys.stdin:
        workload = json.loads(line)
        begin = time.perf_counter()
        prompts, outputs, n = workload["prompts"], workload["outputs"], workload["n"]
        made, computed = run(prompts, outputs, n)
        seconds = time.perf_counter() - begin
        wanted = n * sum(outputs)
        if made == wanted:
            say(answers, seconds=seconds, padding=1 - needed(prompts, outputs, n) / computed)
        else:
            say(answers, error=f"It made {made} of {wanted} tokens.")


def needed(prompts: list[list[int]], outputs: list[int], n: int) -> int:
    """Token positions that are computed for these requests without any padding, where each output computes its prompt:
    all but the last token.
    """
    return n * sum(len(prompt) + size - 1 for prompt, size in zip(prompts, outputs, strict=True))


def say(answers: TextIO, **answer: object) -> None:
    """Writes one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def settings() -> Any:
    """The settings of this script, from its command line."""
    return json.loads(sys.argv[1])
