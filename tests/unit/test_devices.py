"""A device or a dtype that cannot be had is said in one sentence, and each thread computes on the engine's device."""

import pytest
import torch
from quire_engine.executor.torch.devices import computing, resolve_device
from quire_engine.models.errors import ModelError
from quire_engine.models.weights import resolve_dtype

CUDA = torch.device("cuda", 0)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ModelError, match=r"^The device is set to cuda, and no GPU can be used here\.$"):
        resolve_device("cuda")


def test_auto_is_the_current_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 3)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_bfloat16_is_refused_on_gpus_without_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("float16", torch.bfloat16, CUDA) == resolve_dtype("auto", torch.float16, CUDA) == torch.float16
    for name, stored in (("bfloat16", torch.float32), ("auto", torch.bfloat16)):
        if capability >= (8, 0):
            assert resolve_dtype(name, stored, CUDA) == torch.bfloat16
        else:
            with pytest.raises(
                ModelError, match=r"^This GPU cannot compute in bfloat16; use --dtype float16 or float32\.$"
            ):
                resolve_dtype(name, stored, CUDA)


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
    with computing(torch.device("cpu")):
        assert torch.is_inference_mode_enabled()
    assert not entered
    with computing(CUDA):
        assert torch.is_inference_mode_enabled()
    assert entered == [CUDA, None]
