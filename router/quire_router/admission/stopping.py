"""What everybody is told whom a router that is shutting down refuses or does not finish."""

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.reason import RefusalReason

RETRY_STOPPING = 5.0  # seconds: another replica, or the next start


def shutting_down_error() -> QuireError:
    """Whoever asks now has to ask another router."""
    message = "This router is shutting down."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=RETRY_STOPPING, reason=RefusalReason.STOPPING)
