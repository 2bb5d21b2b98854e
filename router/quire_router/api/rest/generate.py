"""``/v1/completions`` and ``/v1/chat/completions``: the same exchange in two styles."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire_proto.errors import QuireError, internal

from quire_router.api.frontend import Frontend
from quire_router.api.rest.answers import Style
from quire_router.api.rest.chunks import Chunks
from quire_router.api.rest.connection import EVENTS, BodyLimits, Reply, read_body, while_connected
from quire_router.api.rest.exchange import Exchange
from quire_router.api.rest.refusals import body_too_large, not_json
from quire_router.api.rest.whole import Whole
from quire_router.api.sampling import check_stream
from quire_router.api.schemas import GenerationRequest
from quire_router.generation import Delta


class Generate:
    """One of the two routes. ``path`` names its span, ``schema`` reads its body, ``style`` writes its answer."""

    def __init__(
        self,
        frontend: Frontend,
        path: str,
        schema: type[GenerationRequest],
        style: Style,
        limits: BodyLimits,
    ) -> None:
        self._frontend = frontend
        self._name = f"POST {path}"
        self._schema = schema
        self._style = style
        self._limits = limits

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request. Raises what the application turns into an error answer or a last event."""
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise not_json()
        if exchange.body_bytes > self._limits.max_bytes:
            raise body_too_large(self._limits.max_bytes)
        with self._frontend.exchange(self._name, exchange.request_id, exchange.caller, exchange.headers):
            body = await read_body(exchange.receive, self._limits)
            await while_connected(exchange.receive, self._answer(exchange, body))

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        admitted = await self._frontend.admit(lambda: self._read(body), exchange.request_id, exchange.caller)
        async with aclosing(self._frontend.run(admitted)) as deltas:
            if admitted.first.stream:
                await _stream(exchange.reply, Chunks(self._style, admitted), deltas)
            else:
                await _collect(exchange.reply, Whole(self._style, admitted), deltas)

    def _read(self, body: bytes) -> GenerationRequest:
        request = self._schema.from_json(body)
        check_stream(request)
        return request


async def _stream(reply: Reply, chunks: Chunks, deltas: AsyncGenerator[Delta]) -> None:
    """Sends each piece as it comes. Nothing is sent before the first, so that an early error has its own status."""
    async for delta in deltas:
        if chunks.shown.anything:
            await chunks.shown.read(delta)
        data = chunks.piece(delta)
        if not reply.started:
            await reply.start(200, EVENTS)
            data = chunks.opening() + data
        if delta.usage is not None:
            await reply.end(data)
            return
        if data:
            await reply.write(data)
    raise _unfinished()


async def _collect(reply: Reply, whole: Whole, deltas: AsyncGenerator[Delta]) -> None:
    async for delta in deltas:
        if whole.shown.anything:
            await whole.shown.read(delta)
        whole.add(delta)
        if delta.usage is not None:
            await reply.whole(200, whole.body(delta.usage))
            return
    raise _unfinished()


def _unfinished() -> QuireError:
    """An answer that ends without its usage is never passed on as a complete one."""
    return internal()
