"""How often a router tells the others its share: at once after a quiet spell, and seldom enough on average. Has no
clock.
"""

BURST = 10
"""Shares that may be told at once if none was told for as many intervals."""

ENGINES_PER_INTERVAL = 100
"""Telling of so many engines is worth another interval: that is what takes time, here and at those who hear it."""


PEERS_PER_INTERVAL = 4
"""With more peers than these the interval grows with their number: each of them hears all others, so that what one
hears would grow with it, and what all hear with its square.
"""


class PublishRate:
    """On average a share is told every ``interval``, or less often where it is long or goes to many: the generic cell
    rate algorithm (ITU-T I.371). Times are numbers of any one unit.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._theoretical_arrival = 0.0

    def next_at(self, now: float) -> float:
        """From when on the next may be told; what is not after ``now`` means at once."""
        return max(now, self._theoretical_arrival - (BURST - 1) * self._interval)

    def on_published(self, now: float, engines: int, peers: int = 0) -> None:
        """A share of so many ``engines`` was published now, for so many ``peers``."""
        intervals = (1 + engines / ENGINES_PER_INTERVAL) * max(1.0, peers / PEERS_PER_INTERVAL)
        self._theoretical_arrival = max(self._theoretical_arrival, now) + self._interval * intervals
