"""The routes of OpenAI's Responses API (``ResponseEndpoints``): what is special about making a response, and those that
are stored.
"""

import logging
import re
from contextlib import aclosing, suppress
from typing import Final

from quire_proto.errors import ErrorCode, QuireError, internal, invalid

from quire_router.api.auth import Identity
from quire_router.api.conversations import Conversations
from quire_router.api.prepared_request import (
    PreparedRequest,
    RequestOptions,
    options_from_headers,
)
from quire_router.api.request_limits import ReservedBody
from quire_router.api.response_opener import Response
from quire_router.api.rest.http import (
    JSON_HEADERS,
    LAST_EVENT_ID,
    BodyLimits,
    Header,
    HttpExchange,
    read_body,
    to_json,
    x_headers,
)
from quire_router.api.rest.item_list import PageQuery, read_query
from quire_router.api.rest.response_history import HistoryReader, keeps_items, prepare_response, read_state_of
from quire_router.api.rest.responses_format import RESPONSES, Answer, read_state
from quire_router.api.rest.sse import KeepAlive, collect, stream
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import (
    InputTokensRequest,
)
from quire_router.api.service import ApiService, counting_rejections, ignored_parameters_header
from quire_router.api.stored_quota import ResponseQuota
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.api.tokenize import TokenizeResult, input_to_tokenize
from quire_router.core.errors import (
    response_not_found,
)
from quire_router.core.response_options import Api, ResponseOptions

log = logging.getLogger(__name__)

PATH: Final = "/v1/responses"
_RUNNING = RequestStatus.RUNNING
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


async def _body(service: ApiService, stored: StoredRequest, caller: Identity) -> tuple[bytes, list[Header]]:
    """Returns a response as it is now, with its output once it has ended, in whatever way; and its headers."""
    if stored.status in (RequestStatus.COMPLETED, RequestStatus.CANCELLED):
        body, own = await collect(await service.replay(stored, caller), RESPONSES)
        return body, [*JSON_HEADERS, *own]
    if stored.status is RequestStatus.FAILED:
        return await _failed_body(service, stored, caller), [*JSON_HEADERS]
    begun = not stored.first.background or any(record.deltas for record in stored.records)
    answer = Answer(await service.reread(stored, caller))
    return answer.json("in_progress" if begun else "queued", None).encode("ascii"), [*JSON_HEADERS]


async def _failed_body(service: ApiService, stored: StoredRequest, caller: Identity) -> bytes:
    """Returns a response that failed, with what was written until then."""
    replayed = await service.replay(stored, caller)
    answer, error = Answer(replayed.prepared), stored.error or internal()
    async with aclosing(replayed.deltas) as deltas:
        with suppress(QuireError):  # which it ended with
            async for delta in deltas:
                for _ in answer.read(delta):
                    pass
    return answer.failed_json(error).encode("ascii")


