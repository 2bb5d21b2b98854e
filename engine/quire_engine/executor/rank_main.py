"""The process of a rank other than 0: makes the calls that rank 0 makes, and ends when rank 0 does.

It is started as ``python -m quire_engine.executor.rank_main RANK LINK PARENT``, with the number of an open
socket and that of rank 0's process.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from threading import Thread

_PR_SET_PDEATHSIG = 1
EXIT_GRACE_SECONDS = 1.0


def main() -> None:
    """Serves calls until rank 0 ends the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, link, parent = map(int, sys.argv[1:])
    _kill_with_parent(parent)
    Thread(target=_exit_with_link, args=(link,), name="link-watch", daemon=True).start()
    from quire_engine.device.host import limit_onednn_caches

    limit_onednn_caches()
    from quire_engine.executor.rank_worker import RankWorker

    RankWorker(socket.socket(fileno=link), rank).run()


def _kill_with_parent(parent: int) -> None:
    """Has the system kill this process when the thread that started it ends, however it ends and whatever this process
    is doing then, even if it is stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _exit_with_link(link: int) -> None:
    """Ends this process soon after the link, also when a collective waits for ranks that are gone."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
