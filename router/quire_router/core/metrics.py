"""The router's Prometheus metrics. Labels are configured models and enumerations only, so their number is bounded. Of
several workers, gauges that count are added up, and of those that show a state the worst counts.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics, values
from quire_proto.errors import ErrorCode
from quire_proto.telemetry import Metric

from quire_router.core.errors import RefusalReason

_VARIABLE = "QUIRE_ROUTER_WORKER_PLACE"


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker gets from the process that started it. ``http_port`` and ``grpc_port`` are shared with the other
    workers. ``parent`` is a file descriptor that reads as ended once the supervisor is gone. ``number`` counts the
    workers from 1. ``folder`` is the supervisor's, for sockets between workers.
    """

    http_port: int
    grpc_port: int
    parent: int
    number: int
    folder: str

    def environment(self) -> dict[str, str]:
        """What a worker's process is started with, besides what this one has."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def own(cls) -> "WorkerContext | None":
        """Returns this process's context, once; None if it is not a worker."""
        context = os.environ.pop(_VARIABLE, None)
        return None if context is None else cls(**json.loads(context))


def worker_number() -> int | None:
    """The number of this worker, until ``WorkerContext.own`` has taken its place; None when this is not a worker."""
    context = os.environ.get(_VARIABLE)
    return None if context is None else int(json.loads(context)["number"])


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)


