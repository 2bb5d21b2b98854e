"""Sums in shared memory are those of the ranks' order, bit for bit and on all ranks; who waits for a rank that is gone
is told; and where memory cannot be shared, sums go through sockets.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine.distributed import shared_memory
from quire_engine.distributed.communicator import GroupCoordinator, PendingSum
from quire_engine.distributed.rank_group import file_store
from quire_engine.kernels.bindings import library
from quire_engine.worker.cpu_graph import capture

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels cannot be compiled here")


@contextmanager
def ranks(size: int, folder: Path) -> Iterator[list[GroupCoordinator]]:
    """Connected ranks, which are threads."""
    groups = [GroupCoordinator(rank, size, CPU, ordered=False) for rank in range(size)]
    together(groups, lambda group: group.connect(file_store(folder, size), None))
    yield groups
    for group in groups:
        group.close()


def together(groups: list[GroupCoordinator], work: Callable[[GroupCoordinator], object]) -> list[object]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # set and unset by each rank for itself otherwise


@needs_kernels
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(2, 5), seed=st.integers(0, 1000))
def test_sums_are_in_the_order_of_the_ranks(tmp_path_factory: pytest.TempPathFactory, size: int, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    counts = [1, 17, 1000, shared_memory.SLOT_BYTES // 4 + 3, 3 * shared_memory.SLOT_BYTES]
    with ranks(size, tmp_path_factory.mktemp("ranks")) as groups:
        for count in counts:
            for dtype in (torch.float32, torch.bfloat16):
                parts = [torch.randn(count, generator=noise).to(dtype) for _ in range(size)]
                total = parts[0].float()
                for other in parts[1:]:
                    total = total + other.float()
                made = together(groups, lambda group: group.all_reduce(parts[group.rank].clone()))  # noqa: B023
                assert all(torch.equal(each, total.to(dtype)) for each in made)  # type: ignore[arg-type]
        assert {group.num_collectives for group in groups} == {2 + 2 * len(counts)}


@needs_kernels
def test_a_graph_adds_up_what_is_there_when_it_is_replayed(tmp_path: Path) -> None:
    def work(group: GroupCoordinator) -> list[float]:
        x = torch.full((3,), float(group.rank))
        assert group.is_capturable
        graph = capture(group.all_reduce, x, tokens=3)
        sums = [float(x[0])]
        for turn in range(50):
            made = graph.replay(torch.full((3,), float(turn + group.rank)))
            group.raise_if_lost()
            sums.append(float(made[0]))
        return sums

    with ranks(2, tmp_path) as groups:
        assert together(groups, work) == [[1.0, *(2.0 * turn + 1 for turn in range(50))]] * 2


@needs_kernels
@pytest.mark.parametrize("spins", [0, 2000])
def test_a_late_rank_is_waited_for_and_one_that_is_gone_is_told(tmp_path: Path, spins: int) -> None:
    with ranks(2, tmp_path) as groups:
        for group in groups:
            group._sums._ranks.spins = spins  # type: ignore[union-attr]
        made: list[object] = []

        def add() -> None:
            try:
                made.append(groups[0].all_reduce(torch.ones(4)).tolist())
            except RuntimeError as error:
                made.append(str(error))

        waiting = Thread(target=add)
        waiting.start()
        time.sleep(0.1)
        assert not made
        groups[1].all_reduce(torch.ones(4))
        waiting.join(5)
        assert made == [[2.0] * 4]
        waiting = Thread(target=add)
        waiting.start()
        time.sleep(0.1)
        groups[0].abort()
        waiting.join(5)
        assert made[1:] == ["another rank has ended, and its part of a sum is missing"]


@needs_kernels
def test_the_memory_is_this_users_alone_and_nobody_can_cut_it_or_open_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, os.stat_result]] = []
    make = shared_memory._make_file

    def look(nbytes: int) -> int:
        descriptor = make(nbytes)
        made.append((descriptor, os.fstat(descriptor)))
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 1)
        return descriptor

    monkeypatch.setattr(shared_memory, "_make_file", look)
    with ranks(2, tmp_path):
        ((descriptor, status),) = made
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        with suppress(OSError):  # the number may be another file's by now
            assert os.fstat(descriptor).st_ino != status.st_ino


def refuse(*_: object) -> int:
    raise OSError("there is no memory")


@pytest.mark.parametrize("broken", ["_make_file", "library"])
def test_where_memory_cannot_be_shared_sums_go_through_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(shared_memory, broken, refuse if broken == "_make_file" else lambda: None)
    with ranks(3, tmp_path) as groups:
        assert not any(group.is_capturable for group in groups)
        made = together(groups, lambda group: group.all_reduce(torch.full((2,), float(group.rank))).tolist())
        assert made == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_under_way_while_their_ranks_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Rank 0 has started two before another has begun, and they are the sums that it would have waited for."""
    monkeypatch.setattr(shared_memory, "library", lambda: None)
    noise = torch.Generator().manual_seed(size)
    parts = torch.randn(2, size, 500, generator=noise).to(torch.bfloat16)

    def start(group: GroupCoordinator) -> list[PendingSum]:
        return [group.all_reduce_async(each.clone()) for each in parts[:, group.rank]]

    with ranks(size, tmp_path) as groups:
        assert all(group.overlaps_sums for group in groups)
        before, pending = groups[0].num_collectives, [start(groups[0])]
        assert groups[0].num_collectives == before + 2, "a sum counts from its start"
        assert not any(each.work.is_completed() for each in pending[0])
        pending += [start(group) for group in groups[1:]]
        for turn, each in enumerate(parts):
            wanted = together(groups, lambda group: group.all_reduce(each[group.rank].clone()))  # noqa: B023
            made = [sums[turn].wait() for sums in pending]
            assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))  # type: ignore[arg-type]


def test_sums_that_nobody_waits_for_leave_the_ranks_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "library", lambda: None)
    with ranks(3, tmp_path) as groups:
        for turn in range(20):
            for group in groups:
                group.all_reduce_async(torch.full((1000,), -1.0))
            made = together(groups, lambda group: float(group.all_reduce(torch.full((1000,), float(turn)))[0]))  # noqa: B023
            assert made == [3.0 * turn] * 3


@needs_kernels
def test_sums_in_shared_memory_do_not_overlap(tmp_path: Path) -> None:
    with ranks(2, tmp_path) as groups:
        assert not any(group.overlaps_sums for group in groups)
