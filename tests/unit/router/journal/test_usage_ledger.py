"""Routers whose exchanges with Redis break off after any command, that die, wake up and repeat what they wrote, in any
order: what tenants used is counted once, never more, and nothing is left out that Redis has not lost.
"""

import asyncio
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from time import time
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.supervise import Backoff
from quire_router.core import metrics
from quire_router.core.generation import MAX_RESPONSE_OPTIONS_CHARACTERS, NO_USAGE, GenerationRequest, LoRA, Usage
from quire_router.core.usage import MAX_COUNTED_AGE, REMEMBERED, UsageRow, used
from quire_router.journal.base import Lease
from quire_router.journal.codec import JournalSettings, decode_usage
from quire_router.journal.redis.ledger import rows_of
from quire_router.journal.redis.redis_connection import LEDGER, keys
from quire_router.journal.redis.redis_journal import RedisJournal
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.support.journals import append_tokens
from tests.support.redis_server import RedisServer, redis_server, settable_clock

ROUTERS = 2
SETTINGS = JournalSettings(lease=9, settle=0, pause=0.001)  # leases expire when the test says so
routers = st.integers(0, ROUTERS - 1)
choices = st.integers(0, 11)  # which of those that there are (see pick)
numbers = count()


@dataclass
class Router:
    """A journal with an event loop of its own: while that does not run, the router is stopped, or dead. The next of its
    flushes break off after as many commands as ``cuts`` says, and their replies are lost.
    """

    url: str
    owner: str = field(default_factory=lambda: f"router-{next(numbers)}")
    cuts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = asyncio.Runner()
        self.journal = RedisJournal(self.url, owner=self.owner, settings=SETTINGS)
        writer: Any = self.journal._writer
        writer._backoff = Backoff(0.001, 0.001)
        self.execute = writer._target._connection.execute
        writer._target._connection.execute = self.execute_some

    async def execute_some(self, commands: Iterable[bytes]) -> list[Any]:
        commands = list(commands)
        if not self.cuts:
            return await self.execute(commands)
        done = self.cuts.pop(0)
        if done:
            await self.execute(commands[:done])
        raise RedisConnectionError("it broke off")

    def run(self, call: Any) -> Any:
        return self.runner.run(asyncio.wait_for(call, 20))

    def open(self, generation: GenerationRequest) -> Lease:
        async def run() -> Lease:
            return self.journal.open(generation)

        lease: Lease = self.run(run())
        return lease

    def go(self, turns: int, call: Any = None) -> None:
        """Goes on for a moment, with ``call`` if there is one: either may end in the middle of anything."""

        async def run() -> None:
            task = None if call is None else asyncio.ensure_future(call)
            for _ in range(turns):
                await asyncio.sleep(0)
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

        self.run(run())


@dataclass
class Holding:
    """A lease, and how many tokens the answer has that its owner knows."""

    router: Router
    lease: Lease
    tokens: int = 0
    live: bool = True


@dataclass
class Request:
    generation: GenerationRequest
    cached: int
    holdings: list[Holding] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.generation.request_id

    @property
    def prompt(self) -> int:
        return len(self.generation.prompt_token_ids)

    def usage(self, holding: Holding) -> Usage:
        return Usage(self.prompt, holding.tokens, self.cached)


