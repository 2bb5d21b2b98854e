"""Errors as gRPC statuses. Metadata: ``quire-request-id``, ``retry-after`` in seconds, ``quire-reason`` where the
status alone does not say what to do, and ``quire-error-bin``, a ``quire.v1.Error`` that names the parameter at fault.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Ends the call with ``error``. Raises ``CancelledError`` where the client has left."""
    with client_may_leave():
        await context.abort(status_code(error), error.message, (*metadata(error), (REQUEST_ID, request_id)))


@contextmanager
def client_may_leave() -> Iterator[None]:
    """A status or a message that cannot be sent, because the connection is gone, ends the call as its cancellation
    does. The gRPC library raises an error of its own in that race, and would log its traceback.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
