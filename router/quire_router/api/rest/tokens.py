"""``/tokenize`` and ``/detokenize``."""

from collections.abc import Awaitable, Callable, Sequence

from quire_router.api.frontend import ApiService, ignored_parameters_header
from quire_router.api.identity import Identity
from quire_router.api.rest.answers import to_json
from quire_router.api.rest.connection import JSON_HEADERS, BodyLimits, read_body
from quire_router.api.rest.exchange import HttpExchange
from quire_router.api.rest.refusals import body_too_large, not_json
from quire_router.api.rest.writing import x_headers
from quire_router.api.running import ReservedBody
from quire_router.api.tokens import DetokenizeRequest, TokenizeRequest, TokenizeResult

_PART = 4096  # entries
Shown = tuple[bytes, Sequence[str]]
"""An answer, and the parameters that it ignored."""


class TokenizeEndpoints:
    """Handlers of both routes."""

    def __init__(self, frontend: ApiService, limits: BodyLimits) -> None:
        self._frontend = frontend
        self._limits = limits

    async def tokenize(self, exchange: HttpExchange) -> None:
        """The tokens of a text or of a conversation."""
        await self._answer(exchange, "POST /tokenize", self._tokens)

    async def detokenize(self, exchange: HttpExchange) -> None:
        """The text of tokens."""
        await self._answer(exchange, "POST /detokenize", self._text)

    async def _answer(
        self, exchange: HttpExchange, name: str, answer: Callable[[ReservedBody, Identity], Awaitable[Shown]]
    ) -> None:
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise not_json()
        if exchange.content_length > self._limits.max_bytes:
            raise body_too_large(self._limits.max_bytes)
        with (
            self._frontend.request_scope(name, exchange.request_id, exchange.headers),
            self._frontend.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            shown, ignored = await answer(body, exchange.caller)
            await exchange.reply.send(200, shown, [*JSON_HEADERS, *x_headers(ignored_parameters_header(ignored))])

    async def _tokens(self, body: ReservedBody, caller: Identity) -> Shown:
        size = len(body)
        return await self._frontend.tokenize(
            lambda: TokenizeRequest.from_json(body.detach()), caller, _written, size=size
        )

    async def _text(self, body: ReservedBody, caller: Identity) -> Shown:
        size = len(body)
        text, ignored = await self._frontend.detokenize(
            lambda: DetokenizeRequest.from_json(body.detach()), caller, size=size
        )
        return to_json({"prompt": text}), ignored


def _written(told: TokenizeResult) -> Shown:
    """As JSON. Lists are written part by part, between which other threads come to their turn."""
    names = None if told.token_strs is None else _parts(told.token_strs)
    head = b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(told.tokens), told.max_model_len)
    middle = b'],"token_strs":'
    body = head + _parts(told.tokens) + middle + (b"null" if names is None else b"[" + names + b"]") + b"}"
    return body, told.ignored


def _parts(values: Sequence[object]) -> bytes:
    """The entries of a list as JSON, without its brackets."""
    return b",".join(to_json(list(values[start : start + _PART]))[1:-1] for start in range(0, len(values), _PART))
