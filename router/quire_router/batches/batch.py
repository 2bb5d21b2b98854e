"""``Batch``: the record of a batch, with who works on it; its lines, what runs them (``LineRunner``), what its file
must hold (``LineReader``), and what is kept of each answer (``encode_result``).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import Any, Final, Protocol, Self, TypeVar

from quire_proto.errors import QuireError

from quire_router.core.complexity import check_complexity
from quire_router.core.errors import invalid_body
from quire_router.journal import records

EMBEDDINGS: Final = "/v1/embeddings"
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", EMBEDDINGS)
WINDOW: Final = 86_400  # seconds: the one completion window, "24h"
T = TypeVar("T")
MAX_LINES = 50_000
MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # that a batch which fails lists
OK, FAILED = b"+", b"-"
"""The first byte of a result says which file it belongs into."""
ENDED: Final = ("completed", "failed", "expired", "cancelled")


@dataclass(slots=True)
class Batch:
    """What is stored of a batch, as JSON. Times are in seconds since 1970, and None where it has not come to that.

    ``status`` is OpenAI's. ``owner`` is the router that works on it until ``lease_until``, by the routers' clocks: who
    takes it over changes the record's version, so that its former owner cannot write it any more. ``cache_salt`` is its
    tenant's, hexadecimal. ``total``, ``completed`` and ``failed`` count lines, and
    ``result_bytes`` what their results take. With ``listed``, its tenant was in the tenants' file.
    """

    id: str
    tenant: str
    cache_salt: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    output_ttl: int | None = None
    status: str = "validating"
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    result_bytes: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    owner: str = ""
    lease_until: float = 0.0
    listed: bool = False

    @classmethod
    def unreadable(cls, batch_id: str, tenant: str) -> Self:
        """Returns the batch whose record is damaged, as one that failed."""
        message = "What is stored of this batch is damaged, so it cannot go on. Its file can be run as a new batch."
        error = LineError("batch_unreadable", message).error
        return cls(batch_id, tenant, "", "", "", 0, 0, status="failed", errors=[error])

    def to_json(self) -> bytes:
        """Returns what is stored."""
        return records.encode(self)

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in ENDED

    def file_id(self, kind: str) -> str:
        """Returns the id of its output or error file, which is the same whoever writes it."""
        digest = blake2b(f"{self.id}\0{kind}".encode(), digest_size=12, person=b"quire batch").hexdigest()
        return f"file-{digest}"

    def to_object(self) -> dict[str, object]:
        """Returns the batch as OpenAI's API shows it."""
        hidden = (
            "tenant",
            "cache_salt",
            "owner",
            "lease_until",
            "listed",
            "output_ttl",
            "result_bytes",
            "total",
            "completed",
            "failed",
        )
        shown = {name: value for name, value in asdict(self).items() if name not in hidden}
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            **shown,
            "object": "batch",
            "completion_window": "24h",
            "request_counts": counts,
            "errors": errors,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch: its number in the file, from 0, its client's name for it, and its ``text``; or the
    ``refusal`` of one that is beyond the bounds of any body, without the text.
    """

    number: int
    custom_id: str
    text: bytes
    model: str | None = None
    refusal: str = ""

    def body(self) -> bytes:
        """Returns its body as JSON. Belongs into a thread where the line is long. Raises ``QuireError`` INVALID with
        the refusal, if there is one.
        """
        if self.refusal:
            raise invalid_body(self.refusal)
        return json.dumps(json.loads(self.text)["body"]).encode()


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line: HTTP's status, the request's id, and the body as JSON."""

    status: int
    request_id: str
    body: bytes


class LineRunner(Protocol):
    """Runs lines as requests; see ``api.rest.batch_lines.BatchLines``."""

    async def run(self, batch: Batch, line: Line) -> LineAnswer:
        """Returns the answer to a line, which is run once however often this is called. Waits until there is room.
        Raises ``QuireError`` only for what passes, and DEADLINE if the batch's window has ended. May be cancelled; the
        request goes on then.
        """
        ...

    async def cancel(self, batch: Batch, number: int) -> None:
        """Ends the request of a line, if it runs."""
        ...

    async def offload(self, batch: Batch, size: int, work: Callable[[], T]) -> T:
        """Returns what ``work`` makes of ``size`` bytes of a batch, off the event loop and in its tenant's turn. Raises
        ``QuireError`` OVERLOADED where too much waits for that.
        """
        ...


class LineError(ValueError):
    """A line that no batch may have: OpenAI's ``code``, the ``message``, the line's number from 1, and the field."""

    def __init__(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "line": line, "param": param}


