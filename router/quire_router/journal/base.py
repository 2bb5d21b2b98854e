"""The ``Journal`` protocol: the fleet's memory of requests.

A record has the request and, delta by delta, what its client was sent, so that any router can replay the answer and
continue it. Who may write it has a lease, whose epoch fences off former owners. Also here: the bounds of what a journal
keeps, and how the error that a request ended with is stored.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs

from quire_router.core.generation import NO_USAGE, Delta, GenerationRequest, Usage
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.core.usage import Account, UsageRow


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
    """One delta of an answer as its client got it, without the text, which follows from the tokens. Its tokens begin
    where the last delta of the same choice ended. Fields as in ``Delta``.
    """

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    stop_token: StopToken | None = None


AnyDelta = RecordedDelta | Delta
"""What is recorded: of a ``Delta``, the fields that a ``RecordedDelta`` has."""


@dataclass(slots=True)
class DeliveredChoice:
    """What the client was sent of one choice, which has ended if there is a ``finish_reason``."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def unrecorded(request_id: str) -> Lease:
    """A lease on no record, for a request of which nothing is kept: what is written with it is dropped."""
    return Lease(request_id, "", REFUSED_EPOCH)


@dataclass(slots=True)
class RequestRecord:
    """All that is needed to replay a request's answer, and to continue it at another router.

    ``deltas`` are what the client was sent, in order. Of a request whose choices are sent together, candidates of
    ``best_of`` or beams, nothing is recorded before that: it is run again, with the same result. ``leased`` is True
    while a router has a lease on the record. ``usage`` is known once it has ended. ``version`` is the model's that the
    deltas are of, as far as it is known.
    """

    generation: GenerationRequest
    owner: str
    epoch: int
    deltas: list[RecordedDelta]
    finish_reason: FinishReason | None = None
    error: str = ""
    usage: Usage = NO_USAGE
    leased: bool = False
    version: ModelVersion = UNKNOWN_VERSION

    @property
    def choices(self) -> list[DeliveredChoice]:
        """What was sent of each choice that the client gets."""
        choices = [DeliveredChoice() for _ in range(self.generation.params.n)]
        for delta in self.deltas:
            choices[delta.index].token_ids += delta.token_ids
            choices[delta.index].finish_reason = delta.finish_reason
        return choices


@dataclass(frozen=True, slots=True)
class RecordUpdate:
    """The deltas of a request since the last poll, and the state of its record now. Fields as in ``RequestRecord``.
    With ``more``, which the next poll returns at once, the record counts as leased and not ended. An end that is
    ``pending`` is not stored yet, and may be lost with this router.
    """

    deltas: list[RecordedDelta]
    finish_reason: FinishReason | None
    error: str
    usage: Usage
    leased: bool
    more: bool = False
    pending: bool = False


def partial_update(deltas: list[RecordedDelta]) -> RecordUpdate:
    """Some of the new deltas, but not the last of them."""
    return RecordUpdate(deltas, None, "", NO_USAGE, leased=True, more=True)


class Follower(Protocol):
    """Follows one record, which any router may be writing."""

    async def poll(self) -> RecordUpdate | None:
        """What is new since the last poll (the first begins at the start of the record), a bounded part at a time;
        None if there is no such record, or no longer. Raises ``QuireError`` UNAVAILABLE when it cannot be read,
        INTERNAL when it is damaged.
        """
        ...


class LeaseListener(Protocol):
    """Gets events about records that this router has leases on."""

    def on_cancelled(self, request_id: str) -> None:
        """Another router was asked to cancel the request."""
        ...

    def on_lease_lost(self, request_id: str) -> None:
        """Another router has the lease now, and refuses what is written with this router's."""
        ...


