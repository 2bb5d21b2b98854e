"""The process of a rank other than 0: runs a ``RankWorker`` and ends when rank 0 ends.

Started as ``python -m quire_engine.executor.rank_main RANK LINK PARENT``, with the descriptor of an open socket and the
process id of rank 0.
"""

import signal
import socket
import sys
from threading import Thread

from quire_engine.executor.child_process import exit_with_link, kill_with_parent


def main() -> None:
    """Handles calls until rank 0 closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, link, parent = map(int, sys.argv[1:])
    kill_with_parent(parent)
    Thread(target=exit_with_link, args=(link,), name="link-watch", daemon=True).start()
    from quire_engine.device.host import limit_onednn_caches

    limit_onednn_caches()
    from quire_engine.executor.rank_worker import RankWorker

    RankWorker(socket.socket(fileno=link), rank).run()


if __name__ == "__main__":
    main()
