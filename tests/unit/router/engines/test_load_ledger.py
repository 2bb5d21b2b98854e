"""The ledger's sums, compared with a recount after any operations, and its use of engines' reports."""

from collections.abc import Mapping
from math import exp

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from quire.v1 import engine_pb2, load_pb2
from quire_router.engines.load import MAX_PEERS, SETTLE_SECONDS, LedgerEntry, LoadLedger, UnseenLoadEstimate
from quire_router.engines.load_messages import (
    MAX_PAYLOAD_BYTES,
    Counts,
    InvalidLoadMessageError,
    LoadMessage,
    RouterLoad,
)
from quire_router.placement.engine_table import EngineTable

ENGINES = st.sampled_from(["a:1", "b:1", "c:1"])
ROUTERS = st.sampled_from(["x", "y", "z"])
SMALL = st.integers(0, 50)
SHARES = st.builds(
    RouterLoad,
    engines=st.dictionaries(ENGINES, st.tuples(SMALL, SMALL, SMALL)),
)


class Recount(RuleBasedStateMachine):
    """Entries, shares and leases as plain lists, beside the ledger."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = EngineTable()
        self.ledger = LoadLedger(self.table, clock=lambda: self.now)
        self.accounts = {engine_id: self.ledger.add(engine_id) for engine_id in ("a:1", "b:1")}
        self.own: dict[LedgerEntry, tuple[str, Counts, int]] = {}
        self.peers: dict[str, tuple[int, RouterLoad, int]] = {}
        self.reported = dict.fromkeys(self.accounts, 0)

    @rule(target=entries, engine_id=ENGINES, pending=SMALL, sequences=st.integers(1, 4))
    def begin(self, engine_id: str, pending: int, sequences: int) -> LedgerEntry | None:
        if engine_id not in self.accounts:
            with pytest.raises(KeyError):
                self.ledger.begin(engine_id, pending_tokens=pending)
            return None
        entry = self.ledger.begin(engine_id, pending_tokens=pending, sequences=sequences)
        self.own[entry] = engine_id, (1, pending, 0), sequences
        return entry

    @rule(entry=entries)
    def hear_output(self, entry: LedgerEntry | None) -> None:
        if entry is not None:
            entry.on_first_output()
            if entry in self.own:
                engine_id, _, sequences = self.own[entry]
                self.own[entry] = engine_id, (1, 0, sequences), sequences

    @rule(entry=st.one_of(entries, consumes(entries)))
    def end(self, entry: LedgerEntry | None) -> None:
        if entry is not None:
            entry.end()
            self.own.pop(entry, None)

    @rule(router_id=ROUTERS, sequence=st.integers(1, 20), share=SHARES, ticks=st.integers(1, 3))
    def hear_share(self, router_id: str, sequence: int, share: RouterLoad, ticks: int) -> None:
        message = LoadMessage.decode(LoadMessage(router_id, sequence, share).encode())
        assert self.ledger.on_message(message, ticks)
        if router_id not in self.peers or sequence > self.peers[router_id][0]:
            self.peers[router_id] = sequence, share, ticks

    @rule()
    def tick(self) -> None:
        self.ledger.tick()
        self.peers = {name: (at, share, left - 1) for name, (at, share, left) in self.peers.items() if left > 1}

    @rule(engine_id=ENGINES, uncomputed=SMALL, running=SMALL, passed=st.sampled_from([0.0, SETTLE_SECONDS]))
    def report(self, engine_id: str, uncomputed: int, running: int, passed: float) -> None:
        self.now += passed
        if engine_id in self.accounts:
            self.accounts[engine_id].report(engine_pb2.Load(uncomputed_tokens=uncomputed, running=running))
            self.reported[engine_id] = max(0, uncomputed - running)

    @precondition(lambda self: "c:1" not in self.accounts)
    @rule()
    def find_engine(self) -> None:
        self.accounts["c:1"], self.reported["c:1"] = self.ledger.add("c:1"), 0

    @precondition(lambda self: "c:1" in self.accounts and not any(e[0] == "c:1" for e in self.own.values()))
    @rule()
    def lose_engine(self) -> None:
        self.ledger.remove("c:1")
        account = self.accounts.pop("c:1")
        account.report(engine_pb2.Load(uncomputed_tokens=99, waiting=99))
        assert self.table.waiting[account.row] == 0  # too late: the row is nobody's, or another engine's

    @invariant()
    def sums_are_what_a_recount_finds(self) -> None:
        assert {name for name, _ in self.table} == set(self.accounts)
        for engine_id, row in self.table:
            requests, counted, decoding = self.recount(engine_id)
            assert (self.table.requests[row], self.table.decoding[row]) == (requests, decoding)
            # Never less than the engine said, and more only by what was dispatched.
            pending, reported = self.table.pending_tokens[row], self.reported[engine_id]
            assert reported <= pending <= max(counted, reported)
            # A step computes some of them, and did not begin later than now.
            assert 0 <= self.table.computing[row] <= pending
            assert self.table.stepped[row] <= self.now

    @invariant()
    def shares_are_what_a_recount_finds(self) -> None:
        assert self.ledger.local_load().engines == {
            engine_id: counts
            for engine_id in self.accounts
            if (counts := total(e[1] for e in self.own.values() if e[0] == engine_id))[0]
        }

    def recount(self, engine_id: str) -> Counts:
        own = [counts for where, counts, _ in self.own.values() if where == engine_id]
        return total([*own, *(share.engines.get(engine_id, (0, 0, 0)) for _, share, _ in self.peers.values())])

    def teardown(self) -> None:
        for entry in list(self.own):
            entry.end()
        for account in self.accounts.values():
            account.report(engine_pb2.Load())
        for _ in range(3):
            self.ledger.tick()
        assert self.ledger.local_load().engines == {}
        assert len(self.ledger) == 0
        for _, row in self.table:
            load = self.table.requests[row], self.table.pending_tokens[row], self.table.decoding[row]
            assert load == (0, 0, 0)


def total(counts: object) -> Counts:
    requests, pending, decoding = 0, 0, 0
    for each in counts:  # type: ignore[attr-defined]
        requests, pending, decoding = requests + each[0], pending + each[1], decoding + each[2]
    return requests, pending, decoding


TestRecount = Recount.TestCase
TestRecount.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class OneEngine:
    """A ledger of one engine, and a clock that the test turns."""

    def __init__(self, capacity_seconds: float = 2.0) -> None:
        self.now = 0.0
        self.table = EngineTable()
        self.rooms = 0
        self.ledger = LoadLedger(
            self.table, capacity_seconds=capacity_seconds, on_capacity=self.count, clock=lambda: self.now
        )
        self.account = self.ledger.add("e:1")

    def count(self) -> None:
        self.rooms += 1

    @property
    def pending(self) -> float:
        return self.table.pending_tokens[self.table.row_of("e:1")]

    @property
    def step(self) -> tuple[float, float]:
        row = self.table.row_of("e:1")
        return self.table.stepped[row], self.table.computing[row]

    def report(self, uncomputed: int, running: int = 0, after: float = 2 * SETTLE_SECONDS) -> None:
        self.now += after
        self.account.report(engine_pb2.Load(uncomputed_tokens=uncomputed, running=running))

    def hear(self, sequence: int, pending: int) -> None:
        self.ledger.on_message(LoadMessage("peer", sequence, RouterLoad({"e:1": (1, pending, 0)})), 5)


def test_a_prompts_pending_tokens_shrink_as_it_is_computed() -> None:
    place = OneEngine()
    place.ledger.begin("e:1", pending_tokens=1000)
    assert place.pending == 1000
    for left in (900, 800, 700):
        place.report(left)
    assert place.pending == 700


@pytest.mark.parametrize("by_a_peer", [False, True])
def test_dispatches_after_a_report_count_in_addition(by_a_peer: bool) -> None:
    place = OneEngine()
    place.ledger.begin("e:1", pending_tokens=1000)
    for _ in range(3):
        place.report(400)
    if by_a_peer:
        place.hear(1, 50)
    else:
        place.ledger.begin("e:1", pending_tokens=50)
    assert place.pending == 450
    place.report(300)  # of a step that began before
    assert place.pending == 350
    place.report(200, after=0)
    assert place.pending == 250
    place.report(240)  # and of the first that knows
    assert place.pending == 240


def test_load_without_a_known_dispatch_counts_as_reported() -> None:
    place = OneEngine()
    place.report(500, running=20)
    assert place.pending == 480
    place.report(3, running=20)
    assert place.pending == 0


def test_a_request_with_a_first_token_has_nothing_pending_although_the_report_is_late() -> None:
    place = OneEngine()
    entry = place.ledger.begin("e:1", pending_tokens=100)
    entry.on_first_output()
    assert place.pending == 0
    entry.end()
    entry.on_first_output()
    assert place.ledger.local_load() == RouterLoad()


def test_tokens_in_the_running_step_are_known_from_its_start() -> None:
    place = OneEngine()
    place.account.describe(engine_pb2.DescribeResponse(max_num_batched_tokens=1000))
    place.now = 5.0
    first = place.ledger.begin("e:1", pending_tokens=300)
    assert place.step == (5.0, 300), "an idle engine begins at once"
    place.now = 5.1
    place.hear(1, 2000)
    assert place.step == (5.0, 300), "what comes meanwhile waits for the next step"
    place.now = 5.3
    first.on_first_output()
    assert place.step == (5.3, 1000), "the first token ends a step, and the next one takes as much as it can"
    place.report(1500, after=0.5)
    assert place.step == (5.8, 1000)
    place.now = 6.0
    place.hear(2, 0)
    assert place.step == (6.0, 1000), "as far as the engine has said"
    place.report(0)
    assert place.step == (6.2, 0)


def test_an_engine_whose_steps_are_not_bounded_in_time_gets_the_prompts_of_a_whole_step() -> None:
    place = OneEngine(capacity_seconds=0.25)
    pace = engine_pb2.Pace(step_seconds=0.01, token_seconds=0.01)
    for unbounded, room in ((False, 24), (True, 999)):
        place.account.describe(engine_pb2.DescribeResponse(max_num_batched_tokens=1000, unbounded_steps=unbounded))
        place.account.report(engine_pb2.Load(uncomputed_tokens=room, pace=pace))
        assert place.account.has_capacity
        place.account.report(engine_pb2.Load(uncomputed_tokens=room + 1, pace=pace))
        assert not place.account.has_capacity


@pytest.mark.parametrize(("reported", "assumed"), [(0, 1000), (250, 250), (5000, 1000)])
def test_a_step_computes_as_much_of_prompts_as_the_engine_says_or_as_it_has_room_for(
    reported: int, assumed: int
) -> None:
    """An engine that reports nothing of it has a whole step for them, as before it could."""
    place = OneEngine()
    place.account.describe(engine_pb2.DescribeResponse(max_num_batched_tokens=1000))
    place.account.report(engine_pb2.Load(uncomputed_tokens=3000, prompt_tokens_per_step=reported))
    assert place.table.prompt_tokens_per_step[place.account.row] == assumed
    assert place.step == (place.now, assumed)
    place.account.report(engine_pb2.Load())
    assert place.table.prompt_tokens_per_step[place.account.row] == 1000


def test_load_that_others_add_during_a_shares_transit_is_their_rate_times_that_time() -> None:
    place = OneEngine()
    unseen = place.ledger.unseen
    for number in range(400):  # this router's shares take 20 ms, and a peer sends 100 tokens every 10 ms
        place.now += 0.01
        place.hear(2 * number + 1, 100)
        if number % 2 == 0:
            place.ledger.begin("e:1", pending_tokens=1)
            unseen.on_published(number)
        else:
            place.now += 0.01
            unseen.on_received(number - 1)
        place.hear(2 * number + 2, 0)
    rate = 100 * 400 / place.now
    assert place.table.unseen_tokens == pytest.approx(rate * 0.02, rel=0.25)
    place.now += 60.0
    assert unseen.tokens() < 1e-6


def test_shares_that_come_back_late_out_of_order_or_never_are_timed_by_the_first_that_does() -> None:
    now = 0.0
    unseen = UnseenLoadEstimate(lambda: now)
    unseen.on_remote_dispatch(1000)
    unseen.on_received(1)
    assert unseen.tokens() == 0, "nothing of its own was on its way"
    unseen.on_local_change()
    for number, moment in ((1, 0.1), (2, 0.2)):
        now = moment
        unseen.on_published(number)
        unseen.on_local_change()
    now = 0.25
    unseen.on_received(0)
    assert unseen.tokens() == 0
    unseen.on_received(2)  # the first was lost
    assert unseen.tokens() == pytest.approx(1000 * exp(-0.125) / 2 * 0.25)
    now = 0.9
    unseen.on_received(2)
    assert unseen.tokens() < 1000 / 2 * 0.25


@pytest.mark.parametrize(("pending_tokens", "has_room"), [(6, True), (7, False)])
def test_each_step_takes_its_time_from_the_seconds_of_capacity(pending_tokens: int, has_room: bool) -> None:
    """With steps of 10 tokens and 0.5 s of their own a token takes 0.3 s."""
    place = OneEngine(capacity_seconds=2.0)
    place.account.describe(engine_pb2.DescribeResponse(max_num_batched_tokens=10))
    place.account.report(engine_pb2.Load(pace=engine_pb2.Pace(step_seconds=0.5, token_seconds=0.25)))
    place.ledger.begin("e:1", pending_tokens=pending_tokens)
    assert place.account.has_capacity is has_room


def test_capacity_is_signalled_when_it_appears_and_not_while_it_lasts() -> None:
    place = OneEngine()
    place.account.describe(engine_pb2.DescribeResponse(max_num_seqs=2))
    place.account.report(engine_pb2.Load(pace=engine_pb2.Pace(token_seconds=1)))
    place.rooms = 0
    long = place.ledger.begin("e:1", pending_tokens=2)
    assert not place.account.has_capacity
    long.on_first_output()
    assert (place.account.has_capacity, place.rooms) == (True, 1)
    place.hear(1, 0)
    assert not place.account.has_capacity
    for _ in range(5):
        place.ledger.tick()
    assert (place.account.has_capacity, place.rooms) == (True, 2)
    long.end()
    assert place.rooms == 2


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), 1e9])
def test_an_invalid_step_time_is_ignored(wrong: float) -> None:
    place = OneEngine()
    before = place.table.token_seconds[0]
    place.account.report(engine_pb2.Load(pace=engine_pb2.Pace(step_seconds=0.5, token_seconds=wrong)))
    assert place.table.token_seconds[place.table.row_of("e:1")] == before


def test_the_number_of_peer_routers_is_bounded() -> None:
    place = OneEngine()
    taken = [
        place.ledger.on_message(LoadMessage(f"r{number}", 1, RouterLoad({"e:1": (1, 1, 1)})), 1)
        for number in range(300)
    ]
    assert sum(taken) == MAX_PEERS == place.table.requests[place.table.row_of("e:1")]


def test_an_engine_with_requests_cannot_be_removed() -> None:
    place = OneEngine()
    place.ledger.begin("e:1", pending_tokens=1)
    with pytest.raises(AssertionError):
        place.ledger.remove("e:1")


# On the wire


@given(st.dictionaries(st.text(max_size=20), st.tuples(*[st.integers(0, 2**32 - 1)] * 3)))
def test_a_share_round_trips(engines: Mapping[str, Counts]) -> None:
    message = LoadMessage("router-1", 7, RouterLoad(engines))
    assert LoadMessage.decode(message.encode()) == message


def test_token_counts_saturate_at_the_largest_that_fits() -> None:
    decoded = LoadMessage.decode(LoadMessage("r", 1, RouterLoad({"e:1": (1, 2**40, 1)})).encode())
    assert decoded.load.engines["e:1"] == (1, 2**32 - 1, 1)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_share_are_refused(payload: bytes) -> None:
    with pytest.raises(InvalidLoadMessageError):
        LoadMessage.decode(payload)


@given(st.integers(0, 200), st.binary(max_size=8))
def test_a_share_that_was_damaged_is_refused_or_well_formed(position: int, noise: bytes) -> None:
    payload = LoadMessage("router", 3, RouterLoad({"a:1": (1, 2, 3), "b:1": (4, 5, 6)})).encode()
    damaged = payload[:position] + noise + payload[position + len(noise) :]
    try:
        message = LoadMessage.decode(damaged)
    except InvalidLoadMessageError:
        return
    assert all(len(counts) == 3 and min(counts) >= 0 for counts in message.load.engines.values())


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"router_id": ""},
        {"router_id": "a b"},
        {"router_id": "a" * 65},
        {"requests": [1, 2]},
    ],
)
def test_a_share_of_another_kind_is_refused(change: dict[str, object]) -> None:
    fields = {
        "version": 1,
        "router_id": "r",
        "engine_ids": ["e"],
        "requests": [1],
        "pending_tokens": [1],
        "decoding": [1],
    }
    assert LoadMessage.decode(load_pb2.LoadShare(**fields).SerializeToString())
    with pytest.raises(InvalidLoadMessageError):
        LoadMessage.decode(load_pb2.LoadShare(**{**fields, **change}).SerializeToString())


def test_a_share_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(InvalidLoadMessageError, match="too long"):
        LoadMessage.decode(b"\x12\x01r" * MAX_PAYLOAD_BYTES)
