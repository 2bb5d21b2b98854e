"""``multipart/form-data`` (RFC 7578), read as it arrives by python-multipart, which starlette reads forms with too: a
file is never held as a whole. Pure: it does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from quire_proto.errors import QuireError, invalid

MAX_HEADERS: Final = 8  # of one field
MAX_HEADER_BYTES: Final = 4_096
MAX_FIELDS: Final = 32


@dataclass(frozen=True, slots=True)
class Field:
    """The head of a form's field. ``filename`` is None for one that is no file."""

    name: str
    filename: str | None


class MultipartParser:
    """Parses the body of a form whose ``content-type`` is given. Raises ``QuireError`` INVALID for what is none."""

    def __init__(self, content_type: str) -> None:
        from python_multipart import exceptions, multipart  # few routers get files

        kind, options = multipart.parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
            raise malformed("the Content-Type must be multipart/form-data with a boundary")
        self._parse_header = multipart.parse_options_header
        self._error = exceptions.MultipartParseError
        self._parser = multipart.MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_field,
                "on_header_field": self._read_header_name,
                "on_header_value": self._read_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._read_data,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self._pieces: list[Field | bytes] = []
        self._header = self._value = self._disposition = b""
        self._fields = 0
        self.ended = False

    def feed(self, data: bytes) -> Iterator[Field | bytes]:
        """Yields the heads of fields that begin in ``data``, and behind each some of its bytes at a time."""
        try:
            self._parser.write(data)
        except self._error as error:
            raise malformed(str(error)) from None
        pieces, self._pieces = self._pieces, []
        yield from pieces

    def _begin_field(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise malformed(f"there are more than {MAX_FIELDS} fields")
        self._header = self._value = self._disposition = b""

    def _read_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _read_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_head(self) -> None:
        kind, options = self._parse_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise malformed("a field has no name")
        filename = options.get(b"filename")
        self._pieces.append(Field(_text(options[b"name"]), None if filename is None else _text(filename)))

    def _read_data(self, data: bytes, start: int, end: int) -> None:
        if start < end:
            self._pieces.append(data[start:end])

    def _end(self) -> None:
        self.ended = True


def _text(name: bytes) -> str:
    """Browsers write a quote in a name as ``%22``; the library reads what other clients write."""
    return name.decode("utf-8", "replace").replace("%22", '"')


def malformed(problem: str) -> QuireError:
    """Returns the error of a body that is no form."""
    return invalid("body", f"This is not a form with a file: {problem}.")
