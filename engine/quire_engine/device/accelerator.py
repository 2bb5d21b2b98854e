"""The device that an engine computes on: which one, with how many threads, and small copies between host and device
that do not make the host wait.

A copy from or to pageable memory makes the host wait until the device is done with everything before it. Here copies go
through pinned memory and are only enqueued. Pinned memory may be dropped at once: torch's allocator does not reuse it
before the copies that torch enqueued from it or to it are done.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.device.host import usable_cores
from quire_engine.errors import ModelError, first_line

Array = npt.NDArray[Any]
# In bytes: an array starts at a multiple of the widest element type that is sent.
_ALIGNMENT = 8


def resolve_device(name: str) -> torch.device:
    """The device called ``cpu`` or ``cuda``, or for ``auto`` a GPU where there is one. Raises ``ModelError``."""
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", _current_gpu())
    if name == "cuda":
        raise ModelError("The device is set to cuda, and no GPU can be used here: quire doctor says why.")
    return torch.device("cpu")


def product_name(device: torch.device) -> str:
    """What people call a device: cpu, or the GPU's name."""
    name: str = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name


def _current_gpu() -> int:
    """The index of the current GPU. The first call that needs the GPU: it fails when another process uses it
    exclusively.
    """
    try:
        number: int = torch.cuda.current_device()
    except RuntimeError as error:
        raise ModelError(f"The GPU cannot be used: {first_line(error)}; --device cpu does without.") from None
    return number


def configure_threads(processes: int = 1) -> int:
    """Lets torch compute with ``usable_threads`` in this process; returns the number. Call it before the first torch
    operation.
    """
    threads = usable_threads(processes)
    torch.set_num_threads(threads)
    return threads


def usable_threads(processes: int = 1) -> int:
    """``OMP_NUM_THREADS`` if the user has set it, else one thread for each usable core, divided by the number of
    ``processes`` that compute.

    More threads than cores of quota is the classic slow pod: each waits for others that are throttled.
    """
    configured = os.environ.get("OMP_NUM_THREADS", "")
    return int(configured) if configured.isdecimal() and int(configured) > 0 else max(1, usable_cores() // processes)


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host where ``device`` can fetch it asynchronously: a pinned copy for a GPU, else ``tensor``
    itself.
    """
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``, for work that is enqueued later; on the CPU it is ``tensor`` itself."""
    return pin(tensor, device).to(device, non_blocking=True)


def upload_arrays(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on ``device``, in one copy; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack_arrays(_pack_for(device, arrays).to(device, non_blocking=True), arrays)


def stage_arrays(arrays: Sequence[Array], device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arrays as tensors on the host, in fresh memory that ``device`` can copy from asynchronously, and on
    ``device``, in one copy; on the CPU both share that memory.
    """
    packed = _pack_for(device, arrays)
    return unpack_arrays(packed, arrays), unpack_arrays(packed.to(device, non_blocking=True), arrays)


def pack_arrays(arrays: Sequence[Array], *, is_pinned: bool = False) -> torch.Tensor:
    """The bytes of the arrays, one after the other, each at an aligned offset: [N] uint8 on the host."""
    starts, size = _offsets(arrays)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    target = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        target[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack_arrays(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views of ``packed``, on any device, with the dtypes and shapes of the arrays that were packed."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, _offsets(arrays)[0], strict=True)
    ]


def _pack_for(device: torch.device, arrays: Sequence[Array]) -> torch.Tensor:
    return pack_arrays(arrays, is_pinned=device.type == "cuda")


def _offsets(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """The offset of each array in bytes, and the end of the last one."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end


class HostCopy:
    """Asynchronous copies of tensors to the host, done before any work that is enqueued later."""

    __slots__ = ("_copied", "_host")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [_pinned_copy(tensor) for tensor in tensors]
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensors[0].device))
        else:
            self._host = list(tensors)

    def wait(self) -> list[torch.Tensor]:
        """Waits for the copies and returns them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def pin_pages(memory: torch.Tensor, device: torch.device, flag: str) -> Callable[[], object]:
    """Keeps the pages of ``memory`` where they are, so that ``device`` copies them itself; this makes all of them
    resident. Returns what ends that, which also happens when ``memory`` goes. Raises ``ModelError``; ``flag`` is the
    setting that asked for so much.

    ``pin_memory`` would take the next power of two, which can be twice as much.
    """
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        raise ModelError(
            f"{memory.nbytes} bytes of host memory cannot be pinned ({str(error).strip()}); lower {flag}."
        ) from None
    release = weakref.finalize(memory, _unpin_pages, memory.data_ptr(), device)
    release.atexit = False
    return release


def _unpin_pages(address: int, device: torch.device) -> None:
    # A device that has failed refuses this too, and its memory goes with the process.
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
