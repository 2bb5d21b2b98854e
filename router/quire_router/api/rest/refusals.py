"""What HTTP itself refuses: routes, methods, sizes and content types. These have no gRPC twin, so they are not in
the table of ``quire_proto.errors``.
"""

from collections.abc import Sequence
from http import HTTPStatus

_MAX_PATH = 128  # characters
_CHAT = "use POST /v1/chat/completions"
_COMPLETIONS = "use POST /v1/completions"
_INSTEAD = {
    "/responses": f"{_CHAT}, as most clients can be told to",
    "/messages": f"{_CHAT}, directly or through a gateway that translates Anthropic's Messages",
    "/embeddings": "this service makes no embeddings; use a server for an embedding model",
    "/chat/completions": _CHAT,
    "/chat/completion": _CHAT,
    "/chat": _CHAT,
    "/completions": _COMPLETIONS,
    "/completion": _COMPLETIONS,
    "/generate": _COMPLETIONS,
    "/tokenize": "use POST /tokenize, without /v1",
    "/detokenize": "use POST /detokenize, without /v1",
    "/metrics": "metrics are on the metrics port, 8002 unless --metrics-port says otherwise",
    "/models": "use GET /v1/models",
    "/v1/chat/completions": f"{_CHAT}; the base URL ends with /v1 already",
    "/v1/completions": f"{_COMPLETIONS}; the base URL ends with /v1 already",
    "/v1/models": "use GET /v1/models; the base URL ends with /v1 already",
    "/api/chat": _CHAT,
    "/api/generate": _COMPLETIONS,
}
"""What to use in the place of what is often asked for, by the path without a first ``/v1``."""


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


def too_many_headers(limit: int) -> HttpError:
    """There are more than ``limit`` headers."""
    message = f"There are more than {limit} headers."
    return HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message)


def no_tunnel() -> HttpError:
    """``CONNECT``, which asks a proxy for a tunnel."""
    message = "This is no proxy: CONNECT is not served."
    return HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, [(b"allow", b"GET, POST, DELETE")])


def wrong_host() -> HttpError:
    """There is no Host, more than one, or one that cannot be."""
    message = "A request needs exactly one Host header, with a valid value."
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_request", message)


def unknown_version() -> HttpError:
    """The request line names an HTTP version that this port does not speak."""
    message = "This port speaks HTTP/1.1 and HTTP/1.0."
    return HttpError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_supported", message)


def unknown_coding() -> HttpError:
    """The body is in a transfer coding that is not read here."""
    message = "The only transfer coding that is read here is chunked."
    return HttpError(HTTPStatus.NOT_IMPLEMENTED, "transfer_coding_not_implemented", message)


def not_http() -> HttpError:
    """What was sent is not a request."""
    return HttpError(HTTPStatus.BAD_REQUEST, "malformed_request", "This is not a valid HTTP request.")


def not_json() -> HttpError:
    """The body is said to be something other than JSON."""
    message = "The body must be JSON: send the header Content-Type: application/json."
    return HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def no_such_route(path: str, instead: str | None = None) -> HttpError:
    """There is nothing at this path. ``instead`` is what to use; by default what suits the path."""
    instead = instead or _INSTEAD.get(path.removeprefix("/v1").rstrip("/"), "docs/api.md lists what there is")
    return HttpError(HTTPStatus.NOT_FOUND, "not_found", f"There is nothing at {path[:_MAX_PATH]}: {instead}.")


def wrong_method(path: str, method: str, allowed: str) -> HttpError:
    """The path exists, with the methods of ``allowed``, which is what the header ``Allow`` says."""
    takes = " and ".join(sorted(allowed.split(", ")))
    message = f"{path[:_MAX_PATH]} takes {takes}, not {method[:_MAX_PATH]}."
    return HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", message, [(b"allow", allowed.encode())])
