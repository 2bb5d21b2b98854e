"""``LoRAKernel``: adds the adapters' outputs to one linear layer's output on the CPU, with ``lora.cpp``. ``LoRAPlan``:
which rows use which adapter, the same for all layers of a step.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from quire_engine.kernels.bindings import DTYPES, LoraCall, LoraPlan, library

_TILE = 4  # rows; kTile in lora.cpp


class LoRAPlan:
    """The rows of a step that use an adapter. Calls point here, in CPU graphs too, and read the present content when
    they are made.
    """

    def __init__(self) -> None:
        self._struct = LoraPlan()
        self._kept: tuple[np.ndarray, ...] = ()

    @property
    def address(self) -> int:
        """The address for the kernel."""
        return ctypes.addressof(self._struct)

    def set(self, slots: torch.Tensor) -> None:
        """Sets the slots of a step's rows, [T] int64 on the host, -1 for rows without an adapter."""
        of_row = slots.numpy()
        rows = np.argsort(of_row, kind="stable")[np.count_nonzero(of_row < 0) :].astype(np.int64)
        of_row = of_row[rows]
        begins = np.flatnonzero(np.diff(of_row, prepend=-1))  # of each slot's rows
        places = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
        firsts = np.flatnonzero(places % _TILE == 0)
        tiles = np.stack((of_row[firsts], firsts, np.append(firsts[1:], len(rows))), axis=1).astype(np.int64)
        self._kept = rows, tiles
        self._struct.rows, self._struct.tiles, self._struct.count = rows.ctypes.data, tiles.ctypes.data, len(tiles)


class LoRAKernel:
    """The kernel for one layer, with the matrices ``a`` [slots, parts * max_rank, in] and ``b`` [slots, max_rank, out]
    of ``LoRALinear``. Its parts begin at ``columns``, whose last entry is the end. ``ranks`` [slots, parts] int64 are
    the ranks of the adapter in each slot, 0 for a part that it does not change. Each call reads all of them anew.
    """

    def __init__(
        self, plan: LoRAPlan, a: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor, columns: Sequence[int]
    ) -> None:
        kernels = library()
        assert kernels is not None, "the caller has asked"
        self._run = kernels.quire_lora
        self._kept = a, b, ranks, torch.tensor(columns)
        pointers = [tensor.data_ptr() for tensor in self._kept]
        self._call = LoraCall(
            **dict(zip(("a", "b", "ranks", "columns"), pointers, strict=True)),
            plan=plan.address,
            inputs=a.shape[2],
            outputs=b.shape[2],
            parts=ranks.shape[1],
            max_rank=b.shape[1],
            bf16=int(a.dtype == torch.bfloat16),
        )
        self._reference = ctypes.pointer(self._call)

    @staticmethod
    def suits(dtype: torch.dtype, device: torch.device) -> bool:
        """Whether there is a kernel for layers of this dtype on this device."""
        return device.type == "cpu" and dtype in DTYPES and library() is not None

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the output of the plan's adapters for ``x`` [T, in] to ``out`` [T, out]. Raises ``ValueError`` for
        tensors that the kernel must not touch.
        """
        call = self._call
        a = self._kept[0]
        if x.dtype != a.dtype or out.dtype != a.dtype or x.shape[1] != call.inputs or out.shape[1] != call.outputs:
            raise ValueError(f"adapters of {a.dtype} do not suit {x.dtype} {list(x.shape)} -> {list(out.shape)}")
        if len(x) != len(out) or x.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError("rows must lie without gaps")
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.x_stride, call.out_stride, call.threads = x.stride(0), out.stride(0), torch.get_num_threads()
        self._run(self._reference)
