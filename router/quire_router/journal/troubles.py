"""What can be wrong with Redis, or with one record in it, and what is said of it."""

import logging

from quire_proto.errors import ErrorCode, QuireError, internal
from redis.exceptions import ResponseError

log = logging.getLogger(__name__)
_CORRUPTION_MESSAGES = ("WRONGTYPE", "DAMAGED", "string exceeds maximum allowed size", "attempt to")


def is_corruption(error: Exception) -> bool:
    """Whether an error is of one record's keys, which it will be again, rather than of Redis, which may pass."""
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in _CORRUPTION_MESSAGES)


def unavailable_error() -> QuireError:
    """Redis does not answer."""
    return QuireError(ErrorCode.UNAVAILABLE, "Request state cannot be read now.", retry_after=1.0)


def corrupt_record_error(request_id: str) -> QuireError:
    """What is stored is no record."""
    log.error("the record of request %s is damaged", request_id)
    return internal()
