"""Whether Redis was there all the time, and still is the one that it was. Knows nothing of records."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import ResponseError

PATIENCE = 0.5  # seconds that a request waits for Redis where it can go on, or begin, without


class RedisServer:
    """What this router has seen of Redis, and what Redis says of its own start, which a router that came later did not
    see. While it was away, or when it lost its data, routers went on without: for ``settle`` seconds from then on they
    may still have to write what they hold, so that what is not there need not be unknown.
    """

    def __init__(self, client: Redis, settle: float) -> None:
        self._client = client
        self._settle = settle
        self._run_id = ""
        self._settled = 0.0

    @property
    def is_settling(self) -> bool:
        """Whether a record that is not there may yet be written."""
        return monotonic() < self._settled

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around an exchange with it: one that takes longer than requests wait means that it was away."""
        began = monotonic()
        try:
            yield
        finally:
            if monotonic() - began > PATIENCE:
                self.was_away()

    def was_away(self) -> None:
        """It cannot be written to, or could not until now."""
        self._settled = monotonic() + self._settle

    async def look(self) -> None:
        """Finds out whether it was restarted. Raises what the client raises."""
        try:
            told = await self._client.info("server")
        except ResponseError:
            return  # this user may not ask
        run_id = str(told.get("run_id", ""))
        if self._run_id not in ("", run_id):
            self.was_away()
        self._run_id = run_id
        uptime = float(told.get("uptime_in_seconds", self._settle))  # rounded down
        self._settled = max(self._settled, monotonic() + self._settle - uptime)


def milliseconds(time: tuple[int, int]) -> int:
    """What TIME answered, in ms."""
    return time[0] * 1000 + time[1] // 1000
