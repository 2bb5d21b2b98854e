"""The routes of OpenAI's Conversations API, under ``/v1/conversations``: conversations and their items. A response
becomes a turn of the one that it names (``response_history``).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from secrets import token_hex
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field
from quire_proto.errors import invalid

from quire_router.api.conversations import Conversation, Conversations, encode_items
from quire_router.api.rest.http import BodyLimits, HttpExchange, read_body, to_json
from quire_router.api.rest.item_list import PageQuery, item_page
from quire_router.api.rest.response_history import HistoryReader
from quire_router.api.schemas.base import Metadata, StrictModel
from quire_router.api.schemas.openai import MAX_MESSAGES
from quire_router.api.schemas.response_items import REFERENCE, InputItem, list_items
from quire_router.api.service import ApiService
from quire_router.core.errors import item_not_found

CONVERSATIONS: Final = "/v1/conversations"
T = TypeVar("T")
MAX_DELETED = 4096  # items of one conversation
GivenItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ConversationBody(StrictModel):
    """The body of ``POST /v1/conversations``."""

    items: GivenItems | None = None
    metadata: Metadata | None = None


class ConversationUpdate(StrictModel):
    """The body of ``POST /v1/conversations/{id}``."""

    metadata: Metadata | None


class NewItems(StrictModel):
    """The body of ``POST /v1/conversations/{id}/items``."""

    items: Annotated[GivenItems, Field(min_length=1)]


class ConversationEndpoints:
    """Handlers of conversations. Each request is charged as one that reaches no engine, or counted as a read."""

    def __init__(self, service: ApiService, conversations: Conversations, limits: BodyLimits) -> None:
        self._service = service
        self._conversations = conversations
        self._limits = limits
        self._history = HistoryReader(service, conversations)

    async def create(self, exchange: HttpExchange) -> None:
        """Makes a conversation, with items if there are some."""

        def read(data: bytes | bytearray) -> tuple[Mapping[str, str], bytes]:
            given = ConversationBody.from_json(data) if data else ConversationBody()
            return given.metadata or {}, encode_items(_listed(given.items)) if given.items else b""

        async with self._body(exchange, f"POST {CONVERSATIONS}", read, optional=True) as (metadata, items):
            made = await self._conversations.create(exchange.caller.tenant, metadata, items)
            await exchange.response.send(200, to_json(made.to_json()))

    async def one(self, exchange: HttpExchange) -> None:
        """Sends a conversation; for ``POST`` with other metadata, for ``DELETE`` without what it was."""
        method, conversation_id, tenant = exchange.scope["method"], _id(exchange), exchange.caller.tenant
        name = f"{method} {CONVERSATIONS}/{{id}}"
        if method == "POST":
            async with self._body(exchange, name, ConversationUpdate.from_json) as update:
                metadata = update.metadata or {}
                changed = await self._conversations.change(
                    conversation_id, tenant, lambda found, _: replace(found, metadata=metadata)
                )
                await exchange.response.send(200, to_json(changed.to_json()))
            return
        with self._service.request_scope(name, exchange.request_id, exchange.headers):
            found = await self._find(exchange)
            if method == "DELETE":
                await self._conversations.delete(found)
                deleted = {"id": found.id, "object": "conversation.deleted", "deleted": True}
                await exchange.response.send(200, to_json(deleted))
            else:
                await exchange.response.send(200, to_json(found.to_json()))

    async def items(self, exchange: HttpExchange) -> None:
        """Lists the items of a conversation; for ``POST``, adds some."""
        name = f"{exchange.scope['method']} {CONVERSATIONS}/{{id}}/items"
        if exchange.scope["method"] == "POST":
            async with self._body(exchange, name, _new_items) as (data, page):
                await self._conversations.add_items(_id(exchange), exchange.caller.tenant, data)
                await exchange.response.send(200, page)
            return
        with self._service.request_scope(name, exchange.request_id, exchange.headers):
            query = PageQuery.read(exchange)
            page = await self._history.page(await self._find(exchange), query, exchange.caller)
            await exchange.response.send(200, page)

    async def item(self, exchange: HttpExchange) -> None:
        """Sends an item of a conversation; for ``DELETE``, removes it and sends the conversation."""
        name = f"{exchange.scope['method']} {CONVERSATIONS}/{{id}}/items/{{item_id}}"
        with self._service.request_scope(name, exchange.request_id, exchange.headers):
            found, item_id = await self._find(exchange), str(exchange.path_parameters["item_id"])
            item = await self._history.item(found, item_id, exchange.caller)
            if item is None:
                raise item_not_found("item_id", item_id)
            if exchange.scope["method"] == "DELETE":
                found = await self._conversations.change(
                    found.id,
                    exchange.caller.tenant,
                    lambda conversation, _: _without(conversation, item_id),
                    limited=False,
                )
                await exchange.response.send(200, to_json(found.to_json()))
            else:
                await exchange.response.send(200, item)

    async def _find(self, exchange: HttpExchange) -> Conversation:
        self._service.count_poll(exchange.caller)
        return await self._conversations.get(_id(exchange), exchange.caller.tenant)

    @asynccontextmanager
    async def _body(
        self, exchange: HttpExchange, name: str, read: Callable[[bytearray], T], *, optional: bool = False
    ) -> AsyncIterator[T]:
        """Yields what ``read`` makes of the body of a request that writes, which is charged. Raises ``QuireError``."""
        exchange.check_json_body(self._limits.max_bytes, optional=optional)
        caller, bodies = exchange.caller, self._service.bodies
        with (
            self._service.request_scope(name, exchange.request_id, exchange.headers),
            bodies.reserve_incoming(caller.tenant, exchange.content_length) as body,
        ):
            await read_body(exchange.receive, self._limits, body)
            await self._service.charge(caller)
            yield await self._service.offload(caller, len(body), lambda: read(body.detach()))


def _new_items(body: bytearray) -> tuple[bytes, bytes]:
    """Returns the items in a body as they are stored, and as they are listed."""
    added = _listed(NewItems.from_json(body).items)
    return encode_items(added), to_json(item_page(added))


def _listed(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Returns items as they are stored, with ids that nothing else has. Raises ``QuireError`` INVALID for references:
    they may expire.
    """
    for number, item in enumerate(items):
        if item.type == REFERENCE:
            raise invalid(f"items[{number}].type", f"items[{number}] names an item: a conversation holds items alone.")
    return list_items(items, token_hex(16), kept=0)


def _without(conversation: Conversation, item_id: str) -> Conversation:
    if len(conversation.deleted) == MAX_DELETED:
        raise invalid("item_id", f"At most {MAX_DELETED} items of a conversation can be deleted.")
    return replace(conversation, deleted=(*conversation.deleted, item_id))


def _id(exchange: HttpExchange) -> str:
    return str(exchange.path_parameters["id"])
