"""``/v1/completions`` and ``/v1/chat/completions``: the same exchange in two styles."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire_proto.errors import QuireError, internal

from quire_router.api.frontend import Frontend
from quire_router.api.rest.answers import Chunks, Style, whole
from quire_router.api.rest.connection import EVENTS, BodyLimits, Reply, read_body, while_connected
from quire_router.api.rest.exchange import Exchange
from quire_router.api.rest.refusals import body_too_large, not_json
from quire_router.api.schemas import GenerationRequest
from quire_router.generation import Delta, Generation


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
        request, generation = await self._frontend.admit(
            lambda: self._schema.from_json(body), exchange.request_id, exchange.caller
        )
        async with aclosing(self._frontend.run(generation)) as deltas:
            if generation.stream:
                chunks = Chunks(self._style, generation, request.include_usage)
                await _stream(exchange.reply, chunks, deltas)
            else:
                await _collect(exchange.reply, self._style, generation, deltas)


async def _stream(reply: Reply, chunks: Chunks, deltas: AsyncGenerator[Delta]) -> None:
    """Sends each piece as it comes. Nothing is sent before the first, so that an early error has its own status."""
    async for delta in deltas:
        data = chunks.piece(delta.text) if delta.text else b""
        if not reply.started:
            await reply.start(200, EVENTS)
            data = chunks.opening() + data
        if delta.finish_reason is not None:
            await reply.end(data + chunks.closing(delta.finish_reason, delta.usage))
            return
        if data:
            await reply.write(data)
    raise _unfinished()


async def _collect(reply: Reply, style: Style, generation: Generation, deltas: AsyncGenerator[Delta]) -> None:
    pieces: list[str] = []
    async for delta in deltas:
        pieces.append(delta.text)
        if delta.finish_reason is not None:
            text = "".join(pieces)
            await reply.whole(200, whole(style, generation, text, delta.finish_reason, delta.usage))
            return
    raise _unfinished()


def _unfinished() -> QuireError:
    """An answer that ends without a reason is never passed on as a complete one."""
    return internal()
