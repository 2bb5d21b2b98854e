"""Typed errors of both APIs, parsed and checked."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from quire.v1 import types_pb2
from quire_proto.errors import STATUS, ErrorCode

PASSING = (ErrorCode.OVERLOADED, ErrorCode.UNAVAILABLE)
_WITH_REASONS = (ErrorCode.INVALID, ErrorCode.FORBIDDEN, *PASSING, ErrorCode.DEADLINE)
_KINDS = {status.kind: code for code, status in STATUS.items()}
_BINARY = "quire-error-bin"
_STORED = ("request_id", "response_id", "file_id", "input_file_id", "batch_id")
_MESSAGES_KINDS = {"overloaded_error": ErrorCode.UNAVAILABLE, "api_error": ErrorCode.INTERNAL}


class UntypedError(ValueError):
    """A response that is neither an answer nor a typed error."""


@dataclass(frozen=True)
class Failure:
    """An error whose words fit together: its status, its kind, its code."""

    code: ErrorCode
    param: str
    message: str

    @property
    def passes(self) -> bool:
        """Whether trying again may cure it."""
        return self.code in PASSING

    @property
    def is_unknown_request(self) -> bool:
        """Whether it says that there is no such request; that there is no such model or route is something else."""
        is_gone = self.code is ErrorCode.NOT_FOUND and self.param in _STORED
        return is_gone or (self.code is ErrorCode.INVALID and self.param == "previous_response_id")


def of_rest(body: Any, status: int | None = None) -> Failure:
    """The object of an error, from an answer with this ``status`` or from a stream. Raises ``UntypedError``."""
    fields = body if isinstance(body, dict) else {}
    code, word = _KINDS.get(fields.get("type", "")), fields.get("code")
    named = [fields.get("message"), word, fields.get("request_id")]
    if code is None or not all(isinstance(each, str) and each for each in named):
        raise UntypedError(f"this is no error: {str(body)[:300]}")
    reasoned = code in _WITH_REASONS and re.fullmatch("[a-z_]+", str(word))
    if not (word == code.name.lower() or reasoned) or status not in (None, STATUS[code].http):
        raise UntypedError(f"status, type and code are of different errors: {status} {str(body)[:300]}")
    return Failure(code, fields.get("param") or "", str(fields["message"]))


def of_messages(body: Any, status: int | None = None) -> Failure:
    """As ``of_rest``, of an error of Anthropic's Messages API. Raises ``UntypedError``."""
    try:
        error, details = body["error"], body["error"]["details"]
        code = _MESSAGES_KINDS.get(error["type"])
        kind = error["type"] if code is None else STATUS[code].kind
        fields = {**error, "type": kind, "code": details["error_code"], "param": details["param"]}
        is_error = body["type"] == "error"
        return of_rest({**fields, "request_id": body["request_id"]} if is_error else None, status)
    except (LookupError, TypeError):
        raise UntypedError(f"this is no error: {str(body)[:300]}") from None


def of_rpc(status: grpc.StatusCode, details: str, metadata: Iterable[tuple[str, Any]]) -> Failure | None:
    """The error of a call; None for one without our words. Raises ``UntypedError``."""
    binary = [value for name, value in metadata if name == _BINARY]
    if not binary:
        return None
    try:
        error = types_pb2.Error.FromString(binary[0])
        code = ErrorCode(error.code)
    except (DecodeError, ValueError):
        raise UntypedError(f"{status}: the error beside it is none") from None
    if len(binary) > 1 or STATUS[code].grpc != status.name or error.message != details or not details:
        raise UntypedError(f"status and error are different ones: {status} {details!r} {error}")
    return Failure(code, error.param, error.message)
