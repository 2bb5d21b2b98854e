"""``/v1/requests/{id}``: what became of a request that came earlier, the rest of its answer, its end."""

from urllib.parse import parse_qsl

from quire_proto.errors import QuireError, invalid

from quire_router.api.earlier import RequestStatus, StoredRequest
from quire_router.api.frontend import ApiService, counting_rejections
from quire_router.api.rest.answers import format_for, request_object, to_json
from quire_router.api.rest.connection import cancel_on_disconnect
from quire_router.api.rest.events import KeepAlive
from quire_router.api.rest.exchange import LAST_EVENT_ID, HttpExchange
from quire_router.api.rest.writing import collect_completion, stream
from quire_router.api.terms import options_from_headers

_PATH = "/v1/requests/{id}"
_AFTER = "after"


class RequestEndpoints:
    """Handlers of the routes."""

    def __init__(self, frontend: ApiService, keepalive: KeepAlive) -> None:
        self._frontend = frontend
        self._keepalive = keepalive

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """How far the request has come, with its answer once that is complete; or what is forgotten, for ``DELETE``."""
        if exchange.scope["method"] == "DELETE":
            await self._delete(exchange)
            return
        with self._frontend.request_scope(f"GET {_PATH}", exchange.request_id, exchange.headers):
            await cancel_on_disconnect(exchange.receive, self._show(exchange))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Ends what has not ended of the request, and tells how it was with it just before."""
        with self._frontend.request_scope(f"POST {_PATH}/cancel", exchange.request_id, exchange.headers):
            earlier = await self._frontend.cancel(_id(exchange), exchange.caller)
            await exchange.reply.send(200, to_json(request_object(earlier)))

    async def _delete(self, exchange: HttpExchange) -> None:
        """Forgets the request, and ends it for that; tells how it was with it just before."""
        with self._frontend.request_scope(f"DELETE {_PATH}", exchange.request_id, exchange.headers):
            earlier = await self._frontend.delete(_id(exchange), exchange.caller)
            await exchange.reply.send(200, to_json({**request_object(earlier), "deleted": True}))

    async def events(self, exchange: HttpExchange) -> None:
        """The answer as a stream, from where the reader stands; its events have ids."""
        with self._frontend.request_scope(f"GET {_PATH}/events", exchange.request_id, exchange.headers):
            await cancel_on_disconnect(exchange.receive, self._events(exchange))

    async def _show(self, exchange: HttpExchange) -> None:
        earlier = await self._frontend.status(_id(exchange), exchange.caller)
        shown = to_json(request_object(earlier))
        if earlier.status is RequestStatus.COMPLETED:
            shown = shown[:-1] + b',"response":' + await self._whole(earlier, exchange) + b"}"
        await exchange.reply.send(200, shown)

    async def _whole(self, earlier: StoredRequest, exchange: HttpExchange) -> bytes:
        answer = await self._frontend.replay(earlier, exchange.caller)
        body, _ = await collect_completion(answer, format_for(earlier.first))
        return body

    async def _events(self, exchange: HttpExchange) -> None:
        with counting_rejections():
            terms = options_from_headers(exchange.values)
            earlier = await self._frontend.find(_id(exchange), exchange.caller)
            exchange.request_id = earlier.first.request_id
            answer = await self._frontend.resume(earlier, _after(exchange), exchange.caller, terms)
        first = earlier.first
        exchange.resumable = first.stream or first.background or bool(first.digest)
        await stream(exchange, format_for(earlier.first), answer, {}, self._keepalive)


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])


def _after(exchange: HttpExchange) -> str:
    """The last event that the client had: in the header, as clients that reconnect by themselves send it, or else in
    the address. Raises ``QuireError``.
    """
    query = _query(exchange)
    headers = exchange.values(LAST_EVENT_ID)
    if len(headers) > 1 or len(query) > 1:
        raise invalid(_AFTER, "There is more than one last event.")
    return headers[0] if headers else query[0] if query else ""


def _query(exchange: HttpExchange) -> list[str]:
    text = exchange.scope["query_string"].decode("latin-1")
    try:
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=2)
    except ValueError:
        raise _unknown() from None
    if any(name != _AFTER for name, _ in fields):
        raise _unknown()
    return [value for _, value in fields]


def _unknown() -> QuireError:
    return invalid(_AFTER, "The address takes one parameter, after.")
