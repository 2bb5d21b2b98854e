"""How a pipeline's steps share the work: each stage is to have one, and all are to take about as long."""

from collections.abc import Collection, Iterable

from quire_engine.core.request import Sequence
from quire_engine.core.step import SchedulerOutput

MIN_STAGE_TOKENS = 64


def micro_batch(running: Collection[Sequence], num_stages: int) -> list[Sequence]:
    """The running sequences that the next step may compute. Each stage is to have some that decode, so there are no
    more of these in a step than their share.
    """
    share = -(-len(running) // num_stages)
    ready = [sequence for sequence in running if sequence.num_unscheduled_tokens]
    decoding = [sequence for sequence in ready if sequence.num_unscheduled_tokens == 1]
    late = {sequence.id for sequence in decoding[share:]}
    return [sequence for sequence in ready if sequence.id not in late]


def share_of_tokens(
    running: Iterable[Sequence], waiting_tokens: int, in_flight: Iterable[SchedulerOutput], num_stages: int
) -> int:
    """The most tokens of the next step: its share of all that are known, those ``in_flight`` included, but not so few
    that it takes as long as one with more.
    """
    known = waiting_tokens + sum(each.num_tokens for each in in_flight)
    known += sum(sequence.num_unscheduled_tokens for sequence in running)
    return max(MIN_STAGE_TOKENS, -(-known // num_stages))
