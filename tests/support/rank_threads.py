"""Ranks that are threads of this process instead of processes: everything else is real, and nothing has to start."""

import socket
from threading import Thread

import pytest
from quire_engine.executor import rank_processes
from quire_engine.executor.rank_worker import RankWorker


class RankThread:
    """What ``RankWorkers`` asks of a ``RankProcess``. It cannot be killed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place = "a thread"
        self.link, theirs = socket.socketpair()
        self._thread = Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            RankWorker(link, self.rank).run()

    def exit_reason(self) -> str:
        return f"Rank {self.rank} has ended."

    def kill(self) -> None:
        self.close_link()

    def close_link(self) -> None:
        self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        self._thread.join(10)
        self.link.close()


def ranks_are_threads(patch: pytest.MonkeyPatch) -> None:
    """Executors that are made while ``patch`` holds have threads for ranks."""
    patch.setattr(rank_processes, "RankProcess", RankThread)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        patch.setenv(name, "lo")  # set and unset by each rank for itself, which would be for all of them here
