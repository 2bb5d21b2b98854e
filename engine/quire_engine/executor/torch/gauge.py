"""Measures what an engine takes while it is being loaded: before the model, with it, and in its largest step."""

from collections.abc import Callable

import torch

from quire_engine.executor.torch.memory import CpuMemory, device_memory
from quire_engine.executor.torch.sizing import MemoryProfile
from quire_engine.models.errors import ModelError, first_line

# What a process grows by after its largest step: compiled products for other shapes, fragments of the heap, buffers of
# connections. Seen on a CPU: 80 MiB with the demo model, 30 MiB with one of 135 M parameters.
GROWTH_RESERVE = 128 << 20


class MemoryProfiler:
    """Made before the model is loaded, and read once it is."""

    def __init__(self, device: torch.device) -> None:
        self._memory = device_memory(device)
        self._host = None if isinstance(self._memory, CpuMemory) else CpuMemory()
        self._before = self._memory.used()

    def profile(self, largest_step: Callable[[], object] | None) -> MemoryProfile:
        """With the model loaded. ``largest_step`` is run, unless its cost is of no interest. Raises ``ModelError``
        where it fails.
        """
        loaded, available = self._memory.used(), self._memory.available()
        return MemoryProfile(
            limit=self._memory.limit,
            source=self._memory.source,
            dedicated=self._memory.dedicated,
            used_before=self._before,
            used_loaded=loaded,
            available=available,
            peak=None if largest_step is None else self._peak(largest_step),
            growth_reserve=GROWTH_RESERVE if self._host is None else 0,
            host_available=None if self._host is None else self._host.available() - GROWTH_RESERVE,
        )

    def _peak(self, largest_step: Callable[[], object]) -> int:
        try:
            return self._memory.peak_during(largest_step)
        except (MemoryError, RuntimeError) as error:
            raise ModelError(
                f"The largest step that is allowed cannot be run: {first_line(error)}; "
                "lower --max-num-batched-tokens or --max-num-seqs."
            ) from None
