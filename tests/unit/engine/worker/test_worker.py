"""Steps compute on their device, and its failures are the engine's."""

import pytest
import torch
from quire_engine.core.executor import ExecutorError
from quire_engine.worker.worker import on_device

CUDA = torch.device("cuda", 0)


def test_computing_is_inference_on_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            entered.append(self._device)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Current)
    with on_device(torch.device("cpu")):
        assert torch.is_inference_mode_enabled()
    assert not entered
    with on_device(CUDA):
        assert torch.is_inference_mode_enabled()
    assert entered == [CUDA, None]


def test_a_failure_of_the_device_is_the_engines() -> None:
    with pytest.raises(ExecutorError, match="The device failed: it fell off the bus"), on_device(torch.device("cpu")):
        raise torch.AcceleratorError("it fell off the bus")
