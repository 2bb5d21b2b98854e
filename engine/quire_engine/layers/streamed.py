"""Weight streaming: decoder layers that do not fit into memory are packed in a file, and each is read while the layer
before it computes (ZeRO-Inference, Aminabadi et al. 2022; FlexGen, Sheng et al. 2023).

``load_layers`` keeps as many layers in memory as allowed. The others share two slots of memory. Each layer is packed
into its slot and written to the file from there, and the compiled kernels find it in the slot whenever it has been read
again. When a layer has run, threads start at once to read the next layer of its slot.

The file has no name and belongs to one engine: no other process can change or truncate it, and it disappears with the
process however that ends. Its blocks are allocated before they are written, so a full disk is an error during loading
and never later. The file is not mapped, so a failing disk is a read error and never a signal.
"""

import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EIO
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch
from quire_proto.folders import user_cache_folder

from quire_engine.attention.base import LayerAttention
from quire_engine.core.executor import ExecutorError, WeightStats
from quire_engine.errors import ModelError
from quire_engine.kernels.host_call import host_call
from quire_engine.kernels.packed_linear import Arena, map_huge_pages, packed_into

log = logging.getLogger(__name__)

AT_ONCE = 2
"""How many layers of the file are in memory at a time: the one that computes and the one that is being read."""
_GIB = 1 << 30
_READERS, _REQUEST_BYTES = 4, 4 << 20  # one request at a time does not keep a disk busy
_IN_MEMORY = ("tmpfs", "ramfs")


class Layer(Protocol):
    """A decoder layer, as ``DecoderModel`` calls it."""

    @property
    def attn(self) -> LayerAttention:
        """The attention of the layer. Constant."""
        ...

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can repeat it."""
        ...

    @property
    def waits_for_device(self) -> bool:
        """Whether the host reads results of the layer, and so waits for them."""
        ...

    def __call__(self, *args: Any) -> torch.Tensor:
        """Computes the layer."""
        ...

    def overlapped(self, *args: Any) -> Any:
        """Computes the layer for two halves of the tokens, overlapped with sums over the ranks."""
        ...

    def experts_only(self, no_tokens: torch.Tensor) -> None:
        """Computes the tokens of other engines with the layer's experts."""
        ...


class SlotWeights(Protocol):
    """The weights of layers that share ``AT_ONCE`` slots: in the order in which layers are added, every ``AT_ONCE``-th
    has the same slot. Use them from one thread, in that order and then again from the first. In any other order they
    are fetched on demand.
    """

    @property
    def is_capturable(self) -> bool:
        """Whether a graph can repeat layers that use them. Constant."""
        ...

    def acquire(self, place: int) -> None:
        """Ensures that the layer is in its slot for later computation."""
        ...

    def release(self, place: int) -> None:
        """Starts to fetch the next layer of the slot into it."""
        ...


W = TypeVar("W", bound=SlotWeights)


def next_in_slot(place: int, count: int) -> int:
    """Returns which of ``count`` layers uses the slot after the layer at ``place``."""
    return place + AT_ONCE if place + AT_ONCE < count else place % AT_ONCE


