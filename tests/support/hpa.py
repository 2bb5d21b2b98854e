"""A HorizontalPodAutoscaler of one external metric with a target average, in the arithmetic of Kubernetes: the ceiling
of load over target, a tolerance in which nothing happens, and windows in which the calmest recommendation counts.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass
class Hpa:
    """``target`` is the load that one replica should have. Windows and times are in seconds, and ``step_down`` is how
    many replicas may go at once.
    """

    target: float
    minimum: int
    maximum: int
    up_window: float = 0.0
    down_window: float = 300.0
    step_down: int = 100
    tolerance: float = 0.1
    _told: deque[tuple[float, int]] = field(default_factory=deque)

    def desired(self, replicas: int, load: int | None, now: float) -> int:
        """How many replicas there should be; without a number, as many as there are."""
        if load is None:
            return replicas
        wanted = self._clamp(self._proportional(replicas, load))
        self._told.append((now, wanted))
        wanted = self._stabilised(replicas, now)
        return self._clamp(max(wanted, replicas - self.step_down))

    def _proportional(self, replicas: int, load: int) -> int:
        if replicas and abs(load / (self.target * replicas) - 1) <= self.tolerance:
            return replicas
        return ceil(load / self.target)

    def _stabilised(self, replicas: int, now: float) -> int:
        """Up to the least, and down to the most, that was recommended within the window of each."""
        while now - self._told[0][0] > max(self.up_window, self.down_window):
            self._told.popleft()
        up = min(wanted for then, wanted in self._told if now - then <= self.up_window)
        down = max(wanted for then, wanted in self._told if now - then <= self.down_window)
        return up if replicas < up else min(replicas, down)

    def _clamp(self, replicas: int) -> int:
        return max(self.minimum, min(self.maximum, replicas))
