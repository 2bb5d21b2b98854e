"""Which engine ran the last request of each session. Bounded: the sessions that were quiet longest are forgotten."""

from collections import OrderedDict

SessionKey = tuple[str, str]
"""A tenant and its name for the session: one tenant cannot speak of another's."""


class SessionEngines:
    """Remembers the engines of the ``limit`` sessions that were seen last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._engines: OrderedDict[SessionKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def record(self, key: SessionKey, engine_id: str) -> None:
        """The session's last request went there."""
        self._engines[key] = engine_id
        self._engines.move_to_end(key)
        if len(self._engines) > self._limit:
            self._engines.popitem(last=False)

    def get(self, key: SessionKey) -> str | None:
        """Where its last request went, as far as is known."""
        return self._engines.get(key)
