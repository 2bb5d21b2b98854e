"""The ``Journal`` protocol: the fleet's memory of requests. Knows nothing of engines or clients."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason, TokenLogprobs

from quire_router.core.generation import NO_USAGE, Delta, GenerationRequest, Usage


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one request's record. ``epoch`` is its fencing token: the journal refuses a write with an
    older one.
    """

    request_id: str
    owner: str
    epoch: int


REFUSED_EPOCH = 0
"""No record ever has it, so whatever is written with it is refused."""


@dataclass(frozen=True, slots=True)
class RecordedDelta:
    """One delta of an answer as its client got it, but for the text, which follows from the tokens. Its tokens begin
    where the last delta of the same choice ended. Fields as in ``Delta``.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None


AnyDelta = RecordedDelta | Delta
"""What is written down: of a delta, the fields that a told delta has."""


@dataclass(slots=True)
class DeliveredChoice:
    """What the client was given of one choice, which has ended once there is a reason."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class RequestRecord:
    """What is remembered of a request: all that is needed to tell it again, and to go on with it elsewhere.

    ``deltas`` are what the client was told, in order. Of a request whose choices are told together, candidates of
    ``best_of`` or beams, nothing is remembered before that: it is run again, and ends in the same ones. It is ``held``
    while a router has a lease on it. Its ``usage`` is known once it has ended.
    """

    generation: GenerationRequest
    owner: str
    epoch: int
    deltas: list[RecordedDelta]
    finish_reason: FinishReason | None = None
    error: str = ""
    usage: Usage = NO_USAGE
    leased: bool = False

    @property
    def choices(self) -> list[DeliveredChoice]:
        """What was told of each choice that the client gets."""
        choices = [DeliveredChoice() for _ in range(self.generation.params.n)]
        for delta in self.deltas:
            choices[delta.index].token_ids += delta.token_ids
            choices[delta.index].finish_reason = delta.finish_reason
        return choices


@dataclass(frozen=True, slots=True)
class RecordUpdate:
    """What was told of a request since somebody looked last, and how it is with its record now. Fields as in
    ``Record``. Where there is ``more``, which the next look gives at once, the record counts as held and not ended.
    """

    deltas: list[RecordedDelta]
    finish_reason: FinishReason | None
    error: str
    usage: Usage
    leased: bool
    more: bool = False


def partial_update(deltas: list[RecordedDelta]) -> RecordUpdate:
    """A part of what was told that is not its last."""
    return RecordUpdate(deltas, None, "", NO_USAGE, leased=True, more=True)


class Follower(Protocol):
    """Looks after one record that another reader of it, or another router, is writing."""

    async def poll(self) -> RecordUpdate | None:
        """What is new, from the beginning when it is the first look, but a bounded part of it at a time; None when
        there is no such record, or no longer. Raises ``QuireError`` UNAVAILABLE when it cannot be read, INTERNAL when
        it is damaged.
        """
        ...


class LeaseListener(Protocol):
    """Who is told what becomes of records that this router holds."""

    def on_cancelled(self, request_id: str) -> None:
        """Somebody asked at another router that the request be ended."""
        ...

    def on_lease_lost(self, request_id: str) -> None:
        """Another router holds the record now, so that nothing which is written here counts any more."""
        ...


class Journal(Protocol):
    """Request state. ``open``, ``append``, ``finish`` and ``release`` never wait: the token path must not depend on a
    database.
    """

    @property
    def available(self) -> bool:
        """Whether what is written now will survive this process (the memory journal: whether it is kept at all)."""
        ...

    def set_listener(self, listener: LeaseListener) -> None:
        """Who hears of cancelled and taken records."""
        ...

    def open(self, generation: GenerationRequest) -> Lease:
        """Begins a record and claims it, with epoch 1. Never waits."""
        ...

    async def open_if_absent(self, generation: GenerationRequest) -> Lease | None:
        """As ``open``, but None when there is a record of this id already, here or at any router. When the journal is
        not available, only this router's own are known.
        """
        ...

    def append(self, lease: Lease, position: int, delta: AnyDelta) -> None:
        """Adds a delta whose tokens begin at ``position`` of its choice's output. Repeating a write changes nothing.
        Never waits.
        """
        ...

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """Ends the record; it is kept for the retention time. What was cancelled ends with ``FinishReason.ABORT``,
        since who asked for that was told so, whatever its choices ended with. Never waits.
        """
        ...

    def release(self, lease: Lease) -> None:
        """Lets go of a record that has not ended, so that anybody may claim it. Never waits."""
        ...

    async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """Takes over a record that nobody holds, with the next epoch; None when somebody does, when it has ended or is
        unknown. Raises as ``Follower.look``.
        """
        ...

    async def read(self, request_id: str, *, tokens_only: bool = False) -> RequestRecord | None:
        """The record as it is stored; None when unknown or forgotten. Of a ``brief`` one the deltas are without
        log-probabilities and scores. Raises as ``Follower.look``.
        """
        ...

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """How it is with each of several requests: its record without prompt and deltas, and with the usage so far.
        Takes as long for a long answer as for a short one. One that is not there counts as unknown without a second
        look unless it has to be ``surely`` so. Raises as ``Follower.look``.
        """
        ...

    def follow(self, request_id: str) -> Follower:
        """A look after a record, whoever writes it."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Asks whoever holds the record to end the request, and ends the record if nobody does; False when there is
        none that has not ended.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Deletes a record that has ended. What has not is cancelled, and its record goes soon after its end. False
        when there is none.
        """
        ...

    async def orphans(self) -> list[str]:
        """Background requests that have not ended and that nobody holds: at most 16 of them, and with the next call
        those that follow, so that one that nobody takes up holds up no other. Raises as ``Follower.look``.
        """
        ...

    async def close(self) -> None:
        """Writes what is pending, within a bounded time, and lets go of connections."""
        ...


# How large one record may be that a journal keeps, and how many it names at once.


MAX_LOG_VALUES = 16_777_216  # values of one request's row: 64 MiB
MAX_ORPHANS = 16


# How the error that a request ended with is written in its record.


def encode_error(error: QuireError) -> str:
    """The error's code, its message and, after them, what else a client is told of it."""
    more = {"param": error.param, "retry_after": error.retry_after, "reason": error.reason}
    known = {name: value for name, value in more.items() if value is not None}
    return f"{error.code.name}: {error.message}" + (f"\n{json.dumps(known)}" if known else "")


def decode_error(text: str) -> QuireError:
    """The error again; an inner one where the text is not known to be an error."""
    code, separator, rest = text.partition(": ")
    if not separator or code not in ErrorCode.__members__:
        return internal()
    message, mark, more = rest.rpartition("\n")
    if not mark or not more.startswith("{"):
        message, more = rest, "{}"
    try:
        return QuireError(ErrorCode[code], message, **_details(more))
    except (TypeError, ValueError, RecursionError):
        return internal()


def _details(text: str) -> dict[str, Any]:
    """Raises ``ValueError`` for what is not written by ``encode_error``."""
    known: dict[str, Any] = json.loads(text)
    wait = known.get("retry_after", 0.0)
    texts = (known.get("param", ""), known.get("reason", ""))
    if not isinstance(wait, int | float) or not 0 <= wait < 1e9 or not all(isinstance(each, str) for each in texts):
        raise ValueError("these are no details of an error")
    return known
