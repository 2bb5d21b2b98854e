"""Calls whose message does not come, given up after a time. Knows no service."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from inspect import isasyncgen
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from quire_proto.errors import ErrorCode, QuireError

from quire_router.api.auth import Identity, StaticKeys
from quire_router.api.request_limits import BUSY_RETRY_AFTER
from quire_router.api.rpc.context import Context, abort, client_may_leave
from quire_router.api.service import counting_rejections, new_request_id
from quire_router.core import metrics

# Keys for every gRPC method, reflection and unknown ones too; only health is open.


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


# Messages that cannot be read, refused as any other request that is malformed.
#
# The gRPC library would answer with a status and a text of its own, and log a traceback for each.


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


# Calls beside the requests, health and reflection, of which clients may hold as many open as they like otherwise.


StreamMethod = Callable[[AsyncIterator[Any], Context], Any]


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """The places of ``services``: at most ``limit`` calls at once of each of their methods, which take streams here.
    Each method has its own, so that those who watch do not keep others from asking once.
    """

    def __init__(self, services: Sequence[str], limit: int) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._limit = limit
        self._taken: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continue, details: grpc.HandlerCallDetails) -> Handler:
        """The method's own handler, for a call that has a place."""
        handler, method = await continuation(details), str(details.method)
        if handler is None or not method.startswith(self._prefixes):
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._placed(method, handler.stream_stream), read, write)
        return grpc.stream_unary_rpc_method_handler(self._placed(method, handler.stream_unary), read, write)

    def _placed(self, method: str, behave: StreamMethod) -> Callable[[AsyncIterator[Any], Context], Awaitable[Any]]:
        async def placed(requests: AsyncIterator[Any], context: Context) -> Any:
            try:
                with self._enter(method), client_may_leave():
                    return await _answer(behave(requests, context), context)
            except QuireError as error:
                await abort(context, error, new_request_id())

        return placed

    @contextmanager
    def _enter(self, method: str) -> Iterator[None]:
        with counting_rejections():
            self._check(method)
        self._taken[method] += 1
        try:
            yield
        finally:
            self._taken[method] -= 1

    def _check(self, method: str) -> None:
        if self._taken[method] >= self._limit:
            name = method.rpartition("/")[2]
            message = f"{self._limit} calls of {name} are open, which is the most that this router takes."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=BUSY_RETRY_AFTER)


async def _answer(answer: Any, context: Context) -> Any:
    """What a handler returns, or writes, or yields."""
    if not isasyncgen(answer):
        return await answer
    async with aclosing(answer) as messages:
        async for message in messages:
            await context.write(message)
    return None
