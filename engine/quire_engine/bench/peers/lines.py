"""The protocol of a peer's script: JSON lines on what was its standard output. Needs nothing but Python."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Run = Callable[[list[list[int]], list[int]], int]


def take_output() -> TextIO:
    """The standard output as a file of our own; whatever a library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, name: str, run: Run) -> None:
    """Answers each workload with the seconds that ``run(prompts, outputs)`` takes, until there are no more."""
    say(answers, ready=name)
    for line in sys.stdin:
        workload = json.loads(line)
        begin = time.perf_counter()
        made = run(workload["prompts"], workload["outputs"])
        seconds = time.perf_counter() - begin
        wanted = sum(workload["outputs"])
        if made == wanted:
            say(answers, seconds=seconds)
        else:
            say(answers, error=f"It made {made} of {wanted} tokens.")


def say(answers: TextIO, **answer: object) -> None:
    """Writes one line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def settings() -> Any:
    """The settings of this script, from its command line."""
    return json.loads(sys.argv[1])
