"""How a simulated router tells the others what it has in flight and what it expects engines to have soon: as
``fleet.peers`` does, without Redis.
"""

from quire_router.fleet.cadence import PublishRate
from quire_router.fleet.expectations import SpeculativeBlocks
from quire_router.fleet.ledger import LoadLedger
from quire_router.fleet.share import LoadMessage
from quire_router.simulation.news import DelayedFeed


class Publisher:
    """Publishes one router's load when it has changed, at the ``PublishRate`` of ``interval`` nanoseconds; never, with
    None.
    """

    def __init__(
        self,
        router_id: str,
        ledger: LoadLedger,
        expectations: SpeculativeBlocks,
        shares: DelayedFeed[LoadMessage],
        interval: int | None,
    ) -> None:
        self._router_id = router_id
        self._ledger = ledger
        self._expectations = expectations
        self._shares = shares
        self._cadence = None if interval is None else PublishRate(interval)
        self._sequence = 0
        self._changed: int | None = None

    def change(self, now: int) -> None:
        """The share changes now. What was to be told before must have been: see ``flush``."""
        if self._changed is None:
            self._changed = now
        self.flush(now)

    def flush(self, now: int) -> None:
        """It is ``now``: tells what was to be told by then, as nothing has changed since."""
        if self._cadence is None or self._changed is None:
            return
        time = round(self._cadence.next_at(self._changed))
        if time > now:
            return
        self._sequence += 1
        message = LoadMessage(self._router_id, self._sequence, self._ledger.local_load(), self._expectations.pop_all())
        self._ledger.unseen.on_published(self._sequence)
        self._shares.publish(time, message)
        self._cadence.on_published(time, len(message.load.engines), len(self._ledger))
        self._changed = None
