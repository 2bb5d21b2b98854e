"""Blocks on disk: what is read is what was written, or nothing, whatever became of the bytes meanwhile."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import Transfer
from quire_engine.core.kv_transfer.transfer import DISK, TransferOutcome
from quire_engine.executor.rank_disks import TransferResults
from quire_engine.worker.block_file import BlockFile, DiskTransfers, FolderLock, measure_block_seconds

SIZE, SLOTS = 40, 5


def name(number: int) -> bytes:
    return bytes([number + 1]) * 16


def contents(number: int) -> bytes:
    return bytes([(number * 31 + index) % 256 for index in range(SIZE)])


def read(file: BlockFile, slot: int, block_hash: bytes) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if file.read(slot, block_hash, memoryview(into)) else None


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:
        yield Path(path)


WRITES = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 9)), max_size=12)


@given(WRITES)
def test_a_file_that_is_opened_again_has_what_was_written_last_into_each_slot(writes: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as path:
        file = BlockFile(Path(path), "model", SLOTS, SIZE)
        slots: dict[int, int] = {}
        for slot, number in writes:
            file.write(slot, name(number), memoryview(contents(number)))
            slots.pop(slot, None)
            slots[slot] = number
        newest = {number: slot for slot, number in slots.items()}
        again = BlockFile(Path(path), "model", SLOTS, SIZE)
        expected = [(slot, name(number)) for slot, number in slots.items() if newest[number] == slot]
        assert [(each.slot, each.block_hash) for each in again.stored()] == expected
        for slot, number in slots.items():
            assert read(again, slot, name(number)) == contents(number)
        file.close()
        again.close()


@settings(max_examples=75)
@given(st.sampled_from(["index", "blocks"]), st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_damage_at_any_byte_is_found(which: str, place: int, change: int, cuts: bool) -> None:
    """A block is never anything but what was written under its hash; and the other blocks are as they were."""
    with TemporaryDirectory() as path:
        file = BlockFile(Path(path), "model", SLOTS, SIZE)
        for number in range(SLOTS):
            file.write(number, name(number), memoryview(contents(number)))
        file.close()
        damaged = Path(path) / which
        data = bytearray(damaged.read_bytes())
        place %= len(data)
        data[place] ^= change
        damaged.write_bytes(data[:place] if cuts else data)
        again = BlockFile(Path(path), "model", SLOTS, SIZE)
        found = [read(again, number, name(number)) for number in range(SLOTS)]
        assert all(each in (None, contents(number)) for number, each in enumerate(found))
        if not cuts and which == "blocks":
            assert [number for number, each in enumerate(found) if each is None] == [place // SIZE]
        for each in again.stored():
            assert each.block_hash == name(each.slot)
        again.close()


@given(st.integers(0, SIZE))
def test_a_write_that_was_torn_leaves_no_block(length: int) -> None:
    """The record is empty from before the first byte until behind the last one."""
    with TemporaryDirectory() as path:
        file = BlockFile(Path(path), "model", SLOTS, SIZE)
        file.write(0, name(0), memoryview(contents(0)))

        class TornError(Exception):
            pass

        def pwrite(descriptor: int, data: bytes, at: int) -> int:
            if len(data) == SIZE:
                real(descriptor, bytes(data)[:length], at)
                raise TornError
            return real(descriptor, data, at)

        real, os.pwrite = os.pwrite, pwrite
        try:
            with pytest.raises(TornError):
                file.write(0, name(1), memoryview(contents(1)))
        finally:
            os.pwrite = real
        file.close()
        again = BlockFile(Path(path), "model", SLOTS, SIZE)
        assert not again.stored()
        assert read(again, 0, name(0)) is None
        assert read(again, 0, name(1)) is None
        again.close()


def test_a_file_of_another_model_or_block_size_is_dropped(folder: Path) -> None:
    for fingerprint, size in (("model", SIZE), ("other", SIZE), ("other", SIZE // 2)):
        file = BlockFile(folder, fingerprint, SLOTS, size)
        assert not file.stored()
        file.write(1, name(1), memoryview(contents(1)[:size]))
        file.close()


def test_with_less_space_the_file_shrinks(folder: Path) -> None:
    file = BlockFile(folder, "model", SLOTS, SIZE)
    for number in range(SLOTS):
        file.write(number, name(number), memoryview(contents(number)))
    file.close()
    again = BlockFile(folder, "model", 2, SIZE)
    assert [each.slot for each in again.stored()] == [0, 1]
    assert (folder / "blocks").stat().st_size == 2 * SIZE
    again.close()


def test_a_folder_that_is_gone_is_an_error_at_the_next_write(folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    file = BlockFile(inner, "model", SLOTS, SIZE)
    shutil.rmtree(inner)
    with pytest.raises(OSError, match="gone"):
        file.write(0, name(0), memoryview(contents(0)))
    file.close()


def test_a_full_disk_fails_the_transfer_and_says_why() -> None:
    class Full(BlockFile):
        def write(self, slot: int, block_hash: bytes, contents: memoryview) -> None:
            raise OSError(28, "No space left on device")

    with TemporaryDirectory() as path:
        results = TransferResults()
        file = Full(Path(path), "model", SLOTS, SIZE)
        transfers = DiskTransfers(file, lambda _: memoryview(bytearray(SIZE)), results.add)
        transfers.submit([Transfer(1, DISK, False, 0, 0, name(0))], lambda: None)
        (result,) = results.take(10.0)
        assert result.outcome is TransferOutcome.FAILED
        assert "No space left" in result.reason
        transfers.close()


def test_what_is_stored_can_be_loaded_into_another_block_and_nothing_begins_before_earlier_copies(folder: Path) -> None:
    memory = [bytearray(contents(number)) for number in range(3)]
    ended, file = TransferResults(), BlockFile(folder, "model", SLOTS, SIZE)
    transfers = DiskTransfers(file, lambda block: memoryview(memory[block]), ended.add)
    copied = Event()
    transfers.submit([Transfer(1, DISK, False, 0, 4, name(7))], copied.wait)
    assert not ended.take(0.05)
    memory[0][:] = contents(9)  # the copy that it had to wait for
    copied.set()
    assert [each.outcome for each in ended.take(10.0)] == [TransferOutcome.DONE]
    transfers.submit([Transfer(2, DISK, True, 1, 4, name(7)), Transfer(3, DISK, True, 2, 3, name(7))], lambda: None)
    results = {}
    while len(results) < 2:
        results.update({each.transfer_id: each.outcome for each in ended.take(10.0)})
    assert results == {2: TransferOutcome.DONE, 3: TransferOutcome.DAMAGED}
    assert memory[1] == contents(9)
    transfers.close()


def test_a_file_that_cannot_be_made_is_closed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            BlockFile(folder, "model", SLOTS, SIZE)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_two_engines_have_folders_of_their_own_and_one_that_was_killed_leaves_its_to_the_next(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from quire_engine.worker.block_file import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print(lock.folder.name, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        own = FolderLock(folder)
        assert own.folder.name == "1"
        other.kill()
        other.wait()
    again = FolderLock(folder)
    assert again.folder.name == "0"
    own.close()
    again.close()


def test_measuring_leaves_no_blocks(folder: Path) -> None:
    assert measure_block_seconds(folder, 1 << 16) > 0
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_a_link_in_the_folder_is_not_followed(folder: Path) -> None:
    victim = folder / "victim.txt"
    victim.write_bytes(b"precious")
    (folder / "index").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        BlockFile(folder, "", SLOTS, SIZE)
    assert victim.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_folder_that_somebody_else_made_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, uid in ((0, 65_534), (1, 0)):
        (folder / str(number)).mkdir()
        os.chown(folder / str(number), uid, uid)
    (folder / "1").chmod(0o777)
    lock = FolderLock(folder)
    assert lock.folder == folder / "2"
    lock.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "belongs to user 65534" in caplog.text
