"""Copies of models from elsewhere than the Hub, in the folder that ``huggingface_hub`` keeps for other libraries
(``HF_HOME/assets``, or ``HF_ASSETS_CACHE``).

A copy is laid out as the Hub's cache is: ``blobs`` has each file once, by what identifies its content, and a folder of
``snapshots`` has links to the files of one state of the model. A download is ``blobs/ID.incomplete``,
which gets its name when it is whole, and where the next download continues.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Protocol

from filelock import FileLock, Timeout
from huggingface_hub import cached_assets_path, constants
from huggingface_hub.utils.tqdm import tqdm
from quire_proto.names import NAME_RULE, is_name, shown

from quire_cli.model.check import check_fits_disk, disk_sentence
from quire_cli.model.name import ModelNotFoundError, Say

WORKERS = 4
ATTEMPTS = 4  # connections in a row that may end without a byte
MAX_FILES = 10_000  # of one model
LISTING = "listing.json"
NAME = "name.txt"  # of the model, as it was typed
PARTIAL = ".incomplete"
_BLOB = re.compile(r"[0-9a-f]{64}")


class ConnectionCutError(Exception):
    """A connection ended in the middle of a file, or there was none. The text is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """``size`` is in bytes; ``blob`` identifies the content, by 64 hexadecimal digits; ``tag`` is what the source
    itself calls this state of the file; ``sha256`` is what the whole file has to have, if that is known. Raises
    ``ValueError`` for a name that no file of a model may have (``is_name``).
    """

    name: str
    size: int
    blob: str
    tag: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"{shown(self.name)!r} is not the name of a file: it may have {NAME_RULE}")
        if not isinstance(self.size, int) or not 0 <= self.size < 1 << 60 or not _BLOB.fullmatch(self.blob):
            raise ValueError(f"{self.name} has no size and no digest")


class Source(Protocol):
    """Where a model's files are kept."""

    def files(self) -> list[RemoteFile]:
        """Returns what is there now. Raises ``ModelNotFoundError``, and ``ConnectionCutError`` without an answer."""

    def read(self, file: RemoteFile, start: int) -> Iterable[bytes]:
        """The bytes of ``file`` from ``start`` on. Raises as ``files`` does."""


