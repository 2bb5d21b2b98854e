"""Workloads: requests with arrival times, lengths and shared prefixes. Knows tokens, and no engine."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire_engine.executor.mixing import uniform
from quire_engine.executor.simulated import VOCAB_SIZE
from quire_engine.simulation.trace import read_trace


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it comes (seconds), its prompt as segments of a name and a length in tokens, and how many
    tokens it will draw. Segments of equal names are equal, so prompts share the prefix that they name alike.
    """

    time: float
    segments: tuple[tuple[int, int], ...]
    num_output: int
    tenant: str = ""

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(length for _, length in self.segments)

    def prompt(self) -> "array[int]":
        """The prompt's tokens: a segment spells the digits of its name over and over."""
        tokens = array("i")
        for name, length in self.segments:
            digits = array("i", (name % VOCAB_SIZE, name // VOCAB_SIZE % VOCAB_SIZE))
            tokens.extend((digits * (length // 2 + 1))[:length])
        return tokens


def from_trace(path: Path, *, start: int, limit: int | None, seed: int) -> list[Job]:
    """The rows of a trace, at the times at which they came; see ``quire_engine.simulation.trace.read_trace``."""
    jobs: list[Job] = []
    for arrival in read_trace(path, start=start, limit=limit, seed=seed):
        ends = [min((i + 1) * arrival.block, arrival.num_prompt) for i in range(len(arrival.prefix_ids))]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        segments = tuple((name, length) for name, length in zip(arrival.prefix_ids, lengths, strict=True) if length)
        jobs.append(Job(arrival.time, segments, arrival.num_output))
    return jobs


def stretched_to(jobs: Sequence[Job], seconds: float) -> list[Job]:
    """The same jobs with their times stretched evenly, so that the last one comes ``seconds`` after the first."""
    span = jobs[-1].time - jobs[0].time
    factor = seconds / span if span else 0.0
    return [replace(job, time=(job.time - jobs[0].time) * factor) for job in jobs]


def order(count: int, seed: int) -> list[int]:
    """The numbers below ``count`` in an order that looks random."""
    return sorted(range(count), key=lambda index: uniform(seed, index))
