"""Whatever is asked of a record, by whoever believes to hold it and in whatever order: each script does on a real Redis
what a model of a few lines says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha1
from typing import Any, ClassVar
from zlib import crc32

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
from quire_router.journal.redis.redis_connection import (
    APPEND,
    BACKGROUND,
    CANCEL,
    CLAIM,
    DELETE,
    FINISH,
    INDEX,
    OPEN,
    RELEASE,
    LuaScript,
    ScriptReply,
    keys,
    tombstone,
)
from redis.exceptions import OutOfMemoryError, ResponseError

from tests.support.redis_server import RedisServer, redis_server

DONE, STALE, LOST, CANCELLED = ScriptReply.DONE, ScriptReply.STALE, ScriptReply.LOST, ScriptReply.CANCELLED
DELETED = ScriptReply.DELETED
RECORD, TOKENS = KEYS = keys("r")
ALL_KEYS = *KEYS, tombstone("r")
TOMBSTONE_TTL = 700
LEASE, RUNNING, RELEASED, RETENTION = 9_000, 5_000, 900, 60  # ms, and s
HOLDER = ""  # stands for whoever has the record
owners = st.sampled_from(["me", "you"])
anybody = st.sampled_from([HOLDER, HOLDER, HOLDER, "me", "you"])
ages = st.sampled_from([0, 0, 0, 0, -1, 1])
logs = st.binary(max_size=8)


@dataclass(frozen=True)
class Model:
    """A record as it ought to be."""

    request: bytes
    owner: str
    epoch: int
    log: bytes = b""
    held: bool = True
    overdue: bool = False
    kept: int = RUNNING
    cancelled: bool = False
    claim: str | None = None
    reason: str | None = None

    def refusal(self, owner: str, epoch: int) -> ScriptReply | None:
        if epoch > self.epoch:
            return LOST
        return None if (owner, epoch) == (self.owner, self.epoch) else STALE

    def ended(self, reason: str) -> "Model":
        return replace(self, reason=reason, held=False, overdue=False, kept=RETENTION)

    def aborted(self) -> "Model":
        return replace(self.ended("abort"), owner="", epoch=self.epoch + 1)

    def leased_by(self, owner: str, epoch: int) -> "Model":
        return replace(self, owner=owner, epoch=epoch, held=True, overdue=False, kept=RUNNING)


class Scripts(RuleBasedStateMachine):
    server: ClassVar[RedisServer]

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis.Redis.from_url(self.server.url)
        self.redis.flushall()
        self.model: Model | None = None
        self.deleted: bytes | None = None  # the request of the record that was deleted last

    def run_script(self, script: LuaScript, *arguments: str | int | bytes) -> Any:
        return self.redis.eval(script.source, len(ALL_KEYS), *ALL_KEYS, *arguments)

    def lease(self, owner: str, age: int) -> tuple[str, int]:
        """A lease that somebody believes in: the holder's, an older one, or one that Redis has forgotten."""
        if self.model is None:
            return owner or "me", max(1, 1 + age)
        return owner or self.model.owner, max(1, self.model.epoch + age)

    @initialize()
    def begin(self) -> None:
        """Most of what can happen, happens to a record that has not ended."""
        self.open("me", 0, b"A")
        self.append("me", 0, 0, b"told")

    @precondition(lambda self: self.model is None or self.model.reason is not None)
    @rule()
    def begin_again(self) -> None:
        self.redis.delete(*ALL_KEYS)
        self.model = self.deleted = None
        self.begin()

    @rule(owner=anybody, age=st.sampled_from([0, -1, 1]), request=st.sampled_from([b"A", b"A", b"B"]))
    def open(self, owner: str, age: int, request: bytes) -> None:
        owner, epoch = self.lease(owner, age)
        before = self.model
        expected = DONE
        if before is None and request == self.deleted:
            expected = DELETED
        elif before is None:
            self.model = Model(request, owner, epoch)
        elif request != before.request or (before.refusal(owner, epoch) is STALE):
            expected = STALE
        elif before.reason is not None:
            expected = DONE if before.refusal(owner, epoch) is None else STALE
        else:
            log = before.log if epoch == before.epoch else b""
            self.model = replace(before.leased_by(owner, epoch), log=log)
        seal = crc32(request)
        assert self.run_script(OPEN, owner, epoch, LEASE, RUNNING, request, b"p", b"", seal, "") == expected

    @rule(owner=anybody, age=ages, back=st.integers(-1, 4), packed=logs)
    def append(self, owner: str, age: int, back: int, packed: bytes) -> None:
        owner, epoch = self.lease(owner, age)
        offset = max(0, len(self.model.log) - back if self.model else -back)
        answer = self.refused(owner, epoch)
        log = packed
        if answer is None and self.model is not None and self.model.reason is None:
            if offset > len(self.model.log):
                answer = LOST
            else:
                log = self.model.log[:offset] + packed
                answer = CANCELLED if self.model.cancelled else DONE
                self.model = replace(self.model.leased_by(owner, epoch), log=log)
        terms = owner, epoch, LEASE, RUNNING, offset, packed, crc32(log), "", ""
        assert self.run_script(APPEND, *terms) == (DONE if answer is None else answer)

    @rule(
        owner=anybody,
        age=ages,
        reason=st.sampled_from(["stop", "length"]),
        beyond=st.sampled_from([0, 0, 1, None]),
    )
    def finish(self, owner: str, age: int, reason: str, beyond: int | None) -> None:
        owner, epoch = self.lease(owner, age)
        length = len(self.model.log) if self.model else 0
        answer = self.refused(owner, epoch)
        if answer is None and self.model is not None and self.model.reason is None:
            if beyond:
                answer = LOST
            else:
                self.model = self.model.ended("abort" if self.model.cancelled else reason)
        terms = owner, epoch, RETENTION, reason, "why", "1 2 3", -1 if beyond is None else length + beyond
        assert self.run_script(FINISH, *terms) == (DONE if answer is None else answer)

    @rule(owner=anybody, age=ages)
    def release(self, owner: str, age: int) -> None:
        owner, epoch = self.lease(owner, age)
        answer = self.refused(owner, epoch)
        if answer is None and self.model is not None and self.model.reason is None:
            cancelled = self.model.cancelled
            self.model = (
                self.model.aborted() if cancelled else replace(self.model, held=False, overdue=False, kept=RELEASED)
            )
        assert self.run_script(RELEASE, owner, epoch, RELEASED, RETENTION) == (DONE if answer is None else answer)

    @rule(owner=owners, name=st.sampled_from(["first", "second", "third"]))
    def claim(self, owner: str, name: str) -> None:
        before, found = self.model, False
        if before is not None and before.reason is None:
            if before.claim == name:
                found = True  # the answer was not heard: it is given again, and changes nothing
            elif before.overdue:
                self.model = replace(before, overdue=False)  # it ends a lease from now on
            elif not before.held and before.cancelled:
                self.model = before.aborted()
            elif not before.held:
                self.model, found = replace(before.leased_by(owner, before.epoch + 1), claim=name), True
        answer = self.run_script(CLAIM, owner, name, LEASE, RUNNING, RETENTION)
        if not found or self.model is None:
            assert answer is None
            return
        fields = dict(zip(answer[0][::2], answer[0][1::2], strict=True))
        assert (fields[b"request"], answer[1]) == (self.model.request, self.model.log)
        assert (fields[b"owner"].decode(), int(fields[b"epoch"])) == (self.model.owner, self.model.epoch)

    @rule()
    def cancel(self) -> None:
        before = self.model
        going = before is not None and before.reason is None
        if before is not None and going:
            self.model = replace(before, cancelled=True) if before.held else before.aborted()
        assert self.run_script(CANCEL, RETENTION) == int(going)

    @rule(buffered=st.sampled_from([None, b"A", b"B"]))
    def delete(self, buffered: bytes | None) -> None:
        before = self.model
        digest = "" if buffered is None else sha1(buffered, usedforsecurity=False).hexdigest()
        if before is not None or buffered is not None:
            self.deleted = buffered if before is None else before.request
        self.model = None
        assert self.run_script(DELETE, TOMBSTONE_TTL, digest) == int(before is not None)

    @rule(overdue=st.booleans())
    def expire(self, overdue: bool) -> None:
        """The lease expires, or the clock goes back."""
        if self.model is not None and self.model.held:
            self.redis.hset(RECORD, "lease_expires", 10**15 if overdue else 1)
            self.model = replace(self.model, held=overdue, overdue=overdue)

    @rule(whole=st.sampled_from([False, False, False, True]))
    def lose(self, whole: bool) -> None:
        self.redis.delete(TOKENS)
        if whole:
            self.redis.delete(RECORD)
            self.model = None
        elif self.model is not None:
            self.redis.hset(RECORD, "sum", 0)
            self.model = replace(self.model, log=b"")

    @rule()
    def leave_a_stray_log(self) -> None:
        if self.model is None:
            self.redis.set(TOKENS, b"stray", ex=RUNNING)

    @invariant()
    def redis_holds_what_the_model_holds(self) -> None:
        fields = {name.decode(): value for name, value in self.redis.hgetall(RECORD).items()}
        kept = self.redis.ttl(tombstone("r"))
        assert (TOMBSTONE_TTL - 50 < kept <= TOMBSTONE_TTL) if self.deleted is not None else kept == -2
        if self.model is None:
            assert not fields
            return
        model, log = self.model, self.redis.get(TOKENS) or b""
        seconds, _ = self.redis.time()
        remains = int(fields.get("lease_expires", 0)) - seconds * 1000
        claim = fields.get("claim")
        assert model == Model(
            request=fields["request"],
            owner=fields["owner"].decode(),
            epoch=int(fields["epoch"]),
            log=log,
            held=remains > 0,
            overdue=remains > LEASE + 1000,
            kept=model.kept if self.is_kept(model) else -1,
            cancelled="cancelled" in fields,
            claim=None if claim is None else claim.decode(),
            reason=fields["reason"].decode() if "reason" in fields else None,
        )
        assert int(fields.get("sum", 0)) == crc32(log)

    def is_kept(self, model: Model) -> bool:
        """Whether both keys are kept for as long as they ought to be, from a moment ago on."""
        ttls = [self.redis.ttl(key) for key in (RECORD, TOKENS) if self.redis.exists(key)]
        return all(model.kept - 50 < ttl <= model.kept for ttl in ttls)

    def refused(self, owner: str, epoch: int) -> ScriptReply | None:
        return LOST if self.model is None else self.model.refusal(owner, epoch)

    def teardown(self) -> None:
        self.redis.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def test_each_script_does_what_the_model_says(server: RedisServer) -> None:
    Scripts.server = server
    run_state_machine_as_test(
        Scripts,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("epoch", [b"", b"x", b"nan", b"inf", b"1.5", b"-1", b"1e3", b"9" * 16])
def test_no_script_accepts_an_invalid_epoch(server: RedisServer, epoch: bytes) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.hset(RECORD, mapping={"owner": "me", "epoch": epoch, "request": "A"})
        before = client.hgetall(RECORD)
        for script in (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE):
            with pytest.raises(ResponseError, match="DAMAGED"):
                client.eval(script.source, len(ALL_KEYS), *ALL_KEYS, "me", 1, 0, 0, 0, b"", 0)
        assert client.hgetall(RECORD) == before


def arguments(script: LuaScript) -> tuple[str | int | bytes, ...]:
    """What the owner of a record, whose log is ``told``, asks a script."""
    holder = "me", 2
    return {
        OPEN: (*holder, LEASE, RUNNING, b"A", b"p", b"", 0, ""),
        APPEND: (*holder, LEASE, RUNNING, 2, b"x", 0, ""),
        FINISH: (*holder, RETENTION, "stop", "", "1 2 3", -1),
        RELEASE: (*holder, RELEASED, RETENTION),
        CLAIM: ("you", "claim", LEASE, RUNNING, RETENTION),
        CANCEL: (RETENTION,),
        DELETE: (TOMBSTONE_TTL, ""),
    }[script]


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("state", ["held", "released", "a stray log", "an older owner's"])
def test_a_write_refused_for_lack_of_memory_changes_nothing(
    server: RedisServer, state: str, *, cancelled: bool
) -> None:
    with redis.Redis.from_url(server.url) as client:
        for script in (OPEN, APPEND, FINISH, RELEASE, CLAIM, CANCEL, DELETE):
            client.flushall()
            if state != "a stray log":
                client.eval(OPEN.source, len(ALL_KEYS), *ALL_KEYS, "me", 2, LEASE, RUNNING, b"A", b"p", b"", 0, "")
            client.set(TOKENS, b"told", ex=RUNNING)
            if state == "released":
                client.eval(RELEASE.source, 2, RECORD, TOKENS, "me", 2, RELEASED, RETENTION)
            if state == "an older owner's":
                client.hset(RECORD, "epoch", 1)
            if cancelled and state != "a stray log":
                client.hset(RECORD, "cancelled", 1)
            before = client.hgetall(RECORD), client.get(TOKENS)
            client.config_set("maxmemory", 1)
            try:
                client.eval(script.source, len(ALL_KEYS), *ALL_KEYS, *arguments(script))
                refused = False
            except OutOfMemoryError:
                refused = True
            finally:
                client.config_set("maxmemory", 0)
            after = client.hgetall(RECORD), client.get(TOKENS)
            assert not refused or after == before
            grows = (
                script is OPEN
                or (script is DELETE and state != "a stray log")
                or (script is APPEND and state == "held")
            )
            assert refused or not grows


def test_the_index_of_background_requests_has_each_leases_expiry_and_expires(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        assert client.eval(INDEX.source, 1, BACKGROUND, "r", LEASE, RUNNING) == 1
        seconds, _ = client.time()
        assert LEASE - 5_000 < client.zscore(BACKGROUND, "r") - seconds * 1000 <= LEASE + 1000
        assert RUNNING - 50 < client.ttl(BACKGROUND) <= RUNNING
