"""Layers in host memory on the CPU: with simulated streams, or with copies that are made at once. And the order of the
copies without one of its waits, to show that each is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any

import pytest
import torch
from quire_engine.config.capabilities import DEVICES, CapabilityRow
from quire_engine.executor.torch_executor import TorchExecutor
from quire_engine.layers import offloaded
from quire_engine.layers.offloaded import HostWeights
from quire_engine.layers.streamed import StreamedLayer
from quire_engine.worker.model_runner import ModelRunner

from tests.support.fake_streams import FakeDevice, FakeEvent, FakeStream, Work

OFFLOAD = {"cpu_offload_gb": 1.0}


class Wait(Enum):
    """The two waits that order copies among the layers that compute."""

    COPIES_FOR_COMPUTE = auto()
    COMPUTE_FOR_COPIES = auto()


class HostWeightsWithout(HostWeights):
    def __init__(self, left_out: Wait | None, *args: Any) -> None:
        super().__init__(*args)
        self._left_out = left_out

    def _wait_for_compute(self) -> None:
        if self._left_out is not Wait.COPIES_FOR_COMPUTE:
            super()._wait_for_compute()

    def _make_compute_wait(self, copied: torch.cuda.Event) -> None:
        if self._left_out is not Wait.COMPUTE_FOR_COPIES:
            super()._make_compute_wait(copied)


class EagerStream(FakeStream):
    """One whose work is done when it is launched, so that the host waits where it would."""

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class EagerDevice(FakeDevice):
    """A device that computes at once, as the CPU does, and copies at any time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.default = self.current = EagerStream(self)
        self.streams = [self.default]

    def launch(self, work: Work) -> None:
        if self.current is self.default:
            work()
        else:
            super().launch(work)


class Immediate:
    """A stream or an event where everything has happened when it is launched."""

    def __init__(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    wait_event = wait_stream = record


@contextmanager
def offloads_on_the_cpu(number: int, device: FakeDevice | None, left_out: Wait | None = None) -> Iterator[None]:
    """Models that are loaded and run inside with ``OFFLOAD`` have so many layers in host memory, on each rank, though
    they are on the CPU. Copies are made as ``device`` does it, or at once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DEVICES, "cpu", CapabilityRow("CPU", {}))  # type: ignore[arg-type]  # a table that nothing else writes
        patch.setattr(offloaded, "_number_offloaded", lambda *_: number)
        patch.setattr(offloaded, "HostWeights", partial(HostWeightsWithout, left_out))
        if device is not None:
            device.install(patch)
            with device:
                yield
            return
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, Immediate)
        patch.setattr(torch.cuda, "stream", lambda _: torch.inference_mode())
        yield


def offloaded_layers(executor: TorchExecutor) -> list[StreamedLayer[HostWeights]]:
    """Those in host memory, on rank 0 if there are several."""
    runner = executor._worker.runner
    assert isinstance(runner, ModelRunner)
    layers = runner._model._stack.layers  # type: ignore[attr-defined]
    return [layer for layer in layers if isinstance(layer, StreamedLayer)]
