"""``Conversations``: what OpenAI's Conversations API keeps, in the journal's place: which turns a conversation has, and
their items.

A turn is what was added at once: items that a client wrote, or a response, of which the input and the output are. Its
items are written once. Those of a response are in its record first, and are copied here when they are next needed
(``rest.response_history.HistoryReader``), so that nobody has to be there when a response ends.
"""

import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import time
from typing import Any

from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_router.admission.limits import counting_refusals
from quire_router.core.errors import (
    RefusalReason,
    conversation_locked,
    conversation_not_found,
    share_full,
    too_much_stored,
)
from quire_router.core.generation import MAX_CONVERSATION_CHARACTERS
from quire_router.core.tenant_ids import owns
from quire_router.journal import records
from quire_router.journal.objects import ANY, BEGUN, CONVERSATIONS, Excess, ObjectStore, Quota, account_of

_ID = re.compile("conv_[0-9a-f]{48}")
MAX_TURNS = 4096  # of one conversation
MAX_CONVERSATION_BYTES = MAX_CONVERSATION_CHARACTERS  # no response could follow more, and each read has all of it
QUOTA = Quota(10_000, 256 * 2**20)  # of a tenant, where nothing else is said
_TURNS_AT_ONCE = 64  # that are read in a round trip
_ATTEMPTS = 8  # to change a conversation that others change too


