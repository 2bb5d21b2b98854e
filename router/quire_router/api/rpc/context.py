"""One gRPC call as the methods see it: its metadata in and out."""

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from quire_proto.convert import error_to_proto
from quire_proto.errors import QuireError

from quire_router.api.auth import ANONYMOUS, Identity
from quire_router.api.request_options import RequestOptions, options_from_metadata
from quire_router.api.service import counting_rejections

# Names for grpc's generic types.


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


# Errors as gRPC statuses. Metadata: ``quire-request-id``, ``retry-after`` in seconds, ``quire-reason`` where the status
# alone does not say what to do, and ``quire-error-bin``, a ``quire.v1.Error`` that names the parameter at fault.


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


@dataclass(slots=True)
class RpcCall:
    """``request_id`` is that of the request which is answered. ``caller`` is known once the key was checked."""

    context: Context
    request_id: str
    caller: Identity = ANONYMOUS

    @property
    def headers(self) -> dict[str, str]:
        """Metadata that are text, by name; of several with one name, the last."""
        return {name: value for name, value in self._metadata if isinstance(value, str)}

    def values(self, name: str) -> list[str]:
        """Every text of a name in the metadata."""
        return [value for key, value in self._metadata if key == name and isinstance(value, str)]

    def options(self, *, has_deadline: bool) -> RequestOptions:
        """What the call says beside its message; whether its deadline is the answer's. Raises ``QuireError``."""
        with counting_rejections():
            return options_from_metadata(self.values, self.context.time_remaining() if has_deadline else None)

    async def begin(self, entries: Mapping[str, str]) -> None:
        """Sends the metadata that come before the first message."""
        await self.context.send_initial_metadata(((REQUEST_ID, self.request_id), *entries.items()))

    def end(self, entries: Mapping[str, str]) -> None:
        """Sets the metadata that come behind the last message."""
        self.context.set_trailing_metadata(((REQUEST_ID, self.request_id), *entries.items()))

    @property
    def _metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(self.context.invocation_metadata() or ())