class Ledger(RuleBasedStateMachine):
    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.database = redis.Redis.from_url(self.server.url)
        self.database.flushall()
        self.routers = [Router(self.server.url) for _ in range(ROUTERS)]
        self.dead: list[Router] = []
        self.requests: list[Request] = []
        self.ended: dict[str, Usage] = {}
        self.revived: set[str] = set()

    # What routers do

    @initialize(cached=st.lists(st.integers(0, 2), min_size=ROUTERS, max_size=ROUTERS))
    def begin(self, cached: list[int]) -> None:
        """Most of what can happen, happens to requests that have begun."""
        for router in range(ROUTERS):
            self.open(router, 2, None if router else 0, cached[router])
            self.append(router, 2)
            self.flush(router)

    @rule(router=routers, prompt=st.integers(1, 3), retention=st.sampled_from([None, 0]), cached=st.integers(0, 3))
    def open(self, router: int, prompt: int, retention: float | None, cached: int) -> None:
        name = f"r{len(self.requests)}"
        generation = GenerationRequest(
            name, "m", array("i", range(prompt)), SamplingParams(), tenant=f"of-{name}", retention=retention
        )
        request = Request(generation, min(cached, prompt))
        request.holdings.append(Holding(self.routers[router], self.routers[router].open(generation)))
        self.requests.append(request)

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices, tokens=st.integers(1, 3))
    def append(self, choice: int, tokens: int) -> None:
        if (held := self.pick(choice)) is not None:
            _, holding = held
            append_tokens(holding.router.journal, holding.lease, holding.tokens, [7] * tokens)
            holding.tokens += tokens

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices, unused=st.booleans(), flushes=st.booleans())
    def finish(self, choice: int, unused: bool, flushes: bool) -> None:
        if (held := self.pick(choice)) is not None:
            request, holding = held
            usage = NO_USAGE if unused and not holding.tokens else request.usage(holding)
            holding.router.journal.finish(holding.lease, FinishReason.STOP, "", usage)
            holding.live = False
            if flushes:
                holding.router.run(holding.router.journal.flush())

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices, flushes=st.booleans())
    def release(self, choice: int, flushes: bool) -> None:
        if (held := self.pick(choice)) is not None:
            request, holding = held
            holding.router.journal.release(holding.lease, request.usage(holding) if holding.tokens else NO_USAGE)
            holding.live = False
            if flushes:
                holding.router.run(holding.router.journal.flush())

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices, router=routers)
    def claim(self, choice: int, router: int) -> None:
        request, chosen = self.requests[choice % len(self.requests)], self.routers[router]
        self.flush(router)
        claimed = chosen.run(chosen.journal.claim(request.name))
        if claimed is not None:
            record, lease = claimed
            request.holdings.append(Holding(chosen, lease, len(record.choices[0].token_ids)))

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices, router=routers, deletes=st.booleans())
    def cancel(self, choice: int, router: int, deletes: bool) -> None:
        request, journal = self.requests[choice % len(self.requests)], self.routers[router].journal
        self.routers[router].run(journal.delete(request.name) if deletes else journal.cancel(request.name))

    @rule(router=routers)
    def flush(self, router: int) -> None:
        self.routers[router].run(self.routers[router].journal.flush())

    @rule(router=routers, turns=st.integers(1, 30))
    def go(self, router: int, turns: int) -> None:
        self.routers[router].go(turns)

    @rule(router=routers)
    def settle(self, router: int) -> None:
        self.routers[router].run(settled(self.routers[router].journal))

    @rule(router=routers, turns=st.integers(1, 30))
    def begin_to_settle(self, router: int, turns: int) -> None:
        self.routers[router].go(turns, settled(self.routers[router].journal))

    # What happens to them

    @rule(router=routers, done=st.integers(0, 8))
    def cut(self, router: int, done: int) -> None:
        self.routers[router].cuts.append(done)

    @rule(router=routers)
    def die(self, router: int) -> None:
        self.dead.append(self.routers[router])
        self.routers[router] = Router(self.server.url)

    @precondition(lambda self: bool(self.requests))
    @rule(choice=choices)
    def expire_lease(self, choice: int) -> None:
        record, _ = keys(self.requests[choice % len(self.requests)].name)
        if self.database.hexists(record, "lease_expires"):
            self.database.hset(record, "lease_expires", 1)

    @rule(choice=choices)
    def expire_record(self, choice: int) -> None:
        """One that has ended: its retention is over."""
        if self.ended:
            self.database.delete(*keys(sorted(self.ended)[choice % len(self.ended)]))

    # What always holds

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        for request in self.requests:
            fields = self.database.hgetall(keys(request.name)[0])
            told = int(fields.get(b"told", 0))
            end = used(decode_usage(fields[b"usage"]), request.prompt, told) if b"reason" in fields else None
            if fields and self.ended.get(request.name, end) != end:
                self.revived.add(request.name)  # its record was gone, and a router that had not heard it went on
            if end is not None:
                self.ended[request.name] = end
        rows = self.rows()
        for request in self.requests:
            row = rows.get(f"of-{request.name}")
            most = max(holding.tokens for holding in request.holdings)
            if row is not None:
                assert row.requests == 1
                assert row.prompt_tokens == request.prompt
                assert row.cached_tokens <= request.cached
                assert row.completion_tokens <= most
                if request.name in self.ended and request.name not in self.revived:
                    assert row.completion_tokens <= self.ended[request.name].completion_tokens

    def teardown(self) -> None:
        try:
            for router in self.routers:
                router.run(router.journal.flush())
            for request in self.requests:  # whoever has not ended by now never does
                record, _ = keys(request.name)
                if self.database.hexists(record, "lease_expires"):
                    self.database.hset(record, "lease_expires", 1)
            for name, state in self.database.hgetall(LEDGER[1]).items():
                if not state.startswith(b"gone"):
                    self.database.zadd(LEDGER[0], {name: 1})  # hours pass
            self.settle(0)
            self.nothing_is_counted_twice()
            self.all_is_counted()
            before, ended = self.rows(), set(self.ended)
            for router in self.dead:  # those that seemed dead come back, and repeat what they wrote
                router.cuts.clear()
                router.run(router.journal.flush())
            self.settle(0)
            self.nothing_is_counted_twice()
            after = self.rows()
            assert all(after[of] == row for of, row in before.items() if of[3:] in ended - self.revived)
        finally:
            for router in self.routers + self.dead:
                router.run(router.journal.close())
                router.runner.close()
            self.database.close()

    def all_is_counted(self) -> None:
        rows = self.rows()
        for request in self.requests:
            if request.name in self.revived:
                continue
            row = rows.get(f"of-{request.name}")
            if (usage := self.ended.get(request.name)) is None:
                told = int(self.database.hget(keys(request.name)[0], "told") or 0)
                assert told == 0 or (row is not None and row.completion_tokens >= told)
            elif usage == NO_USAGE:
                assert row is None
            else:
                assert row is not None
                assert row.completion_tokens == usage.completion_tokens
                assert row.cached_tokens >= usage.cached_tokens

    # Helpers

    def pick(self, choice: int) -> tuple[Request, Holding] | None:
        """A lease that its router believes in, also of a router that does not run. What is drawn does not depend on how
        many there are, which may be another number at the second time: routers do write at their own pace.
        """
        held = [(request, each) for request in self.requests for each in request.holdings if each.live]
        return held[choice % len(held)] if held else None

    def rows(self) -> dict[str, UsageRow]:
        """The ledger by tenant, of which each request has its own; over all hours, as one may end during the test."""
        rows: dict[str, UsageRow] = {}
        for key in self.database.scan_iter(f"{LEDGER[3]}*"):
            for row in rows_of(0, self.database.hgetall(key)):
                before = rows.get(row.tenant)
                counts = (0, 0, 0, 0) if before is None else before.counts
                rows[row.tenant] = UsageRow(0, row.tenant, row.model, *map(sum, zip(row.counts, counts, strict=True)))
        return rows


