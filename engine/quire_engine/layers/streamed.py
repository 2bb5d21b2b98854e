"""Decoder layers that do not fit into memory: they lie packed in a file, and each is read while the layer before it
multiplies (ZeRO-Inference, Aminabadi et al. 2022; FlexGen, Sheng et al. 2023).

``load_layers`` keeps as many layers in memory as may be. The weights of the others are packed straight into a mapping
of a file, which is where the compiled kernels read them. Before a layer runs, a thread has made its pages resident,
and begins with those of the next one; once it has run, its pages are dropped, also from the system's page cache. So two
of them are in memory at a time.

The file has no name, and belongs to one engine: nobody else can change or cut it, it goes with the process however that
ends, and what is read is what this engine has packed. Its blocks are allocated before anything is written to them, so a
full disk is an error of the load and nothing later.
"""

import ctypes
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from errno import EINVAL
from pathlib import Path
from typing import Any, Protocol

import torch
from quire_proto.folders import user_cache_folder

from quire_engine.core.executor import ExecutorError
from quire_engine.errors import ModelError
from quire_engine.kernels.packed_linear import Arena, map_huge_pages, packed_into

log = logging.getLogger(__name__)

AT_ONCE = 2
"""Layers of the file that are in memory at a time: the one that multiplies, and the one that is read."""
_GIB = 1 << 30
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
_IN_MEMORY = ("tmpfs", "ramfs")
_libc = ctypes.CDLL(None, use_errno=True)  # mmap.madvise holds the interpreter's lock while it reads
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Layer(Protocol):
    """A decoder layer, as ``Llama`` calls it."""

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can repeat it."""
        ...

    def __call__(self, *args: Any) -> torch.Tensor:
        """What the layer makes of its arguments."""
        ...


def load_layers(indices: Sequence[int], load: Callable[[int], Layer], memory_gb: float | None) -> Sequence[Layer]:
    """The layers of ``indices``, each made by ``load``; their packed weights take at most ``memory_gb`` GiB of memory,
    of any size if that is None. Raises ``ModelError`` where that cannot be.
    """
    if memory_gb is None:
        return [load(index) for index in indices]
    limit, count = int(memory_gb * _GIB), len(indices)
    arena = Arena(map_huge_pages)
    with packed_into(arena):
        first = load(indices[0])
    size = _whole_pages(arena.allocated)
    if size == 0:
        raise ModelError(
            "--weights-memory-gb needs the compiled kernels, and there are none for weights of this dtype."
        )
    chosen = choose_streamed(count, size, limit)
    if chosen is None:
        raise ModelError(
            f"--weights-memory-gb {memory_gb:g} is too little: three layers, of {size / _GIB:.3f} GiB each, are in "
            "memory at a time."
        )
    file = WeightFile.make() if chosen else None
    layers, sizes = [first], [size]
    for place in range(1, count):
        streamed = file is not None and place in chosen
        arena = Arena(file.map, size) if file is not None and streamed else Arena(map_huge_pages)
        with packed_into(arena):
            layer = load(indices[place])
        layers.append(file.add(layer) if file is not None and streamed else layer)
        sizes.append(_whole_pages(arena.allocated))
    _check_sizes(sizes, chosen, limit)
    if chosen:
        log.info("%d of %d layers are read from disk in each step, %.3f GiB each", len(chosen), count, size / _GIB)
    return layers


def choose_streamed(count: int, size: int, limit: int) -> Sequence[int] | None:
    """The places of the layers, of ``count`` that take ``size`` bytes each, that lie on disk, so that at most ``limit``
    bytes are in memory: as few as can be, spread evenly, so that reading goes on while others multiply, and never the
    first. None if the limit is too small.
    """
    held = limit // size
    if held >= count:
        return []
    if held <= AT_ONCE:
        return None
    number, others = count - held + AT_ONCE, count - 1
    return [place + 1 for place in range(others) if (place + 1) * number // others > place * number // others]


def _check_sizes(sizes: Sequence[int], streamed: Sequence[int], limit: int) -> None:
    """Raises ``ModelError`` if layers are so different that what was planned by the first one takes too much."""
    on_disk = sorted((sizes[place] for place in streamed), reverse=True)
    resident = sum(sizes) - sum(on_disk) + sum(on_disk[:AT_ONCE])
    if resident > limit:
        raise ModelError(
            f"--weights-memory-gb is exceeded by {resident - limit} bytes: layers of this model are larger than its "
            "first one."
        )


class WeightFile:
    """The file of one engine's streamed layers, and what reads them ahead. Layers are used by one thread, in the order
    in which they were added and then again from the first; in any other order they are read when they are asked for.
    """

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._file = os.fdopen(descriptor, "rb+", buffering=0)
        self._folder, self._size = folder, 0
        self._mapped: list[_Pages] = []
        self._layers: list[list[_Pages]] = []
        self._ahead: tuple[int, Future[None]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @classmethod
    def make(cls) -> "WeightFile":
        """A file in the user's cache folder. Raises ``ModelError``."""
        try:
            folder = user_cache_folder()
        except RuntimeError as error:
            raise ModelError(f"Weights cannot be kept on disk: {error}; XDG_CACHE_HOME names a folder.") from None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix="weights-", dir=folder)
            Path(name).unlink()
        except OSError as error:
            raise _unusable(folder, error.strerror or str(error)) from None
        file = cls(descriptor, folder)
        if _file_system(os.fstat(descriptor).st_dev) in _IN_MEMORY:
            raise _unusable(folder, "it lies in memory")
        return file

    def map(self, nbytes: int) -> mmap.mmap:
        """``nbytes`` more of the file, for the layer that is added next. Raises ``ModelError`` for a full disk."""
        size = _whole_pages(nbytes)
        try:
            os.posix_fallocate(self._file.fileno(), self._size, size)
            mapping = mmap.mmap(self._file.fileno(), size, offset=self._size)
        except OSError as error:
            raise _unusable(self._folder, error.strerror or str(error)) from None
        self._mapped.append(_Pages(mapping, self._file.fileno(), self._size))
        self._size += size
        return mapping

    def add(self, layer: Layer) -> "StreamedLayer":
        """``layer``, whose weights were packed into what was mapped since the last call. Raises ``ModelError``."""
        pages, self._mapped = self._mapped, []
        try:
            for each in pages:
                each.write()
        except OSError as error:
            raise _unusable(self._folder, error.strerror or str(error)) from None
        self._layers.append(pages)
        return StreamedLayer(layer, self, len(self._layers) - 1)

    def acquire(self, place: int) -> None:
        """Waits until the layer is in memory, and has the next one read. Raises ``ExecutorError`` where the disk cannot
        be read any more.
        """
        if self._ahead is not None and self._ahead[0] != place:  # a step before this one has failed
            other, reading = self._ahead
            reading.exception()
            self._ahead = None
            self.release(other)
        reading = self._read(place) if self._ahead is None else self._ahead[1]
        self._ahead = None
        try:
            reading.result()
        except OSError as error:
            raise ExecutorError(f"The weights of a layer cannot be read any more: {error.strerror}.") from error
        following = (place + 1) % len(self._layers)
        self._ahead = following, self._read(following)

    def release(self, place: int) -> None:
        """Drops the layer from memory."""
        for pages in self._layers[place]:
            pages.drop()

    def resident_bytes(self) -> int:
        """What of all its layers is in memory now, as far as the system has them in its page cache."""
        return sum(pages.resident_bytes() for layer in self._layers for pages in layer)

    def _read(self, place: int) -> "Future[None]":
        return self._reader.submit(_read_all, self._layers[place])


