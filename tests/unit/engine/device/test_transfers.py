"""Arrays arrive unchanged, and uploads to a GPU go through pinned memory without waiting."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.device.accelerator import (
    HostCopy,
    pack_arrays,
    pin,
    stage_arrays,
    unpack_arrays,
    upload,
    upload_arrays,
)

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")

arrays = st.tuples(st.sampled_from([np.uint8, np.int32, np.float32, np.int64, np.float64]), st.integers(0, 5)).map(
    lambda kind: np.arange(2 * kind[1]).astype(kind[0]).reshape(kind[1], 2)
)


@given(st.lists(arrays, max_size=6))
def test_arrays_arrive_as_they_were_sent(sent: list[np.ndarray]) -> None:
    expected = [torch.from_numpy(one) for one in sent]
    for arrived in (upload_arrays(sent, CPU), unpack_arrays(pack_arrays(sent), sent), *stage_arrays(sent, CPU)):
        assert [(one.dtype, one.tolist()) for one in arrived] == [(one.dtype, one.tolist()) for one in expected]
    for on_device in (upload_arrays(sent, META), stage_arrays(sent, META)[1]):
        assert [(one.dtype, one.shape) for one in on_device] == [(one.dtype, one.shape) for one in expected]


def test_staged_arrays_are_in_memory_of_their_own() -> None:
    sent = np.arange(3)
    (host,), _ = stage_arrays([sent], CPU)
    sent[0] = 9
    assert host.tolist() == [0, 1, 2]


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor, array = torch.arange(3), np.arange(3)
    assert pin(tensor, CPU) is tensor
    assert upload(tensor, CPU) is tensor
    (shared,) = upload_arrays([array], CPU)
    array[0] = 9
    assert shared[0] == 9
    assert HostCopy([tensor]).wait()[0] is tensor


class Pinned:
    """Pinned memory where there is no GPU. It says how it is sent."""

    def __init__(self, calls: list[object], tensor: torch.Tensor) -> None:
        self._calls, self._tensor = calls, tensor

    def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
        self._calls.append((device.type, non_blocking))
        return self._tensor


def send_tensor() -> list[int]:
    return upload(torch.arange(2), CUDA).tolist()


def send_arrays() -> list[int]:
    return upload_arrays([np.arange(2)], CUDA)[0].tolist()


def stage() -> list[int]:
    return stage_arrays([np.arange(2)], CUDA)[1][0].tolist()


@pytest.mark.parametrize("send", [send_tensor, send_arrays, stage])
def test_uploads_to_a_gpu_go_through_pinned_memory_without_waiting(
    monkeypatch: pytest.MonkeyPatch, send: Callable[[], list[int]]
) -> None:
    calls: list[object] = []
    empty = torch.empty

    def recorded(*shape: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        calls.append("pinned" if pin_memory else "pageable")
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    def pin(tensor: torch.Tensor) -> Pinned:
        calls.append("pinned")
        return Pinned(calls, tensor)

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        return Pinned(calls, tensor).to(device, non_blocking)

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert send() == [0, 1]
    assert calls == ["pinned", ("cuda", True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_download_has_the_values_at_the_time_of_its_call() -> None:
    values = torch.arange(1 << 20, device="cuda")
    download = HostCopy([values, values[:3] + 1])
    values.zero_()
    whole, part = download.wait()
    assert whole.device.type == "cpu"
    assert torch.equal(whole, torch.arange(1 << 20))
    assert part.tolist() == [1, 2, 3]
