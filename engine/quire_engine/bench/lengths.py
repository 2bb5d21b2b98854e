"""Lengths of requests as they occur: drawn from distributions with published parameters, or read from a trace.

Of each distribution only a mean, or a median and a mean, of prompts and of outputs are those of its name; the two are
drawn independently. What it draws beyond the longest request that is allowed is drawn again, so that the means of what
is left are somewhat lower.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import log, sqrt
from pathlib import Path

from quire_engine.bench.workload import Workload, random_prompt
from quire_engine.errors import ModelError
from quire_engine.simulation.trace import TraceError, read_trace

Draw = Callable[[random.Random], float]
Pair = tuple[int, int]
_MOST_DRAWS = 1000  # for each request that is needed
DRAWN_AT_MOST = 2048  # tokens of prompt and output, as in the benchmark of vLLM's paper, where nothing else is said


def exponential(mean: float) -> Draw:
    """The distribution of lengths of which only the mean is known that assumes least."""
    return lambda source: source.expovariate(1 / mean)


def lognormal(median: float, mean: float) -> Draw:
    """The distribution of many small and a few large lengths that has this median and this mean."""
    return lambda source: source.lognormvariate(log(median), sqrt(2 * log(mean / median)))


DISTRIBUTIONS: Mapping[str, tuple[Draw, Draw]] = {
    # ShareGPT: the means of figure 11 of Kwon et al., Efficient Memory Management for Large Language Model Serving with
    # PagedAttention, SOSP 2023.
    "sharegpt": (exponential(161.31), exponential(337.99)),
    # Conversations in Azure, 2023: the medians of Patel et al., Splitwise, ISCA 2024, and the means of the trace that
    # was published with it (AzurePublicDataset).
    "azure": (lognormal(1020, 1155), lognormal(129, 211)),
}


def make_workload(lengths: str, count: int, longest: int, vocab_size: int, *, n: int, seed: int) -> Workload:
    """``count`` requests of random tokens and ``n`` outputs each, of the lengths of a distribution or a trace file,
    none longer than ``longest`` tokens in all. Raises ``ModelError`` if the file has too few, or the distribution has
    hardly any.
    """
    source = random.Random(seed)  # noqa: S311 - not for secrets
    known = DISTRIBUTIONS.get(lengths)
    pairs = _read(Path(lengths)) if known is None else islice(_draw(known, source), _MOST_DRAWS * count)
    fitting = list(islice(((prompt, output) for prompt, output in pairs if prompt + output <= longest), count))
    if len(fitting) < count:
        drawn = "" if known is None else f" among {_MOST_DRAWS * count}"
        raise ModelError(
            f"{lengths} has {len(fitting)} requests of at most {longest} tokens{drawn}, and {count} are needed."
        )
    prompts = [random_prompt(source, size, vocab_size) for size, _ in fitting]
    return Workload(prompts, [size for _, size in fitting], n)


def _draw(distributions: tuple[Draw, Draw], source: random.Random) -> Iterator[Pair]:
    prompt, output = distributions
    while True:
        yield max(1, round(prompt(source))), max(1, round(output(source)))


def _read(path: Path) -> Iterator[Pair]:
    try:
        arrivals = read_trace(path)
    except TraceError as error:
        raise ModelError(str(error)) from None
    return ((arrival.num_prompt, arrival.num_output) for arrival in arrivals)
