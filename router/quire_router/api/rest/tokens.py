"""``/tokenize`` and ``/detokenize``."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from quire_router.api.frontend import Frontend
from quire_router.api.identity import Caller
from quire_router.api.rest.answers import to_json
from quire_router.api.rest.connection import JSON, BodyLimits, read_body
from quire_router.api.rest.exchange import Exchange
from quire_router.api.rest.refusals import body_too_large, not_json
from quire_router.api.tokens import DetokenizeRequest, TokenizeRequest

T = TypeVar("T")


class Tokens:
    """Handlers of both routes."""

    def __init__(self, frontend: Frontend, limits: BodyLimits) -> None:
        self._frontend = frontend
        self._limits = limits

    async def tokenize(self, exchange: Exchange) -> None:
        """The tokens of a text or of a conversation."""
        await self._answer(exchange, "POST /tokenize", self._tokens)

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of tokens."""
        await self._answer(exchange, "POST /detokenize", self._text)

    async def _answer(
        self, exchange: Exchange, name: str, answer: Callable[[bytes, Caller], Awaitable[dict[str, Any]]]
    ) -> None:
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise not_json()
        if exchange.body_bytes > self._limits.max_bytes:
            raise body_too_large(self._limits.max_bytes)
        with self._frontend.exchange(name, exchange.request_id, exchange.headers):
            body = await read_body(exchange.receive, self._limits)
            await exchange.reply.whole(200, to_json(await answer(body, exchange.caller)), JSON)

    async def _tokens(self, body: bytes, caller: Caller) -> dict[str, Any]:
        told = await self._frontend.tokenize(lambda: TokenizeRequest.from_json(body), caller)
        return {
            "count": len(told.tokens),
            "max_model_len": told.max_model_len,
            "tokens": told.tokens,
            "token_strs": told.token_strs,
        }

    async def _text(self, body: bytes, caller: Caller) -> dict[str, Any]:
        return {"prompt": await self._frontend.detokenize(lambda: DetokenizeRequest.from_json(body), caller)}
