"""What is counted for a tenant is what is stored of it, also where the database fails once, or requests meet."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import time
from unittest.mock import patch

import pytest
from quire_proto.errors import QuireError
from quire_router.api.conversations import Conversation, Conversations, Turn
from quire_router.batches.batch import WINDOW, Batch
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import UPLOAD_TTL, Files, FileSettings
from quire_router.core.errors import journal_unavailable
from quire_router.journal.objects import BEGUN, MemoryObjectStore, ObjectStore

from tests.support.batch_stage import Life, MortalStore

CONVERSATION = f"conv_{'0' * 48}"


@dataclass
class OneFailure(Life):
    """A database whose call number ``steps`` fails: it is not done, or with ``after`` its reply is lost."""

    async def step(self, act):
        self.steps -= 1
        if self.steps == 0 and not self.after:
            raise journal_unavailable()
        result = await act()
        if self.steps == 0:
            raise journal_unavailable()
        return result


class Away(OneFailure):
    """A database that is away from call number ``steps`` on, of which the first may be done all the same."""

    async def step(self, act):
        if self.steps <= 0:
            raise journal_unavailable()
        return await super().step(act)


@dataclass
class Meeting(Life):
    """Does ``act`` before the call number ``steps``."""

    act: Callable[[], Awaitable[object]] = asyncio.Event().wait

    async def step(self, act):
        self.steps -= 1
        if self.steps == 0:
            await self.act()
        return await act()


async def change_conversation(made: Conversation, what: str, conversations: Conversations) -> None:
    if what == "response":
        await conversations.write_response(made, Turn(7, "resp"), b"[]")
    else:
        await conversations.change(made.id, "a", lambda found, _: found)


async def make_file(store: ObjectStore) -> None:
    upload = await Files(store, FileSettings()).new_upload("a")
    try:
        await upload.write(b"text")
        await upload.end("in", "batch", None)
    except QuireError:
        await upload.abandon()
        raise


async def delete_file(store: ObjectStore) -> None:
    files = Files(store, FileSettings())
    async for info in files.list("a"):
        await files.delete(info)


async def make_conversation(store: ObjectStore) -> None:
    with patch("quire_router.api.conversations.token_hex", lambda size: "0" * 2 * size):
        await Conversations(store, 60.0).create("a", {}, b"[]")


async def delete_conversation(store: ObjectStore) -> None:
    conversations = Conversations(store, 60.0)
    await conversations.delete(await conversations.get(CONVERSATION, "a"))


async def make_batch(store: ObjectStore) -> None:
    now = int(time())
    batch = Batch("batch_1", "a", "", "/v1/completions", "file-1", now, now + WINDOW)
    await Batches(store, Files(store, FileSettings())).create(batch)


Step = Callable[[ObjectStore], Awaitable[None]]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("make", [make_conversation, make_batch])
async def test_what_could_not_be_made_counts_no_more(make: Step, after: bool) -> None:
    failures = 0
    for steps in range(1, 12):
        store = MemoryObjectStore()
        try:
            await make(MortalStore(store, OneFailure(steps, after)))
        except QuireError:
            failures += 1
            assert not store._accounts, f"call {steps}"
            assert not store._objects, f"call {steps}"
    assert failures >= 3


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("make", "kept"), [(make_file, UPLOAD_TTL), (make_conversation, BEGUN), (make_batch, BEGUN)])
async def test_what_was_not_made_before_the_database_went_counts_no_more_soon(
    make: Step, kept: float, after: bool
) -> None:
    failures = 0
    for steps in range(1, 9):
        now = 0.0
        store = MemoryObjectStore(clock=lambda: now)  # noqa: B023
        try:
            await make(MortalStore(store, Away(steps, after)))
        except QuireError:
            failures += not any(each.data for each in store._objects.values())
        now = kept + 1.0
        counted = {name for account in store._accounts for name in store._accounts.current(account).sizes}
        assert counted <= {name for name, each in store._objects.items() if each.data}, f"call {steps}"
    assert failures >= 2


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("make", "delete"), [(make_file, delete_file), (make_conversation, delete_conversation)])
async def test_what_could_not_be_deleted_can_be_deleted_again_and_counts_no_more(
    make: Step, delete: Step, after: bool
) -> None:
    failures = 0
    for steps in range(1, 9):
        store = MemoryObjectStore()
        await make(store)
        try:
            await delete(MortalStore(store, OneFailure(steps, after)))
        except QuireError:
            failures += 1
            with suppress(QuireError):  # it may have been done
                await delete(store)
        assert not store._accounts, f"call {steps}"
        assert not store._objects, f"call {steps}"
    assert failures >= 3


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("what", ["metadata", "response"])
async def test_a_conversation_that_is_deleted_while_it_is_changed_leaves_nothing(steps: int, what: str) -> None:
    """Either comes at any call of the other."""
    for is_first in (True, False):
        store = MemoryObjectStore()
        plain = Conversations(store, 60.0)
        made = await plain.create("a", {})
        change = partial(change_conversation, made, what)
        delete = partial(Conversations.delete, conversation=made)
        first, second = (change, delete) if is_first else (delete, change)
        meeting = Conversations(MortalStore(store, Meeting(steps, act=lambda: second(plain))), 60.0)  # noqa: B023
        with suppress(QuireError):  # it was deleted
            await first(meeting)
        if await store.get(made.id) is not None:
            await plain.delete(made)
        assert not store._accounts
        assert not store._objects
