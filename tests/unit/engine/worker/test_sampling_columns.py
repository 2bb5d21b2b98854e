"""Rows have the parameters of their requests, and a step whose draws are all plain draws what it would by any way."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.sampling.logits_processors import SamplingState, is_plain
from quire_engine.sampling.metadata import SamplingMetadata
from quire_engine.worker.request_states import SamplingColumns

from tests.support.sampling_inputs import KeepingSampler, Output, answers, make_output, run_step, some_logits
from tests.unit.engine.sampling.test_sampler import VOCAB, outputs

ROWS = st.integers(0, 300)


def columns_of(rows: dict[int, Output]) -> SamplingColumns:
    columns = SamplingColumns()
    for row, output in rows.items():
        columns.put(row, output.request, is_plain=is_plain(output.request))
    return columns


@given(st.dictionaries(ROWS, outputs(), min_size=1, max_size=20), st.data())
def test_rows_have_the_parameters_of_their_requests(rows: dict[int, Output], data: st.DataObject) -> None:
    columns, order = columns_of(rows), np.array(data.draw(st.permutations(sorted(rows))))
    requests = [rows[row].request for row in order.tolist()]
    positions = np.array([len(rows[row].token_ids) for row in order.tolist()])
    made = columns.metadata(order, positions)
    if made is None:
        assert all(request.params.greedy for request in requests)
        return
    seeds = [request.seed for request in requests]
    expected = SamplingMetadata.from_params([request.params for request in requests], seeds, positions.tolist())
    for name in SamplingMetadata.__dataclass_fields__:
        assert np.array_equal(getattr(made, name), getattr(expected, name)), name


@given(outputs())
def test_a_draw_is_plain_only_if_nothing_changes_its_logits_and_only_a_token_is_asked_for(output: Output) -> None:
    columns = columns_of({3: output})
    state = SamplingState(output.request, VOCAB)
    asks_more = state.is_beam or state.wants_logprobs or state.has_processors or state.bans is not None
    assert not (columns.is_plain[3] and asks_more)


def test_a_row_that_samples_nothing_is_not_plain() -> None:
    columns = columns_of({row: make_output(row, [1]) for row in range(2)})
    columns.put(0, None, is_plain=False)
    assert columns.is_plain[:3].tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allow_sync", [True, False])
@given(st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=1, max_size=9), st.integers(0, 99), st.data())
def test_plain_draws_are_those_of_any_step(
    dtype: torch.dtype, allow_sync: bool, temperatures: list[float], seed: int, data: st.DataObject
) -> None:
    filters = st.fixed_dictionaries({}, optional={"top_k": st.just(5), "top_p": st.just(0.9), "min_p": st.just(0.1)})
    drawn = [
        make_output(id, [1], [1] * id, seed=seed << 33, temperature=each, **data.draw(filters))
        for id, each in enumerate(temperatures)
    ]
    logits = some_logits(len(drawn), VOCAB, seed).to(dtype)
    if data.draw(st.booleans()):
        logits[data.draw(st.integers(0, len(drawn) - 1)), 7] = torch.nan
    sampler, rows = KeepingSampler(VOCAB, allow_sync=allow_sync), np.arange(len(drawn))
    metadata = columns_of(dict(enumerate(drawn))).metadata(rows, rows + 1)
    made = answers(sampler.sample_plain(logits.clone(), metadata))
    expected = run_step(sampler, drawn, logits)
    assert made.token_ids == expected.token_ids
    assert made.errors.keys() == expected.errors.keys()
    sampler.close()