@dataclass(frozen=True, slots=True)
class Turn:
    """The ``number`` of a turn: numbers grow, and are never used again, also where a turn was removed. Of a
    ``response``, the id of its request, and of the items in its record how many are of the turns before (``known``).
    """

    number: int
    response: str = ""
    known: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items. ``deleted`` are the ids of items that are not there any more. Those that
    clients wrote take ``size`` bytes; what responses add is bounded by the prompts that models read. All items that are
    written take ``stored`` bytes.
    """

    id: str
    tenant: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    deleted: tuple[str, ...] = ()
    size: int = 0
    stored: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns it as the API shows it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}

    def before(self, response: str) -> "Conversation":
        """Returns what it was before a response, if that is one of its turns: a request may come again. Without the id
        of one, all of it.
        """
        numbers = [turn.number for turn in self.turns if response and turn.response == response]
        turns = self.turns if not numbers else tuple(turn for turn in self.turns if turn.number < numbers[0])
        return replace(self, turns=turns)


Items = Sequence[Mapping[str, Any]]


class Conversations:
    """The conversations of all tenants; those of others are not found. Each is kept for ``retention`` seconds after it
    was last used. A tenant has as many of them, and bytes of them, as ``quota`` says: who would add to more is refused
    (``QuireError`` OVERLOADED), and what a response has written is kept. Raises ``QuireError`` as ``ObjectStore`` does.
    """

    def __init__(self, store: ObjectStore, retention: float, quota: Quota = QUOTA) -> None:
        self._store = store
        self._retention = retention
        self._quota = quota

    async def create(self, tenant: str, metadata: Mapping[str, str], data: bytes = b"") -> Conversation:
        """Makes a conversation, with the items in ``data`` (see ``encode_items``) if there are some."""
        made = Conversation(f"conv_{token_hex(24)}", tenant, int(time()), metadata)
        if data:
            made = _with_turn(made, 0, size=len(data))
        try:
            await self._charge(made, self._quota, BEGUN)
            if data:
                await self._write(made.id, 0, data)
            await self._put(made, 0)
            await self._charge(made, ANY)
        except BaseException:
            await self.delete(made)
            raise
        return made

    async def get(self, conversation_id: str, tenant: str) -> Conversation:
        """Returns a conversation. Raises ``QuireError`` NOT_FOUND."""
        return (await self._find(conversation_id, tenant))[0]

    async def change(
        self,
        conversation_id: str,
        tenant: str,
        change: Callable[[Conversation, int], Conversation],
        *,
        limited: bool = True,
    ) -> Conversation:
        """Replaces a conversation by what ``change`` makes of it and of its version, whatever others change meanwhile,
        and keeps it for longer. What is not ``limited`` may be more than the quota. Raises as ``get``, and as
        ``change`` does.
        """
        for _ in range(_ATTEMPTS):
            found, version = await self._find(conversation_id, tenant)
            changed = change(found, version)
            await self._charge(changed, self._quota if limited else ANY)
            if await self._put(changed, version):
                return changed
            if await self._store.get(conversation_id) is None:  # it was deleted meanwhile
                await self._discharge(found)
        raise conversation_locked(conversation_id)

    async def add_items(self, conversation_id: str, tenant: str, data: bytes) -> Conversation:
        """Adds a turn of a client, with the items in ``data``. Raises as ``get``, and INVALID if it is too much."""
        changed = await self.change(
            conversation_id, tenant, lambda found, version: _with_turn(found, version, size=len(data))
        )
        await self._write(conversation_id, changed.turns[-1].number, data)
        return changed

    async def add_response(
        self, conversation_id: str, tenant: str, response: str, known: int, failed: Collection[str] = ()
    ) -> None:
        """Adds a response that begins, unless it is one of the turns, of which those that ``failed`` are removed.
        Raises as ``add_items``.
        """

        def change(found: Conversation, version: int) -> Conversation:
            return _with_turn(_without_responses(found, failed), version, response, known)

        await self.change(conversation_id, tenant, change)

    async def remove_response(self, conversation_id: str, tenant: str, response: str) -> None:
        """Removes a response that was refused, or has failed: it is no turn any more. Raises as ``get``."""
        await self.change(
            conversation_id, tenant, lambda found, _: _without_responses(found, [response]), limited=False
        )

    async def written(self, conversation: Conversation) -> frozenset[int]:
        """Returns the numbers of the turns whose items have been written."""
        return frozenset(await self._store.part_numbers(conversation.id))

    async def read_turns(self, conversation: Conversation, turns: Sequence[Turn]) -> AsyncGenerator[bytes]:
        """Yields the items of those ``turns`` that have been written, in order, as ``encode_items`` wrote them."""
        for start in range(0, len(turns), _TURNS_AT_ONCE):
            numbers = [turn.number for turn in turns[start : start + _TURNS_AT_ONCE]]
            for part in await self._store.parts(conversation.id, numbers):
                if part is not None:
                    yield part

    async def write_response(self, conversation: Conversation, turn: Turn, data: bytes) -> None:
        """Writes the items of a response that has ended, if nobody else has."""
        if not await self._write(conversation.id, turn.number, data):
            return
        try:
            await self.change(
                conversation.id,
                conversation.tenant,
                lambda found, _: replace(found, stored=_stored(found) + len(data)),
                limited=False,
            )
        except QuireError as error:
            if error.code is ErrorCode.NOT_FOUND:
                await self._store.delete(conversation.id)  # what was written just now
            raise

    async def delete(self, conversation: Conversation) -> None:
        """Deletes a conversation with its items; its responses stay."""
        await self._discharge(conversation)  # before: if this fails, the client can repeat the request
        await self._store.delete(conversation.id)
        await self._discharge(conversation)  # a change in between has charged it again

    async def _find(self, conversation_id: str, tenant: str) -> tuple[Conversation, int]:
        found = await self._store.get(conversation_id) if _ID.fullmatch(conversation_id) else None
        conversation = None if found is None else records.read(Conversation, conversation_id, found.data)
        if found is None or conversation is None or not owns(tenant, conversation.tenant):
            raise conversation_not_found(conversation_id)
        return conversation, found.version

    async def _put(self, conversation: Conversation, version: int) -> bool:
        return await self._store.put(conversation.id, records.encode(conversation), version, self._retention)

    async def _write(self, conversation_id: str, number: int, data: bytes) -> bool:
        return await self._store.add_part(conversation_id, number, data, self._retention)

    async def _discharge(self, conversation: Conversation) -> None:
        await self._store.discharge(account_of(CONVERSATIONS, conversation.tenant), conversation.id)

    async def _charge(self, conversation: Conversation, quota: Quota, ttl: float | None = None) -> None:
        """Counts a conversation as it is about to be, for ``ttl`` seconds or as long as it is kept. Raises
        ``QuireError`` OVERLOADED where that is too much.
        """
        size = _stored(conversation) + len(records.encode(conversation))
        account = account_of(CONVERSATIONS, conversation.tenant)
        excess = await self._store.charge(account, conversation.id, size, ttl or self._retention, quota)
        if excess is None:
            return
        if excess is Excess.SHARE:
            raise share_full()
        is_number = excess is Excess.NAMES
        most = f"{quota.max_names} conversations" if is_number else f"{quota.max_bytes} bytes of conversations"
        setting = "--max-tenant-conversations" if is_number else "--max-tenant-conversation-bytes"
        with counting_refusals():
            message = f"This key may have {most} ({setting}): delete some, or wait until they expire."
            raise too_much_stored(message, RefusalReason.MAX_CONVERSATIONS)


def _stored(conversation: Conversation) -> int:
    """Returns how many bytes its items take; of one that an older router made what clients wrote of them."""
    return max(conversation.stored, conversation.size)


def encode_items(items: Items) -> bytes:
    """Returns items as they are stored. Belongs into a thread where they are long."""
    return json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _without_responses(conversation: Conversation, responses: Collection[str]) -> Conversation:
    turns = (turn for turn in conversation.turns if not turn.response or turn.response not in responses)
    return replace(conversation, turns=tuple(turns))


def _with_turn(
    conversation: Conversation, version: int, response: str = "", known: int = 0, size: int = 0
) -> Conversation:
    """Returns a conversation of this ``version`` with another turn, whose items are written after that: a client's take
    ``size`` bytes. The turn has the version as its number, which no other change begins with. Raises ``QuireError``
    INVALID.
    """
    turns = conversation.turns
    if response and any(turn.response == response for turn in turns):
        return conversation
    if len(turns) == MAX_TURNS:
        raise invalid("conversation", f"A conversation has at most {MAX_TURNS} turns.")
    if conversation.size + size > MAX_CONVERSATION_BYTES:
        most = f"The items that clients add to a conversation have at most {MAX_CONVERSATION_BYTES} bytes together."
        raise invalid("items", most)
    taken = conversation.size + size
    stored = _stored(conversation) + size
    return replace(conversation, turns=(*turns, Turn(version, response, known)), size=taken, stored=stored)
