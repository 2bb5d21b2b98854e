"""Workloads: requests with arrival times, lengths and shared prefixes, from a trace or generated, and how much work
they are.

Work is the seconds that one engine needs for a workload when nothing is cached and every step is full. Utilisation is
measured by it: at 1, requests bring as many seconds of such work as the engines have.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log1p
from pathlib import Path

from quire_engine.simulation.simulated_executor import VOCAB_SIZE, LatencyModel, uniform
from quire_engine.simulation.trace import read_trace

_GAP_DRAW = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes (seconds), its prompt as segments of a name and a length in tokens, and how many
    tokens it will draw. Segments of equal names are equal, so prompts share the prefix that they name alike. One that
    is ``best_effort`` runs on what others leave, as the lines of batches do.
    """

    time: float
    segments: tuple[tuple[int, int], ...]
    num_output: int
    tenant: str = ""
    best_effort: bool = False

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return sum(length for _, length in self.segments)

    def prompt(self) -> "array[int]":
        """Returns the prompt's tokens: each segment repeats the digits of its name."""
        tokens = array("i")
        for name, length in self.segments:
            digits = array("i", (name % VOCAB_SIZE, name // VOCAB_SIZE % VOCAB_SIZE))
            tokens.extend((digits * (length // 2 + 1))[:length])
        return tokens


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A generated workload like SGLang's ``generated-shared-prefix``: so many groups of so many prompts; each begins
    with the system prompt of its group, and its question is its own. Lengths are in tokens.
    """

    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int


def from_trace(path: Path, *, start: int, limit: int | None, seed: int) -> list[Job]:
    """Returns the rows of a trace at their arrival times; see ``quire_engine.simulation.trace.read_trace``."""
    jobs: list[Job] = []
    for arrival in read_trace(path, start=start, limit=limit, seed=seed):
        ends = [min((i + 1) * arrival.block, arrival.num_prompt) for i in range(len(arrival.prefix_ids))]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        segments = tuple((name, length) for name, length in zip(arrival.prefix_ids, lengths, strict=True) if length)
        jobs.append(Job(arrival.time, segments, arrival.num_output))
    return jobs


def generate(shape: SharedPrefix, seed: int) -> list[Job]:
    """Returns all prompts, in an order and at times of a Poisson process of one a second that ``seed`` decides."""
    jobs: list[Job] = []
    time = 0.0
    for index in order(shape.num_groups * shape.prompts_per_group, seed):
        system = (index % shape.num_groups, shape.system_prompt_len)
        question = (shape.num_groups + index, shape.question_len)
        jobs.append(Job(time, tuple(part for part in (system, question) if part[1]), shape.output_len))
        time -= log1p(-uniform(seed, _GAP_DRAW, index))
    return jobs


def stretched_to(jobs: Sequence[Job], seconds: float) -> list[Job]:
    """Returns the jobs with their times stretched evenly, so that the last one comes ``seconds`` after the first."""
    span = jobs[-1].time - jobs[0].time
    factor = seconds / span if span else 0.0
    return [replace(job, time=(job.time - jobs[0].time) * factor) for job in jobs]


def order(count: int, seed: int) -> list[int]:
    """Returns the numbers below ``count`` in a random order that ``seed`` decides."""
    return sorted(range(count), key=lambda index: uniform(seed, index))


def work(job: Job, latency: LatencyModel, tokens_per_step: int) -> float:
    """Returns the seconds of one engine for one job: each of its tokens takes its part of a full step, sees all tokens
    before it, and is drawn if it is one of the output. What a step takes less than full costs is not counted, so that
    no engine is faster than this without a cache.
    """
    prompt, output = job.num_prompt, job.num_output
    computed = prompt + output - 1  # the last token is drawn and never computed
    linear = computed * (1 / latency.tokens_per_second + latency.overhead_seconds / tokens_per_step)
    seen = (output - 1) * (prompt + output / 2)
    decode = seen * max(latency.context_seconds, latency.pair_seconds)
    return linear + _prefill_attention(prompt, latency, tokens_per_step) + decode + output * latency.draw_seconds


def _prefill_attention(prompt: int, latency: LatencyModel, tokens_per_step: int) -> float:
    """Returns the attention seconds of a prompt that is computed in chunks of whole steps."""
    seconds, start = 0.0, 0
    while start < prompt:
        end = min(start + tokens_per_step, prompt)
        pairs = (end - start) * (start + end + 1) / 2
        seconds += max(end * latency.context_seconds, pairs * latency.pair_seconds)
        start = end
    return seconds


def span(jobs: Sequence[Job], utilisation: float, engines: int, latency: LatencyModel, tokens_per_step: int) -> float:
    """Returns the seconds within which the jobs have to arrive, for ``utilisation`` of so many engines."""
    return sum(work(job, latency, tokens_per_step) for job in jobs) / (utilisation * engines)
