"""What all connections of one pool share, so that a large fleet does not cost more than it may: ``ReconnectLimiter``,
when each tries to connect, and ``UpdateRate``, how often each hears of its engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_RECONNECTS_PER_SECOND = 100
"""Of all connections together, once each has tried a few times: a try costs about 2 ms of CPU, over TLS up to 7."""

MAX_CONNECTS_PER_SECOND = 500
"""Tries that begin, of all connections together, so that a fleet that is found at once, or comes back at once, leaves
time for streams between them: a thousand engines are tried within two seconds.
"""

CONNECT_BURST = 20
"""Tries that may begin at once."""


class ReconnectLimiter:
    """When the connections of one pool try to connect. Those that wait for their next try are counted, so that each
    tries less often the more there are; and tries begin one after the other, but for those that requests depend on.
    The latter is the generic cell rate algorithm (ITU-T I.371).
    """

    def __init__(self) -> None:
        self._disconnected = 0
        self._next_turn = 0.0

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

    def turn(self, now: float, *, urgent: bool = False) -> float:
        """Seconds until a connection may begin a try, none if it is ``urgent``; takes this turn."""
        delay = self._next_turn - CONNECT_BURST / MAX_CONNECTS_PER_SECOND - now
        self._next_turn = max(self._next_turn, now) + 1 / MAX_CONNECTS_PER_SECOND
        return 0.0 if urgent else max(0.0, delay)


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