class LineReader:
    """Reads the requests of a batch for ``endpoint`` from its file, piece by piece, on any thread. Of a line with more
    than ``max_bytes``, which fails alone, only the ends are kept. ``error`` is why no more can be read; None while more
    can.
    """

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        self.error: LineError | None = None
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = self._number = 0

    def size_with(self, piece: bytes) -> int:
        """Returns how many bytes are read with this piece at most."""
        return min(self._size, self._max_bytes) + len(piece)

    def feed(self, piece: bytes) -> list[Line | LineError]:
        """Returns the lines that end in the next piece, and errors where a line is none. Blank lines do not count."""
        head, *lines = piece.split(b"\n")
        self._add(head)
        if not lines:
            return []
        first, rest = self._take(), lines.pop()
        self._add(rest)
        return self._read([first, *((line, len(line)) for line in lines)])

    def end(self) -> list[Line | LineError]:
        """Returns the last line, if the file does not end with an empty one."""
        return self._read([self._take()])

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._max_bytes:
            text = b"".join(self._pieces)
            self._pieces = [text[:_END_BYTES], text[-_END_BYTES:]]

    def _take(self) -> tuple[bytes, int]:
        """Returns the line so far, or its ends, and its size."""
        line = b"".join(self._pieces), self._size
        self._pieces, self._size = [], 0
        return line

    def _read(self, lines: Iterable[tuple[bytes, int]]) -> list[Line | LineError]:
        found: list[Line | LineError] = []
        for text, size in lines:
            if not text.strip():
                continue
            if self._number >= MAX_LINES:
                self.error = LineError("too_many_requests", f"The file has more than {MAX_LINES} lines.")
                break
            try:
                if size > self._max_bytes:
                    refusal = f"This line has more than {self._max_bytes} bytes."
                    found.append(_refused_line(text, self._number, "line_too_long", refusal))
                else:
                    found.append(read_line(text, self._number, self._endpoint))
            except LineError as error:
                found.append(error)
            self._number += 1
        return found


def read_line(text: bytes, number: int, endpoint: str) -> Line:
    """Returns the request in line ``number`` (from 0) of a batch for ``endpoint``. Raises ``LineError``."""
    at = number + 1
    try:
        check_complexity(text)
    except QuireError as error:
        return _refused_line(text, number, "invalid_request", error.message.replace("The body", "This line"))
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise LineError("invalid_json_line", "This line is not parseable as valid JSON.", at) from None
    if not isinstance(fields, dict):
        raise LineError("invalid_json_line", "This line is not a JSON object.", at)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters."
        raise LineError("missing_required_parameter", message, at, "custom_id")
    if fields.get("method") != "POST":
        raise LineError("invalid_method", "The only method is POST.", at, "method")
    if fields.get("url") != endpoint:
        raise LineError("mismatched_url", f"The url must be the batch's endpoint, {endpoint}.", at, "url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise LineError("missing_required_parameter", "The body must be a JSON object.", at, "body")
    if body.get("stream"):
        raise LineError("invalid_request", "A request of a batch cannot be streamed.", at, "body.stream")
    model = body.get("model")
    return Line(number, custom_id, text, model if isinstance(model, str) else None)


_END_BYTES = 8192  # which hold the fields around the body
_TEXT = rb'"(?:\\.|[^"\\])*+"'
_OTHER = rb'"(?:method|url)"\s*:\s*' + _TEXT + rb"\s*"
_CUSTOM_ID = rb'"custom_id"\s*:\s*(' + _TEXT + rb")\s*"
_CUSTOM_ID_FIRST = re.compile(rb"\s*\{\s*(?:" + _OTHER + rb",\s*)*" + _CUSTOM_ID + rb"[,}]")
_CUSTOM_ID_LAST = re.compile(rb",\s*" + _CUSTOM_ID + rb"(?:,\s*" + _OTHER + rb")*\}\s*\Z")


def _refused_line(text: bytes, number: int, code: str, refusal: str) -> Line:
    """Returns a line that is not parsed, but fails alone if it is an object that names its ``custom_id`` before or
    after its body. Raises ``LineError`` with the ``code`` for another.
    """
    found = _CUSTOM_ID_FIRST.match(text, 0, _END_BYTES) or _CUSTOM_ID_LAST.search(text, max(0, len(text) - _END_BYTES))
    try:
        custom_id = json.loads(found[1]) if found else ""
    except ValueError:
        custom_id = ""
    if not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(code, refusal, number + 1)
    return Line(number, custom_id, b"", refusal=refusal)


def encode_result(line: Line, answer: LineAnswer | None, error: dict[str, str] | None) -> bytes:
    """Returns a line of an output or error file, behind the byte that says of which."""
    response = b"null"
    if answer is not None:
        head = json.dumps({"status_code": answer.status, "request_id": answer.request_id})[:-1].encode()
        response = head + b', "body": ' + answer.body + b"}"
    name = f"batch_req_{answer.request_id}" if answer is not None else f"batch_req_{token_hex(12)}"
    head = json.dumps({"id": name, "custom_id": line.custom_id})[:-1].encode()
    tail = b', "error": ' + json.dumps(error).encode() + b"}"
    mark = OK if answer is not None and answer.status == 200 else FAILED
    return mark + head + b', "response": ' + response + tail
