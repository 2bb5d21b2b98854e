"""Request state in Redis, so that neither a dead engine nor a dead router loses a request."""

import asyncio
import logging
from uuid import uuid4

from quire_proto.errors import ErrorCode, QuireError, internal
from quire_proto.sampling import FinishReason
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from quire_router import metrics
from quire_router.generation import Generation
from quire_router.journal.base import Lease, Record
from quire_router.journal.codec import DamagedRecordError, decode_record
from quire_router.journal.pending import Entry, Pending
from quire_router.journal.writer import RedisWriter, WriterSettings, keys

log = logging.getLogger(__name__)
LAST_WRITE = 2.0  # seconds that a router which is ending waits for Redis: it may be ending too

REFUSED_EPOCH = 0  # no record ever has it, so whatever is written with it is refused


class RedisJournal:
    """Records at ``url`` (``redis://``, ``rediss://`` for TLS, with user and password in it).

    Writes are noted and return; one task writes them, and tries again while Redis is away. At most ``max_requests``
    requests, and ``max_tokens`` tokens that are not written yet, are held here; beyond that records are dropped and
    counted. A token takes 4 bytes, that of a prompt when it came in an ``array``, as from the validator. Raises
    ``ValueError``, without its password, when the URL is not one.
    """

    def __init__(
        self,
        url: str,
        *,
        owner: str | None = None,
        settings: WriterSettings | None = None,
        max_requests: int = 20_000,
        max_tokens: int = 8_000_000,
        timeout: float = 5.0,
    ) -> None:
        self._owner = owner or uuid4().hex
        self._timeout = timeout
        self._client = _client(url, timeout)
        self._pending = Pending(max_requests, max_tokens)
        self._writer = RedisWriter(self._client, self._pending, settings or WriterSettings())
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether the last exchange with Redis succeeded."""
        return self._writer.available

    def start(self) -> None:
        """Begins to connect; never waits, never fails. The first ``open`` does it as well."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._writer.run(), name="journal writer")

    def open(self, generation: Generation) -> Lease:
        """See ``Journal``. A request id that still runs here is not opened again."""
        self.start()
        lease = Lease(generation.request_id, self._owner, 1)
        if self._pending.get(generation.request_id) is not None:
            metrics.STALE_EPOCHS.inc()
            return Lease(generation.request_id, self._owner, REFUSED_EPOCH)
        if not self._pending.add(Entry(generation, lease)):
            metrics.JOURNAL_DROPPED.inc()
        return lease

    def append(
        self,
        lease: Lease,
        position: int,
        token_ids: list[int],
        index: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """See ``Journal``. Tokens that would leave a hole are not kept."""
        entry = self._writable(lease)
        if entry is not None and not self._pending.extend(entry, position, token_ids, index, finish_reason):
            metrics.JOURNAL_DROPPED.inc()

    def finish(self, lease: Lease, reason: FinishReason, error: str = "") -> None:
        """See ``Journal``."""
        entry = self._writable(lease)
        if entry is not None:
            entry.finish = (reason, error)
            self._pending.touch(entry)

    async def read(self, request_id: str) -> Record | None:
        """See ``Journal``: what Redis has, which may be a moment behind what was written."""
        try:
            fields, packed = await self._fetch_surely(request_id)
            return decode_record(fields, packed or b"") if fields else None
        except DamagedRecordError:
            log.error("the record of request %s is damaged", request_id)
            raise internal() from None
        except (RedisError, OSError, TimeoutError):
            raise QuireError(ErrorCode.UNAVAILABLE, "Request state cannot be read now.", retry_after=1.0) from None

    async def flush(self) -> None:
        """Waits until everything written so far is in Redis; for as long as that takes."""
        await self._writer.flush()

    async def close(self) -> None:
        """See ``Journal``."""
        if self._task is not None:
            await self._end_writer(self._task)
        await self._client.aclose()

    async def _end_writer(self, task: asyncio.Task[None]) -> None:
        try:
            async with asyncio.timeout(min(LAST_WRITE, self._timeout)):
                await self._writer.flush()
        except TimeoutError:
            log.warning("the state of %d requests was not written to Redis", len(self._pending))
        task.cancel()
        await asyncio.wait([task])

    async def _fetch_surely(self, request_id: str) -> tuple[dict[bytes, bytes], bytes | None]:
        try:
            return await self._fetch(request_id)
        except RedisConnectionError:
            # The pool may hold connections that died with a former Redis; a fresh one tells whether it is there.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            return await self._fetch(request_id)

    async def _fetch(self, request_id: str) -> tuple[dict[bytes, bytes], bytes | None]:
        """The record's hash and its tokens, as they were at one moment."""
        record, tokens = keys(request_id)
        pipeline = self._client.pipeline(transaction=True)
        pipeline.hgetall(record)
        pipeline.get(tokens)
        fields, packed = await pipeline.execute()
        return fields, packed

    def _writable(self, lease: Lease) -> Entry | None:
        entry = self._pending.get(lease.request_id)
        if entry is None or entry.finish is not None:
            return None
        if lease != entry.lease:
            metrics.STALE_EPOCHS.inc()
            return None
        return entry


def _client(url: str, timeout: float) -> Redis:
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # the writer tries again by itself, with all that came in the meantime
        )
    except ValueError:
        # The library's text can quote a part of a password that holds a slash or a colon.
        raise ValueError("the Redis URL is not of the form redis://[user:password@]host:port/database") from None
