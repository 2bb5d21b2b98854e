"""The errors that clients see: one code each, with its HTTP and gRPC status."""

from dataclasses import dataclass
from enum import IntEnum


class ErrorCode(IntEnum):
    """Kinds of error; the numbers are those of ``quire.v1.ErrorCode``."""

    INVALID = 1
    UNAUTHENTICATED = 2
    FORBIDDEN = 3
    NOT_FOUND = 4
    CONFLICT = 5
    OVERLOADED = 6
    UNAVAILABLE = 7
    DEADLINE = 8
    INTERNAL = 9


@dataclass(frozen=True, slots=True)
class Status:
    """What clients get for a code: the HTTP status, the name of the gRPC status, and OpenAI's ``type``."""

    http: int
    grpc: str
    kind: str


STATUS = {
    ErrorCode.INVALID: Status(400, "INVALID_ARGUMENT", "invalid_request_error"),
    ErrorCode.UNAUTHENTICATED: Status(401, "UNAUTHENTICATED", "authentication_error"),
    ErrorCode.FORBIDDEN: Status(403, "PERMISSION_DENIED", "permission_error"),
    ErrorCode.NOT_FOUND: Status(404, "NOT_FOUND", "not_found_error"),
    ErrorCode.CONFLICT: Status(409, "ALREADY_EXISTS", "conflict_error"),
    ErrorCode.OVERLOADED: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error"),
    ErrorCode.UNAVAILABLE: Status(503, "UNAVAILABLE", "service_unavailable_error"),
    ErrorCode.DEADLINE: Status(504, "DEADLINE_EXCEEDED", "timeout_error"),
    ErrorCode.INTERNAL: Status(500, "INTERNAL", "server_error"),
}


class QuireError(Exception):
    """An error that is sent to the client.

    ``message`` is one sentence without internals, ``param`` the REST name of the parameter at fault,
    ``retry_after`` the seconds after which the same request may succeed, and ``reason`` a word for programs, such as
    which limit was exceeded, if the code alone does not say what to do.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.reason = reason

    @property
    def status(self) -> Status:
        """The HTTP and gRPC status of this error."""
        return STATUS[self.code]

    def about(self, param: str | None, message: str | None = None) -> "QuireError":
        """Returns the same error about another parameter, and in other words if there are some."""
        words = self.message if message is None else message
        return QuireError(self.code, words, param=param, retry_after=self.retry_after, reason=self.reason)


def invalid(param: str, message: str) -> QuireError:
    """An INVALID error for the value of ``param``."""
    return QuireError(ErrorCode.INVALID, message, param=param)


def internal() -> QuireError:
    """An INTERNAL error without its reason, which is in the log under the request's id."""
    return QuireError(ErrorCode.INTERNAL, "The request failed because of an error inside the service.")


class TokenizerLoadError(ValueError):
    """A model folder's tokenizer or chat template cannot be used. The text is one sentence that names the file and the
    problem. Raised when a model is loaded; clients never see it.
    """