class BulkHistogram(Histogram):
    """A histogram that records many observations in one call, which the library's cannot."""

    def observe_many(self, counts: Sequence[int], total: float) -> None:
        """``counts`` observations in each bucket, the one without a bound last, that add up to ``total``."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


if (_number := worker_number()) is not None:
    # Its metrics are in files. Named by its number, they are gone on with by the worker that takes its place; named by
    # its process id, as the library does by itself, they would be more with each worker that dies.
    values.ValueClass = values.MultiProcessValue(lambda: _number)  # type: ignore[no-untyped-call]
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample for each counter, of no use here

REQUESTS = Counter(
    Metric.REQUESTS,
    "Requests that ended, by how; of several choices the gravest reason counts.",
    ["model", "operation", "finish_reason"],
)
REJECTIONS = Counter(
    Metric.REJECTIONS,
    "Requests refused before they reached an engine, by error code; not those that limits or the queue refused.",
    ["reason"],
)
IN_FLIGHT = Gauge(Metric.IN_FLIGHT, "Requests admitted and not ended.", ["model"], multiprocess_mode="livesum")
LOAD = Gauge(
    Metric.LOAD,
    "What this router adds to the load that models are scaled by: requests that wait or run. Add all routers up.",
    ["model"],
    multiprocess_mode="livesum",
)
PARKED = Gauge(Metric.PARKED, "Requests that wait for an engine with room.", ["model"], multiprocess_mode="livesum")
QUEUE_SECONDS = Histogram(
    Metric.QUEUE_SECONDS, "Seconds in the queue, of those that waited.", ["model"], buckets=SECONDS
)
ADMISSION_REFUSALS = Counter(Metric.ADMISSION_REFUSALS, "Requests that limits or the queue refused.", ["reason"])
LIMITS_SHARED = Gauge(
    Metric.LIMITS_SHARED, "1 while tenants' limits are counted for all routers together.", multiprocess_mode="livemin"
)
TTFT = Histogram(Metric.TIME_TO_FIRST_TOKEN, "Seconds from admission to the first token.", ["model"], buckets=SECONDS)
ITL = BulkHistogram(Metric.INTER_TOKEN_LATENCY, "Seconds between pieces of a choice.", ["model"], buckets=TOKEN_SECONDS)
DURATION = Histogram(Metric.REQUEST_DURATION, "Seconds from admission to the end.", ["model"], buckets=SECONDS)
PROMPT_TOKENS = Counter(Metric.PROMPT_TOKENS, "Prompt tokens of admitted requests.", ["model"])
GENERATION_TOKENS = Counter(Metric.GENERATION_TOKENS, "Tokens generated, of all choices.", ["model"])
TENANT_REQUESTS = Counter(
    Metric.TENANT_REQUESTS, "Requests of a tenant that engines took and that ended here.", ["tenant", "model"]
)
TENANT_PROMPT_TOKENS = Counter(Metric.TENANT_PROMPT_TOKENS, "Their prompt tokens.", ["tenant", "model"])
TENANT_CACHED_TOKENS = Counter(
    Metric.TENANT_CACHED_TOKENS, "Their prompt tokens that were in the prefix cache.", ["tenant", "model"]
)
TENANT_COMPLETION_TOKENS = Counter(
    Metric.TENANT_COMPLETION_TOKENS, "Their output tokens, of all choices.", ["tenant", "model"]
)
USAGE_LOST = Counter(Metric.USAGE_LOST, "Requests whose usage may not have been counted, as their records are gone.")
BATCHES = Gauge(
    Metric.BATCHES, "Batches that this router works on, by their status.", ["status"], multiprocess_mode="livesum"
)
BATCHES_ENDED = Counter(Metric.BATCHES_ENDED, "Batches that ended here, by how.", ["status"])
BATCH_LINES = Counter(Metric.BATCH_LINES, "Lines of batches that ended here, by how.", ["result"])
BATCH_LINES_IN_FLIGHT = Gauge(
    Metric.BATCH_LINES_IN_FLIGHT, "Lines of batches that wait for engines or run.", multiprocess_mode="livesum"
)
ENGINES_READY = Gauge(
    Metric.ENGINES_READY, "Engines that can run the model now.", ["model"], multiprocess_mode="livemin"
)
ENGINES_SLEEPING = Gauge(
    Metric.ENGINES_SLEEPING, "Engines of the model that sleep.", ["model"], multiprocess_mode="livemax"
)
DISCOVERY_ENGINES = Gauge(
    Metric.DISCOVERY_ENGINES,
    "Engines that a source of --engine names.",
    ["source", "state"],
    multiprocess_mode="livemin",
)
DISCOVERY_CONNECTED = Gauge(
    Metric.DISCOVERY_CONNECTED, "1 while the source of engines answers.", ["source"], multiprocess_mode="livemin"
)
DISCOVERY_HEARD = Gauge(
    Metric.DISCOVERY_HEARD,
    "When the source of engines answered last, in Unix time.",
    ["source"],
    multiprocess_mode="livemin",
)
ATTEMPTS_LOST = Counter(Metric.ATTEMPTS_LOST, "Attempts that came to nothing and are made again elsewhere.", ["reason"])
TENANTS_FILE_CURRENT = Gauge(
    Metric.TENANTS_FILE_CURRENT,
    "1 while the tenants' file in force is the one that is there.",
    multiprocess_mode="livemin",
)
TARGETS_FILE_CURRENT = Gauge(
    Metric.TARGETS_FILE_CURRENT,
    "1 while the targets in force come from the current file.",
    multiprocess_mode="livemin",
)
TARGET_CHOICES = Counter(
    Metric.TARGET_CHOICES,
    "Requests for a name with several targets, by the one that they got, and why.",
    ["model", "target", "reason"],
)
SHADOWS = Counter(
    Metric.SHADOWS,
    "Requests that were to be sent to a shadow as well, by what came of it.",
    ["model", "target", "result"],
)
SHADOW_EQUAL_SHARE = Histogram(
    Metric.SHADOW_EQUAL_SHARE,
    "Part of an answer's tokens that its shadow has, too, from the beginning on.",
    ["model", "target"],
    buckets=(0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1),
)
OIDC_KEYS_CURRENT = Gauge(
    Metric.OIDC_KEYS_CURRENT, "1 while the keys of the tokens' issuer can be read.", multiprocess_mode="livemin"
)
LOAD_SHARED = Gauge(Metric.LOAD_SHARED, "1 while routers tell each other their load.", multiprocess_mode="livemin")
LOAD_ROUTERS = Gauge(Metric.LOAD_ROUTERS, "Other routers whose load is known.", multiprocess_mode="livemax")
LOAD_SHARES_IGNORED = Counter(Metric.LOAD_SHARES_IGNORED, "Shares of load that were damaged, or of too many routers.")
ROUTE_DECISIONS = Counter(Metric.ROUTE_DECISIONS, "Choices of an engine.", ["policy", "result"])
PICKS = Counter(Metric.PICKS, "Requests that gateways were sent on with, by how they ended.", ["model", "end"])
ROUTE_SECONDS = Histogram(
    Metric.ROUTE_SECONDS,
    "Processor seconds in which an engine was chosen.",
    buckets=(5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05),
)
INDEX_BLOCKS = Gauge(
    Metric.INDEX_BLOCKS,
    "Blocks in the prefix index, counted for each engine that has them.",
    multiprocess_mode="livesum",
)
INDEX_DROPPED = Counter(Metric.INDEX_DROPPED, "Blocks that the prefix index did not take.", ["reason"])
JOURNAL_AVAILABLE = Gauge(
    Metric.JOURNAL_AVAILABLE,
    "1 while Redis takes what is written; without Redis always 1, although nothing outlives the process.",
    multiprocess_mode="livemin",
)
JOURNAL_PENDING = Gauge(
    Metric.JOURNAL_PENDING, "Requests with state that is not written yet.", multiprocess_mode="livesum"
)
JOURNAL_DROPPED = Counter(Metric.JOURNAL_DROPPED, "Writes given up because too many were pending.")
RECORDS_UNREADABLE = Counter(
    Metric.RECORDS_UNREADABLE, "Times that a damaged record of a batch, file or conversation was read.", ["kind"]
)
STALE_EPOCHS = Counter(Metric.STALE_EPOCHS, "Writes refused because another router owns the request now.")
TASK_RESTARTS = Counter(Metric.TASK_RESTARTS, "Tasks of this router that failed and were started again.", ["task"])

FLUSH_PERIOD = 0.1  # seconds


class TokenMetrics:
    """The tokens of one model and the seconds between them, counted in plain numbers since the last ``flush``: a call
    of the library for each token would take longer than most of what is done with it. ``gaps`` are those before single
    tokens, which are added to it directly.
    """

    __slots__ = ("_counts", "_generation_tokens", "_inter_token_latency", "_seconds", "_tokens", "gaps")

    def __init__(self, model: str) -> None:
        self.gaps: list[float] = []
        self._tokens = 0
        self._seconds = 0.0
        self._counts = [0] * (len(TOKEN_SECONDS) + 1)
        self._generation_tokens = GENERATION_TOKENS.labels(model)
        self._inter_token_latency = ITL.labels(model)

    def add(self, tokens: int, gap: float | None) -> None:
        """Counts the tokens of one delta, ``gap`` seconds after the one before it; None for the first of a choice."""
        self._tokens += tokens
        if gap is not None:
            seconds = gap / tokens
            self._seconds += seconds
            self._counts[bisect_left(TOKEN_SECONDS, seconds)] += 1

    def flush(self) -> None:
        """Adds what was counted to the metrics."""
        for gap in self.gaps:
            self.add(1, gap)
        self.gaps.clear()
        if self._tokens:
            self._generation_tokens.inc(self._tokens)
            self._inter_token_latency.observe_many(self._counts, self._seconds)
            self._tokens, self._seconds, self._counts = 0, 0.0, [0] * len(self._counts)


_TOKEN_METRICS: dict[str, TokenMetrics] = {}


def token_metrics(model: str) -> TokenMetrics:
    """The one of a configured model."""
    if model not in _TOKEN_METRICS:
        _TOKEN_METRICS[model] = TokenMetrics(model)
    return _TOKEN_METRICS[model]


def flush_token_metrics() -> None:
    """Adds what was counted of every model to the metrics; to be called every ``FLUSH_PERIOD``."""
    for each in _TOKEN_METRICS.values():
        each.flush()


def count_tenant(tenant: str, model: str, counts: Sequence[int]) -> None:
    """Adds requests, prompt tokens, cached tokens and output tokens to those of a tenant, or of all ``other`` ones."""
    counters = TENANT_REQUESTS, TENANT_PROMPT_TOKENS, TENANT_CACHED_TOKENS, TENANT_COMPLETION_TOKENS
    for counter, count in zip(counters, counts, strict=True):
        counter.labels(tenant, model).inc(count)


def init_series(models: Iterable[str], losses: Iterable[str]) -> None:
    """The series of what has not happened yet: without them, a rate does not see the first time."""
    for model in models:
        PARKED.labels(model)
        IN_FLIGHT.labels(model)
        LOAD.labels(model)
    for status in ("validating", "in_progress", "finalizing", "cancelling"):
        BATCHES.labels(status)
    for status in ("completed", "failed", "expired", "cancelled"):
        BATCHES_ENDED.labels(status)
    for kind in ("batch", "file", "conversation"):
        RECORDS_UNREADABLE.labels(kind)
    for result in ("completed", "failed", "expired"):
        BATCH_LINES.labels(result)
    for reason in losses:
        ATTEMPTS_LOST.labels(reason)
    for refusal in RefusalReason:
        ADMISSION_REFUSALS.labels(refusal)
    for code in ErrorCode:
        REJECTIONS.labels(code.name.lower())