class ResponseEndpoints:
    """Handlers of stored responses, under ``/v1/responses/{id}``, and of ``/v1/responses/input_tokens``."""

    def __init__(
        self,
        service: ApiService,
        limits: BodyLimits,
        keepalive: KeepAlive,
        conversations: Conversations | None = None,
        quota: ResponseQuota | None = None,
    ) -> None:
        self._service = service
        self._limits = limits
        self._keepalive = keepalive
        self._conversations = conversations
        self._quota = quota
        self._history = HistoryReader(service, conversations)

    async def prepare(self, exchange: HttpExchange, body: ReservedBody, options: RequestOptions) -> PreparedRequest:
        """Returns the request in a body, with what it goes on from. Raises ``QuireError``."""
        size, request_id, caller = len(body), exchange.generation_id, exchange.caller
        return await prepare_response(
            self._service, body.detach, size, request_id, caller, options, self._conversations, self._quota
        )

    async def forget(self, exchange: HttpExchange, prepared: PreparedRequest) -> None:
        """Takes a response that was refused, or has failed for good, out of its conversation, and out of its tenant's
        quota if nothing is stored of it. One with an idempotency key may have begun as another request, and stays then.
        """
        first, caller = prepared.first, exchange.caller
        conversation = read_state(prepared).repeated.get("conversation")
        try:
            status = await self._history.status(first.request_id, caller)
            if status is None and self._quota is not None:
                await self._quota.discharge(first.request_id, caller.tenant)
            is_over = status in (None, RequestStatus.FAILED) or not first.digest
            if is_over and conversation is not None and self._conversations is not None:
                await self._conversations.remove_response(conversation["id"], caller.tenant, first.request_id)
        except QuireError as error:  # it is an empty turn, which goes with the next response, and expires in the quota
            log.debug("response %s is not forgotten: %s", first.request_id, error.message)

    async def delete(self, request_id: str, caller: Identity) -> StoredRequest:
        """Ends and forgets a request of any API; returns its state just before. A conversation keeps what a response
        has added to it, and its tenant's quota counts it no more. Raises ``QuireError``.
        """
        return await self._service.delete(request_id, caller, self._prepare_delete)

    async def _prepare_delete(self, stored: StoredRequest, caller: Identity) -> None:
        """Does what a delete does beside it, before: what fails can be asked for again."""
        await self._keep_turn(stored, caller)
        if self._quota is not None:
            await self._quota.discharge(stored.first.request_id, stored.first.tenant)

    async def _keep_turn(self, stored: StoredRequest, caller: Identity) -> None:
        """Copies what a response that is about to be deleted has added to its conversation, which keeps that. Raises
        ``QuireError``.
        """
        is_response = ResponseOptions.from_record(stored.first).api is Api.RESPONSES
        if self._conversations is None or not is_response or stored.status in (_RUNNING, RequestStatus.FAILED):
            return
        try:
            first = (await self._service.recorded(stored.first.request_id, caller)).first
            conversation = ResponseState.read_repeated(first.conversation).repeated.get("conversation")
            if conversation is not None:
                await self._history.turns(await self._conversations.get(conversation["id"], caller.tenant), caller)
        except QuireError as error:
            if error.code is not ErrorCode.NOT_FOUND:  # else the conversation was deleted before, or the response
                raise
        except (ValueError, RecursionError):
            raise internal() from None

    async def start(self, exchange: HttpExchange, prepared: PreparedRequest) -> None:
        """Starts a response in the background, and sends its state, or its events if they are asked for."""
        stored, replayed = await self._service.responses.start_background(prepared)
        exchange.request_id = stored.first.request_id
        headers = self._service.response_headers(prepared, replayed=replayed)
        if prepared.first.stream:
            exchange.resumable = True
            answer = await self._service.replay(stored, exchange.caller)
            await stream(exchange, RESPONSES, answer, headers, self._keepalive)
            return
        body, own = await _body(self._service, stored, exchange.caller)
        await exchange.response.send(200, body, [*own, *x_headers(headers)])

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """Sends a response, or its events from ``starting_after`` on; for ``DELETE``, ends and forgets it."""
        name = f"{exchange.scope['method']} {PATH}/{{id}}"
        with self._service.request_scope(name, exchange.request_id, exchange.headers):
            if exchange.scope["method"] == "DELETE":
                stored = await self._history.stored(_id(exchange), exchange.caller)
                await self.delete(stored.first.request_id, exchange.caller)
                deleted = {"id": f"resp_{stored.first.request_id}", "object": "response", "deleted": True}
                await exchange.response.send(200, to_json(deleted))
            else:
                await exchange.cancel_on_disconnect(self._show(exchange))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Ends a response, and sends it."""
        with self._service.request_scope(f"POST {PATH}/{{id}}/cancel", exchange.request_id, exchange.headers):
            stored = await self._history.stored(_id(exchange), exchange.caller)
            if stored.status is RequestStatus.RUNNING:
                await self._service.cancel(stored.first.request_id, exchange.caller)
                await exchange.cancel_on_disconnect(self._send_ended(exchange, stored))
            else:
                await exchange.response.send(200, *await _body(self._service, stored, exchange.caller))

    async def input_items(self, exchange: HttpExchange) -> None:
        """Lists the conversation that a response answers."""
        with self._service.request_scope(f"GET {PATH}/{{id}}/input_items", exchange.request_id, exchange.headers):
            query, caller = PageQuery.read(exchange), exchange.caller
            stored = await self._history.stored(_id(exchange), caller)
            if not keeps_items(stored):
                raise response_not_found(_id(exchange))
            conversation = stored.first.conversation

            def page() -> bytes:
                return to_json(query.of(list(read_state_of(conversation).items or ())))

            await exchange.response.send(200, await self._service.offload(caller, len(conversation), page))

    async def input_tokens(self, exchange: HttpExchange) -> None:
        """Sends the number of tokens that a request's prompt has."""
        exchange.check_json_body(self._limits.max_bytes, optional=True)
        caller, bodies = exchange.caller, self._service.bodies
        with (
            self._service.request_scope(f"POST {PATH}/input_tokens", exchange.request_id, exchange.headers),
            bodies.reserve_incoming(caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            size = len(body)
            request = await self._service.parse(
                lambda: InputTokensRequest.from_json(body.detach() if size else b"{}"), caller, size=size
            )
            history = await self._history.read(request, caller)
            result = await self._service.tokenize(
                lambda: input_to_tokenize(request, history.read()), caller, _result, size=size + history.size
            )
            counted = {"object": "response.input_tokens", "input_tokens": len(result.tokens)}
            headers = [*JSON_HEADERS, *x_headers(ignored_parameters_header(result.ignored))]
            await exchange.response.send(200, to_json(counted), headers)

    async def _show(self, exchange: HttpExchange) -> None:
        query = read_query(exchange)
        stored = await self._history.stored(_id(exchange), exchange.caller)
        if query.get("stream") == "true":
            await self._stream(exchange, stored, query.get("starting_after"))
        else:
            await exchange.response.send(200, *await _body(self._service, stored, exchange.caller))

    async def _stream(self, exchange: HttpExchange, stored: StoredRequest, after: str | None) -> None:
        with counting_rejections():
            options = options_from_headers(exchange.values)
            given = exchange.headers.get(LAST_EVENT_ID) or after or ""
            if given and not _NUMBER.fullmatch(given):
                raise invalid("starting_after", "starting_after must be the sequence_number of an event.")
            exchange.request_id = stored.first.request_id
            answer: Response = await self._service.resume(stored, "", exchange.caller, options)
            _, answer.delivered = RESPONSES.read_event_id(given)
        exchange.resumable = True
        await stream(exchange, RESPONSES, answer, {}, self._keepalive)

    async def _send_ended(self, exchange: HttpExchange, stored: StoredRequest) -> None:
        """Sends a response that is about to end."""
        body, own = await collect(await self._service.replay(stored, exchange.caller), RESPONSES)
        await exchange.response.send(200, body, [*JSON_HEADERS, *own])


def _result(result: TokenizeResult) -> TokenizeResult:
    return result


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])
