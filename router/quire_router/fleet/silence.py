"""How long an engine has been silent although it should speak. Does no I/O and keeps no timer."""

from quire_router.fleet.settings import ConnectionSettings

TICKS = 6  # in the shorter of the two times, so that each is kept to a sixth


class LivenessMonitor:
    """Counted in ticks, not by the clock, so that a router that was frozen itself does not blame its engines."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.period = min(settings.silence, settings.stall) / TICKS
        self._suspect_after = settings.silence
        self._stalled_after = settings.stall
        self._ticks = 0

    @property
    def suspect(self) -> bool:
        """Whether the engine should get no new work."""
        return self._ticks * self.period >= self._suspect_after

    @property
    def stalled(self) -> bool:
        """Whether there is nothing to wait for on this stream."""
        return self._ticks * self.period >= self._stalled_after

    def on_message(self) -> None:
        """A message came."""
        self._ticks = 0

    def tick(self, expecting: bool) -> None:
        """``period`` seconds have passed; ``expecting`` tells whether the engine owes a word."""
        self._ticks = self._ticks + 1 if expecting else 0
