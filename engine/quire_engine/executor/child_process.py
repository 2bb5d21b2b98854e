"""A child process that runs a part of the engine, with a socket to its parent. ``ChildProcess`` is the parent's handle.
The functions make the child end with its parent.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

EXIT_TIMEOUT_SECONDS = 2.0
EXIT_GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


class ChildProcess:
    """Runs ``python -m MODULE`` with ``arguments``, the descriptor of its end of ``link``, and this process's id.

    Create it on a thread that outlives it: the kernel kills the process when that thread ends.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self.link, child_end = socket.socketpair()
        with child_end:
            # Its own process group: Ctrl-C reaches only the parent, which ends its children after its own work.
            self._popen = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, *arguments, str(child_end.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def exit_status(self) -> str:
        """Returns how the process ended, as the end of a sentence. Call it after the link has closed. Waits up to
        ``EXIT_TIMEOUT_SECONDS``.
        """
        try:
            code = self._popen.wait(EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does when memory runs out"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills the process, even if it is stopped."""
        with suppress(ProcessLookupError):
            self._popen.kill()

    def close_link(self) -> None:
        """Shuts down the link, which ends the process."""
        with suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)

    def wait_or_kill(self, deadline: float) -> None:
        """Waits for the process to end, and kills it at ``deadline`` (monotonic clock). The process has ended when this
        returns.
        """
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._popen.wait()
        self.link.close()


def kill_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread that started it ends. That works however the thread ends, and
    even if this process is stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def exit_with_link(link: int) -> None:
    """Ends this process soon after the link closes, even if a collective is waiting for ranks that have ended."""
    poll = select.poll()
    poll.register(link, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(0)
