"""What tests of journals write, and how they compare what is read."""

from dataclasses import dataclass, field, replace

from quire_proto.sampling import FinishReason
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import DeliveredChoice, Journal, Lease, RecordedDelta, RequestRecord


def append_tokens(
    journal: Journal,
    lease: Lease,
    position: int,
    token_ids: list[int],
    index: int = 0,
    reason: FinishReason | None = None,
) -> None:
    """Appends a delta without log-probabilities."""
    journal.append(lease, position, RecordedDelta(index, token_ids, reason))


@dataclass
class Seen:
    """A record, with the deltas by choice."""

    generation: GenerationRequest
    owner: str
    epoch: int
    choices: list[DeliveredChoice]
    finish_reason: FinishReason | None = None
    error: str = ""


def seen(record: RequestRecord | None) -> Seen | None:
    """The record as ``Seen``."""
    if record is None:
        return None
    generation, choices = record.generation, record.choices
    return Seen(generation, record.owner, record.epoch, choices, record.finish_reason, record.error)


def is_plain(delta: RecordedDelta) -> bool:
    """Whether it has tokens and an end at most."""
    return not delta.logprobs and not delta.prompt_logprobs and delta.score is None and delta.stop_token is None


def canonical(deltas: list[RecordedDelta]) -> list[RecordedDelta]:
    """The same deltas, cut in the one way that says only their order: where plain deltas of one choice are cut is not
    kept.
    """
    cut: list[RecordedDelta] = []
    for delta in deltas:
        if not is_plain(delta):
            cut.append(delta)
            continue
        last = cut[-1] if cut else None
        if delta.token_ids and last and last.index == delta.index and is_plain(last) and last.finish_reason is None:
            cut[-1] = replace(last, token_ids=last.token_ids + delta.token_ids)
        elif delta.token_ids:
            cut.append(RecordedDelta(delta.index, delta.token_ids))
        if delta.finish_reason is not None:
            cut.append(RecordedDelta(delta.index, [], delta.finish_reason))
    return cut


def by_choice(deltas: list[RecordedDelta]) -> dict[int, list[RecordedDelta]]:
    """The deltas of each choice, as ``canonical`` cuts them: the order of choices is not kept."""
    by_index = {
        index: canonical([each for each in deltas if each.index == index]) for index in {p.index for p in deltas}
    }
    return {index: cut for index, cut in by_index.items() if cut}


@dataclass
class Heard:
    """Notes what a ``LeaseListener`` is called with."""

    cancelled: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def on_cancelled(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def on_lease_lost(self, request_id: str) -> None:
        self.taken.append(request_id)
