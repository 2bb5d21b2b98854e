"""Routers that die at any moment, one after the other on one file: a state machine. What was flushed is there for the
next one, which may claim it at once, and a dead one that comes back to life writes nothing any more.
"""

import asyncio
import fcntl
import sqlite3
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.journal.base import Follower, Lease
from quire_router.journal.codec import JournalSettings, unpack_tokens
from quire_router.journal.sqlite.database import transaction
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from quire_router.journal.sqlite.usage_table import read_usage

from tests.support.journals import Heard, append_tokens

NAMES = ["a", "b", "c"]
names = st.sampled_from(NAMES)
choices = st.integers(0, 11)  # which of those that there are (see pick)
numbers = count()


@dataclass
class Router:
    """A journal with an event loop of its own, which stands still while the router is stopped, or dead."""

    file: Path
    owner: str = field(default_factory=lambda: f"router-{next(numbers)}")
    heard: Heard = field(default_factory=Heard)

    def __post_init__(self) -> None:
        self.runner = asyncio.Runner()
        times = JournalSettings(pause=0.001)
        self.journal = SqliteJournal(self.file, owner=self.owner, settings=times, timeout=0.02)
        self.journal.set_listener(self.heard)

    def run(self, call: Any) -> Any:
        return self.runner.run(asyncio.wait_for(call, 20))

    def open(self, generation: GenerationRequest) -> Lease:
        async def run() -> Lease:
            return self.journal.open(generation)

        lease: Lease = self.run(run())
        return lease

    def go(self, seconds: float) -> None:
        """Goes on for a moment, which may end in the middle of anything."""
        self.run(asyncio.sleep(seconds))

    def wake(self) -> None:
        """Goes on until all is written, or cannot be."""

        async def run() -> None:
            while len(self.journal._buffer) and self.journal.available:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.001)

        self.run(run())

    def die(self) -> None:
        """The kernel takes its lock."""
        fcntl.flock(self.journal._store._file._lock, fcntl.LOCK_UN)  # type: ignore[attr-defined]


@dataclass
class Holding:
    """What one lease stands for: what had been sent before, and what its owner added."""

    router: Router
    lease: Lease
    base: list[int]
    added: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    released: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.base + self.added


@dataclass
class Onlooker:
    name: str
    follower: Follower
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    epoch: int
    owner: str
    log: list[int]
    reason: str | None


