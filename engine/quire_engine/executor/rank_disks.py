"""``RankDisks``: the disk tier of the prefix cache, of whose blocks each rank keeps its part in files of its own."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire_engine.core.kv_transfer.transfer import DiskContents
from quire_engine.worker.block_file import FolderLock
from quire_engine.worker.transfer_results import TransferResults

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
