"""Lines of a service's log. What comes from outside, such as a name, a path or another server's words, stays within its
line: it can neither begin one of its own nor change a terminal.
"""

import logging
from types import TracebackType

_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """Writes each message as one line, with control characters escaped. A traceback follows, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Returns the line of a record."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _Error) -> str:  # noqa: N802 - logging's name
        """Returns a traceback, of which no line looks like one of the log."""
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))


def one_line(text: str) -> str:
    """Returns a text with everything escaped that is not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def set_up_logging(level: str | int, form: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
    """Writes records from ``level`` on to the standard error, in this form."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
