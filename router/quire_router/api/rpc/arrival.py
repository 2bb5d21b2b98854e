"""Calls whose message does not come, given up after a time. Knows no service."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from quire_proto.errors import ErrorCode, QuireError

from quire_router import metrics
from quire_router.api.frontend import new_request_id
from quire_router.api.rpc.authentication import Continue, Handler
from quire_router.api.rpc.errors import abort
from quire_router.api.rpc.types import Context

UnaryMethod = Callable[[Message, Context], Awaitable[Any]]


class MessageTimeoutInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call's one message take ``seconds``. The gRPC library would wait for it as long as the client likes, and
    outside of any handler: so methods that take one message are served as ones that take a stream of them.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """The method's own handler, called when its message is here."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._awaiting(handler.unary_stream), read, write)
        return grpc.stream_unary_rpc_method_handler(self._awaiting(handler.unary_unary), read, write)

    def _awaiting(self, behave: UnaryMethod) -> Callable[[object, Context], Awaitable[Any]]:
        async def awaiting(_requests: object, context: Context) -> Any:
            try:
                request = await self._message(context)
            except QuireError as error:
                metrics.REJECTIONS.labels(error.code.name.lower()).inc()
                await abort(context, error, new_request_id())
            return await behave(request, context)

        return awaiting

    async def _message(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                message = await context.read()
        except TimeoutError:
            text = f"The message did not arrive within {self._seconds:g} seconds."
            raise QuireError(ErrorCode.DEADLINE, text) from None
        except DecodeError:
            raise QuireError(ErrorCode.INVALID, "The message is not what this method takes.") from None
        if message is grpc.aio.EOF:
            raise QuireError(ErrorCode.INVALID, "The call has no message.")
        return message
