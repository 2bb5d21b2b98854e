"""Commands in a terminal: a pseudo-terminal of their own, which is their controlling one."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread

from tests.support.processes import eventually

ROWS, COLUMNS = 24, 80
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A command that runs in a terminal, and what it ``shown`` so far."""

    def __init__(self, arguments: Sequence[str], columns: int, environment: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        own = {**os.environ, "TERM": "xterm-256color", **environment}
        # It is the controlling terminal, so that its Ctrl-C is a signal.
        command = ["setsid", "--ctty", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=own)
        os.close(theirs)
        self._seen: list[bytes] = []
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def shown(self) -> str:
        """All of it, with escape sequences."""
        return b"".join(self._seen).decode(errors="replace")

    def type_in(self, text: str) -> None:
        """Types keys."""
        os.write(self._ours, text.encode())

    def close(self) -> None:
        """Kills what still runs."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._ours)

    def end(self, timeout: float = 60.0) -> int:
        """Waits for the end of the command, and of what it shows; its status."""
        status = self.process.wait(timeout)
        self._reader.join(10)
        return status

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 1 << 16):
                self._seen.append(piece)
        except OSError:  # the other end is closed
            return


@contextmanager
def terminal(
    arguments: Sequence[str], *, columns: int = COLUMNS, environment: Mapping[str, str] | None = None, prompt: str = ""
) -> Iterator[Terminal]:
    """Runs a command until the end of the block, which begins once it has shown its ``prompt``."""
    running = Terminal(arguments, columns, environment or {})
    try:
        eventually(lambda: prompt in running.shown)
        yield running
    finally:
        running.close()


def in_terminal(
    arguments: Sequence[str], *, columns: int = COLUMNS, environment: Mapping[str, str] | None = None, status: int = 0
) -> str:
    """What a command shows in a terminal, with escape sequences; it ends with ``status``."""
    with terminal(arguments, columns=columns, environment=environment) as running:
        assert running.end() == status, running.shown
        return running.shown


def plain(shown: str) -> str:
    """The text of what was shown, without colors and movements."""
    return _ESCAPE.sub("", shown)
