"""Which life of Redis this router is talking to. Knows nothing of records."""

from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import ResponseError


class RedisServer:
    """Tells that Redis was restarted, and maybe lost its data: for ``settle`` seconds from then on routers may still
    have to write again what they hold, so that what is not there need not be unknown.
    """

    def __init__(self, client: Redis, settle: float) -> None:
        self._client = client
        self._settle = settle
        self._run_id = ""
        self._settled = 0.0

    @property
    def is_settling(self) -> bool:
        """Whether a record that is not there may yet be written again, as of the last look."""
        return monotonic() < self._settled

    async def look(self) -> None:
        """Finds out whether it is the one that it was. Raises what the client raises."""
        try:
            run_id = str((await self._client.info("server")).get("run_id", ""))
        except ResponseError:
            return  # this user may not ask
        if self._run_id not in ("", run_id):
            self._settled = monotonic() + self._settle
        self._run_id = run_id
