"""``SimulatedDisk``: how long blocks take between the host pool and a disk of a given speed. It stores nothing; the
scheduler knows which block is where on the disk.
"""

from collections import deque
from collections.abc import Sequence

from quire_engine.core.block_pool import BlockCopies
from quire_engine.core.kv_transfer.transfer import TransferResult

_TICK = 1e-9  # seconds that a clock of whole nanoseconds may fall short of the end of a transfer


class SimulatedDisk:
    """A disk that reads and writes one block at a time, in ``block_seconds`` each, in the order of the transfers. Times
    are in seconds. No transfer fails.
    """

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._free = 0.0
        self._in_flight: deque[tuple[float, TransferResult]] = deque()

    def submit(self, copies: BlockCopies, now: float) -> None:
        """Starts the transfers of ``copies`` when the disk is free."""
        for transfer in copies.transfers:
            self._free = max(self._free, now) + self._block_seconds
            self._in_flight.append((self._free, TransferResult(transfer.transfer_id, seconds=self._block_seconds)))

    def seconds_to_next(self, now: float) -> float:
        """Returns the time until a transfer ends: 0 if one has ended, infinite if there is none."""
        return max(0.0, self._in_flight[0][0] - now) if self._in_flight else float("inf")

    def take(self, now: float) -> Sequence[TransferResult]:
        """Returns the results of the transfers that have ended since the last call."""
        results: list[TransferResult] = []
        while self._in_flight and self._in_flight[0][0] <= now + _TICK:
            results.append(self._in_flight.popleft()[1])
        return results
