"""The routes that only tell: models, health, metrics."""

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from quire_router.api.frontend import ApiService
from quire_router.api.identity import ANONYMOUS, Identity
from quire_router.api.rest.answers import model_object, to_json
from quire_router.api.rest.connection import JSON_HEADERS
from quire_router.api.rest.exchange import HttpExchange
from quire_router.api.validate import RETRY_UNREADY
from quire_router.supervise import failing_tasks

_OK, _LEAVING, _FAILING = (to_json({"status": status}) for status in ("ok", "leaving", "failing"))
_UNREADY = (*JSON_HEADERS, (b"retry-after", str(int(RETRY_UNREADY)).encode()))


class StatusEndpoints:
    """Handlers of GET routes."""

    def __init__(self, frontend: ApiService) -> None:
        self._frontend = frontend

    async def models(self, exchange: HttpExchange) -> None:
        """The configured models that the caller may use, whether or not an engine is ready."""
        cards = [model_object(card) for card in self._frontend.models(exchange.caller)]
        await exchange.reply.send(200, to_json({"object": "list", "data": cards}))

    async def model(self, exchange: HttpExchange) -> None:
        """One configured model."""
        name = exchange.path_parameters["model"]
        exchange.caller.check_model(name)
        card = self._frontend.model(name)
        await exchange.reply.send(200, to_json(model_object(card)))

    async def health(self, exchange: HttpExchange) -> None:
        """Whether requests can be served now: 200 when some model has an engine, else 503. A caller with a key, or
        where none is configured, is also told how many engines each of its models has. Raises ``QuireError``
        UNAUTHENTICATED for a wrong key.
        """
        keys, given = self._frontend.keys, exchange.credentials
        if keys.required and not given:
            await self._health(exchange, {})
        else:
            await self._health(exchange, self._engines(keys.authenticate(*given)))

    async def health_in_detail(self, exchange: HttpExchange) -> None:
        """As ``health``, with all models for anyone."""
        await self._health(exchange, self._engines(ANONYMOUS))

    async def started(self, exchange: HttpExchange) -> None:
        """Whether settings and tokenizers are loaded and the ports are open, before which nobody answers here."""
        await exchange.reply.send(200, _OK)

    async def ready(self, exchange: HttpExchange) -> None:
        """Whether new requests are wanted here: also while no engine is ready, because they are held until one is."""
        if self._frontend.concurrency.draining:
            await exchange.reply.send(503, _LEAVING, _UNREADY)
        else:
            await exchange.reply.send(200, _OK)

    async def live(self, exchange: HttpExchange) -> None:
        """Whether the event loop turns, as one that hangs does not answer, and no task of the router fails again and
        again.
        """
        if failing_tasks():
            await exchange.reply.send(503, _FAILING)
        else:
            await exchange.reply.send(200, _OK)

    async def metrics(self, exchange: HttpExchange) -> None:
        """All metrics in Prometheus' text format."""
        await exchange.reply.send(200, generate_latest(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))

    def _engines(self, caller: Identity) -> dict[str, dict[str, int]]:
        return {"ready_engines": {card.name: card.ready_engines for card in self._frontend.models(caller)}}

    async def _health(self, exchange: HttpExchange, details: Mapping[str, object]) -> None:
        if self._frontend.serving():
            await exchange.reply.send(200, to_json({"status": "ok", **details}))
        else:
            await exchange.reply.send(503, to_json({"status": "unavailable", **details}), _UNREADY)
