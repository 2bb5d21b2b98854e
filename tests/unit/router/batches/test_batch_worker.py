"""A batch is worked through by any routers, one after the other, however they die: each line once."""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from secrets import token_hex
from time import monotonic, time
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.auth import Authenticator
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.service import ApiService
from quire_router.batches.batch import WINDOW, Batch, Line, LineAnswer
from quire_router.batches.batch_store import ACTIVE, Batches
from quire_router.batches.files import CHUNK_BYTES, Files, FileSettings
from quire_router.batches.worker import LEASE, LINE_WINDOW, MAX_RUNNING, TURN, BatchWorker
from quire_router.journal.objects import MemoryObjectStore, read_objects

from tests.support.batch_stage import (
    CHAT,
    Life,
    MortalRunner,
    MortalStore,
    batch_api,
    content_of,
    jsonl,
    line,
    store_batch,
)
from tests.support.model_folders import byte_level
from tests.support.scripted_api import CHAT_TEMPLATE, MODEL, ScriptedPool, ScriptedRunner
from tests.support.waiting import until

TOKENIZERS = {MODEL: ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
IMMORTAL = 10**9
T = TypeVar("T")


def service_of(runner: Any) -> ApiService:
    return ApiService(TOKENIZERS, ScriptedPool(), runner, Authenticator(()), ConcurrencyLimit(64))


class Fleet:
    """Routers that share a store and the engines behind one runner. ``later`` is how far the clock is ahead."""

    def __init__(self) -> None:
        self.store = MemoryObjectStore()
        self.runner = ScriptedRunner()
        self.later = 0.0
        self.api = batch_api(service_of(self.runner), self.store)

    async def live(self, life: Life, owner: str) -> None:
        """A router works until the batch has ended or it dies, and until its lease has."""
        service = service_of(MortalRunner(self.runner, life))
        api = batch_api(
            service, cast(Any, MortalStore(self.store, life)), owner=owner, clock=lambda: time() + self.later
        )
        api.worker.wake()
        working = asyncio.create_task(api.worker.run())
        while not life.dead.is_set() and await self.store.names(ACTIVE):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        service.close()
        self.later += LEASE + 1


async def survive(deaths: list[tuple[int, bool]], count: int, bad: int) -> None:
    fleet = Fleet()
    lines = [line(f"line {number}", f"text {number}") for number in range(count)]
    for number in range(bad):
        lines[number]["body"]["max_tokens"] = -1
    await store_batch(fleet.api, jsonl(lines))
    for number, (steps, after) in enumerate(deaths):
        await fleet.live(Life(steps, after), f"router {number}")
    await fleet.live(Life(IMMORTAL), "the last router")
    batch = await fleet.api.batches.get("batch_1", "")
    output, errors = await content_of(fleet.api, batch.output_file_id), await content_of(fleet.api, batch.error_file_id)
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", count, count - bad, bad)
    assert [each["custom_id"] for each in errors] == [f"line {number}" for number in range(bad)]
    assert [each["custom_id"] for each in output] == [f"line {number}" for number in range(bad, count)]
    assert {each["response"]["status_code"] for each in output} <= {200}
    assert {each["response"]["status_code"] for each in errors} <= {400}
    ran = Counter(generation.request_id for generation in fleet.runner.generations)
    assert len(ran) == count - bad
    assert set(ran.values()) <= {1}
    assert await fleet.store.part_numbers("batch_1") == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("steps", range(1, 60))
async def test_a_router_that_dies_at_any_step_leaves_each_line_once(steps: int, after: bool) -> None:
    await survive([(steps, after)], count=4, bad=1)


@settings(max_examples=25, deadline=None)
@given(
    deaths=st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=5),
    count=st.integers(1, 40),
    data=st.data(),
)
def test_routers_that_die_one_after_the_other_leave_each_line_once(
    deaths: list[tuple[int, bool]], count: int, data: st.DataObject
) -> None:
    bad = data.draw(st.integers(0, min(3, count)))
    asyncio.run(survive(deaths, count, bad))