class Copy:
    """The copy of a model whose files a ``source`` has: a ``Repository``. If the source cannot be reached, they are the
    files of the last time. Every method raises ``ModelNotFoundError``.
    """

    elements = None

    def __init__(self, name: object, source: Source, kind: str, place: str, say: Say) -> None:
        self.name, self._source, self._say = name, source, say
        with _explained(Path(kind)):
            self._root = _folder(kind, str(name), place)
        with _explained(self._root):
            self._files = {file.name: file for file in self._listing()}
        blobs = sorted(f"{file.name} {file.blob}" for file in self._files.values())
        self.commit = hashlib.sha256("\n".join(blobs).encode()).hexdigest()[:40]

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: file.size for name, file in self._files.items()}

    def snapshot(self) -> Path:
        """The folder of this state of the model, which need not exist."""
        return self._root / "snapshots" / self.commit

    def download_small(self, file: str) -> Path:
        """The folder with a small ``file``, which is downloaded if it is missing."""
        with _explained(self._root):
            self._download(self._files[file], Event(), lambda _: None)
        return self.snapshot()

    def download(self, files: Sequence[str]) -> Path:
        """The folder with ``files``, of which those that are missing are downloaded, if there is room on the disk."""
        wanted = [self._files[name] for name in files]
        missing = [file for file in wanted if not self._blob(file).exists()]
        with _explained(self._root):
            self._remove_leftovers({file.blob for file in missing})
            size = sum(file.size - self._kept(file) for file in missing)
            check_fits_disk(str(self.name), size, self._root)
            if missing:
                self._say(f"downloading {self.name}: {len(missing)} files, {size / 1e9:.2f} GB, into {self._root}")
            self._download_all(wanted, size)
        return self.snapshot()

    def broken_files(self) -> list[str]:
        """The files of the snapshot that have not the size which the source told."""
        paths = {file.name: self.snapshot() / file.name for file in self._files.values()}
        return sorted(
            name for name, path in paths.items() if path.is_file() and path.stat().st_size != self.files[name]
        )

    def _listing(self) -> list[RemoteFile]:
        """Returns the files of the source; if it cannot be reached, the files of the last time."""
        path = self._root / LISTING
        try:
            files = self._source.files()
        except ConnectionCutError as error:
            try:
                files = [RemoteFile(**each) for each in json.loads(path.read_bytes())]
            except (OSError, ValueError, TypeError):
                raise ModelNotFoundError(str(error)) from None
            self._say(f"{str(error).partition(':')[0]}, so the copy of the last time is taken")
            return files
        (self._root / NAME).write_text(str(self.name))
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps([asdict(file) for file in files]))
        new.replace(path)
        return files

    def _download_all(self, files: list[RemoteFile], size: int) -> None:
        """Downloads several files at a time. The first failure stops all of them."""
        stop, lock = Event(), Lock()
        with (
            tqdm(total=size, unit="B", unit_scale=True, desc=str(self.name)) as bar,  # type: ignore[no-untyped-call]
            ThreadPoolExecutor(WORKERS) as pool,
        ):

            def advance(count: int) -> None:
                with lock:
                    bar.update(count)

            try:
                for done in [pool.submit(self._download, file, stop, advance) for file in files]:
                    done.result()
            finally:
                stop.set()

    def _download(self, file: RemoteFile, stop: Event, advance: Callable[[int], None]) -> None:
        """Links ``file`` into the snapshot, and downloads it if no snapshot has it."""
        blob, link = self._blob(file), self.snapshot() / file.name
        blob.parent.mkdir(exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.parent.resolve().is_relative_to(self.snapshot().resolve()):
            raise ModelNotFoundError(f"{link.parent} leads out of the copy of {self.name}: remove {self._root}.")
        with self._lock(file.blob):  # another process may download the same
            if not blob.exists():
                self._fill(file, stop, advance)
                self._check_digest(file)
                self._partial(file).replace(blob)
            if not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(Path(*[".."] * (2 + file.name.count("/")), "blobs", file.blob))

    def _fill(self, file: RemoteFile, stop: Event, advance: Callable[[int], None]) -> None:
        """Appends what is missing to the incomplete file. A connection that was cut continues where it was."""
        left = ATTEMPTS
        with self._partial(file).open("ab", buffering=0) as out:
            if out.tell() > file.size:  # left by a release that did not stop there
                out.seek(0)
                out.truncate()
            while (start := out.tell()) < file.size:
                try:
                    for block in self._source.read(file, start):
                        if stop.is_set():
                            raise ModelNotFoundError(f"{self.name} was not downloaded: start again.")
                        if out.tell() + len(block) > file.size:
                            out.truncate(0)
                            raise ModelNotFoundError(
                                f"{file.name} of {self.name} has more bytes than were listed ({file.size}): check the "
                                "server, and start again."
                            )
                        out.write(block)
                        advance(len(block))
                    cut = f"{self.name} could not be downloaded ({file.name} ends too early): start again."
                except ConnectionCutError as error:
                    cut = str(error)
                left = left - 1 if out.tell() == start else ATTEMPTS
                if not left:
                    raise ModelNotFoundError(cut)

    def _check_digest(self, file: RemoteFile) -> None:
        """Removes what was downloaded if it is not what it should be."""
        if file.sha256 is None:
            return
        with self._partial(file).open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != file.sha256:
            self._partial(file).unlink()
            raise ModelNotFoundError(f"{file.name} of {self.name} has not its digest, and was removed: start again.")

    def _remove_leftovers(self, wanted: set[str]) -> None:
        """Removes incomplete files that nothing will go on with. A file whose lock is taken is being downloaded."""
        for path in self._root.glob(f"blobs/*{PARTIAL}"):
            if path.stem not in wanted:
                with suppress(Timeout, OSError), self._lock(path.stem, timeout=0):
                    path.unlink(missing_ok=True)

    def _lock(self, blob: str, timeout: float = -1) -> FileLock:
        path = self._root / ".locks" / f"{blob}.lock"
        path.parent.mkdir(exist_ok=True)
        return FileLock(path, timeout=timeout)

    def _kept(self, file: RemoteFile) -> int:
        """Bytes that an earlier download has left."""
        path = self._partial(file)
        return min(path.stat().st_size, file.size) if path.exists() else 0

    def _blob(self, file: RemoteFile) -> Path:
        return self._root / "blobs" / file.blob

    def _partial(self, file: RemoteFile) -> Path:
        return self._root / "blobs" / f"{file.blob}{PARTIAL}"


def copies_of(kind: str) -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder of each copy of a kind; without its name, a copy is called by its folder."""
    for folder in (Path(constants.HF_ASSETS_CACHE) / "quire" / kind).glob("*/"):
        name = folder / NAME
        yield name.read_text() if name.is_file() else folder.name, folder.resolve()


def _folder(kind: str, name: str, place: str) -> Path:
    """Where the copies of what is called ``name`` at ``place`` (the address of a server) are kept."""
    readable = re.sub(r"[^\w.-]+", "--", name.partition("://")[2]).strip("-.")[:80]
    digest = hashlib.sha256(f"{place}\n{name}".encode()).hexdigest()[:10]
    return cached_assets_path("quire", kind, f"{readable}-{digest}")


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What can go wrong with the disk, in one sentence that says what to do."""
    try:
        yield
    except ConnectionCutError as error:
        raise ModelNotFoundError(str(error)) from None
    except (OSError, ValueError) as error:
        where = Path(getattr(error, "filename", None) or folder)
        fallback = f"{where} cannot be used ({str(error).strip().rstrip('.:')}): name another folder with HF_HOME."
        raise ModelNotFoundError(disk_sentence(error, where) or fallback) from None
