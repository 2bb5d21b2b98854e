"""The routes of OpenAI's Responses API (``ResponseEndpoints``): what is special about making a response, and those that
are stored. ``ConversationReader`` finds what a request goes on from in the records of earlier ones, which
any router can: their conversations, and the tokens of their prompts and answers.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time
from typing import Final
from urllib.parse import parse_qsl

from quire_proto.errors import ErrorCode, QuireError, internal, invalid

from quire_router.api.auth import Identity
from quire_router.api.prepared_request import PreparedRequest, RequestOptions, ResponseOptions, options_from_headers
from quire_router.api.request_limits import ReservedBody
from quire_router.api.response_opener import Response
from quire_router.api.rest.http import (
    JSON_HEADERS,
    LAST_EVENT_ID,
    BodyLimits,
    HttpExchange,
    cancel_on_disconnect,
    read_body,
    to_json,
    x_headers,
)
from quire_router.api.rest.responses_format import RESPONSES, Answer, ResponseBuilder
from quire_router.api.rest.sse import KeepAlive, collect, stream
from quire_router.api.schemas.openai import Api
from quire_router.api.schemas.response_items import REFERENCE, History, read_items
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import (
    InputBody,
    InputTokensRequest,
    ResponsesRequest,
)
from quire_router.api.service import ApiService, counting_rejections, ignored_parameters_header
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.api.tokenize import TokenizeResult, input_to_tokenize
from quire_router.core.errors import (
    item_not_found,
    key_conflict,
    previous_failed,
    previous_in_progress,
    previous_not_found,
    response_not_found,
)

PATH: Final = "/v1/responses"
MAX_REFERENCED = 64  # responses that the items of one request may be of
MAX_LISTED, DEFAULT_LISTED = 100, 20  # items
_WAIT = 15.0  # seconds for the end of a response that is gone on from: longer than a dead router's lease
_MAX_QUERY_FIELDS = 16
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([A-Za-z0-9_-]{1,64})_(?:in)?[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """What is known of a response that has ended: its request, the tokens of its answer, and its output as items."""

    prepared: PreparedRequest
    token_ids: Sequence[int]
    builder: ResponseBuilder

    def history(self) -> History:
        """Returns what a request goes on from behind it. Raises ``QuireError`` INTERNAL when its record is damaged."""
        first = self.prepared.first
        try:
            state = ResponseState.read(first.conversation)
            items = read_items([*(state.items or ()), *self.builder.output()])
        except (ValueError, RecursionError):
            raise internal() from None
        return History(items, [*first.prompt_token_ids, *self.token_ids], {item.id or "": item for item in items})


class ConversationReader:
    """Finds what requests go on from. Those of other tenants are not found."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def read(self, request: InputBody, caller: Identity) -> "RecordedHistory":
        """Returns what a request goes on from. Raises ``QuireError``, for a response that does not end soon, too."""
        previous = request.previous_response_id
        earlier = None if previous is None else await self._previous(previous, caller)
        return RecordedHistory(earlier, await self._referenced(request, caller) if request.references else [])

    async def stored(self, response_id: str, caller: Identity, *, polled: bool = True) -> StoredRequest:
        """Returns a stored response. Raises ``QuireError`` NOT_FOUND, also for what is no response, and OVERLOADED when
        the caller reads too often; a request that goes on from one is not ``polled``, but charged as any other.
        """
        try:
            found = await (self._service.find if polled else self._service.recorded)(response_id, caller)
        except QuireError as error:
            raise response_not_found(response_id) if error.code is ErrorCode.NOT_FOUND else error from None
        if ResponseOptions.from_record(found.first).api is not Api.RESPONSES:
            raise response_not_found(response_id)
        return found

    async def _previous(self, response_id: str, caller: Identity) -> EarlierResponse:
        try:
            stored = await self.stored(response_id, caller, polled=False)
        except QuireError as error:
            raise previous_not_found(response_id) if error.code is ErrorCode.NOT_FOUND else error from None
        if not _keeps_items(stored):
            raise previous_not_found(response_id)
        if stored.status is RequestStatus.FAILED:
            raise previous_failed(response_id)
        try:
            return await self._whole(stored, caller)
        except QuireError as error:
            if error.code is not ErrorCode.DEADLINE:
                raise
        raise previous_in_progress(response_id)

    async def _referenced(self, request: InputBody, caller: Identity) -> list[History]:
        """Returns the histories that hold the items which a request refers to. The last response of a conversation
        holds the items of those before it, too, so the last references are looked up first.
        """
        histories: list[History] = []
        for number in reversed(range(len(request.input))):
            item_id = request.input[number].id or ""
            known = any(item_id in history.referenced for history in histories)
            if request.input[number].type != REFERENCE or known:
                continue
            found = _ITEM_ID.fullmatch(item_id)
            if found is None:
                raise item_not_found(f"input[{number}].id", item_id)
            if len(histories) == MAX_REFERENCED:
                message = (
                    f"input refers to items of more than {MAX_REFERENCED} responses that do not follow each other."
                )
                raise invalid("input", message)
            try:
                stored = await self.stored(found[1], caller, polled=False)
            except QuireError as error:
                if error.code is ErrorCode.NOT_FOUND:
                    raise item_not_found(f"input[{number}].id", item_id) from None
                raise
            if not _keeps_items(stored) or stored.status is RequestStatus.FAILED:
                raise item_not_found(f"input[{number}].id", item_id)
            histories.append((await self._whole(stored, caller)).history())
        return histories

    async def _whole(self, stored: StoredRequest, caller: Identity) -> EarlierResponse:
        """Reads a response to its end, which another router may still be writing, or this one has to finish."""
        answer = await self._service.replay(stored, caller, time() + _WAIT)
        builder, token_ids = ResponseBuilder(answer.prepared), list[int]()
        async with aclosing(answer.deltas) as deltas:
            async for delta in deltas:
                if builder.logprobs is not None:
                    await builder.logprobs.read_prompt(delta)
                builder.add(delta)
                token_ids += delta.token_ids
        return EarlierResponse(answer.prepared, token_ids, builder)