async def test_routers_whose_clocks_differ_take_a_batch_from_each_other_and_run_each_line_once() -> None:
    fleet, count = Fleet(), 60
    await store_batch(fleet.api, jsonl([line(f"line {number}") for number in range(count)]))
    routers = []
    for ahead in (0.0, LEASE + 1):
        service = service_of(MortalRunner(fleet.runner, Life(IMMORTAL)))
        clock = lambda ahead=ahead: time() + ahead  # noqa: E731
        api = batch_api(service, fleet.store, owner=f"{ahead} s ahead", clock=clock)
        api.worker.wake()
        routers.append(asyncio.create_task(api.worker.run()))
        await until(lambda: bool(fleet.runner.generations))
    await until(lambda: not fleet.store._collections.get(ACTIVE))
    for router in routers:
        router.cancel()
    await asyncio.gather(*routers, return_exceptions=True)
    batch = await fleet.api.batches.get("batch_1", "")
    output = await content_of(fleet.api, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"line {number}" for number in range(count)]
    assert len({each.request_id for each in fleet.runner.generations}) == len(fleet.runner.generations) == count


class RewoundStore(MemoryObjectStore):
    """Objects of a Redis that dies after its change number ``dies``, and comes back without the last ``lost`` ones."""

    def __init__(self, dies: int, lost: int) -> None:
        super().__init__()
        self._dies = dies
        self._former: deque[Any] = deque(maxlen=lost + 1)

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        return self._changing(method) if name in ("put", "add_part", "enter", "leave") else method

    def _changing(self, method: Any) -> Any:
        async def change(*args: Any, **more: Any) -> Any:
            await asyncio.sleep(0)
            self._former.append(deepcopy((self._objects, self._collections)))
            self._dies -= 1
            changed = await method(*args, **more)
            if self._dies == 0:
                self._objects, self._collections = self._former[0 if len(self._former) < 2 else 1]
            return changed

        return change


@pytest.mark.parametrize("lost", [1, 2, 3, 5])
@pytest.mark.parametrize("dies", range(1, 14))
async def test_what_a_redis_that_dies_forgets_of_a_batch_is_run_again(dies: int, lost: int) -> None:
    fleet, names = Fleet(), [f"line {number}" for number in range(4)]
    await store_batch(fleet.api, jsonl([line(name) for name in names]))
    store = RewoundStore(dies, lost)
    store._objects, store._collections = fleet.store._objects, fleet.store._collections
    fleet.api, fleet.store = batch_api(service_of(fleet.runner), store), store
    await fleet.live(Life(IMMORTAL), "a router")
    batch = await fleet.api.batches.get("batch_1", "")
    output = await content_of(fleet.api, batch.output_file_id)
    assert (batch.status, batch.total, batch.completed) == ("completed", 4, 4)
    assert [each["custom_id"] for each in output] == names
    assert store._dies <= 0


class EndlessLines:
    """Lines that no router gets done with."""

    async def run(self, batch: Batch, line: Line) -> LineAnswer:
        return await asyncio.Event().wait()

    async def cancel(self, batch: Batch, number: int) -> None:
        pass

    async def offload(self, batch: Batch, size: int, work: Callable[[], T]) -> T:
        return work()


