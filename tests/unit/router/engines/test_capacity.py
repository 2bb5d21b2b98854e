"""Capacity of the engines: for any request, and spare capacity for a tenant that is ahead of others."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_router.engines.load import EngineLoad, LoadLedger
from quire_router.engines.pool import any_has_capacity, has_spare_capacity
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
