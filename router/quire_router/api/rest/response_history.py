"""What a request of the Responses API goes on from (``HistoryReader``): earlier responses, whose records any router can
read, with the tokens of their prompts and answers, and conversations.
"""

import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

from quire_proto.errors import ErrorCode, QuireError, internal, invalid

from quire_router.api.auth import Identity
from quire_router.api.conversations import Conversation, Conversations, Items, Turn, encode_items
from quire_router.api.prepared_request import PreparedRequest, RequestOptions
from quire_router.api.rest.http import to_json
from quire_router.api.rest.item_list import PageQuery, item_page
from quire_router.api.rest.responses_format import ResponseBuilder
from quire_router.api.schemas.response_items import REFERENCE, History, read_items
from quire_router.api.schemas.response_state import ResponseState
from quire_router.api.schemas.responses import (
    InputBody,
    ResponsesRequest,
)
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.api.stored_requests import RequestStatus, StoredRequest
from quire_router.core.errors import (
    conversation_locked,
    conversation_not_found,
    item_not_found,
    previous_failed,
    previous_in_progress,
    previous_not_found,
    response_not_found,
)
from quire_router.core.generation import MAX_CONVERSATION_CHARACTERS
from quire_router.core.response_options import Api, ResponseOptions

MAX_REFERENCED = 64  # responses that the items of one request may be of
MAX_REFERENCED_CHARACTERS = 4 * MAX_CONVERSATION_CHARACTERS  # of their conversations together
_WAIT = 15.0  # seconds for the end of a response that is gone on from: longer than a dead router's lease
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([A-Za-z0-9_-]{1,64})_(?:in)?[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class EarlierResponse:
    """What is known of a response that has ended: its request, the tokens of its answer, and its output as items."""

    prepared: PreparedRequest
    token_ids: Sequence[int]
    builder: ResponseBuilder

    @property
    def size(self) -> int:
        """The characters of its conversation, about."""
        return len(self.prepared.first.conversation)

    @property
    def all_token_ids(self) -> list[int]:
        """The tokens of its prompt and of its answer."""
        return [*self.prepared.first.prompt_token_ids, *self.token_ids]

    def items(self) -> list[Mapping[str, Any]]:
        """Returns its conversation and its output. Raises ``QuireError`` INTERNAL when its record is damaged."""
        state = read_state_of(self.prepared.first.conversation)
        return [*(state.items or ()), *self.builder.output()]

    def history(self) -> History:
        """Returns what a request goes on from behind it. Raises as ``items`` does."""
        return history_of(self.items(), self.all_token_ids)


def read_state_of(conversation: str) -> ResponseState:
    """Returns what is stored of a response. Belongs into a thread where it is long. Raises ``QuireError`` INTERNAL when
    it is damaged.
    """
    try:
        return ResponseState.read(conversation)
    except (ValueError, RecursionError):
        raise internal() from None


def history_of(listed: Items, token_ids: Sequence[int]) -> History:
    """Returns what a request goes on from behind items, which had these tokens. Raises ``QuireError`` INTERNAL for what
    are none.
    """
    try:
        items = read_items(listed)
    except (ValueError, RecursionError):
        raise internal() from None
    return History(items, token_ids, {item.id or "": item for item in items})


class _StillRunningError(Exception):
    """The response of a turn runs, and is not waited for."""


class _FailedError(Exception):
    """The response of a turn has failed, which adds nothing."""


class HistoryReader:
    """Finds what requests go on from. Those of other tenants are not found. Without ``conversations`` they go on from
    none.
    """

    def __init__(self, service: ApiService, conversations: Conversations | None = None) -> None:
        self._service = service
        self._conversations = conversations

    async def read(self, request: InputBody, caller: Identity, request_id: str = "") -> "RecordedHistory":
        """Returns what a request of this id goes on from. Raises ``QuireError``, for a response that does not end soon,
        too.
        """
        previous, conversation = request.previous_response_id, request.conversation
        referenced = await self._referenced(request, caller) if request.references else []
        if conversation is not None:
            return RecordedHistory(None, referenced, await self._conversation(conversation, caller, request_id))
        return RecordedHistory(None if previous is None else await self._previous(previous, caller), referenced)

    async def turns(self, conversation: Conversation, caller: Identity, *, wait: bool = False) -> "ConversationItems":
        """Returns the items of a conversation. Those of responses are copied into it once they have ended; one that
        runs is waited for, or else has none yet. Raises ``QuireError``.
        """
        assert self._conversations is not None
        ended = await self._copy_responses(conversation, caller, wait=wait)
        async with aclosing(self._conversations.read_turns(conversation, conversation.turns)) as turns:
            parts = [part async for part in turns]
        size = sum(map(len, parts))
        self._service.charge_read(caller, size)
        deleted = frozenset(conversation.deleted)
        items = await self._service.offload(caller, size, partial(_kept_items, parts, deleted))
        return replace(ended, items=items, size=size)

    async def page(self, conversation: Conversation, query: PageQuery, caller: Identity) -> bytes:
        """Returns a page of a conversation's items as JSON. Only the turns that it is of are parsed. Raises
        ``QuireError``.
        """
        await self._copy_responses(conversation, caller, wait=False)
        deleted, page = frozenset(conversation.deleted), list[Mapping[str, Any]]()
        behind, size = query.after, 0
        async with aclosing(self._parts(conversation, caller, newest_first=query.newest_first)) as parts:
            async for part in parts:
                if behind is not None and _as_written(behind) not in part:
                    continue
                items = await self._service.offload(caller, len(part), partial(_kept_items, [part], deleted))
                items = items[::-1] if query.newest_first else items
                if behind is not None:
                    places = [number for number, item in enumerate(items, 1) if item["id"] == behind]
                    if not places:
                        continue
                    items, behind = items[places[0] :], None
                page += items
                size += len(part)
                if len(page) > query.limit:
                    break
        if behind is not None:
            raise item_not_found("after", behind)
        listed = item_page(page[: query.limit], has_more=len(page) > query.limit)
        return await self._service.offload(caller, size, lambda: to_json(listed))

    async def item(self, conversation: Conversation, item_id: str, caller: Identity) -> bytes | None:
        """Returns an item of a conversation as JSON; None if it has none of this id. Raises ``QuireError``."""
        await self._copy_responses(conversation, caller, wait=False)
        if item_id in conversation.deleted:
            return None
        async with aclosing(self._parts(conversation, caller)) as parts:
            async for part in parts:
                if _as_written(item_id) in part:
                    found = await self._service.offload(caller, len(part), partial(_find_item, part, item_id))
                    if found is not None:
                        return found
        return None

    async def _parts(
        self, conversation: Conversation, caller: Identity, *, newest_first: bool = False
    ) -> AsyncGenerator[bytes]:
        """Yields the items of each turn as they are stored; its tenant is charged for what it has read."""
        assert self._conversations is not None
        turns, size = conversation.turns[::-1] if newest_first else conversation.turns, 0
        try:
            async with aclosing(self._conversations.read_turns(conversation, turns)) as parts:
                async for part in parts:
                    size += len(part)
                    yield part
        finally:
            self._service.charge_read(caller, size)

    async def _copy_responses(self, conversation: Conversation, caller: Identity, *, wait: bool) -> "ConversationItems":
        """Copies the items of responses into a conversation that have ended since it was last read. Returns what is
        known of the last one, without items.
        """
        assert self._conversations is not None
        responses = [turn for turn in conversation.turns if turn.response]
        written = await self._conversations.written(conversation) if responses else frozenset()
        token_ids: Sequence[int] = ()
        model, failed = "", list[str]()
        for turn in responses:
            is_last = turn is responses[-1]
            if turn.number in written and not (wait and is_last):
                continue
            try:
                earlier = await self._turn(turn, conversation, caller, wait=wait)
            except _StillRunningError:
                continue
            except _FailedError:
                failed.append(turn.response)
                continue
            token_ids = () if earlier is None else earlier.all_token_ids
            model = "" if earlier is None else earlier.prepared.first.model
            if turn.number not in written and (earlier is not None or not is_last):
                data = await self._items_of(earlier, turn, caller)
                await self._conversations.write_response(conversation, turn, data)
        return ConversationItems((), token_ids, failed, model)

    async def _items_of(self, earlier: EarlierResponse | None, turn: Turn, caller: Identity) -> bytes:
        if earlier is None:
            return encode_items([])
        return await self._service.offload(caller, earlier.size, lambda: encode_items(earlier.items()[turn.known :]))

    async def _turn(
        self, turn: Turn, conversation: Conversation, caller: Identity, *, wait: bool
    ) -> EarlierResponse | None:
        """Returns the response of a turn; None for one that was never begun, or whose record is gone. Raises
        ``_StillRunningError`` for one that is not waited for, and ``_FailedError``.
        """
        try:
            stored = await self.stored(turn.response, caller, polled=False)
            if stored.status is RequestStatus.FAILED:
                raise _FailedError
            if stored.status is RequestStatus.RUNNING and not wait:
                raise _StillRunningError
            return await self._whole(stored, caller)
        except QuireError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            if error.code is ErrorCode.DEADLINE:
                raise conversation_locked(conversation.id) from None
            if await self.status(turn.response, caller) is RequestStatus.FAILED:
                raise _FailedError from None
            raise

    async def _conversation(self, conversation_id: str, caller: Identity, request_id: str) -> "ConversationItems":
        if self._conversations is None:
            raise invalid("conversation", "conversation is not taken here: send the whole conversation as input.")
        try:
            found = await self._conversations.get(conversation_id, caller.tenant)
        except QuireError as error:
            is_missing = error.code is ErrorCode.NOT_FOUND
            raise conversation_not_found(conversation_id, "conversation") if is_missing else error from None
        return await self.turns(found.before(request_id), caller, wait=True)

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

    async def status(self, response_id: str, caller: Identity) -> RequestStatus | None:
        """Returns the status of a response; None if there is none. Raises ``QuireError`` UNAVAILABLE."""
        try:
            return (await self.stored(response_id, caller, polled=False)).status
        except QuireError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return None
            raise

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
        histories, size = list[History](), 0
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
            size += len(stored.first.conversation)
            if size > MAX_REFERENCED_CHARACTERS:
                most = f"{MAX_REFERENCED_CHARACTERS} characters"
                raise invalid("input", f"input refers to items of responses that have more than {most} together.")
            whole = await self._whole(stored, caller)
            histories.append(await self._service.offload(caller, whole.size, whole.history))
        return histories

    async def _whole(self, stored: StoredRequest, caller: Identity) -> EarlierResponse:
        """Reads a response to its end, which another router may still be writing, or this one has to finish."""
        answer = await self._service.replay(stored, caller, monotonic() + _WAIT)
        self._service.charge_read(caller, len(answer.prepared.first.conversation))
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
    conversation: "ConversationItems | None" = None

    @property
    def model(self) -> str:
        """The model that the last response was of; empty if there is none."""
        if self.conversation is not None:
            return self.conversation.model
        return "" if self.earlier is None else self.earlier.prepared.first.model

    @property
    def size(self) -> int:
        """How many characters are to be read, about."""
        if self.conversation is not None:
            return self.conversation.size
        return 0 if self.earlier is None else self.earlier.size

    def read(self) -> History:
        """Returns the history. Belongs into a thread where it is long."""
        continued = self._continued()
        histories = [*([] if continued is None else [continued]), *self.referenced]
        if not histories:
            return History()
        by_id = {item_id: item for history in reversed(histories) for item_id, item in history.referenced.items()}
        return History(() if continued is None else continued.items, histories[0].token_ids, by_id)

    def _continued(self) -> History | None:
        if self.conversation is not None:
            return history_of(self.conversation.items, self.conversation.token_ids)
        return None if self.earlier is None else self.earlier.history()


@dataclass(frozen=True, slots=True)
class ConversationItems:
    """The items of a conversation, which are stored in ``size`` bytes, the tokens of the prompt and the answer of its
    last response, and the model that this was of. Its responses that ``failed`` are turns of it no longer.
    """

    items: Items
    token_ids: Sequence[int]
    failed: Sequence[str] = ()
    model: str = ""
    size: int = 0


def _kept_items(parts: Iterable[bytes], deleted: Collection[str]) -> list[Mapping[str, Any]]:
    return [item for part in parts for item in json.loads(part) if item["id"] not in deleted]


def _find_item(part: bytes, item_id: str) -> bytes | None:
    return next((to_json(item) for item in _kept_items([part], ()) if item["id"] == item_id), None)


def _as_written(item_id: str) -> bytes:
    """Returns an id as ``encode_items`` writes it: a turn without it need not be parsed."""
    return json.dumps(item_id, ensure_ascii=False).encode("utf-8", "surrogatepass")


def keeps_items(stored: StoredRequest) -> bool:
    """Whether a response may be gone on from: without ``store`` its conversation is not kept."""
    return stored.first.keeps_conversation


async def prepare_response(  # noqa: PLR0917 - as ``ApiService.prepare``
    service: ApiService,
    body: Callable[[], bytes | bytearray],
    size: int,
    request_id: str,
    caller: Identity,
    options: RequestOptions,
    conversations: Conversations | None = None,
    quota: ResponseQuota | None = None,
) -> PreparedRequest:
    """Returns the request in a body of ``size`` bytes, with what it goes on from; a conversation has it as a turn then,
    and it counts in its tenant's ``quota``. Raises ``QuireError``.
    """
    request = await service.parse(lambda: ResponsesRequest.from_json(body()), caller, size=size)
    reader = HistoryReader(service, conversations)
    history = await reader.read(request, caller, request_id)
    options = replace(options, target=history.model)
    prepared = await service.prepare(
        lambda: request.to_chat(history.read(), request_id), request_id, caller, options, size=size + history.size
    )
    if quota is not None:
        await quota.charge(prepared)
    if conversations is not None and request.conversation is not None and history.conversation is not None:
        known, failed = len(history.conversation.items), history.conversation.failed
        try:
            await conversations.add_response(request.conversation, caller.tenant, request_id, known, failed)
        except QuireError:
            if quota is not None and await reader.status(request_id, caller) is None:  # else it came before
                await quota.discharge(request_id, caller.tenant)
            raise
    return prepared
