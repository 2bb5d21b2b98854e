"""Decoder layers that do not fit onto a GPU: they lie in pinned host memory, and each is copied to the GPU while the
layers before it compute (ZeRO-Inference, Aminabadi et al. 2022; FlexGen, Sheng et al. 2023).

``load_offloaded_layers`` moves as many layers to the host as it may. They share two slots of the GPU's memory: each is
loaded into its slot, from where it is copied to the host, and where the kernels find it whenever it has been copied
back. A layer that has run makes room for the next but one, whose copy begins at once, on a stream of its own.

The host launches all of that and waits for none of it. Steps in flight share the slots, as their layers run one after
the other.
"""

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quire_engine.core.executor import WeightStats
from quire_engine.device.accelerator import pin_pages
from quire_engine.errors import ModelError
from quire_engine.kernels.packed_linear import map_huge_pages, packed_into
from quire_engine.layers.streamed import AT_ONCE, Layer, StreamedLayer, next_in_slot, spread

log = logging.getLogger(__name__)

_GIB = 1 << 30
_ALIGNMENT = 512  # as torch's memory on a GPU: libraries choose their kernels by it


def load_offloaded_layers(
    indices: Sequence[int], load: Callable[[int], Layer], offload_gb: float, device: torch.device
) -> tuple[Sequence[Layer], WeightStats]:
    """The layers of ``indices``, each made by ``load`` on ``device``; of their weights, ``offload_gb`` GiB lie in the
    host's memory, less what is not a whole layer. Raises ``ModelError`` where that cannot be.
    """
    count, arena = len(indices), DeviceArena(device)
    with packed_into(arena):
        layers = [load(indices[0])]
    size = arena.allocated
    chosen = spread(_number_offloaded(count, size, int(offload_gb * _GIB)), count)
    host = HostWeights(len(chosen), size, device)
    for place in range(1, count):
        load_this = partial(load, indices[place])
        if place in chosen:
            layers.append(host.add(load_this))
        else:
            with packed_into(arena):
                layers.append(load_this())
    host.stats.memory_bytes += arena.allocated
    told = "%d of %d layers lie in host memory and are copied to the GPU in each step, %.3f GiB each; no CUDA graphs"
    log.info(told, len(chosen), count, size / _GIB)
    return layers, host.stats


def _number_offloaded(count: int, size: int, limit: int) -> int:
    """How many of ``count`` layers of ``size`` bytes each lie in ``limit`` bytes of host memory. Raises ``ModelError``
    where that saves nothing, and where there are not so many.
    """
    number = limit // size
    if number <= AT_ONCE:
        raise ModelError(
            f"--cpu-offload-gb is too little: {AT_ONCE} layers of those in host memory are on the GPU too at a time, "
            f"so less than {AT_ONCE + 1}, of {size / _GIB:.3f} GiB each, save nothing."
        )
    if number >= count:
        raise ModelError(
            f"--cpu-offload-gb is too much: all of a GPU's {count} layers but the first can lie in host memory, of "
            f"{size / _GIB:.3f} GiB each."
        )
    return number


class DeviceArena:
    """Memory on ``device`` for weights, all of it from ``memory`` [bytes] uint8 if that is given. An ``Allocator``.
    ``allocated`` bytes have been given in all.
    """

    def __init__(self, device: torch.device, memory: torch.Tensor | None = None) -> None:
        self._device, self._memory = device, memory
        self.allocated = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See ``Allocator.allocate``. Raises ``ModelError`` if ``memory`` is too small."""
        start = self.allocated
        self.allocated += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        if self.allocated > len(self._memory):
            raise ModelError("--cpu-offload-gb is exceeded: layers of this model are larger than its first one.")
        return self._memory[start : start + nbytes]


@dataclass(slots=True)
class _DeviceSlot:
    """Memory of the GPU that has one layer at a time: that of ``place``, once ``copied`` has happened."""

    memory: torch.Tensor
    copied: torch.cuda.Event
    place: int | None = None


class HostWeights:
    """The weights of one GPU's ``number`` offloaded layers, of at most ``size`` bytes each, in pinned memory of the
    host; the slots that they are copied into, and the order of these copies among the work that computes with them.
    Copies have a stream of their own, beside the current one that computes. A ``SlotWeights``.

    A copy runs after all work that was launched before it: the layer that has its slot until then may still compute. A
    layer runs after its copy, and beside those of others.
    """

    is_capturable = False
    """A graph would have to begin with the copies of the step before."""

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self._device = device
        self._layers = _pinned(number, size, device)  # before the slots: it goes first then, after the last copy
        self._sizes: list[int] = []
        self._stream = torch.cuda.Stream(device)
        self._slots = [
            _DeviceSlot(torch.empty(size, dtype=torch.uint8, device=device), torch.cuda.Event()) for _ in range(AT_ONCE)
        ]
        self.stats = WeightStats(memory_bytes=AT_ONCE * size)

    def add(self, load: Callable[[], Layer]) -> "StreamedLayer[HostWeights]":
        """The layer that ``load`` makes, whose weights are put into a slot, and copied to the host from there. Raises
        ``ModelError``.
        """
        place = len(self._sizes)
        memory = self._slots[place % AT_ONCE].memory
        arena = DeviceArena(self._device, memory)
        with packed_into(arena):
            layer = load()
        self._layers[place, : arena.allocated].copy_(memory[: arena.allocated])
        self._sizes.append(arena.allocated)
        self.stats.host_bytes += arena.allocated
        return StreamedLayer(layer, self, place)

    def acquire(self, place: int) -> None:
        """Makes what is launched from now on wait until the layer is in its slot."""
        slot = self._slots[place % AT_ONCE]
        if slot.place != place:  # in the first step, and where the one before has failed
            self._copy(place)
        self._make_compute_wait(slot.copied)

    def release(self, place: int) -> None:
        """Has the next layer of the slot copied into it."""
        following = next_in_slot(place, len(self._sizes))
        if following != place:
            self._copy(following)

    def _copy(self, place: int) -> None:
        slot, size = self._slots[place % AT_ONCE], self._sizes[place]
        slot.place = None
        self._wait_for_compute()
        with torch.cuda.stream(self._stream):
            slot.memory[:size].copy_(self._layers[place, :size], non_blocking=True)
        slot.copied.record(self._stream)
        slot.place = place
        self.stats.read_bytes += size

    def _wait_for_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _make_compute_wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)


def _pinned(number: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory [number, size] uint8 of the host. Raises ``ModelError`` where it cannot be had, or cannot be pinned."""
    try:
        mapping = map_huge_pages(number * size)
    except (OSError, OverflowError) as error:
        raise ModelError(f"There is no host memory for weights of {number * size} bytes: {error}.") from None
    mapping.madvise(mmap.MADV_DONTFORK)  # a child would get a copy of pages that are pinned, and has no use for it
    memory = torch.frombuffer(mapping, dtype=torch.uint8).view(number, size)
    if device.type == "cuda":
        pin_pages(memory, device, "--cpu-offload-gb")
    return memory
