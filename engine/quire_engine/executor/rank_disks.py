"""``RankDisks``: the disk tier of the prefix cache on all ranks, each of which keeps its part of a block in its own
files. ``TransferResults`` says when all of them have moved a block.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

from quire_engine.core.kv_transfer.transfer import DiskContents, TransferResult
from quire_engine.worker.block_file import FolderLock

log = logging.getLogger(__name__)

OpenOnRanks = Callable[[str, int], Sequence[Any]]
"""Opens the files of all ranks in a folder, with a number of slots. Returns what each rank found there
(``DiskContents.to_plain``), or why it could not, in rank order.
"""


class RankDisks:
    """The files of all ranks in one folder, which no other engine uses until ``close``, and the ``results`` of their
    transfers. ``contents`` is what all ranks found when the files were opened; None if there are none.
    """

    def __init__(self) -> None:
        self.results = TransferResults()
        self.contents: DiskContents | None = None
        self._lock: FolderLock | None = None

    def open(self, path: Path, num_slots: int, block_bytes: int, num_ranks: int, open_on_ranks: OpenOnRanks) -> None:
        """Opens a folder below ``path`` for ``num_slots`` blocks, but no more than its file system has room for.
        ``block_bytes`` is the size of a block on all ``num_ranks`` ranks together. If the disk cannot be used, logs a
        warning, and there is no tier.
        """
        self.close()
        self.contents = None
        self.results.begin(num_ranks)
        try:
            lock = FolderLock(path)
            try:
                num_slots = min(num_slots, lock.file_system_bytes // block_bytes)
                answers = open_on_ranks(str(lock.folder), num_slots)
                for rank, answer in enumerate(answers):
                    if isinstance(answer, str):
                        raise OSError(f"rank {rank}: {answer}" if len(answers) > 1 else answer)
            except OSError:
                lock.close()
                raise
        except OSError as error:
            log.warning("KV blocks are not kept on disk: %s cannot be used: %s", path, error)
            return
        self.contents, self._lock = DiskContents.in_common([DiskContents.from_plain(each) for each in answers]), lock
        log.info("KV blocks on disk: %d of %d found in %s", len(self.contents.stored), num_slots, lock.folder)

    def close(self) -> None:
        """Releases the folder for other engines. May be called again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


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
