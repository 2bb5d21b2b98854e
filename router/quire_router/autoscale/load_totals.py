"""The one number that models are scaled by: requests that were admitted and have not ended, of all routers together.
Does no I/O.

It counts what waits in the queue, what waits for an engine after it lost one, and what engines run. What waits alone
would be nothing while every engine is just busy, and they would be taken away for it.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.supervise import SupervisedTask
from redis.exceptions import RedisError

from quire_router.clients.redis_client import RedisAccess, lua_source, redis_client
from quire_router.core.retry import supervise

log = logging.getLogger(__name__)

METRIC = "quire_load"
"""What the metric is called, wherever it is asked for."""


class Load(Protocol):
    """The load of all routers."""

    async def read(self) -> Mapping[str, int]:
        """Each configured model's, 0 where it is idle, at most a second old. Raises ``QuireError`` UNAVAILABLE where
        it is not known: nothing that is not known is ever 0.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


class LocalLoad:
    """Implements ``Load`` for a router that is the only one: ``count`` tells what it has of a model."""

    def __init__(self, models: Iterable[str], count: Callable[[str], int]) -> None:
        self._models = tuple(models)
        self._count = count

    async def read(self) -> Mapping[str, int]:
        """See ``Load``."""
        return self.now()

    async def close(self) -> None:
        """See ``Load``."""

    def now(self) -> dict[str, int]:
        """What this router has at this moment."""
        return {model: self._count(model) for model in self._models}


def unknown_load(message: str) -> QuireError:
    """The load cannot be told now. Nobody is asked to wait: autoscalers come again by themselves."""
    return QuireError(ErrorCode.UNAVAILABLE, message)


def no_such_model(model: str) -> QuireError:
    """A model that is not configured, whatever engines there are."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no model {model!r}.")


# What one router has, as it stands in Redis. Does no I/O.


MAX_SNAPSHOT_BYTES = 256 * 1024
_LARGEST = 2**32


class InvalidSnapshotError(ValueError):
    """What was read is no router's part."""


def encode(part: Mapping[str, int]) -> bytes:
    """A router's part: how many requests it has of each model that it has any of."""
    return json.dumps({model: count for model, count in part.items() if count}, separators=(",", ":")).encode("ascii")


def decode(payload: bytes | None) -> dict[str, int]:
    """Raises ``InvalidSnapshotError``, whatever the bytes are."""
    if payload is None:
        raise InvalidSnapshotError("it is not there")
    if len(payload) > MAX_SNAPSHOT_BYTES:
        raise InvalidSnapshotError("it is too long")
    try:
        part = json.loads(payload)
    except (ValueError, RecursionError):
        raise InvalidSnapshotError("it is not JSON") from None
    if not isinstance(part, dict) or not all(map(_is_count, part.values())):
        raise InvalidSnapshotError("it holds something else than counts")
    return part


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


# The load of all routers, through Redis: each tells its part and renews its lease, and who is asked adds them up.
#
# Nothing is remembered here that Redis does not say now. A router that died is forgotten with its lease, and a Redis
# that begins empty is not believed before every router has had the time to tell it.


