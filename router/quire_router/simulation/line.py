"""The queue of one simulated router: the fair queue of a real one, in virtual time."""

from quire_proto.errors import QuireError

from quire_router.admission.fair import FairQueue
from quire_router.admission.queue import QueueSettings
from quire_router.admission.tenant import Tenants
from quire_router.admission.turn import QueuedRequest
from quire_router.simulation.replica import SimulatedRouter


class SimulatedQueue:
    """Requests that wait for room. What ``AdmissionQueue`` does with tasks, this does when it is asked."""

    def __init__(self, replica: SimulatedRouter, settings: QueueSettings) -> None:
        self._replica = replica
        self._queue = FairQueue(Tenants(), settings.bounds)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: QueuedRequest) -> list[QueuedRequest]:
        """A request has come. Returns those that have to give way, itself too if it is refused."""
        try:
            return self._queue.add(waiting)
        except QuireError:
            return [waiting]

    def next(self) -> QueuedRequest | None:
        """Whose turn it is, if it is anybody's."""
        if not self._queue:
            return None
        replica, now = self._replica, self._replica.seconds
        is_ahead = self._queue.is_ahead(self._queue.peek().tenant, now)
        return self._queue.pop(now) if (replica.has_spare_room if is_ahead else replica.has_room) else None

    def remove(self, request_id: str) -> bool:
        """The request waits no more; False if it did not."""
        return self._queue.remove(request_id)
