"""One other rank's process, as rank 0 sees it: started, spoken to, and ended. Knows no calls."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

EXIT_TIMEOUT_SECONDS = 2.0
# What runs a rank's process; its number, that of its end of the link, and that of rank 0's process follow.
COMMAND = (sys.executable, "-P", "-m", "quire_engine.executor.torch.ranks.worker")


class RankProcess:
    """The process of ``rank``. Start it on a thread that lives as long as it should: the system ends it with that."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.link, theirs = socket.socketpair()
        with theirs:
            # A group of its own: Ctrl-C is for rank 0, which ends the others when it has finished its work.
            self._popen = subprocess.Popen(  # noqa: S603 - our own module
                [*COMMAND, str(rank), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._popen.pid

    def exit_reason(self) -> str:
        """How it ended, as a sentence; to be asked for once its link was closed."""
        return f"Rank {self.rank} (process {self.pid}) {self._exit_status()}, and the engine cannot go on without it."

    def kill(self) -> None:
        """Ends it at once, even where it is stopped."""
        with suppress(ProcessLookupError):
            self._popen.kill()

    def close_link(self) -> None:
        """Ends the link, at which the process ends."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        """Waits for its end, which is forced at ``deadline``, by the monotonic clock. It is gone afterwards."""
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()
        self.link.close()

    def _exit_status(self) -> str:
        try:
            code = self._popen.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
