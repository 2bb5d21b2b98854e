"""The process of a rank other than 0: runs a ``RankWorker`` and ends when rank 0 ends.

Started as ``python -m quire_engine.executor.rank_main RANK LINK PARENT``, with the descriptor of an open socket and the
process id of rank 0.
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
    """Handles calls until rank 0 closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, link, parent = map(int, sys.argv[1:])
    _kill_with_parent(parent)
    Thread(target=_exit_with_link, args=(link,), name="link-watch", daemon=True).start()
    from quire_engine.device.host import limit_onednn_caches

    limit_onednn_caches()
    from quire_engine.executor.rank_worker import RankWorker

    RankWorker(socket.socket(fileno=link), rank).run()


def _kill_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends. That works however the thread ends, and
    even if this process is stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _exit_with_link(link: int) -> None:
    """Ends this process soon after the link closes, even if a collective is waiting for ranks that have ended."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