KEYS = ("quire:{autoscale}:leases", "quire:{autoscale}:parts", "quire:{autoscale}:born")
"""All in one slot of a cluster."""
MAX_ROUTERS = 1024
_FAILURES = (RedisError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Times in seconds. A part is told ``interval`` after it changed, and at least every ``beat``; a router that is
    silent for ``lease`` is taken for dead. What was read is good for ``age``. A Redis in which there was nobody is
    believed after ``settle``, in which every router that is there has found it again. Redis has to answer within
    ``timeout``.
    """

    interval: float = 0.1
    beat: float = 0.5
    lease: float = 3.0
    age: float = 0.1
    settle: float = 1.5
    timeout: float = 0.5


class LoadPublisher:
    """Tells the part of a router, which ``part`` returns, to the Redis at ``place``; ``ValueError``, without its
    password, when that is no URL. ``changed`` says that there is something new to tell.
    """

    def __init__(
        self,
        place: RedisAccess | str,
        part: Callable[[], Mapping[str, int]],
        settings: LoadSettings | None = None,
        *,
        router_id: str | None = None,
    ) -> None:
        self._part = part
        self._settings = settings or LoadSettings()
        self._id = router_id or uuid4().hex
        self._client = redis_client(place, timeout=self._settings.timeout, repeats=1)
        self._script = self._client.register_script(lua_source(__package__, "tell"))
        self._changed = asyncio.Event()
        self._task: SupervisedTask | None = None
        self._closing = False

    def start(self) -> None:
        """Begins to tell; never waits, never fails."""
        self._task = supervise("load for autoscalers", self._publish_changes)

    def changed(self) -> None:
        """The part is another one now."""
        self._changed.set()

    async def close(self) -> None:
        """Takes the part back, if Redis is there to be told."""
        self._closing = True
        if self._task is not None:
            await self._task.stop()
            with suppress(*_FAILURES):
                await self._publish(b"")
        await self._client.aclose()

    async def _publish_changes(self) -> None:
        told = True
        while not self._closing:  # a time limit that passes at the same moment can swallow the cancellation
            self._changed.clear()
            try:
                await self._publish(encode(self._part()))
                told = True
            except _FAILURES as error:
                if told:
                    log.warning("autoscalers cannot be told of the load: %s", type(error).__name__)
                told = False
            await asyncio.sleep(self._settings.interval)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat - self._settings.interval):
                    await self._changed.wait()

    async def _publish(self, part: bytes) -> None:
        await self._script(keys=KEYS, args=[self._id, part, round(self._settings.lease * 1000)])


class RedisLoad:
    """Implements ``Load`` for several routers: the sum of what they told the Redis at ``place``. Those who ask at once
    share one answer. ``ValueError``, without its password, when that is no URL.
    """

    def __init__(self, place: RedisAccess | str, models: Iterable[str], settings: LoadSettings | None = None) -> None:
        self._models = tuple(models)
        self._settings = settings or LoadSettings()
        self._client = redis_client(place, timeout=self._settings.timeout, repeats=1)
        self._script = self._client.register_script(lua_source(__package__, "read"))
        self._reading = asyncio.Lock()
        self._known: Mapping[str, int] | QuireError = {}
        self._asked = -math.inf

    async def read(self) -> Mapping[str, int]:
        """See ``Load``."""
        loop = asyncio.get_running_loop()
        came = loop.time()
        async with self._reading:
            # What was asked after somebody came is new to them, however long it took: nobody waits for more than two.
            if self._asked < came and loop.time() >= self._asked + self._settings.age:
                asked = loop.time()
                self._known = await self._sum()
                self._asked = asked
            known = self._known
        if isinstance(known, QuireError):
            raise QuireError(known.code, known.message)
        return known

    async def close(self) -> None:
        """Lets go of the connection."""
        await self._client.aclose()

    async def _sum(self) -> Mapping[str, int] | QuireError:
        try:
            async with asyncio.timeout(self._settings.timeout):
                settled, routers, parts = await self._script(keys=KEYS, args=[MAX_ROUTERS])
        except _FAILURES as error:
            log.debug("the load cannot be read: %s", type(error).__name__)
            return unknown_load("The load of all routers is not known, because Redis does not answer.")
        if settled < self._settings.settle * 1000:
            return unknown_load("The load of all routers is not known yet: they are only now being heard.")
        if routers > MAX_ROUTERS:
            return unknown_load(f"More than {MAX_ROUTERS} routers tell their load.")
        try:
            return _add_up(map(decode, parts), self._models)
        except InvalidSnapshotError:
            return unknown_load("What a router told of its load cannot be read.")


def _add_up(parts: Iterable[Mapping[str, int]], models: Iterable[str]) -> dict[str, int]:
    total = dict.fromkeys(models, 0)
    for part in parts:
        for model in total.keys() & part.keys():
            total[model] += part[model]
    return total
