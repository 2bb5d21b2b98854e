"""CPU offload for decoder layers that do not fit on a GPU. They are kept in pinned host memory, and each is copied to
the GPU while the layers before it compute (ZeRO-Inference, Aminabadi et al. 2022; FlexGen, Sheng et al. 2023).

``load_offloaded_layers`` moves as many layers to the host as it may. They share two slots of GPU memory. Each layer is
loaded into its slot and copied to the host from there, and the kernels find it in the slot whenever it has been copied
back. When a layer has run, the copy of the next layer of its slot starts at once, on a separate stream.

The host launches all of this without waiting. Steps in flight share the slots, because their layers run one after the
other.
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
_ALIGNMENT = 512  # like torch's GPU memory: libraries choose kernels by it


def load_offloaded_layers(
    indices: Sequence[int], load: Callable[[int], Layer], offload_gb: float, device: torch.device
) -> tuple[Sequence[Layer], WeightStats]:
    """Makes the layers of ``indices`` with ``load`` on ``device``. Keeps ``offload_gb`` GiB of their weights in host
    memory, rounded down to whole layers. Raises ``ModelError`` if that is not possible.
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
    """Returns how many of ``count`` layers of ``size`` bytes each fit in ``limit`` bytes of host memory. Raises
    ``ModelError`` if that saves nothing, or if it is more layers than can be offloaded.
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
    """Memory on ``device`` for weights, all from ``memory`` [bytes] uint8 if that is given. Implements ``Allocator``.
    ``allocated`` counts the bytes given out.
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
    """GPU memory that holds one layer at a time: the layer at ``place``, once the event ``copied`` has occurred."""

    memory: torch.Tensor
    copied: torch.cuda.Event
    place: int | None = None


class HostWeights:
    """The weights of one GPU's ``number`` offloaded layers, at most ``size`` bytes each, in pinned host memory, and the
    slots that they are copied into. It orders the copies among the work that computes with them. Copies use a separate
    stream, concurrent with the current stream. Implements ``SlotWeights``.

    A copy runs after all work that was launched before it, because the layer that had the slot may still compute. A
    layer runs after its own copy, concurrently with the copies of other layers.
    """

    is_capturable = False
    """A graph would have to begin with the copies of the previous step."""

    def __init__(self, number: int, size: int, device: torch.device) -> None:
        self._device = device
        self._layers = _pinned(number, size, device)  # before the slots, so that it is freed first, after the last copy
        self._sizes: list[int] = []
        self._stream = torch.cuda.Stream(device)
        self._slots = [
            _DeviceSlot(torch.empty(size, dtype=torch.uint8, device=device), torch.cuda.Event()) for _ in range(AT_ONCE)
        ]
        self.stats = WeightStats(memory_bytes=AT_ONCE * size)

    def add(self, load: Callable[[], Layer]) -> "StreamedLayer[HostWeights]":
        """Makes a layer with ``load``: puts its weights into a slot and copies them from there to the host. Raises
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
        """Makes later work wait until the layer is in its slot."""
        slot = self._slots[place % AT_ONCE]
        if slot.place != place:  # in the first step, and after a failed step
            self._copy(place)
        self._make_compute_wait(slot.copied)

    def release(self, place: int) -> None:
        """Starts to copy the next layer of the slot into it."""
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
    """Returns host memory [number, size] uint8. Raises ``ModelError`` if it cannot be allocated or pinned."""
    try:
        mapping = map_huge_pages(number * size)
    except (OSError, OverflowError) as error:
        raise ModelError(f"There is no host memory for weights of {number * size} bytes: {error}.") from None
    mapping.madvise(mmap.MADV_DONTFORK)  # a child would get a useless copy of pinned pages
    memory = torch.frombuffer(mapping, dtype=torch.uint8).view(number, size)
    if device.type == "cuda":
        pin_pages(memory, device, "--cpu-offload-gb")
    return memory
