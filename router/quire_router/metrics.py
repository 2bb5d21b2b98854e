"""The router's Prometheus metrics. Labels are configured models and enumerations only, so their number is bounded."""

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from quire_proto.telemetry import Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample for each counter, which nobody reads

REQUESTS = Counter(
    Metric.REQUESTS,
    "Requests that ended, by how; of several choices the gravest reason counts.",
    ["model", "operation", "finish_reason"],
)
REJECTIONS = Counter(Metric.REJECTIONS, "Requests refused before they reached an engine, by error code.", ["reason"])
IN_FLIGHT = Gauge(Metric.IN_FLIGHT, "Requests admitted and not ended.", ["model"])
TTFT = Histogram(Metric.TIME_TO_FIRST_TOKEN, "Seconds from admission to the first token.", ["model"], buckets=_SECONDS)
ITL = Histogram(Metric.INTER_TOKEN_LATENCY, "Seconds between pieces of a choice.", ["model"], buckets=_TOKEN_SECONDS)
DURATION = Histogram(Metric.REQUEST_DURATION, "Seconds from admission to the end.", ["model"], buckets=_SECONDS)
PROMPT_TOKENS = Counter(Metric.PROMPT_TOKENS, "Prompt tokens of admitted requests.", ["model"])
GENERATION_TOKENS = Counter(Metric.GENERATION_TOKENS, "Tokens generated, of all choices.", ["model"])
ENGINES_READY = Gauge(Metric.ENGINES_READY, "Engines that can run the model now.", ["model"])
ROUTE_DECISIONS = Counter(Metric.ROUTE_DECISIONS, "Choices of an engine.", ["policy", "result"])
JOURNAL_AVAILABLE = Gauge(Metric.JOURNAL_AVAILABLE, "1 while request state is being kept.")
JOURNAL_PENDING = Gauge(Metric.JOURNAL_PENDING, "Requests with state that is not written yet.")
JOURNAL_DROPPED = Counter(Metric.JOURNAL_DROPPED, "Writes given up because too many were pending.")
STALE_EPOCHS = Counter(Metric.STALE_EPOCHS, "Writes refused because another router owns the request now.")
