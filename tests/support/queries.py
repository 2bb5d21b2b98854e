"""What PromQL asks for: the series that it names, held against what the code tells, and the labels that it knows."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import promql_parser as promql

from tests.support import pages

# What Prometheus and its operator add to all that they scrape in a cluster.
TARGET_LABELS = {"namespace", "job", "pod", "instance", "container"}
# What others tell, with the labels that are used of it.
FOREIGN: Mapping[str, set[str]] = {
    "aggregator_unavailable_apiservice": {"name"},
    "certmanager_certificate_expiration_timestamp_seconds": {"name"},
    "kube_pod_container_status_last_terminated_reason": {"reason"},
    "kube_pod_container_status_restarts_total": set(),
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
}
# Grafana's variables, as what they may stand for.
VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m"}


@dataclass(frozen=True)
class Selector:
    """A series by its name, and the labels that are looked at."""

    name: str
    labels: frozenset[str]


def parse(expression: str) -> promql.Expr:
    """Raises ``ValueError`` for what is no PromQL."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return promql.parse(re.sub(r"\$[a-z]+", ".*", expression))


def selectors(expression: str) -> list[Selector]:
    """Every series that an expression names."""
    found: list[Selector] = []
    promql.walk(parse(expression), lambda node: found.extend(_selected(node)))
    return found


def grouped(expression: str) -> set[str]:
    """Labels that an expression groups or matches by."""
    found: set[str] = set()
    promql.walk(parse(expression), lambda node: found.update(_modifiers(node)))
    return found


def exported_metrics() -> dict[str, set[str]]:
    """Each series that a router or an engine tells, by its whole name, with its labels: those of docs/metrics.md, which
    is held against the code.
    """
    series: dict[str, set[str]] = {}
    for heading in ("The router", "The engine"):
        for name, kind, _ in pages.rows(pages.section(pages.METRICS, heading)):
            base, _, labels = name.strip("`").rstrip("}").partition("{")
            own = set(filter(None, labels.split(",")))
            ends = {"_sum": own, "_count": own, "_bucket": own | {"le"}} if kind == "histogram" else {"": own}
            series |= {base + end: labels for end, labels in ends.items()}
    return series


def complaints(expression: str) -> Iterator[str]:
    """What an expression asks for that there is not."""
    known = {**exported_metrics(), **FOREIGN}
    series = selectors(expression)
    for each in series:
        if each.name not in known:
            yield f"nothing tells {each.name}"
        elif unknown := each.labels - known[each.name] - TARGET_LABELS:
            yield f"{each.name} has no {', '.join(sorted(unknown))}"
    there = set().union(TARGET_LABELS, *(known.get(each.name, set()) for each in series))
    if unknown := grouped(expression) - there:
        yield f"nothing here has {', '.join(sorted(unknown))}"


def _selected(node: promql.Expr) -> Iterator[Selector]:
    if isinstance(node, promql.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql.VectorSelector):
        yield Selector(node.name or "", frozenset(matcher.name for matcher in node.matchers.matchers))


def _modifiers(node: promql.Expr) -> Iterator[str]:
    if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
        yield from node.modifier.labels
    if isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
        yield from node.modifier.matching.labels
