"""A decision explained to people: what each scorer made of the best engines, for a span and for a header."""

import json

import numpy as np

from quire_router.placement.outlook import CandidateView
from quire_router.placement.query import PlacementDecision, PlacementQuery
from quire_router.placement.scorers import make_scorers
from quire_router.placement.settings import PlacementSettings
from quire_router.placement.table import EngineTable

MAX_EXPLAINED_ENGINES = 4
"""Engines that an explanation tells of."""

MAX_ROUTE_HEADER_BYTES = 1024
"""Bytes of ``x-quire-route``."""

ScoreBreakdown = list[tuple[str, dict[str, float]]]


def explain(query: PlacementQuery, table: EngineTable, settings: PlacementSettings, chosen: int) -> ScoreBreakdown:
    """The terms of ``cost`` for the engines that it finds best, cheapest first, and for the ``chosen`` one; in seconds,
    to a tenth of a millisecond. Another policy's choice is explained by the same terms: what it cost.
    """
    outlook = CandidateView(query, table)
    columns = {name: outlook.score(scorer) for name, scorer in make_scorers(settings).items()}
    total = np.sum(list(columns.values()), axis=0)
    best = np.argsort(total, kind="stable")
    shown = [place for place in best if query.rows[place] == chosen] + [
        place for place in best[:MAX_EXPLAINED_ENGINES] if query.rows[place] != chosen
    ]
    shown = sorted(shown[:MAX_EXPLAINED_ENGINES], key=lambda place: float(total[place]))
    return [
        (str(table.ids[query.rows[place]]), {name: round(float(column[place]), 4) for name, column in columns.items()})
        for place in shown
    ]


def route_attributes(decision: PlacementDecision) -> dict[str, str]:
    """Attributes of the route span beyond those of every decision: one for each engine that is explained."""
    return {
        f"quire.route.{rank}": f"{engine_id} {json.dumps(terms)}"
        for rank, (engine_id, terms) in enumerate(decision.scores, 1)
    }


def route_header(decision: PlacementDecision) -> str:
    """``x-quire-route``: printable ASCII, at most ``MAX_ROUTE_HEADER_BYTES`` bytes; engines that do not fit are left
    out.
    """
    header = f"{_ascii(decision.engine_id)}; policy={decision.policy}; cached={decision.cached_tokens}"
    header = header[:MAX_ROUTE_HEADER_BYTES]
    for engine_id, terms in decision.scores:
        told = " ".join(f"{name}={seconds:g}" for name, seconds in terms.items() if seconds)
        entry = f", {_ascii(engine_id)}: {told or '0'}"
        if len(header) + len(entry) > MAX_ROUTE_HEADER_BYTES:
            break
        header += entry
    return header


def _ascii(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)
