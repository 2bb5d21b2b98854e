"""Messages that cannot be read, refused as any other request that is malformed.

The gRPC library would answer with a status and a text of its own, and log a traceback for each.
"""

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from quire_proto.errors import ErrorCode, QuireError

from quire_router import metrics
from quire_router.api.frontend import new_request_id
from quire_router.api.rpc.authentication import Continue, Handler
from quire_router.api.rpc.errors import abort
from quire_router.api.rpc.types import Context

DecodedMethod = Callable[[Message, Context], Any]


class DecodeErrorInterceptor(grpc.aio.ServerInterceptor):
    """Reads the messages of one service."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """The method's own handler, around which reading cannot fail."""
        handler = await continuation(details)
        if handler is None or not str(details.method).startswith(self._prefix):
            return handler
        read, write = _forgiving(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_checking(handler.unary_stream), read, write)
        return grpc.unary_unary_rpc_method_handler(_checking(handler.unary_unary), read, write)


def _forgiving(read: Callable[[bytes], Message]) -> Callable[[bytes], Message | None]:
    def forgiving(data: bytes) -> Message | None:
        try:
            return read(data)
        except DecodeError:
            return None

    return forgiving


def _checking(behave: DecodedMethod) -> Callable[[Message | None, Context], Any]:
    async def checking(request: Message | None, context: Context) -> Any:
        if request is not None:
            return await behave(request, context)
        error = QuireError(ErrorCode.INVALID, "The message is not what this method takes.")
        metrics.REJECTIONS.labels(error.code.name.lower()).inc()
        await abort(context, error, new_request_id())

    return checking
