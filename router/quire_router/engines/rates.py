"""What all connections of one pool share, so that a large fleet does not cost more than it may: ``ReconnectLimiter``,
when each opens its session, and ``UpdateRate``, how often each hears of its engine.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

from quire_proto.supervise import Backoff

from quire_router.engines.join_window import LOOK_INTERVAL, Join, JoinWindow

MAX_RECONNECTS_PER_SECOND = 100
"""Of all connections together, once each has tried a few times: a try costs about 2 ms of CPU, over TLS up to 7."""

STARTING_PART = 1 / 16
"""While nothing listens at an engine's address, a pause is at most this part of how long that has been so. So a process
that starts is found soon after it listens, whether its start took four seconds or a minute.
"""

MOMENT = 1.0
"""Seconds between two losses of one cause, at most. Sessions notice it one after the other."""

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class JoinRank(IntEnum):
    """Which session is opened first."""

    URGENT = 0  # requests wait for it
    KNOWN = 1  # the engine had a session before
    NEW = 2


class CommonLosses(Generic[ConnectionT]):
    """The connections that have lost their sessions, by the event that they were lost in. Losses within a ``MOMENT`` of
    each other have one cause, as far as a router can tell: a network was cut, or a node died. Times are in seconds of
    any one clock.

    Each connection backs off by itself while it fails. What ends a common cause ends it for all: with the first session
    that is open again the others are tried at once, as many at a time as the ``JoinWindow`` allows.
    """

    def __init__(self) -> None:
        self._events: dict[ConnectionT, dict[ConnectionT, None]] = {}
        self._latest: dict[ConnectionT, None] = {}
        self._latest_at = -inf

    def lost(self, connection: ConnectionT, now: float) -> None:
        """Its session has ended."""
        if now - self._latest_at > MOMENT:
            self._latest = {}
        self._latest_at = now
        self._latest[connection] = None
        self._events[connection] = self._latest

    def opened(self, connection: ConnectionT) -> list[ConnectionT]:
        """It has a session. Returns the others that were lost with it and have none, in the order in which they were
        lost. They are returned once: those that fail now have a reason of their own.
        """
        event = self._events.get(connection, {})
        others = [other for other in event if other != connection]
        for member in list(event):
            self.forget(member)
        return others

    def forget(self, connection: ConnectionT) -> None:
        """It is not used any more."""
        self._events.pop(connection, {}).pop(connection, None)


class ReconnectLimiter:
    """When the connections of one pool open their sessions. Those that wait for their next try are counted, so that
    each tries less often the more there are; and as many try at a time as the ``JoinWindow`` allows, in the order of
    their ranks. A connection is known by its ``retry``, which ends its pause.
    """

    def __init__(self) -> None:
        self._disconnected = 0
        self._window = JoinWindow()
        self._losses = CommonLosses[Callable[[], None]]()
        self._waiting: list[tuple[JoinRank, int, asyncio.Future[Join]]] = []  # a heap
        self._arrivals = count()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts one more until the block ends."""
        self._disconnected += 1
        try:
            yield
        finally:
            self._disconnected -= 1

    @property
    def spacing(self) -> float:
        """Seconds between two tries of one connection with which all make ``MAX_RECONNECTS_PER_SECOND``."""
        return self._disconnected / MAX_RECONNECTS_PER_SECOND

    def pause(self, backoff: Backoff, refused_since: float | None) -> float:
        """Returns the seconds until a connection's next try. Nothing has listened since ``refused_since``; None if
        something does, or if that is not known.
        """
        if refused_since is None:
            return backoff.next(self.spacing)
        return backoff.next(self.spacing, max(self.spacing, STARTING_PART * (_now() - refused_since)))

    def lost(self, retry: Callable[[], None]) -> None:
        """A connection has lost its session."""
        self._losses.lost(retry, _now())

    def opened(self, retry: Callable[[], None]) -> None:
        """A connection has a session: those that have lost theirs with it are tried now."""
        for other in self._losses.opened(retry):
            other()

    def forget(self, retry: Callable[[], None]) -> None:
        """A connection is closed."""
        self._losses.forget(retry)

    @asynccontextmanager
    async def turn(self, rank: JoinRank = JoinRank.NEW) -> AsyncIterator["JoinTurn"]:
        """Waits until a connection may try to open its session. It ends with ``JoinTurn.end``, or the block."""
        turn = JoinTurn(self, await self._take(rank))
        try:
            yield turn
        except TimeoutError:
            self._window.timed_out(turn.join, _now())
            raise
        finally:
            turn.end()

    async def _take(self, rank: JoinRank) -> Join:
        future: asyncio.Future[Join] = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (rank, next(self._arrivals), future))
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.end(future.result())
            raise

    def answered(self, join: Join) -> None:
        """See ``JoinTurn.answered``."""
        self._window.answered(join, _now())
        self._admit()

    def end(self, join: Join) -> None:
        """See ``JoinTurn.end``."""
        self._window.end(join)
        self._admit()

    def _admit(self) -> None:
        """Begins the joins that there is room for, and looks again soon where others wait."""
        while self._waiting:
            rank, _, future = self._waiting[0]
            if not future.done():
                urgent = rank is JoinRank.URGENT
                if not self._window.has_room(urgent=urgent):
                    break
                future.set_result(self._window.begin(_now(), urgent=urgent))
            heappop(self._waiting)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_INTERVAL, self._look)

    def _look(self) -> None:
        self._timer = None
        self._window.look(_now())
        self._admit()


class JoinTurn:
    """A connection's try to open its session."""

    def __init__(self, limiter: ReconnectLimiter, join: Join) -> None:
        self._limiter = limiter
        self.join = join

    def answered(self) -> None:
        """The engine has answered, and the session will be open between two of its steps."""
        self._limiter.answered(self.join)

    def end(self) -> None:
        """The session is open, or the try has failed. Idempotent."""
        self._limiter.end(self.join)


def _now() -> float:
    return asyncio.get_running_loop().time()


MAX_UPDATES_PER_SECOND = 1000
"""Batches without outputs, from all engines together: reading one takes about a tenth of a millisecond."""

MIN_UPDATE_INTERVAL = 0.2  # seconds

MAX_PINGS_PER_SECOND = 25
"""To all idle engines together. Each is answered, which together takes about a tenth of a millisecond."""

MIN_PING_INTERVAL = 6.0
"""Seconds. Engines of the release before this one end connections that ping them more often than every 5 seconds."""

_RELEVANT_CHANGE = 1.25  # of the interval: what is less is not worth a message to every engine


class UpdateRate:
    """How often each engine of a pool is to send an update, which is what it does for other routers: seldom enough that
    all together send ``MAX_UPDATES_PER_SECOND``. Between two updates a router knows what it has dispatched itself, and
    what the other routers have. ``ping_interval`` is after how many seconds without traffic an engine is pinged, by a
    connection that is made now.
    """

    def __init__(self) -> None:
        self.interval = MIN_UPDATE_INTERVAL
        self.ping_interval = MIN_PING_INTERVAL

    def set_engines(self, count: int) -> None:
        """Sets how many engines there are. They are sent it with the next acknowledgement that they get."""
        self.interval = max(MIN_UPDATE_INTERVAL, count / MAX_UPDATES_PER_SECOND)
        self.ping_interval = max(MIN_PING_INTERVAL, count / MAX_PINGS_PER_SECOND)

    def has_changed_since(self, sent: float) -> bool:
        """Whether an engine that was sent an interval has to be sent another one."""
        return not 1 / _RELEVANT_CHANGE < self.interval / sent < _RELEVANT_CHANGE
