"""The journal in Redis, which any number of routers share."""

import asyncio
from collections.abc import Sequence

from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.journal.base import RequestRecord
from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.codec import JournalSettings
from quire_router.journal.journal_writer import JournalWriter
from quire_router.journal.redis.owner_channel import OwnerChannel
from quire_router.journal.redis.redis_connection import PipelinedConnection, RedisHealth
from quire_router.journal.redis.store import RedisStore
from quire_router.journal.redis.writer import RedisTarget
from quire_router.journal.write_buffer import WriteBuffer

READ_CONNECTIONS = 32


class RedisJournal(BufferedJournal):
    """Records in the Redis of ``access`` (or its URL: ``redis://``, ``rediss://`` for TLS, with user and password).

    At most ``max_requests`` requests, and ``max_tokens`` tokens that are not written yet, are buffered. Raises
    ``ValueError``, without its password, when the URL is not one.
    """

    def __init__(
        self,
        access: RedisAccess | str,
        *,
        owner: str | None = None,
        settings: JournalSettings | None = None,
        max_requests: int = 20_000,
        max_tokens: int = 8_000_000,
        timeout: float = 5.0,
    ) -> None:
        self._client = redis_client(access, timeout=timeout)
        self._writing = redis_client(access, timeout=timeout, limited_by_caller=True)
        # There may be hundreds of readers, which must not delay writes.
        reading = redis_client(access, timeout=timeout, connections=READ_CONNECTIONS)
        settings, buffer = settings or JournalSettings(), WriteBuffer(max_requests, max_tokens)
        health = RedisHealth(self._client, settings.settle)
        target = RedisTarget(self._client, PipelinedConnection(self._writing, timeout), health, settings)
        self._records = RedisStore(reading, settings, health)
        writer = JournalWriter(target, buffer, settings)
        super().__init__(self._records, writer, buffer, owner=owner, timeout=timeout, end_timeout=settings.end_timeout)
        asking = redis_client(access, timeout=timeout, repeats=0)
        self._owners = OwnerChannel(asking, self._owner, self.flush_ends, timeout=settings.ask_timeout)

    def start(self) -> None:
        """See ``BufferedJournal``."""
        super().start()
        self._owners.start()

    async def close(self) -> None:
        """See ``Journal``."""
        await super().close()
        await self._owners.close()
        await self._client.aclose()
        await self._writing.aclose()

    async def _ask_owners(self, records: Sequence[RequestRecord]) -> bool:
        self.start()
        by_owner: dict[str, list[str]] = {}
        for record in records:
            by_owner.setdefault(record.owner, []).append(record.generation.request_id)
        return any(await asyncio.gather(*(self._owners.ask(owner, names) for owner, names in by_owner.items())))

    async def _is_settling(self, request_id: str) -> bool:
        return await self._call(request_id, lambda: self._records.is_settling(request_id))
