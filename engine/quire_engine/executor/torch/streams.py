"""The order of work on a device: marks in it, and the stream that blocks are copied on. Knows streams, neither tensors
nor blocks.

On the CPU everything has happened when its call returns, so there is nothing to order there.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class StepEvent(Protocol):
    """A place in the order of a device's work."""

    def wait(self) -> None:
        """Returns once everything is done that was launched before the mark was made."""
        ...


class SwapStream(Protocol):
    """Where block copies stand among the work that computes with blocks. Used by one thread.

    Copies run after all work that was launched before the last ``record_compute``, and before all work that is launched
    after ``swap_region``. Among each other they keep their order.
    """

    def record_compute(self) -> None:
        """Says that everything launched until now may have read or written blocks. Say it also after a failure."""
        ...

    def swap_region(self) -> AbstractContextManager[None]:
        """The copies that are launched inside are ordered as above."""
        ...


class SyncSwapStream:
    """A ``SwapStream`` for a device that does one thing after the other."""

    def record_compute(self) -> None:
        """Nothing to note."""

    def swap_region(self) -> AbstractContextManager[None]:
        """In the order of the calls."""
        return nullcontext()


class CudaSwapStream:
    """A ``SwapStream`` on CUDA: copies have a stream of their own, beside the current one that computes.

    They run beside what computes without blocks, which is the drawing of tokens, and beside the upload of the next
    batch. Copies in both directions wait for the last forward pass, as it reads what is copied out and may still write
    what is copied over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._compute_done = torch.cuda.Event()

    def record_compute(self) -> None:
        """See ``SwapStream.record_compute``."""
        self._compute_done.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def swap_region(self) -> Iterator[None]:
        """See ``SwapStream.swap_region``."""
        compute = torch.cuda.current_stream(self._device)
        self._wait_for_compute()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after a failure too: what was launched before it still reads and writes blocks
            self._make_compute_wait(compute)

    def _wait_for_compute(self) -> None:
        self._stream.wait_event(self._compute_done)

    def _make_compute_wait(self, compute: torch.cuda.Stream) -> None:
        compute.wait_stream(self._stream)


class _Passed:
    """A ``StepEvent`` where everything is done at once."""

    def wait(self) -> None:
        """It is done."""


class _CudaStepEvent:
    """A ``StepEvent`` in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """See ``StepEvent.wait``."""
        self._event.synchronize()


def make_swap_stream(device: torch.device) -> SwapStream:
    """How blocks are copied on ``device``."""
    return SyncSwapStream() if device.type == "cpu" else CudaSwapStream(device)


def record_event(device: torch.device) -> StepEvent:
    """A mark after everything that was launched until now."""
    return _Passed() if device.type == "cpu" else _CudaStepEvent(device)
