"""Small tensors on their way between host and device, behind what the device still has to do. Knows no streams.

A copy from or to pageable memory makes the host wait until the device is done with everything before it. Here copies go
through pinned memory and are only enqueued. Pinned memory may be dropped at once: torch's allocator gives it to nobody
else before the copies that torch enqueued from it or to it are done.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
# Where an array may start within the packed bytes: the widest type that is sent.
_ALIGNMENT = 8


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host where ``device`` can fetch it without anybody waiting: a pinned copy for a GPU, and else
    ``tensor`` itself.
    """
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``, for what is enqueued later; on the CPU it is ``tensor`` itself."""
    return pin(tensor, device).to(device, non_blocking=True)


def upload_arrays(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on ``device``, in one copy; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack_arrays(_pack_for(device, arrays).to(device, non_blocking=True), arrays)


def stage_arrays(arrays: Sequence[Array], device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arrays as tensors on the host, in fresh memory that ``device`` can copy from later without anybody waiting,
    and on ``device``, in one copy; on the CPU both share that memory.
    """
    packed = _pack_for(device, arrays)
    return unpack_arrays(packed, arrays), unpack_arrays(packed.to(device, non_blocking=True), arrays)


def pack_arrays(arrays: Sequence[Array], *, is_pinned: bool = False) -> torch.Tensor:
    """The bytes of the arrays, one after the other, each from an aligned place: [N] uint8 on the host."""
    starts, size = _offsets(arrays)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    bytes_of = packed.numpy()
    for array, start in zip(arrays, starts, strict=True):
        bytes_of[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack_arrays(packed: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Views of ``packed``, wherever it lies, with the types and shapes of the arrays that were packed."""
    return [
        packed[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, _offsets(arrays)[0], strict=True)
    ]


def _pack_for(device: torch.device, arrays: Sequence[Array]) -> torch.Tensor:
    return pack_arrays(arrays, is_pinned=device.type == "cuda")


def _offsets(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each of the arrays starts, and where the last one ends."""
    starts, end = [], 0
    for array in arrays:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + array.nbytes
    return starts, end


class HostCopy:
    """Tensors that are copied to the host as soon as their device gets to it, before whatever is enqueued later."""

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
        """The copies, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
