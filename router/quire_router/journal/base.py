"""The ``Journal`` protocol: the fleet's memory of requests. Knows nothing of engines or clients."""

from dataclasses import dataclass, field
from typing import Protocol

from quire_proto.sampling import FinishReason

from quire_router.generation import Generation


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one request's record. ``epoch`` is its fencing token: the journal refuses a write with an
    older one.
    """

    request_id: str
    owner: str
    epoch: int


@dataclass(slots=True)
class Delivered:
    """What the client was given of one choice, which has ended once there is a reason."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Record:
    """What is remembered of a request: all that is needed to go on with it elsewhere.

    ``choices`` are the ``n`` that the client gets. Of a request whose choices are told together, candidates of
    ``best_of`` or beams, nothing is remembered before that: it is run again, and ends in the same ones.
    """

    generation: Generation
    owner: str
    epoch: int
    choices: list[Delivered]
    finish_reason: FinishReason | None = None
    error: str = ""


class Journal(Protocol):
    """Request state. ``append`` and ``finish`` never wait: the token path must not depend on a database."""

    @property
    def available(self) -> bool:
        """Whether what is written now will survive this process (the memory journal: whether it is kept at all)."""
        ...

    def open(self, generation: Generation) -> Lease:
        """Begins a record and claims it, with epoch 1. Never waits."""
        ...

    def append(
        self,
        lease: Lease,
        position: int,
        token_ids: list[int],
        index: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Adds tokens of choice ``index`` at ``position`` of its output, and its end if there is a reason. Repeating a
        write changes nothing. Never waits.
        """
        ...

    def finish(self, lease: Lease, reason: FinishReason, error: str = "") -> None:
        """Ends the record; it is kept for the retention time. Never waits."""
        ...

    async def read(self, request_id: str) -> Record | None:
        """The record as it is stored; None when unknown or forgotten. Raises ``QuireError`` UNAVAILABLE when it
        cannot be read.
        """
        ...

    async def close(self) -> None:
        """Writes what is pending, within a bounded time, and lets go of connections."""
        ...
