"""``JoinWindow``: how many connections of one pool may be opening their sessions at a time. Does no I/O; times are in
seconds of any one clock.

It is the window of a congestion control. What is opened shares processors with what is open, here and at the engines,
and one that takes too long there is begun again: more of them at a time then complete fewer. So the window grows while
engines answer soon, at first by one with each answer, and shrinks when they answer late; new ones begin as others
complete.
"""

from dataclasses import dataclass
from math import inf

from quire_router.core.retry import was_held_up

FIRST_SIZE = 4
MIN_SIZE, MAX_SIZE = 2, 32

LATE = 0.25
LATE_FACTOR = 3
"""An answer is late after ``LATE`` seconds, or so many times the shortest: a far or encrypted engine takes longer."""

OVERDUE = 1.0
"""Seconds after which any answer is late, and a join that others have overtaken waits for its own engine, and holds up
nobody.
"""

LOOK_INTERVAL = 0.05
"""Seconds from one ``look`` to the next. Where nothing completes, one more may begin with each: engines that are there
are found among a thousand whose hosts are gone.
"""

_SHRINK = 0.7


@dataclass(eq=False, slots=True)
class Join:
    """A session that is being opened, since ``begun``. Requests wait for one that is ``urgent``."""

    begun: float
    urgent: bool


class JoinWindow:
    """The joins that are under way. ``has_room`` says whether one more may begin; those that are urgent make room only
    for each other, so that they wait for no new session.
    """

    def __init__(self) -> None:
        self.size = float(FIRST_SIZE)
        self._under_way: dict[Join, None] = {}  # in the order in which they began
        self._best = inf
        self._shrunk_at = self._progress_at = self._looked_at = -inf

    def __len__(self) -> int:
        return len(self._under_way)

    def has_room(self, *, urgent: bool = False) -> bool:
        """Whether a join may begin now."""
        counted = sum(join.urgent for join in self._under_way) if urgent else len(self._under_way)
        return counted < int(self.size)

    def begin(self, now: float, *, urgent: bool = False) -> Join:
        """Begins a join."""
        if not self._under_way:
            self._progress_at = now
        join = Join(now, urgent)
        self._under_way[join] = None
        return join

    def answered(self, join: Join, now: float) -> None:
        """Its engine has answered. Those that began before, and are overdue, do not count any more."""
        self._progress_at = now
        if join not in self._under_way:
            return  # others have overtaken it: its own engine is late
        took = now - join.begun
        self._best = min(self._best, took)
        if took <= min(OVERDUE, max(LATE, LATE_FACTOR * self._best)):
            self.size = min(MAX_SIZE, self.size + (1 / self.size if self._shrunk_at > -inf else 1))
        else:
            self._shrink(join, max(MIN_SIZE, _SHRINK * self.size), now)
        for other in list(self._under_way):
            if other.begun >= join.begun or now - other.begun < OVERDUE:
                break
            del self._under_way[other]

    def timed_out(self, join: Join, now: float) -> None:
        """Its engine has not answered at all."""
        if join in self._under_way:
            self._shrink(join, MIN_SIZE, now)

    def end(self, join: Join) -> None:
        """The session is open, or the try has failed. Idempotent."""
        self._under_way.pop(join, None)

    def look(self, now: float) -> None:
        """To be called every ``LOOK_INTERVAL`` while a join waits. Where no engine answers, the oldest join gives its
        place to another. A router that was held up itself first hears what has come meanwhile.
        """
        if was_held_up(now - self._looked_at, LOOK_INTERVAL):
            self._progress_at = now
        self._looked_at = now
        if self._under_way and now - self._progress_at >= OVERDUE:
            del self._under_way[next(iter(self._under_way))]

    def _shrink(self, join: Join, size: float, now: float) -> None:
        """Shrinks the window, once for all that began before it was shrunk."""
        if join.begun >= self._shrunk_at:
            self.size, self._shrunk_at = size, now
