"""``TokenInterceptor``: requires a token from every call to the engine's port."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from quire_proto.engine_token import HEADER, EngineTokens

log = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler, whose type parameters say nothing here
_MISSING = "This engine asks for a token: give its file to the router as --engine-token-file."
_WRONG = "This token is none of the engine's: router and engine need an --engine-token-file with the same token."


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without one of ``tokens`` before their messages are read. This covers every method, including
    health, reflection and unknown ones.
    """

    def __init__(self, tokens: EngineTokens) -> None:
        self._tokens = tokens
        self._was_open = False

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """Returns the method's own handler, or one that refuses the call."""
        headers = [value for name, value in details.invocation_metadata or () if name == HEADER]
        if not self._tokens.current.accept(headers):
            return grpc.stream_stream_rpc_method_handler(_refuse_wrong if headers else _refuse_missing)
        if not headers and not self._was_open:
            self._was_open = True
            until = self._tokens.current.optional_until
            log.warning("accepted a caller without a token: tokens are optional until %s (optional-until)", until)
        return await continuation(details)


async def _refuse_missing(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _MISSING)


async def _refuse_wrong(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _WRONG)
