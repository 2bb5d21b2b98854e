"""``/v1/completions`` and ``/v1/chat/completions``: the same exchange in two styles."""

from functools import partial

from quire_proto.errors import QuireError, invalid

from quire_router.api.admitted import PreparedRequest
from quire_router.api.frontend import ApiService, counting_rejections
from quire_router.api.rest.answers import OpenAiFormat, request_object, to_json
from quire_router.api.rest.connection import JSON_HEADERS, BodyLimits, cancel_on_disconnect, read_body
from quire_router.api.rest.events import KeepAlive
from quire_router.api.rest.exchange import LAST_EVENT_ID, HttpExchange
from quire_router.api.rest.refusals import body_too_large, not_json
from quire_router.api.rest.writing import send_completion, stream, x_headers
from quire_router.api.running import ReservedBody
from quire_router.api.sampling import check_stream
from quire_router.api.schemas import GenerationBody
from quire_router.api.terms import RequestOptions, options_from_headers


class GenerateHandler:
    """One of the two routes. ``path`` names its span, ``schema`` reads its body, ``style`` writes its answer."""

    def __init__(
        self,
        frontend: ApiService,
        path: str,
        schema: type[GenerationBody],
        style: OpenAiFormat,
        *,
        limits: BodyLimits,
        keepalive: KeepAlive,
    ) -> None:
        self._frontend = frontend
        self._name = f"POST {path}"
        self._schema = schema
        self._style = style
        self._limits = limits
        self._keepalive = keepalive

    async def __call__(self, exchange: HttpExchange) -> None:
        """Answers one request. Raises what the application turns into an error answer or a last event."""
        if exchange.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise not_json()
        if exchange.content_length > self._limits.max_bytes:
            raise body_too_large(self._limits.max_bytes)
        with counting_rejections():
            terms = options_from_headers(exchange.values)
            keyed_id = terms.request_id(exchange.caller)
            if exchange.headers.get(LAST_EVENT_ID):
                raise _reads_on(keyed_id)
        exchange.request_id = keyed_id or exchange.request_id
        with (
            self._frontend.request_scope(self._name, exchange.request_id, exchange.headers),
            self._frontend.bodies.reserve_incoming(exchange.caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            await cancel_on_disconnect(exchange.receive, self._answer(exchange, body, terms))

    async def _answer(self, exchange: HttpExchange, body: ReservedBody, terms: RequestOptions) -> None:
        request_id, caller = exchange.request_id, exchange.caller
        read = partial(self._read, body)
        admitted = await self._frontend.prepare(read, request_id, caller, terms, size=len(body))
        body.hold_until_queued(admitted.first.request_id)
        if admitted.first.background:
            await self._start(exchange, admitted)
            return
        answer = await self._frontend.answer(admitted, caller)
        if answer.replayed:
            body.release()  # no new request comes to the queue, and the answer to the one that did may take long
        exchange.resumable = bool(admitted.first.digest)
        notes = self._frontend.response_headers(admitted, replayed=answer.replayed)
        if admitted.first.stream:
            await stream(exchange, self._style, answer, notes, self._keepalive)
        else:
            await send_completion(exchange, self._style, answer, notes)

    async def _start(self, exchange: HttpExchange, admitted: PreparedRequest) -> None:
        earlier, replayed = await self._frontend.start(admitted)
        location = (b"location", f"/v1/requests/{earlier.first.request_id}".encode("ascii"))
        notes = x_headers(self._frontend.response_headers(admitted, replayed=replayed))
        await exchange.reply.send(202, to_json(request_object(earlier)), [*JSON_HEADERS, location, *notes])

    def _read(self, body: ReservedBody) -> GenerationBody:
        request = self._schema.from_json(body.detach())
        check_stream(request)
        return request


def _reads_on(request_id: str) -> QuireError:
    """A new request of a client that means to read on: to run it would be a second answer, made and charged."""
    address = f"/v1/requests/{request_id or '{id}'}/events"
    which = "" if request_id else " with the id in the x-request-id of the answer that broke off"
    message = f"This route begins a new answer. To read on, send {LAST_EVENT_ID} with GET {address}{which}."
    return invalid(LAST_EVENT_ID, message)
