"""``multipart/form-data`` (RFC 7578), read as it arrives: a file is never held as a whole. Pure: it does no I/O."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from quire_proto.errors import QuireError, invalid

MAX_HEADERS: Final = 8_192  # bytes of one field
MAX_FIELDS: Final = 32
_BOUNDARY = re.compile(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;",]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(r"^content-disposition:\s*form-data\s*;(.*)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(r'(?:^|[;\s])(name|filename)="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Field:
    """The head of a form's field. ``filename`` is None for one that is no file."""

    name: str
    filename: str | None


class MultipartParser:
    """Parses the body of a form whose ``content-type`` is given. Raises ``QuireError`` INVALID for what is none."""

    def __init__(self, content_type: str) -> None:
        found = _BOUNDARY.search(content_type)
        if not content_type.lower().startswith("multipart/form-data") or found is None:
            raise malformed("the Content-Type must be multipart/form-data with a boundary")
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._buffer = bytearray(b"\r\n")  # the first delimiter stands at the beginning of a line, too
        self._in_field = False
        self._at_delimiter = False
        self._fields = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[Field | bytes]:
        """Yields the heads of fields that begin in ``data``, and behind each some of its bytes at a time."""
        self._buffer += data
        while not self.ended:
            if self._at_delimiter:
                field = self._read_head()
                if field is None:
                    return
                if not self.ended:
                    yield field
                continue
            end = self._buffer.find(self._delimiter)
            length = max(0, len(self._buffer) - len(self._delimiter) + 1) if end < 0 else end
            if length and self._in_field:
                yield bytes(self._buffer[:length])
            del self._buffer[:length]
            if end < 0:
                return
            del self._buffer[: len(self._delimiter)]
            self._at_delimiter = True

    def _read_head(self) -> Field | None:
        """Returns the head behind a delimiter, None if it is not all there; at the last delimiter the form ends."""
        if self._buffer.startswith(b"--"):
            self.ended = True
            return Field("", None)
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEADERS:
                raise malformed(f"the headers of a field have more than {MAX_HEADERS} bytes")
            return None
        head = self._buffer[:end].decode("utf-8", "replace").lstrip("\r\n").replace("\r\n", "\n")
        del self._buffer[: end + 4]
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise malformed(f"there are more than {MAX_FIELDS} fields")
        found = _DISPOSITION.search(head)
        parameters = {name.lower(): value for name, value in _PARAMETER.findall("" if found is None else found[1])}
        if "name" not in parameters:
            raise malformed("a field has no name")
        self._at_delimiter, self._in_field = False, True
        filename = parameters.get("filename")
        return Field(parameters["name"], None if filename is None else _unquoted(filename))


def _unquoted(text: str) -> str:
    r"""Browsers write a quote as ``%22``, other clients as ``\"``."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"')


def malformed(problem: str) -> QuireError:
    """Returns the error of a body that is no form."""
    return invalid("body", f"This is no form with a file: {problem}.")
