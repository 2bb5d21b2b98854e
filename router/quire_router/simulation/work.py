"""How much work a workload is: the seconds that one engine needs for it when nothing is cached and every step is full.

This is what utilisation means here: at 1, requests bring as many seconds of such work as the engines have.
"""

from collections.abc import Sequence

from quire_engine.executor.latency import LatencyModel

from quire_router.simulation.workload import Job


def work(job: Job, latency: LatencyModel, tokens_per_step: int) -> float:
    """Seconds of one engine for one job: each of its tokens takes its part of a full step, sees all tokens before it,
    and is drawn if it is one of the output. What a step takes less than full costs is not counted, so that no engine
    is faster than this without a cache.
    """
    prompt, output = job.num_prompt, job.num_output
    computed = prompt + output - 1  # the last token is drawn and never computed
    linear = computed * (1 / latency.tokens_per_second + latency.overhead_seconds / tokens_per_step)
    seen = (output - 1) * (prompt + output / 2)
    decode = seen * max(latency.context_seconds, latency.pair_seconds)
    return linear + _prefill(prompt, latency, tokens_per_step) + decode + output * latency.draw_seconds


def _prefill(prompt: int, latency: LatencyModel, tokens_per_step: int) -> float:
    """The attention of a prompt that is computed in chunks of whole steps."""
    seconds, start = 0.0, 0
    while start < prompt:
        end = min(start + tokens_per_step, prompt)
        pairs = (end - start) * (start + end + 1) / 2
        seconds += max(end * latency.context_seconds, pairs * latency.pair_seconds)
        start = end
    return seconds


def span(jobs: Sequence[Job], utilisation: float, engines: int, latency: LatencyModel, tokens_per_step: int) -> float:
    """Seconds within which the jobs have to arrive, for ``utilisation`` of so many engines."""
    return sum(work(job, latency, tokens_per_step) for job in jobs) / (utilisation * engines)