class Journal(Protocol):
    """Request state. ``open``, ``append``, ``finish`` and ``release`` never wait: the token path must not depend on a
    database.
    """

    @property
    def available(self) -> bool:
        """Whether what is written now will survive this process (the memory journal: whether it is kept at all)."""
        ...

    def is_durable(self, request_ids: Sequence[str]) -> bool:
        """Whether requests that were opened here will survive this process, as far as is known: the journal is
        available, and did not refuse one of them.
        """
        ...

    def set_listener(self, listener: LeaseListener) -> None:
        """Sets what is called when a record is cancelled or its lease lost."""
        ...

    def open(self, generation: GenerationRequest) -> Lease:
        """Creates a record with a lease of epoch 1. Never waits."""
        ...

    def open_unrecorded(self, generation: GenerationRequest) -> Lease:
        """A lease on no record, for a request of which nothing is kept but what it used, with the lease's ``finish`` or
        ``release``: once, however often a request of this id is opened within hours. Never waits.
        """
        ...

    async def open_if_absent(self, generation: GenerationRequest) -> Lease | None:
        """As ``open``, but returns None if there is a record of this id already, from any router. While the journal is
        not available, only this router's own are known.
        """
        ...

    def set_version(self, lease: Lease, version: ModelVersion) -> None:
        """Says which version of the model makes what will be appended, until anything was: it is stored with the first
        tokens. Never waits.
        """
        ...

    def append(self, lease: Lease, position: int, delta: AnyDelta) -> None:
        """Adds a delta whose tokens begin at ``position`` of its choice's output. Repeating a write changes nothing.
        Never waits.
        """
        ...

    def append_token(self, lease: Lease, index: int, position: int, token_id: int) -> None:
        """As ``append`` of a delta that is one token of choice ``index``; called once for nearly every token."""
        ...

    def finish(self, lease: Lease, reason: FinishReason, error: str = "", usage: Usage = NO_USAGE) -> None:
        """Ends the record, which is kept for the retention time. A cancelled one ends with ``FinishReason.ABORT``,
        whatever its choices ended with, since that was the answer to ``cancel``. ``usage`` is counted for its tenant,
        and is ``NO_USAGE`` if no engine had the request. Never waits.
        """
        ...

    async def flush_end(self, lease: Lease) -> bool:
        """Waits until the end that ``finish`` was called with survives this process and is what every router reads, a
        fifth of a second at most; returns whether it is. To be called right after ``finish``.
        """
        ...

    def release(self, lease: Lease, usage: Usage = NO_USAGE) -> None:
        """Gives up the lease on a record that has not ended, so that any router may claim it. ``usage``, what the
        request used so far, is counted: nobody may come for the rest. Never waits.
        """
        ...

    async def claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """Takes the lease on a record that has none, with the next epoch; None if it has one, has ended or is unknown.
        Raises as ``Follower.poll``.
        """
        ...

    async def read(self, request_id: str, *, tokens_only: bool = False) -> RequestRecord | None:
        """The record as it is now, with its end if any router has it; None if unknown or expired. With ``tokens_only``
        the deltas are without log-probabilities, stop tokens and scores. Raises as ``Follower.poll``.
        """
        ...

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        """The state of each of several requests: its record without prompt and deltas, and with the usage so far.
        Takes as long for a long answer as for a short one. With ``confirm_missing`` one that is not there counts as
        unknown only if it cannot be still to be written. Raises as ``Follower.poll``.
        """
        ...

    def follow(self, request_id: str) -> Follower:
        """Follows a record from its beginning, whichever router writes it."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Asks the router that has the lease to end the request, or ends the record if none has; False if there is no
        record that has not ended.
        """
        ...

    async def delete(self, request_id: str) -> bool:
        """Deletes a record: from now on no router finds it, and nothing that is still written creates it again. A
        request that has not ended is cancelled. Returns False if there is no record. Raises as ``Follower.poll``, and
        has changed nothing then.
        """
        ...

    async def orphans(self) -> list[str]:
        """Background requests that have not ended and have no lease: at most 16 of them, and with the next call those
        that follow, so that one that no router claims delays no other. Raises as ``Follower.poll``.
        """
        ...

    async def usage(self, since: float, until: float, tenant: str | None = None) -> list[UsageRow]:
        """What one tenant, or each, used in the hours that begin from ``since`` until before ``until``, in seconds
        after 1970; by hour, tenant and model. Raises ``QuireError`` UNAVAILABLE when it cannot be read.
        """
        ...

    def count_usage(self, lease: Lease, account: Account, usage: Usage) -> None:
        """Counts what a request has used that has ended and has no record (``unrecorded``), such as one that a gateway
        sent to a server itself. Never waits; counted once, also where it is written more than once.
        """
        ...

    async def settle_usage(self) -> None:
        """Counts what requests used whose routers died before they could, where that is not done with the record.
        Raises as ``usage``.
        """
        ...

    async def close(self) -> None:
        """Writes what is pending, within a bounded time, and closes connections."""
        ...


MAX_LOG_VALUES = 16_777_216  # values of one request's token log: 64 MiB
MAX_ORPHANS = 16  # that one call returns


def encode_error(error: QuireError) -> str:
    """The error's code, its message and, after them, the other fields that a client gets."""
    more = {"param": error.param, "retry_after": error.retry_after, "reason": error.reason}
    known = {name: value for name, value in more.items() if value is not None}
    return f"{error.code.name}: {error.message}" + (f"\n{json.dumps(known)}" if known else "")


def decode_error(text: str) -> QuireError:
    """The error; an INTERNAL one if the text is not one that ``encode_error`` wrote."""
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
    known = {name: value for name, value in json.loads(text).items() if name in ("param", "retry_after", "reason")}
    wait = known.get("retry_after", 0.0)
    texts = (known.get("param", ""), known.get("reason", ""))
    if not isinstance(wait, int | float) or not 0 <= wait < 1e9 or not all(isinstance(each, str) for each in texts):
        raise ValueError("these are not the details of an error")
    return known