async def settled(journal: RedisJournal, grace: float = 0.0) -> None:
    await journal._store._ledger.settle(grace)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def test_what_requests_used_is_counted_once(server: RedisServer) -> None:
    Ledger.server = server
    run_state_machine_as_test(
        Ledger,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def lately(router: Router, tenant: str | None = None) -> list[UsageRow]:
    rows: list[UsageRow] = router.run(router.journal.usage(time() - 7200, time() + 1, tenant))
    return rows


def usage_of(router: Router) -> list[tuple[str, str, int, int, int, int]]:
    """Tenant, model, requests and tokens of each row."""
    return [(row.tenant, row.model, *row.counts) for row in lately(router)]


@pytest.fixture
def router(server: RedisServer) -> Iterator[Router]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    router = Router(server.url)
    yield router
    router.run(router.journal.close())
    router.runner.close()


def request_of(name: str = "r", **fields: Any) -> GenerationRequest:
    return GenerationRequest(name, "m", array("i", [1, 2, 3]), SamplingParams(), tenant="shop", **fields)


def test_rows_are_of_tenants_and_of_models_or_their_adapters(router: Router) -> None:
    adapter = request_of("b", lora=LoRA("an/adapter", b"d"))
    for generation in (request_of("a"), adapter, replace(request_of("c"), tenant="")):
        lease = router.open(generation)
        append_tokens(router.journal, lease, 0, [5, 6])
        router.journal.finish(lease, FinishReason.STOP, "", Usage(3, 2, 1))
    router.run(router.journal.flush())
    assert usage_of(router) == [("", "m", 1, 3, 1, 2), ("shop", "an/adapter", 1, 3, 1, 2), ("shop", "m", 1, 3, 1, 2)]
    [only] = lately(router, "")
    assert (only.tenant, only.hour % 3600) == ("", 0)
    assert router.run(router.journal.usage(only.hour + 1, only.hour + 7200)) == []
    assert router.run(router.journal.usage(only.hour - 7200, only.hour)) == []


def test_an_answer_that_is_given_up_is_counted_at_once_and_the_rest_of_it_when_it_ends(router: Router) -> None:
    lease = router.open(request_of(stream=True))
    append_tokens(router.journal, lease, 0, [5, 6])
    router.journal.release(lease, Usage(3, 2, 1))
    router.run(router.journal.flush())
    assert usage_of(router) == [("shop", "m", 1, 3, 1, 2)]
    _, lease = router.run(router.journal.claim("r"))
    append_tokens(router.journal, lease, 2, [7])
    router.journal.finish(lease, FinishReason.STOP, "", Usage(3, 3, 1))
    router.run(router.journal.flush())
    assert usage_of(router) == [("shop", "m", 1, 3, 1, 3)]


@pytest.mark.parametrize("done", range(4))
def test_what_a_router_could_not_count_another_one_counts_even_if_the_record_is_gone(
    server: RedisServer, router: Router, done: int
) -> None:
    """It dies between two commands of its last flush: noted, written, ended, counted."""
    dying = Router(server.url)
    lease = dying.open(request_of(retention=0))
    dying.run(dying.journal.flush())
    append_tokens(dying.journal, lease, 0, [5, 6])
    dying.journal.finish(lease, FinishReason.STOP, "", Usage(3, 2, 1))
    dying.cuts.append(done)
    while dying.cuts:
        dying.go(1)
    with redis.Redis.from_url(server.url) as client:
        if done == 3:
            client.delete(*keys("r"))  # its ten seconds are over
        else:
            client.hset(keys("r")[0], "lease_expires", 1)
    router.run(settled(router.journal))
    delivered = [("shop", "m", 1, 3, 0, 2)] if done == 2 else []
    assert usage_of(router) == ([("shop", "m", 1, 3, 1, 2)] if done == 3 else delivered)
    dying.run(dying.journal.close())
    dying.runner.close()


def test_a_request_that_is_too_large_to_be_stored_is_counted_once(router: Router) -> None:
    lease = router.open(request_of(response_options="x" * (MAX_RESPONSE_OPTIONS_CHARACTERS + 1)))
    router.journal.finish(lease, FinishReason.STOP, "", Usage(3, 2, 1))
    router.cuts += [0, 1, 2]
    router.run(router.journal.flush())
    assert usage_of(router) == [("shop", "m", 1, 3, 1, 2)]
    assert router.run(router.journal.read("r")) is None


def test_a_request_that_runs_is_looked_at_again_later(server: RedisServer, router: Router) -> None:
    lease = router.open(request_of())
    append_tokens(router.journal, lease, 0, [5, 6])
    router.run(router.journal.flush())
    with redis.Redis.from_url(server.url) as client:
        client.zadd(LEDGER[0], {"r": 1})
        router.run(settled(router.journal, 20.0))
        seconds, _ = client.time()
        assert client.zscore(LEDGER[0], "r") > seconds * 1000 - 10_000
    assert usage_of(router) == []


@pytest.mark.parametrize("starts_later", [False, True])
def test_a_note_is_looked_at_in_time_after_a_clock_that_went_back(tmp_path: Path, starts_later: bool) -> None:
    with redis_server(clock=settable_clock(tmp_path)) as own:
        assert own.clock is not None
        dying = Router(own.url)
        looks = None if starts_later else Router(own.url)
        if looks is not None:
            looks.run(settled(looks.journal))
        lease = dying.open(request_of())
        append_tokens(dying.journal, lease, 0, [5, 6])
        dying.run(dying.journal.flush())
        released = dying.open(request_of("released", stream=True))
        append_tokens(dying.journal, released, 0, [5])
        dying.journal.release(released, Usage(3, 1))
        dying.run(dying.journal.flush())
        own.clock.move(-600)
        looks = looks or Router(own.url)
        with redis.Redis.from_url(own.url) as client:
            client.hset(keys("r")[0], "lease_expires", 1)
            looks.run(settled(looks.journal, -1.0))
            rows = [row.counts for row in lately(looks)]  # of two hours, if the clock went back to the former
            assert [sum(column) for column in zip(*rows, strict=True)] == [2, 6, 0, 3]
            seconds, _ = client.time()
            assert client.zscore(LEDGER[0], "released") > (seconds + 3600) * 1000
        for each in (dying, looks):
            each.run(each.journal.close())
            each.runner.close()


def test_a_record_that_is_gone_without_a_trace_of_its_usage_is_a_warning(
    server: RedisServer, router: Router, caplog: pytest.LogCaptureFixture
) -> None:
    before = metrics.USAGE_LOST._value.get()
    lease = router.open(request_of())
    append_tokens(router.journal, lease, 0, [5, 6])
    router.run(router.journal.flush())
    with redis.Redis.from_url(server.url) as client:
        client.delete(*keys("r"))
        with caplog.at_level(logging.WARNING):
            router.run(settled(router.journal))
        assert "request r may not have been counted: its record is gone" in caplog.text
        assert metrics.USAGE_LOST._value.get() == before + 1
        assert not client.zcard(LEDGER[0])
        assert not client.hlen(LEDGER[1])


def test_what_ended_hours_ago_is_not_counted(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis may have counted it and forgotten that, if it answers only now."""
    before = metrics.USAGE_LOST._value.get()
    lease = router.open(request_of())
    append_tokens(router.journal, lease, 0, [5, 6])
    router.run(router.journal.flush())
    router.journal.finish(lease, FinishReason.STOP, "", Usage(3, 2))
    request: Any = router.journal._buffer.get("r")
    request.closed_at -= MAX_COUNTED_AGE
    router.run(router.journal.flush())
    assert usage_of(router) == []
    assert metrics.USAGE_LOST._value.get() == before + 1
    assert MAX_COUNTED_AGE + 3600 <= REMEMBERED


def test_what_was_counted_is_remembered_for_hours_and_no_longer(server: RedisServer, router: Router) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.zadd(LEDGER[2], {f"old-{number}": number for number in range(20)})
        for name in "abc":
            router.journal.finish(router.open(request_of(name)), FinishReason.STOP, "", Usage(3, 2))
            router.run(router.journal.flush())
        assert client.zcard(LEDGER[2]) == 3
        assert REMEMBERED - 50 < client.ttl(LEDGER[2]) <= REMEMBERED
        [hour] = client.keys(f"{LEDGER[3]}*")
        assert 0 < SETTINGS.usage_retention - client.ttl(hour) + 1 < 50
        assert not client.zcard(LEDGER[0])


def test_a_full_redis_counts_all_or_nothing_and_later_all(server: RedisServer, router: Router) -> None:
    lease = router.open(request_of())
    append_tokens(router.journal, lease, 0, [5, 6])
    router.run(router.journal.flush())
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        router.journal.finish(lease, FinishReason.STOP, "", Usage(3, 2))
        router.go(300)
        assert usage_of(router) == []
        client.config_set("maxmemory", 0)
    router.run(router.journal.flush())
    assert usage_of(router) == [("shop", "m", 1, 3, 0, 2)]


def test_deleting_what_a_dead_router_left_counts_it_first(server: RedisServer, router: Router) -> None:
    lease = router.open(request_of(stream=True))
    append_tokens(router.journal, lease, 0, [5, 6])
    router.run(router.journal.flush())
    other = Router(server.url)
    with redis.Redis.from_url(server.url) as client:
        client.hset(keys("r")[0], "lease_expires", 1)
        assert other.run(other.journal.delete("r"))
    assert usage_of(other) == [("shop", "m", 1, 3, 0, 2)]
    other.run(other.journal.close())
    other.runner.close()
