"""One gRPC call as the methods see it: ``RpcCall`` with its metadata in and out, and errors as gRPC statuses.

The metadata of an error: ``quire-request-id``, ``retry-after`` in seconds, ``quire-reason`` where the status alone does
not say what to do, and ``quire-error-bin``, a ``quire.v1.Error`` that names the parameter at fault.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from quire_proto.convert import error_to_proto
from quire_proto.errors import QuireError

from quire_router.api.auth import ANONYMOUS, Identity
from quire_router.api.prepared_request import RequestOptions, options_from_metadata
from quire_router.api.service import counting_rejections
from quire_router.core.retry import retry_after

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


REQUEST_ID = "quire-request-id"
RETRY_AFTER = "retry-after"
REASON = "quire-reason"
ERROR = "quire-error-bin"

Metadata = tuple[tuple[str, str | bytes], ...]


def status_code(error: QuireError) -> grpc.StatusCode:
    """Returns the gRPC status of an error."""
    return grpc.StatusCode[error.status.grpc]


def metadata(error: QuireError) -> Metadata:
    """Returns an error's trailing metadata."""
    message = error_to_proto(error)
    entries: Metadata = ()
    if error.reason is not None:
        entries = (*entries, (REASON, error.reason))
    if error.retry_after is not None:
        message.retry_after = wait = retry_after(error.retry_after)
        entries = (*entries, (RETRY_AFTER, str(wait)))
    return ((ERROR, message.SerializeToString()), *entries)


async def abort(context: Context, error: QuireError, request_id: str) -> NoReturn:
    """Ends the call with ``error``. Raises ``CancelledError`` where the client has left."""
    with client_may_leave():
        await context.abort(status_code(error), error.message, (*metadata(error), (REQUEST_ID, request_id)))


@contextmanager
def client_may_leave() -> Iterator[None]:
    """Turns the failure to send on a connection that is gone into the call's cancellation. The gRPC library raises an
    error of its own in that race, and would log its traceback.
    """
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


@dataclass(slots=True)
class RpcCall:
    """One call. ``request_id`` is that of the request that is answered. ``caller`` is set once the key was checked."""

    context: Context
    request_id: str
    caller: Identity = ANONYMOUS

    @property
    def headers(self) -> dict[str, str]:
        """Text metadata by name; of several with one name, the last."""
        return {name: value for name, value in self._metadata if isinstance(value, str)}

    def values(self, name: str) -> list[str]:
        """Returns every text of one name in the metadata."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]

    def options(self, *, has_deadline: bool) -> RequestOptions:
        """Returns the options in the metadata; with ``has_deadline`` the call's deadline is the response's. Raises
        ``QuireError``.
        """
        with counting_rejections():
            return options_from_metadata(self.values, self.context.time_remaining() if has_deadline else None)

    async def begin(self, entries: Mapping[str, str]) -> None:
        """Sends the initial metadata."""
        await self.context.send_initial_metadata(((REQUEST_ID, self.request_id), *entries.items()))

    def end(self, entries: Mapping[str, str]) -> None:
        """Sets the trailing metadata."""
        self.context.set_trailing_metadata(((REQUEST_ID, self.request_id), *entries.items()))

    @property
    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(self.context.invocation_metadata() or ())
