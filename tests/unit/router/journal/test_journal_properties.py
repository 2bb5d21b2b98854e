"""Whatever is written, in whatever order, and whenever Redis dies: what is read equals a model of a few lines."""

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import DeliveredChoice, Lease
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.journal_kinds import ALONE, AnyJournal
from tests.support.journals import Seen, append_tokens, seen
from tests.support.redis_server import RedisServer, redis_server

NAMES = ["a", "b", "c"]
CHOICES = 3
names = st.sampled_from(NAMES)
indexes = st.integers(0, CHOICES - 1)
any_tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5)
operations = st.one_of(
    st.tuples(st.just("open"), names),
    st.tuples(st.just("append"), names, any_tokens, indexes),
    st.tuples(st.just("append"), names, any_tokens, indexes),
    st.tuples(st.just("repeat"), names, st.integers(0, 5), indexes),
    st.tuples(st.just("end"), names, st.sampled_from(FinishReason), indexes),
    st.tuples(st.just("finish"), names, st.sampled_from(FinishReason)),
    st.tuples(st.just("stale"), names),
    st.tuples(st.just("flush")),
    st.tuples(st.just("kill")),
)


Script = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def persistent() -> Iterator[RedisServer]:
    with redis_server(persistent=True) as server:
        yield server


@dataclass
class Run:
    """One journal, and the records as they ought to be."""

    journal: AnyJournal
    server: RedisServer | None
    prefix: str = field(default_factory=lambda: uuid4().hex)
    model: dict[str, Seen] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)

    async def do(self, operation: str, name: str = "", value: object = None, index: int = 0) -> None:
        record = self.model.get(name)
        running = record is not None and record.finish_reason is None
        if operation == "open":
            self.open(name)
        elif operation == "flush":
            await self.compare()
        elif operation == "kill" and self.server is not None:
            self.server.restart()
        elif record is not None:
            self.write(operation, record, name, value, index, running)

    def open(self, name: str) -> None:
        generation = GenerationRequest(
            self.prefix + name, "m", array("i", [1, 2, 3]), SamplingParams(seed=len(self.model), n=CHOICES)
        )
        lease = self.journal.open(generation)
        if name in self.model:
            # The id is taken: what is written with this lease must change nothing.
            append_tokens(self.journal, lease, 0, [7] * 50)
        else:
            self.leases[name], self.model[name] = (
                lease,
                Seen(generation, "me", 1, [DeliveredChoice() for _ in range(CHOICES)]),
            )

    def write(self, operation: str, record: Seen, name: str, value: object, index: int, running: bool) -> None:
        lease, choice = self.leases[name], record.choices[index]
        growing = running and choice.finish_reason is None
        if operation == "append" and isinstance(value, list):
            append_tokens(self.journal, lease, len(choice.token_ids), value, index)
            choice.token_ids += value if growing else []
        elif operation == "repeat" and isinstance(value, int):
            start = max(0, len(choice.token_ids) - value)
            append_tokens(self.journal, lease, start, choice.token_ids[start:], index)
        elif operation == "end" and isinstance(value, FinishReason):
            append_tokens(self.journal, lease, len(choice.token_ids), [], index, value)
            choice.finish_reason = value if growing else choice.finish_reason
        elif operation == "finish" and isinstance(value, FinishReason):
            self.journal.finish(lease, value, "why")
            if running:
                record.finish_reason, record.error = value, "why"
        elif operation == "stale":
            append_tokens(self.journal, replace(lease, epoch=0), len(choice.token_ids), [9, 9], index)
            self.journal.finish(replace(lease, owner="other"), FinishReason.ERROR)

    async def compare(self) -> None:
        await asyncio.wait_for(self.journal.flush(), 20)
        for name in NAMES:
            assert seen(await self.journal.read(self.prefix + name)) == self.model.get(name)


async def play(journal: AnyJournal, server: RedisServer | None, script: Script) -> None:
    run = Run(journal, server)
    try:
        for operation in script:
            await run.do(*operation)  # type: ignore[arg-type]
            await asyncio.sleep(0)
        await run.compare()
    finally:
        await journal.close()


@given(st.lists(operations, max_size=40))
@settings(deadline=None)
def test_memory_holds_what_the_model_holds(script: Script) -> None:
    asyncio.run(play(MemoryJournal(owner="me"), None, script))


@given(st.lists(operations, max_size=40))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_redis_holds_what_the_model_holds_however_often_it_is_killed(persistent: RedisServer, script: Script) -> None:
    async def run() -> None:
        await play(RedisJournal(persistent.url, owner="me", settings=ALONE), persistent, script)

    asyncio.run(run())


@given(st.lists(operations, max_size=40))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_file_holds_what_the_model_holds(tmp_path_factory: pytest.TempPathFactory, script: Script) -> None:
    async def run() -> None:
        await play(SqliteJournal(tmp_path_factory.mktemp("file") / "journal", owner="me"), None, script)

    asyncio.run(run())
