"""A generated workload: groups of prompts that begin alike, as SGLang's ``generated-shared-prefix`` has them."""

from dataclasses import dataclass
from math import log1p

from quire_engine.executor.mixing import uniform

from quire_router.simulation.workload import Job, order

_GAPS = 1


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """So many groups of so many prompts: each begins with the system prompt of its group, and its question is its own.
    Lengths are in tokens.
    """

    num_groups: int
    prompts_per_group: int
    system_prompt_len: int
    question_len: int
    output_len: int


def generate(shape: SharedPrefix, seed: int) -> list[Job]:
    """All prompts, in an order and at times of a Poisson process of one a second that ``seed`` decides."""
    jobs: list[Job] = []
    time = 0.0
    for index in order(shape.num_groups * shape.prompts_per_group, seed):
        system = (index % shape.num_groups, shape.system_prompt_len)
        question = (shape.num_groups + index, shape.question_len)
        jobs.append(Job(time, tuple(part for part in (system, question) if part[1]), shape.output_len))
        time -= log1p(-uniform(seed, _GAPS, index))
    return jobs
