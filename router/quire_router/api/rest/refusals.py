"""What HTTP itself refuses: routes, methods, sizes and content types. These have no gRPC twin, so they are not in
the table of ``quire_proto.errors``.
"""

from collections.abc import Sequence
from http import HTTPStatus


class HttpError(Exception):
    """A request that is refused before it means anything to this service."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message)
        self.headers = headers
        self.status = status
        self.code = code
        self.message = message


def body_too_large(limit: int) -> HttpError:
    """The body has more than ``limit`` bytes."""
    message = f"The body is larger than the limit of {limit} bytes."
    return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message)


def body_too_slow(seconds: float) -> HttpError:
    """The body did not arrive within ``seconds``."""
    message = f"The body did not arrive within {seconds:g} seconds."
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", message)


def head_too_large(limit: int) -> HttpError:
    """The request line and headers have more than ``limit`` bytes."""
    message = f"The headers are larger than the limit of {limit} bytes."
    return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)


def head_too_slow(seconds: float) -> HttpError:
    """The request line and headers did not arrive within ``seconds``."""
    message = f"The headers did not arrive within {seconds:g} seconds."
    return HttpError(HTTPStatus.REQUEST_TIMEOUT, "headers_too_slow", message)


def not_http() -> HttpError:
    """What was sent is not a request."""
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not a valid HTTP request.")


def not_json() -> HttpError:
    """The body is said to be something other than JSON."""
    message = "The body must be JSON: send the header Content-Type: application/json."
    return HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def no_such_route() -> HttpError:
    """There is nothing at this path."""
    return HttpError(HTTPStatus.NOT_FOUND, "not_found", "There is nothing at this path.")


def wrong_method(allowed: str) -> HttpError:
    """The path exists, with another method."""
    headers = [(b"allow", allowed.encode())]
    return HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", "This path takes another method.", headers)
