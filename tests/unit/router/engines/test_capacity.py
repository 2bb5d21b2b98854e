"""Capacity of the engines: for any request, and spare capacity for a tenant that is ahead of others."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_router.engines.engine import Engine
from quire_router.engines.load import EngineLoad, LoadLedger
from quire_router.engines.pool import any_has_capacity, has_best_effort_capacity, has_spare_capacity
from quire_router.placement.engine_table import EngineTable

CAPACITY = 100  # tokens, of which each takes a second
SEQUENCES = 4


def engines(
    pending: Sequence[int], on_capacity: Callable[[], None] = lambda: None
) -> tuple[LoadLedger, list[EngineLoad]]:
    ledger = LoadLedger(EngineTable(), capacity_seconds=CAPACITY, on_capacity=on_capacity)
    accounts = [ledger.add(f"e{number}:1") for number in range(len(pending))]
    for number, (account, tokens) in enumerate(zip(accounts, pending, strict=True)):
        account.describe(engine_pb2.DescribeResponse(max_num_seqs=SEQUENCES))
        account.report(engine_pb2.Load(pace=engine_pb2.Pace(token_seconds=1)))
        if tokens:
            ledger.begin(f"e{number}:1", pending_tokens=tokens)
    return ledger, accounts


@given(st.lists(st.sampled_from([0, 1, 4, 5, 99, 100, 500]), max_size=12))
def test_an_engine_has_capacity_with_little_pending_work_and_spare_capacity_with_a_quarter_free(
    pending: list[int],
) -> None:
    _, accounts = engines(pending)
    assert any_has_capacity(accounts) == any(tokens < CAPACITY for tokens in pending)
    assert has_spare_capacity(accounts) == (sum(tokens < CAPACITY / 20 for tokens in pending) - 1 >= len(pending) // 4)


def test_an_engine_at_its_maximum_of_sequences_has_no_spare_capacity() -> None:
    ledger, accounts = engines([0])
    for _ in range(SEQUENCES):
        assert has_spare_capacity(accounts)
        ledger.begin("e0:1", pending_tokens=1).on_first_output()
    assert not has_spare_capacity(accounts)


@pytest.mark.parametrize("tokens", [50, 150])
def test_waiters_are_signalled_when_an_engine_gets_spare_capacity_though_it_had_capacity_before(tokens: int) -> None:
    told: list[None] = []
    ledger, accounts = engines([0], lambda: told.append(None))
    request = ledger.begin("e0:1", pending_tokens=tokens)
    assert (accounts[0].has_capacity, accounts[0].is_mostly_idle) == (tokens < CAPACITY, False)
    told.clear()
    request.on_first_output()
    assert (told, accounts[0].is_mostly_idle) == ([None], True)


def knowing_engine(most: int = 8) -> tuple[LoadLedger, EngineLoad, list[None]]:
    """One that schedules what is best effort behind all else."""
    told: list[None] = []
    ledger = LoadLedger(EngineTable(), capacity_seconds=CAPACITY, on_capacity=lambda: told.append(None))
    load = ledger.add("e:1")
    load.describe(engine_pb2.DescribeResponse(max_num_seqs=most, best_effort=True))
    load.report(engine_pb2.Load(pace=engine_pb2.Pace(token_seconds=1)))
    return ledger, load, told


def test_what_is_best_effort_is_no_load_for_others_and_has_three_quarters_of_the_places() -> None:
    ledger, load, told = knowing_engine()
    entries = []
    while has_best_effort_capacity([load]):
        entries.append(ledger.begin("e:1", pending_tokens=500, best_effort=True))
    assert len(entries) == 6
    assert has_spare_capacity([load])
    assert load.has_capacity
    assert ledger.local_load().engines == {}
    told.clear()
    entries[0].on_first_output()
    assert told == []
    entries[0].end()
    entries[0].end()
    assert (told, load.best_effort, load.has_best_effort_capacity) == ([None], 5, True)


def test_others_take_the_places_that_best_effort_may_have() -> None:
    ledger, load, _ = knowing_engine()
    for _ in range(6):
        ledger.begin("e:1", pending_tokens=1)
    assert not load.has_best_effort_capacity
    assert load.has_capacity


def test_what_an_engine_has_of_other_routers_counts_too() -> None:
    _, load, told = knowing_engine()
    load.report(engine_pb2.Load(best_effort=6))
    assert not load.has_best_effort_capacity
    told.clear()
    load.report(engine_pb2.Load(best_effort=5))
    assert load.has_best_effort_capacity
    assert told == [None]


def test_at_an_engine_that_does_not_know_the_class_it_is_a_request_like_any() -> None:
    ledger, (load,) = engines([0])
    assert has_best_effort_capacity([load])
    ledger.begin("e0:1", pending_tokens=50, best_effort=True)
    assert load.local == (1, 50, 0)
    assert not has_best_effort_capacity([load]), "it would delay others"


class DescribedConnection:
    """A connection that has just heard what its engine is, and has not reported it yet."""

    address, ready, condition = "e:1", True, "ready"

    def __init__(self) -> None:
        self.description: engine_pb2.DescribeResponse | None = None


def test_reading_what_an_engine_is_never_finds_capacity() -> None:
    told: list[None] = []
    ledger = LoadLedger(EngineTable(), capacity_seconds=CAPACITY, on_capacity=lambda: told.append(None))
    connection, load = DescribedConnection(), ledger.add("e:1")
    load.describe(engine_pb2.DescribeResponse(max_num_seqs=1))
    ledger.begin("e:1", pending_tokens=1)
    engine = Engine(connection, load)  # type: ignore[arg-type]
    told.clear()
    connection.description = engine_pb2.DescribeResponse(served_model_names=["m"], max_num_seqs=8)
    for name in (name for name in dir(Engine) if isinstance(getattr(Engine, name), property)):
        getattr(engine, name)
    assert not engine.can_run("m")
    assert not told
    engine.refresh()
    assert engine.can_run("m")
    assert told == [None]
