"""What every gRPC call passes before its method: the check of keys (``AuthInterceptor``), the limit of health and
reflection calls (``CallLimitInterceptor``), the time for its message to arrive (``MessageTimeoutInterceptor``), and
messages that cannot be decoded (``DecodeErrorInterceptor``).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from inspect import isasyncgen
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from quire_proto.errors import QuireError

from quire_router.api.auth import Authenticator, Identity
from quire_router.api.rpc.context import Context, abort, client_may_leave
from quire_router.api.service import counting_rejections, new_request_id
from quire_router.core import metrics
from quire_router.core.errors import invalid_body, message_too_slow, router_busy

OPEN_SERVICE = "/grpc.health.v1.Health/"
Handler = Any  # grpc.RpcMethodHandler, whose type parameters say nothing here
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before their messages are read: of every method, reflection and unknown ones
    too; only health is open.
    """

    def __init__(self, keys: Authenticator) -> None:
        self._keys = keys

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """Returns the method's own handler, or one of the same kind that refuses the call."""
        handler = await continuation(details)
        if str(details.method).startswith(OPEN_SERVICE):
            return handler
        try:
            with counting_rejections():
                authenticate(self._keys, details.invocation_metadata)
        except QuireError as error:
            return _refusing(handler, error)
        return handler


def authenticate(keys: Authenticator, metadata: Iterable[tuple[str, str | bytes]] | None) -> Identity:
    """Returns the caller. Raises ``QuireError`` UNAUTHENTICATED."""
    values = [value for name, value in metadata or () if name == "authorization"]
    return keys.authenticate(*(value.decode("latin-1") if isinstance(value, bytes) else value for value in values))


def _refusing(handler: Handler, error: QuireError) -> Handler:
    async def refuse(_request: object, context: Context) -> None:
        await abort(context, error, new_request_id())

    # As a method that takes a stream, so that the refusal does not wait for a message.
    if handler is not None and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    return grpc.stream_unary_rpc_method_handler(refuse)


UnaryMethod = Callable[[Message, Context], Awaitable[Any]]


class MessageTimeoutInterceptor(grpc.aio.ServerInterceptor):
    """Bounds the arrival of a call's one message by ``seconds``. The gRPC library would wait for it as long as the
    client likes, and outside of any handler: so methods that take one message are served as ones that take a stream of
    them.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """Returns a handler that calls the method's own one when its message has arrived."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._reading_message(handler.unary_stream), read, write)
        return grpc.stream_unary_rpc_method_handler(self._reading_message(handler.unary_unary), read, write)

    def _reading_message(self, method: UnaryMethod) -> Callable[[object, Context], Awaitable[Any]]:
        async def read_then_call(_requests: object, context: Context) -> Any:
            try:
                request = await self._message(context)
            except QuireError as error:
                metrics.REJECTIONS.labels(error.code.name.lower()).inc()
                await abort(context, error, new_request_id())
            return await method(request, context)

        return read_then_call

    async def _message(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(self._seconds):
                message = await context.read()
        except TimeoutError:
            raise message_too_slow(self._seconds) from None
        except DecodeError:
            raise invalid_body("The message is not what this method takes.") from None
        if message is grpc.aio.EOF:
            raise invalid_body("The call has no message.")
        return message


DecodedMethod = Callable[[Message, Context], Any]


class DecodeErrorInterceptor(grpc.aio.ServerInterceptor):
    """Refuses messages of one service that cannot be decoded, as any other malformed request. The gRPC library would
    answer with a status and a text of its own, and log a traceback for each.
    """

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """Returns a handler that decodes without raising."""
        handler = await continuation(details)
        if handler is None or not str(details.method).startswith(self._prefix):
            return handler
        read, write = _none_if_invalid(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refusing_invalid(handler.unary_stream), read, write)
        return grpc.unary_unary_rpc_method_handler(_refusing_invalid(handler.unary_unary), read, write)


def _none_if_invalid(read: Callable[[bytes], Message]) -> Callable[[bytes], Message | None]:
    def decode(data: bytes) -> Message | None:
        try:
            return read(data)
        except DecodeError:
            return None

    return decode


def _refusing_invalid(method: DecodedMethod) -> Callable[[Message | None, Context], Any]:
    async def checked(request: Message | None, context: Context) -> Any:
        if request is not None:
            return await method(request, context)
        error = invalid_body("The message is not what this method takes.")
        metrics.REJECTIONS.labels(error.code.name.lower()).inc()
        await abort(context, error, new_request_id())

    return checked


StreamMethod = Callable[[AsyncIterator[Any], Context], Any]


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """At most ``limit`` calls at once of each method of ``services``, health and reflection, of which clients could
    hold any number open otherwise. The methods take streams here. Each has its own limit, so that clients that watch do
    not keep others from a single call.
    """

    def __init__(self, services: Sequence[str], limit: int) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._limit = limit
        self._open_calls: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """Returns a handler that calls the method's own one within the limit."""
        handler, method = await continuation(details), str(details.method)
        if handler is None or not method.startswith(self._prefixes):
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._limited(method, handler.stream_stream), read, write)
        return grpc.stream_unary_rpc_method_handler(self._limited(method, handler.stream_unary), read, write)

    def _limited(self, name: str, method: StreamMethod) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
        async def limited(requests: AsyncIterator[Any], context: Context) -> Any:
            try:
                with self._count_call(name), client_may_leave():
                    return await _answer(method(requests, context), context)
            except QuireError as error:
                await abort(context, error, new_request_id())

        return limited

    @contextmanager
    def _count_call(self, method: str) -> Iterator[None]:
        with counting_rejections():
            self._check(method)
        self._open_calls[method] += 1
        try:
            yield
        finally:
            self._open_calls[method] -= 1

    def _check(self, method: str) -> None:
        if self._open_calls[method] >= self._limit:
            name = method.rpartition("/")[2]
            raise router_busy(f"{self._limit} calls of {name} are open")


async def _answer(answer: Any, context: Context) -> Any:
    """Awaits what a handler returns, or writes what it yields."""
    if not isasyncgen(answer):
        return await answer
    async with aclosing(answer) as messages:
        async for message in messages:
            await context.write(message)
    return None
