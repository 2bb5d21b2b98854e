"""``CommonLosses``: sessions that ended within a moment of each other, which have one cause as far as a router can
tell: a network that was cut, a node that died. Does no I/O; times are in seconds of any one clock.

Each connection backs off by itself while it fails. What ends a common cause ends it for all: with the first session
that is open again the others are tried at once, as many at a time as the ``JoinWindow`` allows, instead of each after
the pause that its own failures have led to.
"""

from collections.abc import Hashable
from math import inf
from typing import Generic, TypeVar

MOMENT = 1.0
"""Seconds between two losses of one cause, at most. Sessions notice it one after the other."""

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class CommonLosses(Generic[ConnectionT]):
    """The connections that have lost their sessions, by the event that they were lost in."""

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
