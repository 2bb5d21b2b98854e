"""Lines of a service's log. What comes from outside, such as a name, a path or another server's words, stays within its
line: it can neither begin one of its own nor change a terminal.
"""

import json
import logging
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

_Error = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


LogFormat = Literal["text", "json"]


class LineFormatter(logging.Formatter):
    """Writes each message as one line, with control characters escaped. A traceback follows, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Returns the line of a record."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _Error) -> str:  # noqa: N802 - logging's name
        """Returns a traceback, of which no line looks like one of the log."""
        return "\n".join(f"  {one_line(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Writes each record as one line of JSON, with the traceback in it. ``fields`` are added to each."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record, in ASCII."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        named = {"time": time, "level": record.levelname.lower(), "logger": record.name, **self._fields}
        named["message"] = record.getMessage()
        if record.exc_info:
            named["exception"] = self.formatException(record.exc_info)
        return json.dumps(named)


def one_line(text: str) -> str:
    """Returns a text with everything escaped that is not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def set_up_logging(level: str | int, form: LogFormat = "text", **process: int) -> None:
    """Writes records from ``level`` on to the standard error, with what distinguishes this ``process`` from others of
    its service, such as ``rank=1``.
    """
    handler = logging.StreamHandler()
    which = "".join(f"[{name} {number}] " for name, number in process.items())
    text = LineFormatter(f"%(asctime)s {which}%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(**process) if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])


def log_format() -> LogFormat:
    """The form that was set up here."""
    return "json" if any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers) else "text"