@dataclass(frozen=True, slots=True)
class RecordedHistory:
    """The response that a request follows, and the histories that hold the items which it refers to."""

    earlier: EarlierResponse | None
    referenced: Sequence[History]

    @property
    def size(self) -> int:
        """How many characters are to be read, about."""
        return 0 if self.earlier is None else len(self.earlier.prepared.first.conversation)

    def read(self) -> History:
        """Returns the history. Belongs into a thread where it is long."""
        histories = [*([] if self.earlier is None else [self.earlier.history()]), *self.referenced]
        if not histories:
            return History()
        by_id = {item_id: item for history in reversed(histories) for item_id, item in history.referenced.items()}
        return History(() if self.earlier is None else histories[0].items, histories[0].token_ids, by_id)


def _keeps_items(stored: StoredRequest) -> bool:
    """Whether a response may be gone on from: without ``store`` its conversation is not kept."""
    return bool(stored.first.conversation.partition("\n")[2])


async def _body(service: ApiService, stored: StoredRequest, caller: Identity) -> bytes:
    """Returns a response as it is now: with its output once it has ended."""
    if stored.status in (RequestStatus.COMPLETED, RequestStatus.CANCELLED):
        body, _ = await collect(await service.replay(stored, caller), RESPONSES)
        return body
    status = "failed" if stored.status is RequestStatus.FAILED else "in_progress"
    if status == "in_progress" and stored.first.background and not any(record.deltas for record in stored.records):
        status = "queued"
    prepared = await service.reread(stored, caller)
    return Answer(prepared).json(status, None, stored.error).encode("ascii")


async def prepare_response(  # noqa: PLR0917 - as ``ApiService.prepare``
    service: ApiService,
    body: Callable[[], bytes | bytearray],
    size: int,
    request_id: str,
    caller: Identity,
    options: RequestOptions,
) -> PreparedRequest:
    """Returns the request in a body of ``size`` bytes, with what it goes on from. Raises ``QuireError``."""
    request = await service.parse(lambda: ResponsesRequest.from_json(body()), caller, size=size)
    history = await ConversationReader(service).read(request, caller)
    return await service.prepare(
        lambda: request.to_chat(history.read(), request_id), request_id, caller, options, size=size + history.size
    )


