"""``AnswerFormat``: what the answers of an API look like, as server-sent events while they are generated, as the body
of a whole response, and as errors. Each route has one, and a stored request that of its route: whichever router writes
its answer again writes the same. How answers are sent is in ``sse``, whatever their format.
"""

from typing import Protocol

from quire_proto.errors import ErrorCode, QuireError

from quire_router.api.prepared_request import PreparedRequest
from quire_router.api.rest.http import Header, HttpError
from quire_router.api.rest.logprobs import LogprobsRenderer
from quire_router.core.generation import Delta, StreamCursor, Usage
from quire_router.core.retry import retry_after

ErrorResponse = tuple[int, bytes, list[Header]]
"""Status, body and headers."""


class EventEncoder(Protocol):
    """Encodes the deltas of one answer as events, in order. Does no I/O. Where there are ``logprobs``, they are given
    each delta before it is encoded.
    """

    logprobs: LogprobsRenderer | None

    def opening(self) -> bytes:
        """Returns the events before the first delta, of those that the client has not had."""
        ...

    def encode(self, delta: Delta) -> bytes:
        """Returns the events of a delta, if there are any. A delta with the usage ends the stream."""
        ...

    def encode_token(self, index: int, token_id: int, text: str) -> bytes:
        """As ``encode`` of a delta that is one token of choice ``index`` and its text."""
        ...


class BodyBuilder(Protocol):
    """Collects the deltas of one answer for a whole response. Does no I/O. ``logprobs`` as in ``EventEncoder``."""

    logprobs: LogprobsRenderer | None

    def add(self, delta: Delta) -> None:
        """Adds a delta."""
        ...

    async def body(self, usage: Usage) -> bytes:
        """Returns the answer as JSON; yields to the event loop between long parts. Raises ``QuireError`` INTERNAL when
        it has not ended: an incomplete answer is never passed on as complete.
        """
        ...


class AnswerFormat(Protocol):
    """The format of one route's answers."""

    @property
    def heartbeat(self) -> bytes | None:
        """The event that is sent while there is nothing to send; None for a comment (see ``SseStream``)."""
        ...

    @property
    def tells_cancelled(self) -> bool:
        """Whether an answer can say that its request was cancelled, as a reason that the API's document knows. Where it
        cannot, it ends with an error.
        """
        ...

    @property
    def id_headers(self) -> tuple[bytes, ...]:
        """The names of the response headers that the request's id is in."""
        ...

    def encoder(self, prepared: PreparedRequest, cursor: StreamCursor, delivered: int = 0) -> EventEncoder:
        """Returns the encoder of an answer that its client has up to ``cursor``, and up to ``delivered`` behind that
        (see ``read_event_id``).
        """
        ...

    def read_event_id(self, event_id: str) -> tuple[str, int]:
        """Returns the cursor in an event's id, and how much the client has behind it, 0 where each delta is one event
        at most. May raise ``QuireError`` INVALID for what is no id.
        """
        ...

    def builder(self, prepared: PreparedRequest) -> BodyBuilder:
        """Returns the builder of an answer."""
        ...

    def error_response(self, error: HttpError | QuireError, request_id: str) -> ErrorResponse:
        """Returns the response to a request that fails before anything of its answer was sent."""
        ...

    def error_event(
        self, error: QuireError, request_id: str, *, resumable: bool, encoder: EventEncoder | None = None
    ) -> bytes:
        """Returns the last event of a stream that fails; ``resumable`` says whether it can be resumed, here or at
        another router. ``encoder`` wrote the events before it, if there were any.
        """
        ...


def error_headers(error: QuireError) -> list[Header]:
    """Returns the headers of an error's response, which are the same in all formats."""
    headers: list[Header] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % retry_after(error.retry_after)))
    if error.reason is not None:
        headers.append((b"x-quire-reason", error.reason.encode("ascii")))
    if error.code is ErrorCode.CONFLICT:  # the clients of OpenAI and Anthropic would send it twice more
        headers.append((b"x-should-retry", b"false"))
    if error.status.http == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
