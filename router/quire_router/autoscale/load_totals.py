"""The one number that models are scaled by: requests that were admitted and have not ended, of all routers together.

It counts what waits in the queue, what waits for an engine after it lost one, and what engines run. The queue alone
would be empty while every engine is just busy, and they would be scaled away.

With several routers it is summed up through Redis: each publishes its counts (a snapshot) as its record in the
``TotalsRegister``, and a router that is asked adds them up. Nothing is cached beyond ``LoadSettings.age``. A router
that died is forgotten when its lease expires, and a Redis that was empty is not believed before every router has had
the time to publish.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from uuid import uuid4

from quire_proto.errors import QuireError
from quire_proto.supervise import SupervisedTask
from redis.exceptions import RedisError

from quire_router.api.rest.http import to_json
from quire_router.clients.membership import TotalsRegister
from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.core.errors import load_damaged, load_redis_away, load_settling, load_too_many_routers
from quire_router.core.retry import supervise, wait_at_most

log = logging.getLogger(__name__)

MAX_ROUTERS = 1024
_FAILURES = (RedisError, OSError, TimeoutError)
MAX_SNAPSHOT_BYTES = 256 * 1024
_LARGEST = 2**32


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Times in seconds. A snapshot is published ``interval`` after it changed, and at least every ``heartbeat``; a
    router that published nothing for ``lease`` counts as dead. A sum is reused for ``age``. A Redis in which there was
    no router is believed after ``settle``, in which every live router has reconnected. Redis has to answer within
    ``timeout``.
    """

    interval: float = 0.1
    heartbeat: float = 0.5
    lease: float = 3.0
    age: float = 0.1
    settle: float = 1.5
    timeout: float = 0.5


class LoadPublisher:
    """Publishes a router's load, which ``snapshot`` returns, in Redis; ``changed`` is called when it changed. Raises
    ``ValueError``, without the password, if ``access`` is no URL.
    """

    def __init__(
        self,
        access: RedisAccess | str,
        snapshot: Callable[[], Mapping[str, int]],
        settings: LoadSettings | None = None,
        *,
        router_id: str | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._settings = settings or LoadSettings()
        self._id = router_id or uuid4().hex
        self._client = redis_client(access, timeout=self._settings.timeout)
        self._register = TotalsRegister(self._client, self._settings.lease)
        self._changed = asyncio.Event()
        self._task: SupervisedTask | None = None
        self._closing = False

    def start(self) -> None:
        """Begins to publish; never waits, never fails."""
        self._task = supervise("load for autoscalers", self._publish_changes)

    def changed(self) -> None:
        """The load has changed."""
        self._changed.set()

    async def close(self) -> None:
        """Removes this router's load from Redis, if that is available."""
        self._closing = True
        if self._task is not None:
            await self._task.stop()
            with suppress(*_FAILURES):
                await self._register.leave(self._id)
        await self._client.aclose()

    async def _publish_changes(self) -> None:
        published = True
        while not self._closing:  # a time limit that passes at the same moment can swallow the cancellation
            self._changed.clear()
            try:
                await self._register.renew(self._id, encode(self._snapshot()))
                published = True
            except _FAILURES as error:
                if published:
                    log.warning("cannot report the load to autoscalers: %s", describe_failure(error))
                published = False
            await asyncio.sleep(self._settings.interval)
            await wait_at_most(self._changed, self._settings.heartbeat - self._settings.interval)


class RedisLoad:
    """Implements ``Load`` for several routers: the sum of what they published in Redis. Concurrent reads share one
    query. Raises ``ValueError``, without the password, if ``access`` is no URL.
    """

    def __init__(self, access: RedisAccess | str, models: Iterable[str], settings: LoadSettings | None = None) -> None:
        self._models = tuple(models)
        self._settings = settings or LoadSettings()
        self._client = redis_client(access, timeout=self._settings.timeout)
        self._register = TotalsRegister(self._client, self._settings.lease)
        self._reading = asyncio.Lock()
        self._known: Mapping[str, int] | QuireError = {}
        self._read_at = -math.inf

    async def read(self) -> Mapping[str, int]:
        """See ``Load``."""
        loop = asyncio.get_running_loop()
        called_at = loop.time()
        async with self._reading:
            # A query that began after this call is fresh enough, however long it took: no call waits for more than two.
            if self._read_at < called_at and loop.time() >= self._read_at + self._settings.age:
                read_at = loop.time()
                self._known = await self._read_sum()
                self._read_at = read_at
            known = self._known
        if isinstance(known, QuireError):
            raise known.with_traceback(None)  # without the frames of the call that it was raised in before
        return known

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.aclose()

    async def _read_sum(self) -> Mapping[str, int] | QuireError:
        try:
            async with asyncio.timeout(self._settings.timeout):
                settled, routers, payloads = await self._register.read(MAX_ROUTERS)
        except _FAILURES as error:
            log.debug("the load cannot be read: %s", describe_failure(error))
            return load_redis_away()
        if settled < self._settings.settle:
            return load_settling()
        if routers > MAX_ROUTERS:
            return load_too_many_routers(MAX_ROUTERS)
        try:
            return _add_up(map(decode, payloads), self._models)
        except InvalidSnapshotError:
            return load_damaged()


def _add_up(snapshots: Iterable[Mapping[str, int]], models: Iterable[str]) -> dict[str, int]:
    total = dict.fromkeys(models, 0)
    for snapshot in snapshots:
        for model in total.keys() & snapshot.keys():
            total[model] += snapshot[model]
    return total


class InvalidSnapshotError(ValueError):
    """What was read is no router's snapshot."""


def encode(snapshot: Mapping[str, int]) -> bytes:
    """A router's snapshot: its requests of each model that it has any of."""
    return to_json({model: count for model, count in snapshot.items() if count})


def decode(payload: bytes | None) -> dict[str, int]:
    """The snapshot. Raises ``InvalidSnapshotError`` for any bytes that are none."""
    if payload is None:
        raise InvalidSnapshotError("it is not there")
    if len(payload) > MAX_SNAPSHOT_BYTES:
        raise InvalidSnapshotError("it is too long")
    try:
        snapshot = json.loads(payload)
    except (ValueError, RecursionError):
        raise InvalidSnapshotError("it is not JSON") from None
    if not isinstance(snapshot, dict) or not all(map(_is_count, snapshot.values())):
        raise InvalidSnapshotError("it holds something else than counts")
    return snapshot


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
