"""The policy ``cost`` against the straightforward computation: one engine after the other, nothing remembered from one
request to the next. They must agree to the last bit, whatever happened in between.
"""

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.placement.engine_table import (
    OUTLIER_THRESHOLD,
    SHORT_PROMPT,
    SPEED_TTL,
    STEP_TIMES_TTL,
    EngineTable,
    StepTimes,
)
from quire_router.placement.policies import (
    DECODE_WEIGHT,
    DELAYED_BY_DUPLICATES,
    DELAYED_PER_QUEUED,
    MUTUAL_DELAY,
    TIE_TOLERANCE,
    TYPICAL_OUTPUT,
    CostPolicy,
    PlacementQuery,
    PlacementSettings,
    PrefixMatches,
    choose_by_water_filling,
    make_scorers,
)

from tests.support.placement import PACE, Engine, describe, engines

PACES = ("step_seconds", "token_seconds", "sequence_seconds", "host_block_seconds")


# The straightforward computation


def paces(table: EngineTable, rows: list[int], now: float) -> list[StepTimes]:
    """The step times that are assumed of each row: see ``cluster_step_times``."""
    own = [StepTimes(*(float(getattr(table, name)[row]) for name in PACES)) for row in rows]
    measured = [place for place, row in enumerate(rows) if table.measured[row]]
    recent = [place for place in measured if table.stepped[rows[place]] > now - STEP_TIMES_TTL]
    if not (known := recent or measured):
        return own
    odd: set[int] = set()
    for tokens in (lambda row: table.step_tokens[row], lambda _: SHORT_PROMPT):
        steps = [pace.step_seconds + tokens(row) * pace.token_seconds for pace, row in zip(own, rows, strict=True)]
        middle = sorted(steps[place] for place in known)[len(known) // 2]
        odd |= {place for place in recent if abs(steps[place] - middle) > OUTLIER_THRESHOLD * middle}
    members = [place for place in known if place not in odd] or known
    weights = np.array([1 / len(members) if place in members else 0.0 for place in range(len(rows))])
    mean = StepTimes(*(float(np.array([getattr(pace, name) for pace in own]) @ weights) for name in PACES))
    return [own[place] if place in odd else mean for place in range(len(rows))]


def total(table: EngineTable, query: PlacementQuery) -> tuple[list[float], list[float]]:
    """The seconds that the request costs at each row, and those of a prompt token."""
    rows, limits = query.rows.tolist(), PlacementSettings()
    believed = paces(table, rows, query.now)
    found = [_one(table, query, row, pace) for row, pace in zip(rows, believed, strict=True)]
    longest = min(waits for _, waits, _, _ in found) + limits.max_affinity_wait
    at_home = query.session_row in rows
    costs = []
    for row, (costs_here, waits, saved, _) in zip(rows, found, strict=True):
        affinity = max(saved - limits.max_affinity_wait, 0) if waits > longest else 0.0
        leaving = limits.session_seconds if at_home and row != query.session_row else 0.0
        costs.append(costs_here + affinity + leaving)
    return costs, [token for _, _, _, token in found]


def _one(table: EngineTable, query: PlacementQuery, row: int, pace: StepTimes) -> tuple[float, float, float, float]:
    """At one engine: seconds without affinity and session, seconds of waiting, what the cache saves, and a token's."""
    at = {name: float(getattr(table, name)[row]) for name in COLUMNS}
    device, host = float(query.matches.device[row]), float(query.matches.host[row])
    cached, block_size = device + host, max(at["block_size"], 1)
    uncached, part = query.prompt_tokens - cached, 1 / max(at["prompt_tokens_per_step"], 1)
    token = pace.token_seconds + pace.step_seconds * part
    slowing = at["decoding"] * pace.sequence_seconds
    pending = at["pending_tokens"]
    under_way = min(at["computing"], pending) * token
    waiting = pending * token - min(max(query.now - at["stepped"], 0), under_way)
    copying = host / block_size * pace.host_block_seconds
    prefill = uncached * token + pace.step_seconds + copying
    decode_steps = 2 * query.sequences * min(query.output_tokens, TYPICAL_OUTPUT)
    neighbours = (1 + (pending + uncached) * part + DECODE_WEIGHT * decode_steps) * slowing
    blocks = (pending + (query.prompt_tokens - device)) / block_size - at["blocks_free"]
    places = at["requests"] + at["swapped"] + query.sequences - at["max_sequences"]
    missing = max(_part(blocks, at["blocks_total"]), _part(places, at["max_sequences"]))
    memory = missing * (TYPICAL_OUTPUT * (pace.step_seconds + slowing))
    delayed = DELAYED_PER_QUEUED * query.mean_queued + DELAYED_BY_DUPLICATES
    saved = (1 + delayed) * (cached * token - copying) + cached * part * slowing
    return waiting + prefill + neighbours + memory + delayed * prefill, waiting + memory, saved, token


COLUMNS = (
    "block_size", "prompt_tokens_per_step", "decoding", "pending_tokens", "computing", "stepped", "blocks_free",
    "blocks_total", "requests", "swapped", "max_sequences",
)  # fmt: skip


def _part(missing: float, whole: float) -> float:
    return max(missing, 0) / max(whole, 1) if whole > 0 else 0.0


def choice(table: EngineTable, query: PlacementQuery) -> int:
    """The row that it goes to."""
    costs, tokens = total(table, query)
    width = MUTUAL_DELAY * table.unseen_tokens * float(np.mean(tokens))
    ties = [place for place, cost in enumerate(costs) if cost <= min(costs) + TIE_TOLERANCE]
    place = (
        choose_by_water_filling(np.array(costs), width, query.tie_break % 2**32 / 2**32)
        if width > TIE_TOLERANCE
        else ties[query.tie_break % len(ties)]
    )
    return int(query.rows[place])


# A fleet to which things happen


@dataclass
class Fleet:
    """A table as a router has it, with one policy that chooses all the time."""

    table: EngineTable = field(default_factory=EngineTable)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.policy = CostPolicy(make_scorers(PlacementSettings()))
        self._numbers = count()
        self._hand_out()

    def add(self, engine: Engine) -> None:
        row = self.table.add(f"engine-{next(self._numbers)}")
        describe(self.table, row, engine)
        self._hand_out()

    def remove(self, place: int) -> None:
        if len(self.table.ids) - self.table.ids.count(None) > 1:
            names = [engine_id for engine_id, _ in self.table]
            self.table.remove(names[place % len(names)])
            self._hand_out()

    def row(self, place: int) -> int:
        return int(self.rows[place % len(self.rows)])

    def _hand_out(self) -> None:
        """As a fleet does: the same array until the engines change, which nobody can write to."""
        self.rows = np.array([row for _, row in self.table], np.intp)
        self.rows.flags.writeable = False


SPEED = st.sampled_from([0.5, 0.95, 1.0, 1.05, 1.2, 4.0])


@st.composite
def kinds(draw: st.DrawFn) -> dict[str, float]:
    """Engines of which most are of one kind, and some have not reported their step times."""
    speed = draw(SPEED)
    kind = {name: speed * getattr(PACE, name) for name in PACES}
    own = {"blocks_free": draw(st.sampled_from([0, 50, 4000])), "blocks_total": 5000, "max_sequences": 40}
    moved = {
        "measured": draw(st.sampled_from([0, 1, 1, 1])),
        "stepped": draw(st.sampled_from([30.0, 45.0, 99.0, 99.99])),
    }
    return {**draw(engines()), **kind, **own, **moved, "computing": draw(st.integers(0, 4000))}


EVENTS = st.one_of(
    st.tuples(st.just("add"), kinds() | engines()),
    st.tuples(st.just("remove"), st.integers(0, 40)),
    st.tuples(st.just("pace"), st.integers(0, 40), SPEED),
    st.tuples(st.just("sizes"), st.integers(0, 40), st.sampled_from([1, 16, 64]), st.sampled_from([0, 512, 2048])),
    st.tuples(st.just("step"), st.integers(0, 40), st.integers(0, 9000), st.sampled_from([16, 500, 2048])),
    st.tuples(st.just("time"), st.sampled_from([0.01, 1.0, 20.0, 61.0])),
    st.tuples(st.just("unseen"), st.sampled_from([0.0, 50.0, 5000.0])),
    st.tuples(st.just("nothing")),
)


def happen(fleet: Fleet, event: tuple[object, ...]) -> None:
    match event:
        case "add", dict(engine):
            fleet.add(engine)
        case "remove", int(place):
            fleet.remove(place)
        case "pace", int(place), float(speed):
            fleet.table.set_step_times(fleet.row(place), StepTimes(*(speed * getattr(PACE, name) for name in PACES)))
        case "sizes", int(place), int(block_size), int(step_tokens):
            fleet.table.set_sizes(fleet.row(place), block_size=block_size, step_tokens=step_tokens)
        case "step", int(place), int(pending), int(prompt_tokens):
            fleet.table.stepped[fleet.row(place)] = fleet.now
            fleet.table.prompt_tokens_per_step[fleet.row(place)] = prompt_tokens
            fleet.table.pending_tokens[fleet.row(place)] = pending
        case "time", float(seconds):
            fleet.now += seconds
        case "unseen", float(tokens):
            fleet.table.unseen_tokens = tokens


@st.composite
def requests(draw: st.DrawFn) -> PlacementQuery:
    """A request for any rows, with a hit in half of them at most."""
    blocks = st.lists(st.sampled_from([0, 0, 7, 31]), min_size=64, max_size=64)
    device = 16.0 * np.array(draw(blocks))
    host = 16.0 * np.array(draw(blocks)) if draw(st.booleans()) else np.zeros(64)
    return PlacementQuery(
        1000,
        draw(st.sampled_from([1, 300])),
        draw(st.integers(1, 3)),
        np.zeros(1, np.intp),
        PrefixMatches(device, host),
        session_row=draw(st.integers(-1, 20)),
        mean_queued=draw(st.floats(0, 50)),
        tie_break=draw(st.integers(0, 2**32 - 1)),
    )


@given(
    first=st.lists(kinds(), min_size=1, max_size=18),
    events=st.lists(EVENTS, min_size=1, max_size=8),
    request=requests(),
    some=st.lists(st.integers(0, 40), min_size=1, max_size=9),
)
@settings(deadline=None, max_examples=50)
def test_cost_decides_as_the_straightforward_computation_does(
    first: list[Engine], events: list[tuple[object, ...]], request: PlacementQuery, some: list[int]
) -> None:
    fleet = Fleet()
    for engine in first:
        fleet.add(engine)
    for event in events:
        happen(fleet, event)
        fleet.now += SPEED_TTL
        of_them = np.array(list(dict.fromkeys(fleet.row(place) for place in some)), np.intp)
        for rows in (fleet.rows, of_them):
            query = replace(request, rows=rows, now=fleet.now)
            assert fleet.policy.total(query, fleet.table).tolist() == total(fleet.table, query)[0]
            assert fleet.policy.choose(query, fleet.table) == choice(fleet.table, query)


def test_engines_of_another_model_that_make_the_table_grow_change_nothing() -> None:
    fleet = Fleet()
    for _ in range(16):
        fleet.add({"blocks_total": 1000, "blocks_free": 1000})
    rows, size = fleet.rows, len(fleet.table)
    matches = PrefixMatches(np.zeros(64), np.zeros(64))
    query = PlacementQuery(1000, 256, 1, rows, matches, now=fleet.now)
    for loaded in range(4):
        assert fleet.policy.total(query, fleet.table).tolist() == total(fleet.table, query)[0]
        fleet.add({})
        fleet.table.pending_tokens[rows[loaded]] = 5000
    assert len(fleet.table) > size


def test_a_new_pace_counts_soon() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.add({})
        fleet.table.set_step_times(int(fleet.rows[-1]), PACE)
    query = PlacementQuery(1000, 256, 1, fleet.rows, PrefixMatches(np.zeros(64), np.zeros(64)), now=fleet.now)
    before = fleet.policy.total(query, fleet.table).tolist()
    for place in (0, 1):
        fleet.table.set_step_times(fleet.row(place), StepTimes(*(3 * getattr(PACE, name) for name in PACES)))
    assert fleet.policy.total(replace(query, now=fleet.now + SPEED_TTL / 2), fleet.table).tolist() == before
    assert min(fleet.policy.total(replace(query, now=fleet.now + SPEED_TTL), fleet.table)) > 2 * max(before)
