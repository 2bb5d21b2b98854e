"""A swap stream that leaves out one of its waits, to show that each is needed."""

from enum import Enum, auto

import torch
from quire_engine.worker.kv_cache import CudaSwapStream


class Wait(Enum):
    """The two waits that order copies on a stream of their own."""

    COPIES_FOR_COMPUTE = auto()
    COMPUTE_FOR_COPIES = auto()


class SwapStreamWithout(CudaSwapStream):
    def __init__(self, device: torch.device, left_out: Wait | None = None) -> None:
        super().__init__(device)
        self._left_out = left_out

    def _wait_for_compute(self) -> None:
        if self._left_out is not Wait.COPIES_FOR_COMPUTE:
            super()._wait_for_compute()

    def _make_compute_wait(self, compute: torch.cuda.Stream) -> None:
        if self._left_out is not Wait.COMPUTE_FOR_COPIES:
            super()._make_compute_wait(compute)
