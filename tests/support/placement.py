"""Fleets and requests as placement's tests need them."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from quire_router.placement.engine_table import EngineColumns, EngineTable, StepTimes
from quire_router.placement.policies import CandidateView, PlacementQuery, PrefixMatches

PACE = StepTimes(step_seconds=0.01, token_seconds=1e-4, sequence_seconds=1e-4, host_block_seconds=2e-4)
Engine = Mapping[str, float]
"""One engine: what is not zero of its columns, and ``device`` and ``host``, the tokens it has of the prompt."""

LOAD = frozenset(field.name for field in fields(EngineColumns)) - {
    "block_size", "step_tokens", "step_seconds", "token_seconds", "sequence_seconds", "host_block_seconds", "measured",
}  # fmt: skip
"""Columns that change with what an engine does, and may be written to."""

IDLE: Engine = {"blocks_total": 1000, "blocks_free": 1000, "max_sequences": 64}


def fleet(engines: Sequence[Engine]) -> tuple[EngineTable, PlacementQuery]:
    """A table with these engines in its first rows, and a request of 1,000 tokens for any of them."""
    table = EngineTable()
    rows = [table.add(f"engine-{number}") for number in range(len(engines))]
    device, host = np.zeros(len(table)), np.zeros(len(table))
    for row, engine in zip(rows, engines, strict=True):
        device[row], host[row] = engine.get("device", 0), engine.get("host", 0)
        describe(table, row, engine)
    return table, PlacementQuery(1000, 256, 1, np.array(rows, np.intp), PrefixMatches(device, host))


def describe(table: EngineTable, row: int, engine: Engine) -> None:
    """Writes what the engine says into its row."""
    if engine.get("measured", 1):
        table.set_step_times(
            row, StepTimes(*(engine.get(field.name, getattr(PACE, field.name)) for field in fields(StepTimes)))
        )
    sizes = {name: int(engine.get(name, getattr(table, name)[row])) for name in ("block_size", "step_tokens")}
    table.set_sizes(row, **sizes)
    for name in engine.keys() & LOAD:
        getattr(table, name)[row] = engine[name]


def candidates(*engines: Engine, **request: object) -> CandidateView:
    """What such a request would meet at these engines; ``request`` replaces some of its fields."""
    table, query = fleet([{**IDLE, **engine} for engine in engines])
    return CandidateView(replace(query, **request), table)  # type: ignore[arg-type]


def seconds(column: np.ndarray) -> list[float]:
    """A scorer's answer, to a microsecond."""
    return [round(float(each), 6) for each in column]


def rises(column: np.ndarray) -> bool:
    """Whether each number is above the one before it."""
    return all(before < after for before, after in pairwise(seconds(column)))


def _paces() -> st.SearchStrategy[dict[str, float]]:
    rates = {name: st.floats(0, 0.1) for name in ("step_seconds", "token_seconds", "sequence_seconds")}
    return st.fixed_dictionaries({**rates, "host_block_seconds": st.floats(0, 0.1)})


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Any engine, also one that has said nothing of itself, or nonsense."""
    device = draw(st.integers(0, 62)) * 16
    loads = {name: draw(st.integers(0, 50)) for name in ("requests", "decoding", "waiting", "swapped")}
    sizes = {name: draw(st.sampled_from([0, 1, 100, 5000])) for name in ("blocks_total", "max_sequences")}
    return {
        **loads,
        **sizes,
        **draw(_paces()),
        "blocks_free": draw(st.integers(0, int(sizes["blocks_total"]))),
        "pending_tokens": draw(st.integers(0, 100_000)),
        "step_tokens": draw(st.sampled_from([0, 512, 2048])),
        "prompt_tokens_per_step": draw(st.sampled_from([0, 16, 130, 512])),
        "block_size": draw(st.sampled_from([0, 1, 16, 64])),
        "device": device,
        "host": draw(st.integers(0, 62 - device // 16)) * 16,
    }


fleets = st.lists(engines(), min_size=1, max_size=6)
