"""What tests of journals write, and how they compare what is read."""

from dataclasses import dataclass, field, replace

from quire_proto.sampling import FinishReason
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import DeliveredChoice, Journal, Lease, RecordedDelta, RequestRecord


def tell(
    journal: Journal,
    lease: Lease,
    position: int,
    token_ids: list[int],
    index: int = 0,
    reason: FinishReason | None = None,
) -> None:
    """Appends a piece without log-probabilities."""
    journal.append(lease, position, RecordedDelta(index, token_ids, reason))


@dataclass
class Seen:
    """A record, with what was told by choice."""

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


def is_plain(piece: RecordedDelta) -> bool:
    """Whether it has tokens and an end at most."""
    return not piece.logprobs and not piece.prompt_logprobs and piece.score is None


def canonical(pieces: list[RecordedDelta]) -> list[RecordedDelta]:
    """The same pieces, cut in the one way that says only their order: where plain pieces of one choice are cut is not
    kept.
    """
    cut: list[RecordedDelta] = []
    for piece in pieces:
        if not is_plain(piece):
            cut.append(piece)
            continue
        last = cut[-1] if cut else None
        if piece.token_ids and last and last.index == piece.index and is_plain(last) and last.finish_reason is None:
            cut[-1] = replace(last, token_ids=last.token_ids + piece.token_ids)
        elif piece.token_ids:
            cut.append(RecordedDelta(piece.index, piece.token_ids))
        if piece.finish_reason is not None:
            cut.append(RecordedDelta(piece.index, [], piece.finish_reason))
    return cut


def by_choice(pieces: list[RecordedDelta]) -> dict[int, list[RecordedDelta]]:
    """The pieces of each choice, as ``canonical`` cuts them: which choice was told before which is not kept."""
    told = {index: canonical([each for each in pieces if each.index == index]) for index in {p.index for p in pieces}}
    return {index: cut for index, cut in told.items() if cut}


@dataclass
class Heard:
    """Notes what a ``LeaseListener`` is called with."""

    cancelled: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def on_cancelled(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def on_lease_lost(self, request_id: str) -> None:
        self.taken.append(request_id)
