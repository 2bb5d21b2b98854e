"""``RecordStore``: what a journal reads from its database, and changes there at once."""

from collections.abc import Sequence
from typing import Protocol

from quire_router.core.generation import GenerationRequest
from quire_router.core.usage import UsageRow
from quire_router.journal.base import Lease
from quire_router.journal.follower import RawRecordUpdate

StoredRecord = tuple[dict[bytes, bytes], bytes, int]
"""A record's fields, its packed token log, and the database's time in ms."""


class RecordStore(Protocol):
    """What a journal reads from its database, and changes there at once: calls that wait for the reply. They raise
    ``CorruptRecordError`` for what is no record, and ``errors`` without the database.
    """

    errors: tuple[type[Exception], ...]

    async def open(self, generation: GenerationRequest, lease: Lease) -> bool:
        """Creates the record with this lease; False if there is one of another request or owner."""
        ...

    async def claim(self, request_id: str, owner: str, name: str) -> StoredRecord | None:
        """Takes the lease on a record that has none; None if it cannot. ``name`` is the claim's own, so it can be
        repeated.
        """
        ...

    async def fail_corrupt(self, lease: Lease) -> None:
        """Ends a record that cannot be read."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Ends the record, or marks it as cancelled if it is leased; False if there is none that has not ended."""
        ...

    async def delete(self, request_id: str, buffered: GenerationRequest | None) -> bool:
        """Deletes the record, also one of a request that runs; False if there is none. Of one that this router still
        has ``buffered``, no write that is on its way creates it again.
        """
        ...

    async def read(self, request_id: str) -> StoredRecord | None:
        """The record as it is; None if there is none."""
        ...

    async def statuses(self, request_ids: Sequence[str]) -> list[tuple[dict[bytes, bytes], int, int]]:
        """Of each record its ``STATUS_FIELDS``, the bytes of its prompt, and the database's time in ms."""
        ...

    async def read_update(self, request_id: str, names: tuple[str, ...], offset: int) -> RawRecordUpdate:
        """What is new in the record from this byte of its token log on, and these fields of it."""
        ...

    async def orphans(self) -> list[str]:
        """See ``Journal``."""
        ...

    async def usage(self, since: float, until: float, tenant: str | None) -> list[UsageRow]:
        """See ``Journal``."""
        ...

    async def settle_usage(self) -> None:
        """See ``Journal``."""
        ...

    def abandon(self, lease: Lease) -> None:
        """Nothing will be written with this lease any more, although its request goes on. Never waits."""
        ...

    async def close(self) -> None:
        """Closes connections, when nothing is to be written any more."""
        ...