class Restarts(RuleBasedStateMachine):
    folder: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.file = self.folder / f"journal-{next(numbers)}"
        self.router = Router(self.file)
        self.database = sqlite3.connect(self.file)
        self.dead: list[Router] = []
        self.holdings: dict[str, list[Holding]] = {name: [] for name in NAMES}
        self.flushed: dict[str, Stored] = {}
        self.onlookers: list[Onlooker] = []
        self.tokens = count()

    @rule(name=names)
    def open(self, name: str) -> None:
        if not self.holdings[name]:
            generation = GenerationRequest(
                name, "m", array("i", [1]), SamplingParams(seed=3), background=name == "a", tenant=name
            )
            self.holdings[name].append(Holding(self.router, self.router.open(generation), []))

    @rule(choice=choices, name=names, length=st.integers(1, 3))
    def append(self, choice: int, name: str, length: int) -> None:
        holding = self.pick(choice, name)
        if holding is not None:
            token_ids = [next(self.tokens) for _ in range(length)]
            append_tokens(holding.router.journal, holding.lease, len(holding.tokens), token_ids)
            holding.added += token_ids

    @rule(choice=choices, name=names, really=st.booleans())
    def finish(self, choice: int, name: str, really: bool) -> None:
        holding = self.pick(choice, name)
        if holding is not None and really:
            holding.router.journal.finish(holding.lease, FinishReason.STOP, "", Usage(1, len(holding.tokens)))
            holding.ended = FinishReason.STOP

    @rule(choice=choices, name=names)
    def release(self, choice: int, name: str) -> None:
        holding = self.pick(choice, name)
        if holding is not None:
            holding.router.journal.release(holding.lease, Usage(1, len(holding.tokens)))
            holding.released = True

    @rule(name=names)
    def claim(self, name: str) -> None:
        """What nobody has a lease on can always be claimed, with all that was flushed."""
        before = self.stored(name)
        claimed = self.router.run(self.router.journal.claim(name))
        held = [each for each in self.holdings[name] if each.router is self.router and not each.released]
        if claimed is None:
            assert before is None or before.reason is not None or held
            return
        record, lease = claimed
        assert not held
        tokens = record.choices[0].token_ids
        assert before is None or tokens[: len(before.log)] == before.log
        assert before is None or lease.epoch == before.epoch + 1
        self.holdings[name].append(Holding(self.router, lease, tokens))

    @rule(name=names, really=st.integers(0, 3))
    def cancel(self, name: str, really: int) -> None:
        if not really:
            self.router.run(self.router.journal.cancel(name))
            self.flush()

    @rule()
    def flush(self) -> None:
        self.router.run(self.router.journal.flush())
        for name in NAMES:
            stored, holding = self.stored(name), (self.holdings[name] or [None])[-1]
            if stored is not None and holding is not None and holding.router is self.router:
                assert stored.log == holding.tokens
                assert stored.reason in (holding.ended, "abort")

    @rule(seconds=st.sampled_from([0, 0, 0.0005, 0.002]))
    def go(self, seconds: float) -> None:
        self.router.go(seconds)

    @rule()
    def die(self) -> None:
        self.router.die()
        self.dead.append(self.router)
        self.onlookers.clear()
        self.router = Router(self.file)

    @precondition(lambda self: bool(self.dead))
    @rule(choice=choices)
    def wake(self, choice: int) -> None:
        """A dead one goes on, as if locks did not work here."""
        self.flush()  # so that no thread of the living one is writing meanwhile
        before = [self.stored(name) for name in NAMES]
        self.dead[choice % len(self.dead)].wake()
        assert [self.stored(name) for name in NAMES] == before

    @rule(name=names)
    def follow(self, name: str) -> None:
        self.onlookers.append(Onlooker(name, self.router.journal.follow(name)))

    @precondition(lambda self: bool(self.onlookers))
    @rule(choice=choices)
    def poll(self, choice: int) -> None:
        reader = self.onlookers[choice % len(self.onlookers)]
        self.flush()
        update = self.router.run(reader.follower.poll())
        stored = self.stored(reader.name)
        assert (update is None) == (stored is None)
        reader.tokens += [token for delta in (update.deltas if update else []) for token in delta.token_ids]
        assert stored is None or reader.tokens == stored.log

    @invariant()
    def a_record_only_grows_and_is_what_its_holders_wrote(self) -> None:
        for name in NAMES:
            stored, former = self.stored(name), self.flushed.get(name)
            if stored is None:
                assert former is None
                continue
            assert any(each.tokens[: len(stored.log)] == stored.log for each in self.holdings[name])
            if former is not None:
                assert stored.epoch >= former.epoch
                assert stored.log[: len(former.log)] == former.log
                assert former.reason is None or stored == former
            self.flushed[name] = stored

    @invariant()
    def what_was_used_is_counted_once(self) -> None:
        with transaction(self.database, "DEFERRED"):  # else the thread that writes may end a record in between
            rows = {row.tenant: row for row in read_usage(self.database, 0, 1e11, None)}
            records = {name: self.stored(name) for name in NAMES}
        for name, stored in records.items():
            row = rows.get(name)
            if row is not None:
                assert (row.requests, row.prompt_tokens) == (1, 1)
                assert stored is not None
                assert row.completion_tokens <= len(stored.log)
            if stored is not None and stored.reason is not None:
                assert (0 if row is None else row.completion_tokens) == len(stored.log)

    def teardown(self) -> None:
        try:
            self.flush()
        finally:
            for router in [*self.dead, self.router]:
                router.run(router.journal.close())
                router.runner.close()
            self.database.close()

    def pick(self, choice: int, name: str) -> Holding | None:
        """A lease that its router believes in, also of a dead one. What is drawn does not depend on how many there are,
        which may be another number at the second time: routers do write at their own pace.
        """
        held = [each for each in self.holdings[name] if each.ended is None and not each.released]
        return held[choice % len(held)] if held else None

    def stored(self, name: str) -> Stored | None:
        row = self.database.execute(
            "SELECT epoch, owner, reason, record FROM records WHERE request_id = ?", (name,)
        ).fetchone()
        if row is None:
            return None
        epoch, owner, reason, record = row
        parts = self.database.execute("SELECT packed FROM logs WHERE record = ? ORDER BY start", (record,))
        log = unpack_tokens(b"".join(part for (part,) in parts)).tolist()
        return Stored(epoch, owner, [value for value in log if value >= 0], reason)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    Restarts.folder = tmp_path
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_routers_die_one_after_the_other_and_nothing_flushed_is_lost() -> None:
    run_state_machine_as_test(
        Restarts,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