def load_layers(
    indices: Sequence[int], load: Callable[[int], Layer], memory_gb: float | None
) -> tuple[Sequence[Layer], WeightStats | None]:
    """Makes the layers of ``indices`` with ``load``. Their packed weights take at most ``memory_gb`` GiB of memory, or
    any amount if that is None. Returns the layers and the statistics of streamed layers, or None if no layer is
    streamed. Raises ``ModelError`` if that is not possible.
    """
    if memory_gb is None:
        return [load(index) for index in indices], None
    limit, count = int(memory_gb * _GIB), len(indices)
    first, size = _load_in_memory(lambda: load(indices[0]))
    if size == 0:
        raise ModelError(
            "--weights-memory-gb needs the compiled kernels, and there are none for weights of this dtype."
        )
    chosen = choose_streamed(count, size, limit)
    if chosen is None:
        raise ModelError(
            f"--weights-memory-gb is too little: this process may have {memory_gb:g} GiB of it, and three layers, of "
            f"{size / _GIB:.3f} GiB each, are in its memory at a time."
        )
    layers, resident, file = [first], size, WeightFile.make(limit // AT_ONCE) if chosen else None
    for place in range(1, count):
        load_this = partial(load, indices[place])
        if file is not None and place in chosen:
            layers.append(file.add(load_this))
        else:
            layer, nbytes = _load_in_memory(load_this)
            layers.append(layer)
            resident += nbytes
    resident += 0 if file is None else file.memory_bytes
    if resident > limit:
        raise ModelError(f"--weights-memory-gb is exceeded by {resident - limit} bytes: {_TOO_LARGE}")
    if file is not None:
        file.stats.memory_bytes = resident
        log.info("%d of %d layers are read from disk in each step, %.3f GiB each", len(chosen), count, size / _GIB)
    return layers, None if file is None else file.stats


def _load_in_memory(load: Callable[[], Layer]) -> tuple[Layer, int]:
    """Returns the layer, and the bytes of memory that its packed weights take."""
    arena = Arena(map_huge_pages)
    with packed_into(arena):
        layer = load()
    return layer, _whole_pages(arena.allocated)


def choose_streamed(count: int, size: int, limit: int) -> Sequence[int] | None:
    """Chooses which of ``count`` layers of ``size`` bytes each are on disk, so that at most ``limit`` bytes are in
    memory. Chooses as few as possible, never the first, evenly spread so that reads overlap with other layers'
    computation. Returns None if the limit is too small.
    """
    held = limit // size
    if held >= count:
        return []
    if held <= AT_ONCE:
        return None
    return spread(count - held + AT_ONCE, count)


def spread(number: int, count: int) -> Sequence[int]:
    """Returns ``number`` of the places of ``count`` layers, as evenly spread as possible, and never the first."""
    others = count - 1
    return [place + 1 for place in range(others) if (place + 1) * number // others > place * number // others]


class _Piece(NamedTuple):
    """Where a layer is in the file."""

    offset: int
    nbytes: int


@dataclass(slots=True)
class _Slot:
    """Memory that holds one layer at a time: the layer at ``place``, once all requests in ``reading`` are done."""

    memory: mmap.mmap
    place: int
    reading: list[Future[None]] = field(default_factory=list)


class WeightFile:
    """The file of one engine's streamed layers, the slots that they are read into, and the threads that read them.
    Implements ``SlotWeights``. ``stats`` are updated with each use.
    """

    is_capturable = True

    def __init__(self, descriptor: int, folder: Path, slot_bytes: int) -> None:
        self._file = os.fdopen(descriptor, "rb+", buffering=0)
        self._folder = folder
        self.stats = WeightStats()
        self._layers: list[_Piece] = []
        self._slots = [_Slot(_map_slot(slot_bytes), place) for place in range(AT_ONCE)]
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")

    @classmethod
    def make(cls, slot_bytes: int) -> "WeightFile":
        """Makes a file in the user's cache folder for layers of at most ``slot_bytes`` each. Raises ``ModelError``."""
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
        file = cls(descriptor, folder, slot_bytes)
        if _file_system(os.fstat(descriptor).st_dev) in _IN_MEMORY:
            raise _unusable(folder, "it lies in memory")
        _bypass_page_cache(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # the system must not read ahead of a request
        return file

    @property
    def memory_bytes(self) -> int:
        """The bytes of the slots that are in use: each slot needs room for the largest of its layers."""
        return sum(max((layer.nbytes for layer in self._layers[slot::AT_ONCE]), default=0) for slot in range(AT_ONCE))

    def add(self, load: Callable[[], Layer]) -> "StreamedLayer[WeightFile]":
        """Makes a layer with ``load``: packs its weights into a slot and writes them from there to the disk. Raises
        ``ModelError``.
        """
        place = len(self._layers)
        slot = self._slots[place % AT_ONCE]
        arena = Arena(_refuse, slot.memory)
        with packed_into(arena):
            layer = load()
        try:
            self._layers.append(self._write(slot.memory, _whole_pages(arena.allocated)))
        except OSError as error:
            raise _unusable(self._folder, error.strerror or str(error)) from None
        slot.place = place
        return StreamedLayer(layer, self, place)

    def acquire(self, place: int) -> None:
        """Waits until the layer is in its slot. Raises ``ExecutorError`` if the disk can no longer be read."""
        slot, start = self._slots[place % AT_ONCE], perf_counter()
        if slot.place != place:  # in the first step, and after a failed step
            self._read(place)
        try:
            for request in slot.reading:
                request.result()
        except OSError as error:
            raise ExecutorError(f"The weights of a layer cannot be read any more: {error.strerror}.") from error
        self.stats.wait_seconds += perf_counter() - start

    def release(self, place: int) -> None:
        """Starts to read the next layer of the slot into it."""
        following = next_in_slot(place, len(self._layers))
        if following != place:
            self._read(following)

    def _read(self, place: int) -> None:
        slot, layer = self._slots[place % AT_ONCE], self._layers[place]
        wait(slot.reading)
        slot.place, memory = place, memoryview(slot.memory)[: layer.nbytes]
        self.stats.read_bytes += layer.nbytes
        slot.reading = [
            self._readers.submit(self._read_request, memory[first : first + _REQUEST_BYTES], layer.offset + first)
            for first in range(0, layer.nbytes, _REQUEST_BYTES)
        ]

    def _read_request(self, memory: memoryview, offset: int) -> None:
        """Fills ``memory`` from the file at ``offset``. Raises ``OSError``."""
        start, end = offset, offset + len(memory)
        while offset < end:
            count = os.preadv(self._file.fileno(), [memory[offset - start :]], offset)
            if count == 0:
                raise OSError(EIO, "the file ends before them")
            offset += count
        os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)

    def _write(self, packed: mmap.mmap, nbytes: int) -> _Piece:
        """Appends the first ``nbytes`` of ``packed``, and drops them from the page cache. Raises ``OSError``."""
        file, start, memory = self._file.fileno(), self.stats.disk_bytes, memoryview(packed)
        os.posix_fallocate(file, start, nbytes)
        written = 0
        while written < nbytes:
            written += os.pwrite(file, memory[written:nbytes], start + written)
        os.fdatasync(file)
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)
        self.stats.disk_bytes += nbytes
        return _Piece(start, nbytes)


class StreamedLayer(Generic[W]):
    """A layer whose weights are in a slot while it runs: the layer at ``place`` of ``weights``. A graph that repeats it
    waits for its weights too. Calls raise ``ExecutorError`` if the weights cannot be read.
    """

    def __init__(self, layer: Layer, weights: W, place: int) -> None:
        self._layer, self.weights, self._place = layer, weights, place

    @property
    def attn(self) -> LayerAttention:
        """See ``Layer``."""
        return self._layer.attn

    @property
    def is_capturable(self) -> bool:
        """See ``Layer``."""
        return self.weights.is_capturable and self._layer.is_capturable

    @property
    def waits_for_device(self) -> bool:
        """See ``Layer``."""
        return self._layer.waits_for_device

    def __call__(self, *args: Any) -> torch.Tensor:
        """See ``Layer``."""
        result: torch.Tensor = self._use(self._layer, args)
        return result

    def overlapped(self, *args: Any) -> Any:
        """See ``Layer``."""
        return self._use(self._layer.overlapped, args)

    def experts_only(self, no_tokens: torch.Tensor) -> None:
        """See ``Layer``."""
        self._use(self._layer.experts_only, (no_tokens,))

    def _use(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        host_call(partial(self.weights.acquire, self._place))
        try:
            return work(*args)
        finally:  # also after a failure: the next step waits for what was launched before it
            host_call(partial(self.weights.release, self._place))


def _map_slot(nbytes: int) -> mmap.mmap:
    memory = map_huge_pages(_whole_pages(nbytes))
    memory.madvise(mmap.MADV_DONTFORK)  # a fork during a read would leave this process without the data
    return memory


_TOO_LARGE = "layers of this model are larger than its first one."


def _refuse(_: int) -> NoReturn:
    raise ModelError(f"--weights-memory-gb is exceeded by one layer of the two that are read: {_TOO_LARGE}")


def _bypass_page_cache(descriptor: int) -> None:
    """Makes the disk transfer the file's pages directly to and from memory. If the file system cannot, the pages that
    were read are dropped from the page cache instead.
    """
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _unusable(folder: Path, reason: str) -> ModelError:
    return ModelError(f"Weights cannot be kept in {folder}: {reason}. XDG_CACHE_HOME names another folder for it.")


def _file_system(device: int) -> str:
    """Returns the type of the mounted file system with this ``device`` number, or an empty string if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == number:
                return rest.split()[0]
    return ""
