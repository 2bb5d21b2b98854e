"""Measures what an engine takes while it is being loaded: before the model, with it, and in its largest step."""

from collections.abc import Callable

import torch

from quire_engine.executor.torch.memory import CpuMemory, memory_of
from quire_engine.executor.torch.sizing import Measured
from quire_engine.models.errors import ModelError, first_line

# What a process grows by after its largest step: compiled products for other shapes, fragments of the heap, buffers of
# connections. Seen on a CPU: 80 MiB with the demo model, 30 MiB with one of 135 M parameters.
LATER_GROWTH = 128 << 20


class MemoryGauge:
    """Made before the model is loaded, and read once it is."""

    def __init__(self, device: torch.device) -> None:
        self._memory = memory_of(device)
        self._host = None if isinstance(self._memory, CpuMemory) else CpuMemory()
        self._before = self._memory.used()

    def read(self, largest_step: Callable[[], object] | None) -> Measured:
        """With the model loaded. ``largest_step`` is run, unless its cost is of no interest. Raises ``ModelError``
        where it fails.
        """
        loaded, available = self._memory.used(), self._memory.available()
        return Measured(
            limit=self._memory.limit,
            source=self._memory.source,
            granted=self._memory.granted,
            before=self._before,
            loaded=loaded,
            available=available,
            peak=None if largest_step is None else self._peak(largest_step),
            growth=LATER_GROWTH if self._host is None else 0,
            host=None if self._host is None else self._host.available() - LATER_GROWTH,
        )

    def _peak(self, largest_step: Callable[[], object]) -> int:
        try:
            return self._memory.peak_during(largest_step)
        except (MemoryError, RuntimeError) as error:
            raise ModelError(
                f"The largest step that is allowed cannot be run: {first_line(error)}; "
                "lower --max-num-batched-tokens or --max-num-seqs."
            ) from None
