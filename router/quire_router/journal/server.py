"""Whether Redis was there all the time, and still is the one that it was. Knows nothing of records."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from quire_router.journal.keys import PROBE

MAX_REDIS_WAIT = 0.5  # seconds that a request waits for Redis where it can go on, or begin, without


class RedisHealth:
    """What this router has seen of Redis, and what Redis says of its own start, which a router that came later did not
    see. While it was away, or when it lost its data, routers went on without: for ``settle`` seconds from then on they
    may still have to write what they hold, so that what is not there need not be unknown.
    """

    def __init__(self, client: Redis, settle: float) -> None:
        self._client = client
        self._settle = settle
        self._run_id = ""
        self._settled_at = 0.0
        # Of reads and of writes: when the last was answered, and when those were asked that are not, in their order.
        self._last_reply = {False: 0.0, True: 0.0}
        self._outstanding: dict[bool, dict[object, float]] = {False: {}, True: {}}

    @property
    def is_settling(self) -> bool:
        """Whether a record that is not there may yet be written."""
        return monotonic() < self._settled_at

    @contextmanager
    def track_exchange(self, *, writes: bool = False) -> Iterator[None]:
        """Around an exchange with it: one that takes longer than requests wait, while no other is answered, means that
        it was away. Answers to reads say nothing of those to what ``writes``. Where many ask at once, one may just have
        waited here for its turn: each of them would keep all others from going on.
        """
        asked = object()
        self._outstanding[writes][asked] = monotonic()
        try:
            yield
        finally:
            self._check_latency(writes)
            del self._outstanding[writes][asked]
        self._last_reply[writes] = monotonic()

    def _check_latency(self, writes: bool) -> None:
        """Whether it was silent since it was asked what it was asked first, of all that is not answered."""
        first = next(iter(self._outstanding[writes].values()))
        if monotonic() - max(first, self._last_reply[writes]) > MAX_REDIS_WAIT:
            self.mark_unavailable()

    def mark_unavailable(self) -> None:
        """It cannot be written to, or could not until now."""
        self._settled_at = monotonic() + self._settle

    async def check(self) -> ResponseError | None:
        """Finds out whether it was restarted, and whether it takes what is written: a router that has nothing to write
        would not know. Returns why it does not. Raises what the client raises.
        """
        pipeline = self._client.pipeline(transaction=False)
        pipeline.info("server")
        pipeline.setrange(PROBE, 0, "")
        told, taken = await pipeline.execute(raise_on_error=False)
        if not isinstance(told, ResponseError):  # else this user may not ask
            self._check_run_id(told)
        if isinstance(taken, ResponseError) and not isinstance(taken, NoPermissionError):
            self.mark_unavailable()
            return taken
        return None

    def _check_run_id(self, info: dict[str, Any]) -> None:
        run_id = str(info.get("run_id", ""))
        if run_id and run_id == self._run_id:
            return  # its age says nothing new, and goes by a clock that may go back: below zero, if to before its start
        if self._run_id:
            self.mark_unavailable()
        self._run_id = run_id
        uptime = max(0.0, float(info.get("uptime_in_seconds", self._settle)))  # rounded down
        self._settled_at = max(self._settled_at, monotonic() + self._settle - uptime)


def to_milliseconds(time: tuple[int, int]) -> int:
    """What TIME answered, in ms."""
    return time[0] * 1000 + time[1] // 1000
