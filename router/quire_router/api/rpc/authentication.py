"""Keys for every gRPC method, reflection and unknown ones too; only health is open."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from quire_proto.errors import QuireError

from quire_router.api.frontend import counting_rejections, new_request_id
from quire_router.api.identity import Identity, StaticKeys
from quire_router.api.rpc.errors import abort
from quire_router.api.rpc.types import Context

OPEN_SERVICE = "/grpc.health.v1.Health/"
Handler = Any  # grpc.RpcMethodHandler, whose type parameters say nothing here
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before their messages are read."""

    def __init__(self, keys: StaticKeys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """The method's own handler, or one of the same kind that refuses the call."""
        handler = await continuation(details)
        if str(details.method).startswith(OPEN_SERVICE):
            return handler
        try:
            with counting_rejections():
                authenticate(self._keys, details.invocation_metadata)
        except QuireError as error:
            return _refusing(handler, error)
        return handler


def authenticate(keys: StaticKeys, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
    """Who calls. Raises ``QuireError`` UNAUTHENTICATED."""
    values = [value for name, value in metadata or () if name == "authorization"]
    return keys.authenticate(*(value.decode("latin-1") if isinstance(value, bytes) else value for value in values))


def _refusing(handler: Handler, error: QuireError) -> Handler:
    async def refuse(_request: object, context: Context) -> None:
        await abort(context, error, new_request_id())

    # As a method that takes a stream, so that the refusal does not wait for a message.
    if handler is not None and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.stream_unary_rpc_method_handler(refuse)
