"""What a request of the Responses API goes on from (``HistoryReader``): earlier responses, whose records any router can
read, with the tokens of their prompts and answers, and conversations.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import time

from quire_proto.errors import ErrorCode, QuireError, internal, invalid

from quire_router.api.auth import Identity
from quire_router.api.prepared_request import PreparedRequest, RequestOptions, ResponseOptions
from quire_router.api.rest.responses_format import ResponseBuilder
from quire_router.api.schemas.openai import Api
from quire_router.api.schemas.response_items import REFERENCE, History, read_items
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import (
    InputBody,
    ResponsesRequest,
)
from quire_router.api.service import ApiService
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.core.errors import (
    item_not_found,
    previous_failed,
    previous_in_progress,
    previous_not_found,
    response_not_found,
)

MAX_REFERENCED = 64  # responses that the items of one request may be of
_WAIT = 15.0  # seconds for the end of a response that is gone on from: longer than a dead router's lease
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


class HistoryReader:
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
        if not keeps_items(stored):
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
            if not keeps_items(stored) or stored.status is RequestStatus.FAILED:
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


def keeps_items(stored: StoredRequest) -> bool:
    """Whether a response may be gone on from: without ``store`` its conversation is not kept."""
    return bool(stored.first.conversation.partition("\n")[2])


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
    history = await HistoryReader(service).read(request, caller)
    return await service.prepare(
        lambda: request.to_chat(history.read(), request_id), request_id, caller, options, size=size + history.size
    )