class Places:
    """A worker whose clock stands at ``now``, and the tenants whose batches it works on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = MemoryObjectStore(clock=lambda: self.now)
        self.batches = Batches(self.store, Files(self.store, FileSettings()))
        self.worker = BatchWorker(self.batches, EndlessLines(), owner="me", clock=lambda: self.now)

    async def add(self, tenant: str, count: int) -> None:
        for _ in range(count):
            name = f"batch_{token_hex(8)}"
            await self.batches.create(Batch(name, tenant, "", CHAT, "file-in", 0, int(time()) + WINDOW))

    async def stop(self) -> None:
        tasks = [running.task for running in self.worker._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> Counter[str]:
        await self.worker.look()
        await asyncio.sleep(0)
        return Counter(running.tenant for running in self.worker._running.values())


async def test_a_router_works_on_as_many_batches_of_each_tenant() -> None:
    places = Places()
    await places.add("a", MAX_RUNNING + 3)
    assert await places.look() == {"a": MAX_RUNNING}
    await places.add("b", 2)
    assert await places.look() == {"a": MAX_RUNNING - 2, "b": 2}
    await places.add("b", MAX_RUNNING)
    for _ in range(3):
        assert await places.look() == {"a": MAX_RUNNING // 2, "b": MAX_RUNNING // 2}
    await places.stop()


async def test_where_there_are_more_tenants_than_places_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    places, worked = Places(), set[str]()
    monkeypatch.setattr("quire_router.batches.worker.monotonic", lambda: places.now)
    tenants = [f"tenant {number}" for number in range(2 * MAX_RUNNING)]
    for tenant in tenants:
        await places.add(tenant, 1)
    for _ in range(4):
        for _ in range(2):  # nobody is put back before its turn is over
            running = await places.look()
            assert set(running.values()) == {1}
            worked |= set(running)
        places.now += TURN + 1
    assert worked == set(tenants)
    await places.stop()


@pytest.mark.parametrize("how", ["a request ran out of time", "the clock was set"])
async def test_lines_whose_window_ended_unseen_have_expired_as_any_others(how: str) -> None:
    fleet, count, gate = Fleet(), LINE_WINDOW + 8, asyncio.Event()
    fleet.runner.script = (gate, "done", FinishReason.STOP)
    await store_batch(fleet.api, jsonl([line(f"line {number}") for number in range(count)]))
    living = asyncio.create_task(fleet.live(Life(IMMORTAL), "a router"))
    await until(lambda: len(fleet.runner.generations) == LINE_WINDOW)
    if how == "the clock was set":
        fleet.later = WINDOW + 3600
    else:
        over = QuireError(ErrorCode.DEADLINE, "The time for this request was over before its answer had ended.")
        fleet.runner.script = (over,)
    gate.set()
    await asyncio.wait_for(living, 20)
    batch = await fleet.api.batches.get("batch_1", "")
    output, errors = await content_of(fleet.api, batch.output_file_id), await content_of(fleet.api, batch.error_file_id)
    assert (batch.status, len(output) + len(errors), bool(errors)) == ("expired", count, True)
    assert {each["response"]["status_code"] for each in output} <= {200}
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len({each["custom_id"] for each in output + errors}) == count


async def test_a_lease_that_nobody_renews_is_over_though_a_clock_that_was_ahead_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_router.batches.worker.LEASE", 0.2)
    fleet = Fleet()
    batch = await store_batch(fleet.api, jsonl([line("a")]))
    batch.owner, batch.lease_until = "it died", time() + 3600
    assert await fleet.store.put(batch.id, batch.to_json(), 1, 9000)
    began = monotonic()
    await asyncio.wait_for(fleet.live(Life(IMMORTAL), "the other"), 20)
    assert (await fleet.api.batches.get("batch_1", "")).status == "completed"
    assert monotonic() - began > 0.2


class ListingStore(MemoryObjectStore):
    """One whose lists others read before and after each change, as routers that look for batches do."""

    async def put(self, name: str, data: bytes, version: int, ttl: float) -> bool:
        await self._read_all()
        done = await super().put(name, data, version, ttl)
        await self._read_all()
        return done

    async def _read_all(self) -> None:
        for collection in [*self._collections]:
            async for _ in read_objects(self, collection, await self.names(collection)):
                pass


async def test_what_is_made_while_others_read_the_lists_stays_in_them() -> None:
    store = ListingStore()
    api = batch_api(service_of(ScriptedRunner()), cast(Any, store))
    batch, batches = await store_batch(api, jsonl([line("a")])), api.batches
    assert await store.names(ACTIVE) == [batch.id]
    assert [each.id async for each in batches.list(batch.tenant)] == [batch.id]
    assert [each.id async for each in batches.files.list(batch.tenant)] == [batch.input_file_id]


async def test_a_line_that_was_begun_with_another_prompt_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet()
    batch = await store_batch(fleet.api, jsonl([line("a")]))
    asked = Line(0, "a", json.dumps(line("a")).encode())
    first = await fleet.api.worker.lines.run(batch, asked)
    monkeypatch.setattr("quire_router.api.prepared_request._digest", lambda *_: "of the next day")
    assert await fleet.api.worker.lines.run(batch, asked) == first
    assert (first.status, len(fleet.runner.generations)) == (200, 1)


DAMAGED = {
    "no JSON": lambda _: b"{",
    "no object": lambda _: b"[]",
    "nothing": lambda _: b"",
    "fields that are missing": lambda _: b'{"id": "batch_0"}',
    "another type": lambda batch: batch.to_json().replace(b'"lease_until":0.0', b'"lease_until":"soon"'),
}


@pytest.mark.parametrize("damage", DAMAGED)
async def test_a_damaged_record_stops_no_other_batch_and_is_one_that_failed(damage: str) -> None:
    fleet, before = Fleet(), damaged_records("batch")
    batches = fleet.api.batches
    await store_batch(fleet.api, jsonl([line("a")]))
    bad = replace(await batches.get("batch_1", ""), id="batch_0")
    await fleet.store.put("batch_0", DAMAGED[damage](bad), 0, 60.0)
    for collection in (ACTIVE, "batches:"):
        await fleet.store.leave(collection, "batch_1")
        for name in ("batch_0", "batch_1"):
            await fleet.store.enter(collection, name, 60.0)
    await fleet.live(Life(IMMORTAL), "router")
    assert (await batches.get("batch_1", "")).status == "completed"
    assert await fleet.store.names(ACTIVE) == []
    assert damaged_records("batch") > before
    failed = await batches.get("batch_0", "")
    assert (failed.status, failed.errors[0]["code"]) == ("failed", "batch_unreadable")
    assert [each.id async for each in batches.list("")] == ["batch_1", "batch_0"]
    for call in (batches.cancel("batch_0", ""), batches.get("batch_0", "another tenant")):
        with pytest.raises(QuireError) as caught:
            await call
        assert caught.value.code in (ErrorCode.CONFLICT, ErrorCode.NOT_FOUND)


async def test_a_damaged_file_is_not_there_and_the_others_are() -> None:
    fleet, before = Fleet(), damaged_records("file")
    files, names = fleet.api.batches.files, []
    for content in (b"one", b"two"):
        upload = await files.new_upload("")
        await upload.write(content)
        names.append((await upload.end("a", "batch", None)).id)
    await fleet.store.put(names[0], b"{", 1, 60.0)
    assert [each.id async for each in files.list("")] == names[1:]
    with pytest.raises(QuireError) as caught:
        await files.get(names[0], "")
    assert caught.value.code is ErrorCode.NOT_FOUND
    assert damaged_records("file") == before + 2
    assert (await (await files.new_upload("")).end("b", "batch", None)).bytes == 0


def damaged_records(kind: str) -> float:
    return REGISTRY.get_sample_value("quire_unreadable_records_total", {"kind": kind}) or 0.0


async def test_a_batch_whose_name_redis_forgot_is_worked_on_once_it_is_asked_after() -> None:
    fleet = Fleet()
    await store_batch(fleet.api, jsonl([line("a")]))
    await fleet.store.leave(ACTIVE, "batch_1")
    assert (await fleet.api.batches.get("batch_1", "")).status == "validating"
    await fleet.live(Life(IMMORTAL), "a router")
    assert (await fleet.api.batches.get("batch_1", "")).status == "completed"
    assert await fleet.store.names(ACTIVE) == []


async def test_a_file_of_which_a_part_is_lost_before_it_is_complete_is_not_taken() -> None:
    store = MemoryObjectStore()
    files = Files(store, FileSettings())
    upload = await files.new_upload("")
    await upload.write(b"x" * (CHUNK_BYTES + 1))
    store._objects.clear()  # a Redis that died just then
    with pytest.raises(QuireError) as raised:
        await upload.end("in.jsonl", "batch", None)
    assert raised.value.code is ErrorCode.UNAVAILABLE
