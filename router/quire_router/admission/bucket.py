"""One limit a minute, as the generic cell rate algorithm (ITU-T I.371) keeps it: a single number. Has no clock.

Times are whole microseconds, so that every answer is exact.
"""

from dataclasses import dataclass, field

MICROSECONDS = 1_000_000
WINDOW = 60 * MICROSECONDS
"""A full bucket is a minute's worth, so that in any ``w`` seconds at most ``limit * (1 + w / 60)`` are taken."""


@dataclass(slots=True)
class GcraBucket:
    """At most ``limit`` a minute, all of them at once if they were saved up.

    ``full_at`` is when the bucket will be full again if nothing more is taken: the algorithm's theoretical arrival
    time.
    """

    limit: int
    full_at: int = field(default=0)

    def cost(self, amount: int) -> int:
        """The time it takes to refill ``amount``, rounded up: what is taken may never be too little."""
        return -(-amount * WINDOW // self.limit)

    def debt(self, now: int) -> int:
        """Time until the bucket is full."""
        return max(0, self.full_at - now)

    def wait(self, amount: int, now: int) -> int | None:
        """Time after which ``amount`` can be taken if nobody takes anything before, 0 for at once; None when it is more
        than a full bucket.
        """
        cost = self.cost(amount)
        return None if cost > WINDOW else max(0, self.debt(now) + cost - WINDOW)

    def consume(self, amount: int, now: int) -> None:
        """Takes ``amount``, which needed no wait."""
        self.full_at = max(self.full_at, now) + self.cost(amount)

    def refund(self, amount: int) -> None:
        """Puts back what was taken and not used; what a full bucket cannot hold is lost."""
        self.full_at -= self.refund_time(amount)

    def refund_time(self, amount: int) -> int:
        """The time that is given back for ``amount``, rounded down."""
        return amount * WINDOW // self.limit

    def sync(self, debt: int, now: int) -> None:
        """Takes over how another bucket of the same limit stands."""
        self.full_at = now + debt

    def remaining(self, now: int) -> int:
        """What can be taken at once."""
        return max(0, (WINDOW - self.debt(now)) * self.limit // WINDOW)
