"""Ranks whose processes are forked off one that has imported all that they need."""

import os
import socket
import sys
from collections.abc import Callable, Mapping

import psutil
import pytest
from quire_engine.executor import rank_main, rank_processes
from quire_engine.executor.rank_processes import RankProcess

from tests.support.forked_engines import Forked

prepare: Callable[[], None] | None = None
"""What each rank does first. A function by its name, or a part of one."""

_started: list[tuple[int, Forked]] = []  # each rank's process


class ForkedRank(RankProcess):
    """One that runs what the product's does, after ``prepare``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link, child_end = socket.socketpair()
        with child_end:
            forked = Forked(_run, rank, child_end, dict(os.environ), prepare)
        self._popen = forked  # type: ignore[assignment]
        _started.append((rank, forked))


def _run(rank: int, link: socket.socket, environment: Mapping[str, str], prepare: Callable[[], None] | None) -> None:
    os.setpgid(0, 0)
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    sys.argv = ["rank", str(rank), str(link.detach()), str(os.getppid())]
    rank_main.main()


def running_ranks() -> list[psutil.Process]:
    """Those that run, forked or not, by rank."""
    found = {forked.pid: rank for rank, forked in _started if forked.poll() is None}
    for child in psutil.Process().children():
        if "executor.rank_main" in " ".join(command := child.cmdline()):
            found[child.pid] = int(command[-3])
    return [psutil.Process(pid) for pid in sorted(found, key=found.__getitem__)]


def ranks_are_forked(patch: pytest.MonkeyPatch) -> None:
    """Executors that are made while ``patch`` holds have such ranks."""
    patch.setattr(rank_processes, "RankProcess", ForkedRank)
