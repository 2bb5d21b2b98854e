"""Errors as gRPC statuses. Metadata: ``quire-request-id``, ``retry-after`` in seconds, ``quire-reason`` where the
status alone does not say what to do, and ``quire-error-bin``, a ``quire.v1.Error`` that names the parameter at fault.
"""

import math
from typing import NoReturn

import grpc
from quire_proto.convert import error_to_proto
from quire_proto.errors import QuireError

from quire_router.api.rpc.types import Context

REQUEST_ID = "quire-request-id"
RETRY_AFTER = "retry-after"
REASON = "quire-reason"
ERROR = "quire-error-bin"

Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: QuireError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    return grpc.StatusCode[error.status.grpc]


def metadata(error: QuireError) -> Metadata:
    """What travels behind the status."""
    entries: Metadata = ((ERROR, error_to_proto(error).SerializeToString()),)
    if error.reason is not None:
        entries = (*entries, (REASON, error.reason))
    if error.retry_after is None:
        return entries
    return (*entries, (RETRY_AFTER, str(math.ceil(error.retry_after))))


async def abort(context: Context, error: QuireError, request_id: str) -> NoReturn:
    """Ends the call with ``error``."""
    await context.abort(status_code(error), error.message, (*metadata(error), (REQUEST_ID, request_id)))
