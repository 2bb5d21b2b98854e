"""What tenants stored under the shorter ids that they had before is theirs until it expires, and nobody else's."""

from dataclasses import replace
from time import time

import pytest
from quire_proto.errors import QuireError
from quire_router.api.conversations import Conversations
from quire_router.batches.batch import Batch
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import Files, FileSettings
from quire_router.core.usage import Account, MemoryLedger
from quire_router.journal.objects import MemoryObjectStore

FORMER = "0123456789ab"
TENANT, STRANGER = FORMER + "c" * 20, "f" * 32


def batch_of(name: str, tenant: str) -> Batch:
    now = int(time())
    return Batch(f"batch_{name}", tenant, "", "/v1/completions", "file-x", now, now + 3600)


async def written(files: Files, tenant: str) -> str:
    upload = await files.new_upload(tenant)
    await upload.write(b"text")
    return (await upload.end("a", "batch", None)).id


async def test_files_and_batches_are_found_listed_and_deleted() -> None:
    store = MemoryObjectStore()
    files = Files(store, FileSettings())
    batches = Batches(store, files)
    before, after = await written(files, FORMER), await written(files, TENANT)
    for each in (batch_of("1", FORMER), batch_of("2", TENANT)):
        await batches.create(each)

    assert [each.id async for each in files.list(TENANT)] == [after, before]
    assert [each.id async for each in files.list(TENANT, ascending=True)] == [before, after]
    assert [each.id async for each in files.list(TENANT, after)] == [before]
    assert [each.id async for each in batches.list(TENANT)] == ["batch_2", "batch_1"]
    assert (await batches.get("batch_1", TENANT)).tenant == FORMER
    assert [each.id async for each in files.list(STRANGER)] == []
    for refused in (files.get(before, STRANGER), batches.get("batch_1", STRANGER), files.get(after, FORMER)):
        with pytest.raises(QuireError):
            await refused
    await files.delete(await files.get(before, TENANT))
    assert [each.id async for each in files.list(TENANT)] == [after]


async def test_a_conversation_goes_on() -> None:
    conversations = Conversations(MemoryObjectStore(), 60.0)
    made = await conversations.create(FORMER, {})
    changed = await conversations.add_items(made.id, TENANT, [{"type": "message"}])
    assert (changed.tenant, len(changed.turns)) == (FORMER, 1)
    with pytest.raises(QuireError):
        await conversations.get(made.id, STRANGER)


def test_usage_is_that_of_both_ids() -> None:
    ledger = MemoryLedger()
    for tenant in (FORMER, TENANT, STRANGER):
        ledger.add(Account(tenant, "m"), (1, 2, 0, 3))
    rows = ledger.rows(0, time() + 1, TENANT)
    assert [row.tenant for row in rows] == [FORMER, TENANT]
    assert {replace(row, tenant="") for row in rows} == {replace(rows[0], tenant="")}
