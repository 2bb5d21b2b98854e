"""Weights are read ahead within the memory that is left, and whatever cannot be is left to the loader."""

import os
from pathlib import Path

import pytest
from quire_engine.checkpoint import prefetch
from quire_engine.checkpoint.prefetch import PART_BYTES, prefetch_weights

MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the system is told to read: the file's name, from where, and how many bytes."""
    told: list[tuple[str, int, int]] = []

    def advise(descriptor: int, start: int, count: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, start, count))

    monkeypatch.setattr(prefetch.os, "posix_fadvise", advise)
    return told


def machine(root: Path, available: int) -> Path:
    """A machine with ``available`` MiB of memory left."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemAvailable: {available * 1024} kB\n")
    return root


def sparse(file: Path, size: int) -> None:
    with file.open("wb") as opened:
        opened.truncate(size)


def join(model: Path, root: Path) -> None:
    for thread in prefetch_weights(model, root):
        thread.join(10)


def test_every_byte_of_the_weights_is_read_once_and_nothing_else(
    tmp_path: Path, advised: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sparse(folder / "a.safetensors", 2 * PART_BYTES + 5)
    sparse(folder / "b.safetensors", 7)
    sparse(folder / "tokenizer.json", MIB)
    join(folder, machine(tmp_path, 1024))
    whole = [("a.safetensors", start, PART_BYTES) for start in (0, PART_BYTES)]
    assert sorted(advised) == [*whole, ("a.safetensors", 2 * PART_BYTES, 5), ("b.safetensors", 0, 7)]


def test_a_gguf_file_is_read_too(tmp_path: Path, advised: list[tuple[str, int, int]]) -> None:
    sparse(tmp_path / "model.gguf", 9)
    join(tmp_path / "model.gguf", machine(tmp_path, 1))
    assert advised == [("model.gguf", 0, 9)]


@pytest.mark.parametrize(("available", "is_read"), [(127, False), (128, True)])
def test_weights_that_need_more_than_half_of_the_memory_are_not_read(
    tmp_path: Path, advised: list[tuple[str, int, int]], available: int, is_read: bool
) -> None:
    sparse(tmp_path / "model.safetensors", 64 * MIB)
    join(tmp_path, machine(tmp_path, available))
    assert bool(advised) is is_read


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path, advised: list[tuple[str, int, int]]) -> None:
    sparse(tmp_path / "model.safetensors", 64 * MIB)
    root = machine(tmp_path, 4096)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{127 * MIB}\n")
    join(tmp_path, root)
    assert not advised


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_folder_without_weights_is_left_to_the_loader(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert prefetch_weights(tmp_path / name, machine(tmp_path, 1024)) == []


def test_a_file_that_goes_away_ends_its_readers_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse(tmp_path / "model.safetensors", 3 * PART_BYTES)

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(prefetch.os, "open", refuse)
    join(tmp_path, machine(tmp_path, 1024))
