"""Memory of tensors that is given back, and had again with what it held."""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from quire_engine.core.executor import SleepError
from quire_engine.worker import sleep
from quire_engine.worker.sleep import MIN_BYTES, device_storages, give_back, put_away, take_again

CPU = torch.device("cpu")
MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def test_memory_is_given_back_and_comes_again_with_its_contents_at_its_address() -> None:
    big, odd = random_bytes(96 * MIB), random_bytes(MIB + 4097)[3:]
    copies, addresses = (big.clone(), odd.clone()), (big.data_ptr(), odd.data_ptr())
    storages = [big.untyped_storage(), odd.untyped_storage()]
    before = resident()
    kept = put_away(storages, CPU)
    assert resident() < before - 90 * MIB
    assert not big[mmap.PAGESIZE : -mmap.PAGESIZE].any()
    kept.restore()
    assert torch.equal(big, copies[0])
    assert torch.equal(odd, copies[1])
    assert (big.data_ptr(), odd.data_ptr()) == addresses


def test_pages_that_are_shared_with_others_are_left_alone() -> None:
    around = random_bytes(8 * mmap.PAGESIZE + 64)
    before = around.clone()
    inner = around[mmap.PAGESIZE // 2 :].untyped_storage()  # the same storage: what is between two is not known
    own = random_bytes(MIN_BYTES)
    kept = put_away([own.untyped_storage()], CPU)
    assert torch.equal(around, before)
    kept.restore()
    assert inner.data_ptr() == around.untyped_storage().data_ptr()


def test_kv_memory_on_the_cpu_is_zeros_after_it_was_given_back() -> None:
    pool = torch.frombuffer(mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    pool.fill_(7)
    before = resident()
    give_back(pool.untyped_storage())
    assert resident() < before - 60 * MIB
    take_again(pool.untyped_storage(), 64 * MIB)
    assert not pool.any()


def test_what_is_mapped_from_a_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB))
    with path.open("rb") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    before = mapped.clone()
    kept = put_away([mapped.untyped_storage()], CPU)
    assert torch.equal(mapped, before)
    kept.restore()
    assert torch.equal(mapped, before)


def test_a_disk_that_is_full_leaves_the_weights_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_bytes(MIB)
    before, written = weight.clone(), []

    def full(descriptor: int, part: memoryview, place: int) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append((descriptor, place))
        return len(part) // 2

    monkeypatch.setattr(sleep.os, "pwrite", full)
    with pytest.raises(SleepError, match="cannot be written to a file: No space left on device"):
        put_away([weight.untyped_storage()], CPU)
    assert torch.equal(weight, before)


def test_short_writes_and_reads_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_bytes(MIB)
    before, write, read = weight.clone(), os.pwrite, os.preadv
    monkeypatch.setattr(sleep.os, "pwrite", lambda file, part, place: write(file, part[:100_000], place))
    monkeypatch.setattr(sleep.os, "preadv", lambda file, parts, place: read(file, [parts[0][:77_777]], place))
    put_away([weight.untyped_storage()], CPU).restore()
    assert torch.equal(weight, before)


class Holder:
    """Holds tensors in all the places in which models have them."""

    __slots__ = ("closure", "nested", "view")

    def __init__(self) -> None:
        base, self.nested = torch.zeros(MIN_BYTES), {"a": [(torch.zeros(MIN_BYTES),)]}
        self.view = base[10:20]
        hidden = torch.zeros(MIN_BYTES)
        self.closure: Callable[[], torch.Tensor] = lambda: hidden


def test_all_tensors_of_a_model_are_found_once_and_nothing_of_others() -> None:
    holder, small = Holder(), torch.zeros(4)
    others = torch.zeros(MIN_BYTES)  # a global of a function is not what it closes over
    globals()["OTHERS"] = others
    found = device_storages((holder, holder, small), CPU)
    tensors = (holder.view, holder.nested["a"][0][0], holder.closure())
    assert sorted(each.data_ptr() for each in found) == sorted(t.untyped_storage().data_ptr() for t in tensors)
    assert device_storages(holder, torch.device("meta")) == []


def test_a_weight_that_onednn_has_packed_is_given_back_and_multiplies_as_before() -> None:
    """Processors without AVX-512 have such, and torch shows no storage of them."""
    weight, x = torch.randn(1024, 2048), torch.randn(3, 2048)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    except (AttributeError, RuntimeError):
        pytest.skip("torch has no oneDNN here")
    product = partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], "")
    expected, held = product(), device_storages(lambda: packed, CPU)
    assert sum(each.nbytes() for each in held) >= weight.nbytes
    before = resident()
    kept = put_away(held, CPU)
    assert resident() < before - 7 * MIB
    kept.restore()
    assert torch.equal(product(), expected)
