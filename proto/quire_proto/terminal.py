"""What a program says to a person at a terminal: ``error:`` and ``tip:`` lines on standard error.

Colours are used where standard error is a terminal, unless ``NO_COLOR`` is set (https://no-color.org).
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import NoReturn, TextIO

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells report it."""
CLEAR_LINE = "\r\x1b[K"
RED, GREEN, YELLOW, CYAN = "\x1b[1;31m", "\x1b[32m", "\x1b[33m", "\x1b[1;36m"
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_PERIOD = 0.5  # seconds between two states of a line that counts them
_HEADING = re.compile(r"^(?:usage:|[A-Za-z].*:$)", re.MULTILINE)


def has_color(stream: TextIO | None) -> bool:
    """Returns whether escape sequences belong into what is written there."""
    return (
        stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def colored(text: str, color: str, stream: TextIO | None) -> str:
    """Returns ``text`` in a color where ``stream`` shows it."""
    return f"{color}{text}{PLAIN}" if has_color(stream) else text


def bold_headings(text: str, stream: TextIO | None) -> str:
    """Returns a help text with its headings in bold where ``stream`` shows that."""
    return _HEADING.sub(lambda found: colored(found[0], BOLD, stream), text)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows ``text`` on standard error while the block runs, with the seconds that it has taken; in a terminal only."""
    if not has_color(sys.stderr):
        yield
        return
    began, ended = monotonic(), Event()

    def show() -> None:
        while not ended.wait(_PERIOD):
            line = colored(f"{text} ({monotonic() - began:.0f} s)", DIM, sys.stderr)
            sys.stderr.write(f"{CLEAR_LINE}{line}")
            sys.stderr.flush()

    showing = Thread(target=show, daemon=True, name="waiting")
    showing.start()
    try:
        yield
    finally:
        ended.set()
        showing.join()
        sys.stderr.write(CLEAR_LINE)
        sys.stderr.flush()


def report_error(problem: str, tip: str = "") -> None:
    """Writes what went wrong, and below it what to do."""
    lines = [f"{colored('error:', RED, sys.stderr)} {problem}\n"]
    lines += [f"{colored('tip:', CYAN, sys.stderr)} {tip}\n"] if tip else []
    sys.stderr.writelines(lines)


def fail(problem: str, tip: str = "", status: int = 1) -> NoReturn:
    """Ends the process after ``report_error``."""
    report_error(problem, tip)
    raise SystemExit(status)


def did_you_mean(name: str) -> str:
    """Returns the question behind an unknown name; nothing without a similar one."""
    return f" (did you mean {name}?)" if name else ""
