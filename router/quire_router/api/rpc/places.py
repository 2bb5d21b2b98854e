"""Calls beside the requests, health and reflection, of which clients may hold as many open as they like otherwise."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from inspect import isasyncgen
from typing import Any

import grpc
from quire_proto.errors import ErrorCode, QuireError

from quire_router.api.frontend import counting_rejections, new_request_id
from quire_router.api.rpc.authentication import Continue, Handler
from quire_router.api.rpc.errors import abort, client_may_leave
from quire_router.api.rpc.types import Context
from quire_router.api.running import BUSY_RETRY_AFTER

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
