"""Why a request is not admitted, in the words that clients, metrics and documents share; and the error of a router that
shuts down.
"""

from enum import StrEnum

from quire_proto.errors import ErrorCode, QuireError


class RefusalReason(StrEnum):
    """Goes with an error's code, as ``reason``. The limits are the tenant's, the queue is one model's at one router."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    MAX_CONCURRENT = "max_concurrent"
    MAX_QUEUED = "max_queued"
    POLLS_PER_MINUTE = "polls_per_minute"
    BODY_BYTES = "body_bytes"
    TOKENIZER_FULL = "tokenizer_full"
    QUEUE_FULL = "queue_full"
    QUEUE_BYTES = "queue_bytes"
    QUEUE_SECONDS = "queue_seconds"
    NONE_READY = "none_ready"
    DEADLINE = "deadline"
    STOPPING = "stopping"
    MODEL = "model"


RETRY_STOPPING = 5.0  # seconds: another replica, or the next start


def shutting_down_error() -> QuireError:
    """Returns the error of requests that a router refuses or does not finish because it shuts down."""
    message = "This router is shutting down."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_STOPPING, reason=RefusalReason.STOPPING)
