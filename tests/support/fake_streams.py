"""CUDA's streams and events on the CPU, as they are documented: work is queued, and done in any order that the waits
allow. Which one is drawn from a seed, so what holds for many seeds does not hang on luck.

Copies that do not block are queued, and so is what ``launch`` is given. Everything else happens at once.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

Work = Callable[[], object]


class FakeEvent:
    """A place in a stream: how often it was recorded, and how many of these records were passed."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.recorded = self.passed = 0

    def record(self, stream: "FakeStream | None" = None) -> None:
        self.recorded += 1
        number = self.recorded

        def pass_by() -> None:
            self.passed = max(self.passed, number)

        (stream or self._device.current).queue.append((None, pass_by))

    def synchronize(self) -> None:
        number = self.recorded
        self._device.run(lambda: self.passed >= number)


class FakeStream:
    """Work in its order. Each entry may have an event's record to wait for first."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.queue: deque[tuple[tuple[FakeEvent, int] | None, Work]] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        # The latest record at the time of the call, as CUDA has it; an event without one is not waited for.
        self.queue.append(((event, event.recorded), lambda: None))

    def wait_stream(self, stream: "FakeStream") -> None:
        event = FakeEvent(self._device)
        event.record(stream)
        self.wait_event(event)

    @property
    def can_go_on(self) -> bool:
        if not self.queue:
            return False
        wait, _ = self.queue[0]
        return wait is None or wait[0].passed >= wait[1]


class FakeDevice(TorchFunctionMode):
    """What has streams. Entered, it queues the copies that do not block."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.default = self.current = FakeStream(self)
        self.streams = [self.default]
        self._is_running = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself in the place of CUDA's streams and events."""
        patch.setattr(torch.cuda, "Stream", lambda device=None: self.new_stream())
        patch.setattr(torch.cuda, "Event", lambda: FakeEvent(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self.switched)

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    @contextmanager
    def switched(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, work: Work) -> None:
        """Queues work on the current stream."""
        self.current.queue.append((None, work))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Does work, by default all of it."""
        self._is_running = True
        while not until() and (ready := [stream for stream in self.streams if stream.can_go_on]):
            # Mostly the same stream goes on, so that one may get far ahead of the others.
            stream = self._random.choice(ready)
            for _ in range(self._random.choice((1, 1, 10))):
                if until() or not stream.can_go_on:
                    break
                _, work = stream.queue.popleft()
                work()
        self._is_running = False
        assert until() or not any(stream.queue for stream in self.streams), "streams wait for each other"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking") and not self._is_running:
            self.launch(lambda: torch.Tensor.copy_(*args))
            return args[0]
        return func(*args, **kwargs)
