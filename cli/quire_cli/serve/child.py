"""Becomes ``python -m MODULE …`` in a process that the kernel kills when its parent dies, even by SIGKILL.

Run as a file, as it needs none of the packages: ``python -S child.py PARENT MODULE [ARGUMENT…]``. PARENT is the id of
the process that started it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, which stays asked for after ``exec``, and becomes the program."""
    parent, *command = sys.argv[1:]
    # SIGKILL, because a tree that starts again at once needs the ports and the journal.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before there was a signal to send
        raise SystemExit(1)
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606 - the program is this Python


if __name__ == "__main__":
    main()
