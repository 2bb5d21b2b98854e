"""Routers that open, claim, write, let go, stop, wake up and die in any order, on one real Redis that may lose all it
has: who holds a record writes it, and nobody else.
"""

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from quire_proto.errors import QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest
from quire_router.journal.base import Follower, Lease
from quire_router.journal.codec import JournalSettings, unpack_tokens
from quire_router.journal.redis.redis_connection import keys
from quire_router.journal.redis.redis_journal import RedisJournal

from tests.support.journals import Heard, append_tokens
from tests.support.redis_server import RedisServer, redis_server

ROUTERS = 3
NAMES = ["a", "b"]
SETTINGS = JournalSettings(lease=9, settle=0, pause=0.001)  # leases expire when the test says so
routers = st.integers(0, ROUTERS - 1)
names = st.sampled_from(NAMES)
choices = st.integers(0, 11)  # which of those that there are (see pick)
numbers = count()


@dataclass
class Router:
    """A journal with an event loop of its own: while that does not run, the router is stopped, or dead."""

    url: str
    owner: str = field(default_factory=lambda: f"router-{next(numbers)}")
    heard: Heard = field(default_factory=Heard)

    def __post_init__(self) -> None:
        self.runner = asyncio.Runner()
        self.journal = RedisJournal(self.url, owner=self.owner, settings=SETTINGS)
        self.journal.set_listener(self.heard)

    def run(self, call: Any) -> Any:
        return self.runner.run(asyncio.wait_for(call, 20))

    def open(self, generation: GenerationRequest) -> Lease:
        async def run() -> Lease:
            return self.journal.open(generation)

        lease: Lease = self.run(run())
        return lease

    def go(self, turns: int) -> None:
        """Goes on for a moment, which may end in the middle of anything."""

        async def run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(run())


@dataclass
class Holding:
    """What one lease stands for: what had been sent before, and what its owner added."""

    router: Router
    lease: Lease
    base: list[int]
    added: list[int] = field(default_factory=list)
    live: bool = True

    @property
    def tokens(self) -> list[int]:
        return self.base + self.added


@dataclass
class Onlooker:
    """A follower, and the tokens it got."""

    router: Router
    name: str
    follower: Follower
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """A record as Redis has it."""

    epoch: int
    owner: str
    log: list[int]
    fields: dict[bytes, bytes]

    @property
    def ended(self) -> bool:
        return b"reason" in self.fields