class StreamedLayer:
    """A layer of a ``WeightFile``, at ``place`` of it."""

    is_capturable = False  # a graph knows of kernels alone

    def __init__(self, layer: Layer, file: WeightFile, place: int) -> None:
        self._layer, self.file, self._place = layer, file, place

    def __call__(self, *args: Any) -> torch.Tensor:
        """See ``Layer``. Raises ``ExecutorError`` where its weights cannot be read."""
        self.file.acquire(self._place)
        try:
            return self._layer(*args)
        finally:
            self.file.release(self._place)


class _Pages:
    """A mapping of the file from ``offset`` on."""

    def __init__(self, mapping: mmap.mmap, file: int, offset: int) -> None:
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapping, self._file, self._offset = mapping, file, offset

    def write(self) -> None:
        """Writes what was packed to the disk, and drops it. Raises ``OSError``."""
        self._mapping.flush()
        self.drop()

    def read(self) -> None:
        """Makes the pages resident. Raises ``OSError``."""
        with suppress(OSError):  # has all of it read at once, where the next call reads piece by piece
            self._advise(mmap.MADV_WILLNEED)
        try:
            self._advise(_MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            self._memory[:: mmap.PAGESIZE].sum()  # a kernel that does not know that advice

    def drop(self) -> None:
        """Takes the pages out of the resident set and the page cache."""
        self._advise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, self._offset, len(self._mapping), os.POSIX_FADV_DONTNEED)

    def resident_bytes(self) -> int:
        """What of it is in the page cache."""
        pages = (ctypes.c_ubyte * -(-len(self._mapping) // mmap.PAGESIZE))()
        _libc.mincore(ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_size_t(len(self._mapping)), pages)
        return sum(each & 1 for each in pages) * mmap.PAGESIZE

    def _advise(self, advice: int) -> None:
        if _libc.madvise(self._memory.data_ptr(), len(self._mapping), advice):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _read_all(layer: Sequence[_Pages]) -> None:
    for pages in layer:
        pages.read()


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _unusable(folder: Path, reason: str) -> ModelError:
    return ModelError(f"Weights cannot be kept in {folder}: {reason}. XDG_CACHE_HOME names another folder for it.")


def _file_system(device: int) -> str:
    """The type of the mounted file system that is ``device``; empty where that is not known."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return ""
