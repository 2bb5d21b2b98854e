"""KV blocks on disk: the files, and the threads that move blocks between them and the host pool.

A folder has two files. ``blocks`` is an array of slots of one block each. ``index`` has a header, which names
everything that the numbers in a block depend on, and a record per slot. A record has the block's hash, a digest of hash
and contents, a number that gives the order of writes, and a checksum of itself. A record is emptied before its slot is
written, and is written after it, so an interrupted write leaves no record. If the bytes of either file are damaged in
another way, the digest shows it, and the block is not used. Nothing is flushed: data lost in a crash of the machine is
detected in the same way.
"""

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

from quire_proto.folders import open_trusted, trusted_folder

from quire_engine.core.block_pool import Transfer
from quire_engine.core.kv_transfer.transfer import DISK, DiskContents, TransferOutcome, TransferResult

log = logging.getLogger(__name__)

NUM_THREADS = 4
MAX_ENGINES = 64
TIMED_BLOCKS = 4
_MAGIC = b"quire-kv-blocks\1"
_HEADER = struct.Struct("<16s32s")
_RECORD = struct.Struct("<16s16sQI4x")
_CHECKED = struct.Struct("<16s16sQ")
_EMPTY = bytes(_RECORD.size)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that the index names: its slot, its hash, and ``sequence``, a number that grows with each write."""

    sequence: int
    slot: int
    block_hash: bytes


class BlockFile:
    """``num_slots`` slots of ``block_bytes`` each in ``folder``, which no other process uses. ``fingerprint`` is what
    blocks depend on besides their hashes: the contents of a file with another fingerprint are dropped. Several threads
    may use it at once, each with its own slot. Raises ``OSError`` if the files cannot be created.
    """

    def __init__(self, folder: Path, fingerprint: str, num_slots: int, block_bytes: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._index = open_trusted(folder / "index")
        try:
            self._blocks = open_trusted(folder / "blocks")
        except OSError:
            os.close(self._index)
            raise
        about = blake2b(f"{fingerprint}\0{block_bytes}".encode(), digest_size=32).digest()
        try:
            self._prepare(_HEADER.pack(_MAGIC, about))
        except OSError:
            self.close()
            raise
        self._sequences = count(max((each.sequence for each in self._records()), default=0) + 1)

    def _prepare(self, header: bytes) -> None:
        """Drops contents with another header, or beyond the slots."""
        num_slots, block_bytes = self.num_slots, self.block_bytes
        if os.pread(self._index, len(header), 0) != header:
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            os.pwrite(self._index, header, 0)
        if os.fstat(self._blocks).st_size > num_slots * block_bytes:
            os.ftruncate(self._blocks, num_slots * block_bytes)
            os.ftruncate(self._index, min(self._record_at(num_slots), os.fstat(self._index).st_size))

    def stored(self) -> list[StoredBlock]:
        """Returns the blocks in the index, oldest first, each hash once."""
        found = {each.block_hash: each for each in sorted(self._records(), key=lambda each: each.sequence)}
        return sorted(found.values(), key=lambda each: each.sequence)

    def write(self, slot: int, block_hash: bytes, contents: memoryview) -> None:
        """Writes a block. Raises ``OSError``, also if the folder is gone."""
        if not os.fstat(self._blocks).st_nlink:
            raise FileNotFoundError("its folder is gone")
        os.pwrite(self._index, _EMPTY, self._record_at(slot))
        done = 0
        while done < len(contents):
            done += os.pwrite(self._blocks, contents[done:], slot * self.block_bytes + done)
        fields = block_hash, _digest(block_hash, contents), next(self._sequences)
        record = _RECORD.pack(*fields, zlib.crc32(_CHECKED.pack(*fields)))
        os.pwrite(self._index, record, self._record_at(slot))

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        """Reads a block. Returns whether it is the one that was written under this hash; if not, the contents of
        ``into`` are meaningless. Raises ``OSError``.
        """
        found = _parse(os.pread(self._index, _RECORD.size, self._record_at(slot)))
        done = 0
        while done < len(into):
            read = os.preadv(self._blocks, [into[done:]], slot * self.block_bytes + done)
            if not read:
                return False
            done += read
        return found is not None and found[0] == block_hash and found[1] == _digest(block_hash, into)

    def drop_pages(self) -> None:
        """Makes the next reads come from the disk instead of the page cache, if possible."""
        os.fdatasync(self._blocks)
        os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Closes the files."""
        os.close(self._index)
        os.close(self._blocks)

    def _records(self) -> Iterator[StoredBlock]:
        size = min(os.fstat(self._index).st_size, self._record_at(self.num_slots)) - _HEADER.size
        whole = os.fstat(self._blocks).st_size // self.block_bytes
        table = os.pread(self._index, max(0, size), _HEADER.size)
        for slot in range(min(len(table) // _RECORD.size, whole)):
            found = _parse(table[slot * _RECORD.size : (slot + 1) * _RECORD.size])
            if found is not None:
                yield StoredBlock(found[2], slot, found[0])

    @staticmethod
    def _record_at(slot: int) -> int:
        return _HEADER.size + slot * _RECORD.size


def _parse(record: bytes) -> tuple[bytes, bytes, int] | None:
    """Returns the hash, the digest and the sequence of a record; None if it is empty or damaged."""
    if len(record) < _RECORD.size:
        return None
    block_hash, digest, sequence, checksum = _RECORD.unpack(record)
    is_right = sequence and checksum == zlib.crc32(_CHECKED.pack(block_hash, digest, sequence))
    return (block_hash, digest, sequence) if is_right else None


def _digest(block_hash: bytes, contents: memoryview) -> bytes:
    digest = blake2b(block_hash, digest_size=16)
    digest.update(contents)
    return digest.digest()


class FolderLock:
    """A folder below ``path`` that this process has for itself until it ends: the first one, by number, that no other
    engine uses and no other user may write to (``trusted_folder``). Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        for number in range(MAX_ENGINES):
            try:
                self.folder = trusted_folder(path / str(number), within=path)
                self._descriptor = open_trusted(self.folder / "lock")
            except PermissionError as error:
                if not (path / str(number)).exists():
                    raise
                log.warning("KV blocks in %s are not used: %s", path / str(number), error.strerror)
                continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
            else:
                return
        raise FileExistsError(f"{MAX_ENGINES} engines use it")

    @property
    def file_system_bytes(self) -> int:
        """The size of the file system that has the folder. If unknown, a size that no file can exceed."""
        found = os.statvfs(self.folder)
        return found.f_blocks * found.f_frsize or 1 << 63

    def close(self) -> None:
        """Releases the folder for other processes."""
        os.close(self._descriptor)


class DiskTransfers:
    """Moves blocks between ``file`` and the host pool on its own threads. Calls ``report`` with each result.
    ``host_block`` returns the memory of a host block.
    """

    def __init__(
        self,
        file: BlockFile,
        host_block: Callable[[int], memoryview],
        report: Callable[[TransferResult], object],
    ) -> None:
        self._file = file
        self._host_block = host_block
        self._report = report
        self._work: SimpleQueue[tuple[Transfer, Callable[[], object]] | None] = SimpleQueue()
        # Daemon threads, because a disk may never answer and must not keep the process alive.
        self._threads = [Thread(target=self._run, name="kv-disk", daemon=True) for _ in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def submit(self, transfers: Iterable[Transfer], wait: Callable[[], object]) -> None:
        """Starts ``transfers`` of the disk's tier. ``wait`` returns when earlier copies leave the host blocks alone."""
        for transfer in transfers:
            assert transfer.tier == DISK, "a transfer is of no tier that there is"
            self._work.put((transfer, wait))

    def close(self) -> None:
        """Ends the threads and closes the files. Gives up on a thread that waits for the disk."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(1.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._file.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            transfer, wait = work
            start, outcome, reason = perf_counter(), TransferOutcome.DONE, ""
            try:
                wait()
                outcome = self._transfer(transfer)
            except Exception as error:  # noqa: BLE001 - a thread that ended would leave its blocks held for ever
                outcome, reason = TransferOutcome.FAILED, str(error)
            seconds = (perf_counter() - start) / NUM_THREADS
            self._report(TransferResult(transfer.transfer_id, outcome, seconds, reason))

    def _transfer(self, transfer: Transfer) -> TransferOutcome:
        memory = self._host_block(transfer.host_block)
        if not transfer.is_load:
            self._file.write(transfer.tier_block, transfer.block_hash, memory)
            return TransferOutcome.DONE
        is_right = self._file.read(transfer.tier_block, transfer.block_hash, memory)
        return TransferOutcome.DONE if is_right else TransferOutcome.DAMAGED


def measure_block_seconds(folder: Path, block_bytes: int) -> float:
    """Measures how long one more block takes to load, in seconds, if as many load at once as there are threads. Uses a
    temporary file. Raises ``OSError``.
    """
    probe = folder / "probe"
    probe.mkdir(exist_ok=True)
    file = BlockFile(probe, "", TIMED_BLOCKS, block_bytes)
    try:
        block = memoryview(bytearray(block_bytes))
        for slot in range(TIMED_BLOCKS):
            file.write(slot, bytes(16), block)
        file.drop_pages()
        start = perf_counter()
        for slot in range(TIMED_BLOCKS):
            file.read(slot, bytes(16), block)
        return (perf_counter() - start) / TIMED_BLOCKS / NUM_THREADS
    finally:
        file.close()
        for name in ("index", "blocks"):
            with suppress(OSError):
                (probe / name).unlink()


def disk_contents(file: BlockFile, block_seconds: float) -> DiskContents:
    """Returns the contents of ``file``, for the scheduler."""
    stored = [(each.slot, each.block_hash) for each in file.stored()]
    return DiskContents(file.num_slots, stored, block_seconds, file.block_bytes)