class Fencing(RuleBasedStateMachine):
    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.database = redis.Redis.from_url(self.server.url)
        self.database.flushall()
        self.routers = [Router(self.server.url) for _ in range(ROUTERS)]
        self.dead: list[Router] = []
        self.holdings: dict[str, list[Holding]] = {name: [] for name in NAMES}
        self.former: dict[str, Stored] = {}
        self.onlookers: list[Onlooker] = []
        self.tokens = count()
        self.lost = False

    # What routers do

    @rule(router=routers, name=names)
    def open(self, router: int, name: str) -> None:
        if not self.holdings[name]:
            generation = GenerationRequest(name, "m", array("i", [1]), SamplingParams(seed=3))
            chosen = self.routers[router]
            self.holdings[name].append(Holding(chosen, chosen.open(generation), []))

    @rule(choice=choices, name=names, length=st.integers(1, 3))
    def append(self, choice: int, name: str, length: int) -> None:
        holding = self.pick(choice, name)
        if holding is not None:
            self.add(holding, length)

    @rule(choice=choices, name=names, really=st.booleans())
    def finish(self, choice: int, name: str, really: bool) -> None:
        holding = self.pick(choice, name)
        if holding is not None and really:
            holding.router.journal.finish(holding.lease, FinishReason.STOP)
            holding.live = False

    @rule(choice=choices, name=names)
    def release(self, choice: int, name: str) -> None:
        holding = self.pick(choice, name)
        if holding is not None:
            holding.router.journal.release(holding.lease)
            holding.live = False

    @rule(router=routers, name=names, expires=st.booleans(), settled=st.booleans())
    def claim(self, router: int, name: str, expires: bool, settled: bool) -> None:
        chosen = self.routers[router]
        if settled:
            self.flush(router)
        if expires:
            self.expire(name)
        before, was_held = self.stored(name), self.is_leased(name)
        claimed = chosen.run(chosen.journal.claim(name))
        if claimed is None:
            mine = any(each.router is chosen for each in self.holdings[name])
            assert before is None or before.ended or was_held or mine or b"cancelled" in before.fields
            return
        record, lease = claimed
        self.holdings[name].append(Holding(chosen, lease, record.choices[0].token_ids))
        if settled:  # otherwise its own writes come before its claim
            assert before is not None
            assert not before.ended
            assert not was_held
            assert (lease.epoch, lease.owner) == (before.epoch + 1, chosen.owner)
            assert record.choices[0].token_ids == before.log

    @rule(router=routers, name=names, really=st.integers(0, 2))
    def cancel(self, router: int, name: str, really: int) -> None:
        chosen = self.routers[router]
        if not really:
            chosen.run(chosen.journal.cancel(name))

    @rule(router=routers)
    def flush(self, router: int) -> None:
        self.routers[router].run(self.routers[router].journal.flush())

    @rule(router=routers, turns=st.integers(1, 30))
    def go(self, router: int, turns: int) -> None:
        self.routers[router].go(turns)

    # What happens to them

    @rule(router=routers)
    def die(self, router: int) -> None:
        self.dead.append(self.routers[router])
        self.routers[router] = Router(self.server.url)

    @rule(name=names)
    def expire(self, name: str) -> None:
        if self.is_leased(name):
            self.database.hset(keys(name)[0], "lease_expires", 1)

    @precondition(lambda self: any(self.holdings.values()))
    @rule(really=st.integers(0, 3))
    def lose_everything(self, really: int) -> None:
        if not really:
            self.database.close()
            self.server.restart()
            self.former.clear()
            self.lost = True

    # Onlookers

    @rule(router=routers, name=names)
    def follow(self, router: int, name: str) -> None:
        chosen = self.routers[router]
        self.onlookers.append(Onlooker(chosen, name, chosen.journal.follow(name)))

    @precondition(lambda self: bool(self.onlookers))
    @rule(choice=choices)
    def poll(self, choice: int) -> None:
        self.poll_with(self.onlookers[choice % len(self.onlookers)])

    # What always holds

    @invariant()
    def a_record_is_what_its_holder_wrote(self) -> None:
        for name in NAMES:
            stored, former = self.stored(name), self.former.get(name)
            if stored is None:
                assert former is None
                continue
            writers = [each for each in self.holdings[name] if wrote(each, stored)]
            assert writers, f"nobody holds {stored}"
            assert any(each.tokens[: len(stored.log)] == stored.log for each in writers)
            if former is not None:
                assert stored.epoch >= former.epoch
                assert self.lost or stored.log[: len(former.log)] == former.log
                assert stored.epoch > former.epoch or stored.owner == former.owner
                assert not former.ended or stored == former
            self.former[name] = stored

    def teardown(self) -> None:
        try:
            self.settle()
            for reader in self.onlookers:
                self.poll_with(reader)
        finally:
            for router in self.routers + self.dead:
                router.run(router.journal.close())
                router.runner.close()
        self.a_record_is_what_its_holder_wrote()  # also after those that seemed dead had their say
        self.database.close()

    def settle(self) -> None:
        """Whoever believes to hold a record writes to it, and learns whether that is so: at the second time at last, as
        the first one restores what a Redis lost, and who held it later may come after who held it before.
        """
        for name in NAMES:
            for _ in range(2):
                for holding in filter(self.is_alive, self.holdings[name]):
                    self.add(holding, 1)
                for router in self.routers:
                    router.run(router.journal.flush())
            stored = self.stored(name)
            for holding in filter(self.is_alive, self.holdings[name]):
                if stored is not None and wrote(holding, stored) and stored.owner:
                    assert stored.ended or stored.log == holding.tokens
                else:
                    assert name in holding.router.heard.taken
        self.a_record_is_what_its_holder_wrote()

    # Helpers

    def pick(self, choice: int, name: str) -> Holding | None:
        """A lease that its router believes in, also of a router that does not run. What is drawn does not depend on how
        many there are, which may be another number at the second time: routers do write at their own pace.
        """
        held = [each for each in self.holdings[name] if each.live]
        return held[choice % len(held)] if held else None

    def is_alive(self, holding: Holding) -> bool:
        return holding.live and holding.router in self.routers

    def add(self, holding: Holding, length: int) -> None:
        """Tells so many tokens, which no other lease ever tells."""
        token_ids = [next(self.tokens) for _ in range(length)]
        append_tokens(holding.router.journal, holding.lease, len(holding.tokens), token_ids)
        holding.added += token_ids

    def stored(self, name: str) -> Stored | None:
        record, tokens = keys(name)
        fields: dict[bytes, bytes] = self.database.hgetall(record)
        if not fields:
            return None
        log = unpack_tokens(self.database.get(tokens) or b"").tolist()
        fields.pop(b"lease_expires", None)
        return Stored(int(fields[b"epoch"]), fields[b"owner"].decode(), [v for v in log if v >= 0], fields)

    def is_leased(self, name: str) -> bool:
        seconds, _ = self.database.time()
        return int(self.database.hget(keys(name)[0], "lease_expires") or 0) > seconds * 1000

    def poll_with(self, reader: Onlooker) -> None:
        reader.router.run(reader.router.journal.flush())  # so that nothing is written between the two looks
        try:
            tail = reader.router.run(reader.follower.poll())
        except QuireError:
            assert self.lost
            return
        stored = self.stored(reader.name)
        assert (tail is None) == (stored is None)
        if tail is None or stored is None:
            return
        reader.tokens += [token_id for delta in tail.deltas for token_id in delta.token_ids]
        assert reader.tokens == stored.log or (self.lost and not tail.deltas and len(stored.log) < len(reader.tokens))


def wrote(holding: Holding, stored: Stored) -> bool:
    """Whether a record is a lease's; one that was ended for nobody is anybody's before."""
    return not stored.owner or (holding.lease.epoch, holding.lease.owner) == (stored.epoch, stored.owner)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def test_only_the_owner_of_a_record_writes_it(server: RedisServer) -> None:
    Fencing.server = server
    run_state_machine_as_test(
        Fencing,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
