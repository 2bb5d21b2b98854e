"""``TransferResults``: the results of transfers between host and disk, which every rank performs for its part."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Lock

from quire_engine.core.kv_transfer.transfer import TransferResult


class TransferResults:
    """Collects the results of all ranks. A transfer has ended when each of ``num_ranks`` has added its result, and has
    failed if it failed on any rank. Thread-safe.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._adding = Lock()
        self._parts: dict[int, list[TransferResult]] = {}
        self._ended: SimpleQueue[TransferResult] = SimpleQueue()

    def begin(self, num_ranks: int) -> None:
        """Forgets all results. From now on ``num_ranks`` add theirs."""
        with self._adding:
            self._num_ranks, self._parts, self._ended = num_ranks, {}, SimpleQueue()

    def add(self, result: TransferResult) -> None:
        """Adds the result of one rank."""
        with self._adding:
            parts = self._parts.setdefault(result.transfer_id, [])
            parts.append(result)
            if len(parts) < self._num_ranks:
                return
            del self._parts[result.transfer_id]
        worst = max(parts, key=lambda part: part.outcome)
        self._ended.put(replace(worst, seconds=max(part.seconds for part in parts)))

    def take(self, timeout: float) -> Sequence[TransferResult]:
        """See ``Executor.take_transfers``."""
        results: list[TransferResult] = []
        with suppress(Empty):
            results.append(self._ended.get(block=timeout > 0, timeout=timeout or None))
            while True:
                results.append(self._ended.get_nowait())
        return results