class ResponseEndpoints:
    """Handlers of stored responses, under ``/v1/responses/{id}``, and of ``/v1/responses/input_tokens``."""

    def __init__(self, service: ApiService, limits: BodyLimits, keepalive: KeepAlive) -> None:
        self._service = service
        self._limits = limits
        self._keepalive = keepalive
        self._conversations = ConversationReader(service)

    async def prepare(self, exchange: HttpExchange, body: ReservedBody, options: RequestOptions) -> PreparedRequest:
        """Returns the request in a body, with what it goes on from. Raises ``QuireError``."""
        size = len(body)
        return await prepare_response(self._service, body.detach, size, exchange.request_id, exchange.caller, options)

    async def start(self, exchange: HttpExchange, prepared: PreparedRequest) -> None:
        """Starts a response in the background, and sends its state, or its events if they are asked for."""
        stored, replayed = await self._service.responses.start_background(prepared)
        if ResponseOptions.from_record(stored.first).api is not Api.RESPONSES:
            raise key_conflict()  # the first request of this key came by another route
        headers = self._service.response_headers(prepared, replayed=replayed)
        if prepared.first.stream:
            exchange.resumable = True
            answer = await self._service.replay(stored, exchange.caller)
            await stream(exchange, RESPONSES, answer, headers, self._keepalive)
            return
        body = await _body(self._service, stored, exchange.caller)
        await exchange.response.send(200, body, [*JSON_HEADERS, *x_headers(headers)])

    async def show_or_delete(self, exchange: HttpExchange) -> None:
        """Sends a response, or its events from ``starting_after`` on; for ``DELETE``, ends and forgets it."""
        name = f"{exchange.scope['method']} {PATH}/{{id}}"
        with self._service.request_scope(name, exchange.request_id, exchange.headers):
            if exchange.scope["method"] == "DELETE":
                stored = await self._conversations.stored(_id(exchange), exchange.caller)
                await self._service.delete(stored.first.request_id, exchange.caller)
                deleted = {"id": f"resp_{stored.first.request_id}", "object": "response", "deleted": True}
                await exchange.response.send(200, to_json(deleted))
            else:
                await cancel_on_disconnect(exchange.receive, self._show(exchange))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Ends a response, and sends it."""
        with self._service.request_scope(f"POST {PATH}/{{id}}/cancel", exchange.request_id, exchange.headers):
            stored = await self._conversations.stored(_id(exchange), exchange.caller)
            if stored.status is RequestStatus.RUNNING:
                await self._service.cancel(stored.first.request_id, exchange.caller)
                await cancel_on_disconnect(exchange.receive, self._send_ended(exchange, stored))
            else:
                await exchange.response.send(200, await _body(self._service, stored, exchange.caller))

    async def input_items(self, exchange: HttpExchange) -> None:
        """Lists the conversation that a response answers."""
        with self._service.request_scope(f"GET {PATH}/{{id}}/input_items", exchange.request_id, exchange.headers):
            query = _query(exchange)
            stored = await self._conversations.stored(_id(exchange), exchange.caller)
            if not _keeps_items(stored):
                raise response_not_found(_id(exchange))
            try:
                items = list(ResponseState.read(stored.first.conversation).items or ())
            except (ValueError, RecursionError):
                raise internal() from None
            if _order(query) == "desc":
                items.reverse()
            begin = _position_behind([str(item.get("id")) for item in items], query.get("after"))
            page = items[begin : begin + _limit(query)]
            listed = {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": begin + len(page) < len(items),
            }
            await exchange.response.send(200, to_json(listed))

    async def input_tokens(self, exchange: HttpExchange) -> None:
        """Sends the number of tokens that a request's prompt has."""
        exchange.check_json_body(self._limits.max_bytes)
        caller, bodies = exchange.caller, self._service.bodies
        with (
            self._service.request_scope(f"POST {PATH}/input_tokens", exchange.request_id, exchange.headers),
            bodies.reserve_incoming(caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            size = len(body)
            request = await self._service.parse(lambda: InputTokensRequest.from_json(body.detach()), caller, size=size)
            history = await self._conversations.read(request, caller)
            result = await self._service.tokenize(
                lambda: input_to_tokenize(request, history.read()), caller, _result, size=size + history.size
            )
            counted = {"object": "response.input_tokens", "input_tokens": len(result.tokens)}
            headers = [*JSON_HEADERS, *x_headers(ignored_parameters_header(result.ignored))]
            await exchange.response.send(200, to_json(counted), headers)

    async def _show(self, exchange: HttpExchange) -> None:
        query = _query(exchange)
        stored = await self._conversations.stored(_id(exchange), exchange.caller)
        if query.get("stream") == "true":
            await self._stream(exchange, stored, query.get("starting_after"))
        else:
            await exchange.response.send(200, await _body(self._service, stored, exchange.caller))

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
        body, _ = await collect(await self._service.replay(stored, exchange.caller), RESPONSES)
        await exchange.response.send(200, body)


def _result(result: TokenizeResult) -> TokenizeResult:
    return result


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])


def _query(exchange: HttpExchange) -> dict[str, str]:
    """Returns the fields of the address, the last of each name. Raises ``QuireError`` INVALID for too many."""
    try:
        fields = parse_qsl(exchange.scope["query_string"].decode("latin-1"), max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise invalid("query", f"The address has more than {_MAX_QUERY_FIELDS} fields.") from None
    return dict(fields)


def _order(query: dict[str, str]) -> str:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    return order


def _limit(query: dict[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_LISTED))
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= MAX_LISTED:
        raise invalid("limit", f"limit must be a number from 1 to {MAX_LISTED}.")
    return int(given)


def _position_behind(ids: Sequence[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise item_not_found("after", after)
    return ids.index(after) + 1
