"""How the error that a request ended with is written in its record."""

import json
from typing import Any

from quire_proto.errors import ErrorCode, QuireError, internal


def encode_error(error: QuireError) -> str:
    """The error's code, its message and, after them, what else a client is told of it."""
    more = {"param": error.param, "retry_after": error.retry_after, "reason": error.reason}
    known = {name: value for name, value in more.items() if value is not None}
    return f"{error.code.name}: {error.message}" + (f"\n{json.dumps(known)}" if known else "")


def decode_error(text: str) -> QuireError:
    """The error again; an inner one where the text is not known to be an error."""
    code, separator, rest = text.partition(": ")
    if not separator or code not in ErrorCode.__members__:
        return internal()
    message, mark, more = rest.rpartition("\n")
    if not mark or not more.startswith("{"):
        message, more = rest, "{}"
    try:
        return QuireError(ErrorCode[code], message, **_details(more))
    except (TypeError, ValueError, RecursionError):
        return internal()


def _details(text: str) -> dict[str, Any]:
    """Raises ``ValueError`` for what is not written by ``encode_error``."""
    known: dict[str, Any] = json.loads(text)
    wait = known.get("retry_after", 0.0)
    texts = (known.get("param", ""), known.get("reason", ""))
    if not isinstance(wait, int | float) or not 0 <= wait < 1e9 or not all(isinstance(each, str) for each in texts):
        raise ValueError("these are no details of an error")
    return known
