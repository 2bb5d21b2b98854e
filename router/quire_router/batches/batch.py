"""``Batch``: the record of a batch, with who works on it; its lines, what runs them (``LineRunner``), what its file
must hold (``read_lines``), and what is kept of each answer (``encode_result``).
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from secrets import token_hex
from typing import Any, Final, Protocol, Self

from quire_router.journal import records

EMBEDDINGS: Final = "/v1/embeddings"
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", EMBEDDINGS)
WINDOW: Final = 86_400  # seconds: the one completion window, "24h"
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
    ``result_bytes`` what their results take.
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
    """One request of a batch: its number in the file, from 0, its client's name for it, and its body as JSON."""

    number: int
    custom_id: str
    body: bytes
    model: str | None = None


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
        Raises ``QuireError`` only for what passes. May be cancelled; the request goes on then.
        """
        ...

    async def cancel(self, batch: Batch, number: int) -> None:
        """Ends the request of a line, if it runs."""
        ...


class LineError(ValueError):
    """A line that no batch may have: OpenAI's ``code``, the ``message``, the line's number from 1, and the field."""

    def __init__(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "line": line, "param": param}


async def split_lines(chunks: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes]:
    """Yields the lines of a file that comes in chunks, without those that are blank. Raises ``LineError`` for one of
    more than ``max_bytes``.
    """
    rest, count = b"", 0
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                count += 1
                yield _checked_size(line, max_bytes, count)
        _checked_size(rest, max_bytes, count + 1)
    if rest.strip():
        yield rest


def _checked_size(line: bytes, max_bytes: int, number: int) -> bytes:
    if len(line) > max_bytes:
        raise LineError("line_too_long", f"This line has more than {max_bytes} bytes.", number)
    return line


def read_line(text: bytes, number: int, endpoint: str) -> Line:
    """Returns the request in line ``number`` (from 0) of a batch for ``endpoint``. Raises ``LineError``."""
    at = number + 1
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
    return Line(number, custom_id, json.dumps(body).encode(), model if isinstance(model, str) else None)


async def read_lines(
    chunks: AsyncIterator[bytes], endpoint: str, max_line_bytes: int
) -> AsyncGenerator[Line | LineError]:
    """Yields the requests in a file, and errors where a line is none. Raises ``LineError`` where it cannot be read
    further.
    """
    number = 0
    async for text in split_lines(chunks, max_line_bytes):
        if number >= MAX_LINES:
            raise LineError("too_many_requests", f"The file has more than {MAX_LINES} lines.")
        try:
            yield read_line(text, number, endpoint)
        except LineError as error:
            yield error
        number += 1


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
