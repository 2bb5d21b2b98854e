"""Export of spans, as OpenTelemetry's variables say; without an endpoint or an exporter nothing is recorded. The trace
context of a request is passed on whether it is recorded, sampled, or neither.
"""

import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from threading import Thread
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire_proto.telemetry import DropReason

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

SHUTDOWN_TIMEOUT = 2.0  # seconds
ENDPOINT_VARIABLES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL_VARIABLES = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
_LINKS = 128  # of a span, OpenTelemetry's default
_W3C = TraceContextTextMapPropagator()


def setup_tracing(service: str, *, max_links: int = _LINKS, dropped: Counter[DropReason] | None = None) -> bool:
    """Starts exporting this process's spans as ``service``. Returns False if the variables ask for no exporter; then
    spans cost nothing. Spans that do not reach the collector are counted in ``dropped``. Raises ``ValueError`` for
    a variable that cannot be used.

    ``max_links`` must cover the sequences of a step: OpenTelemetry's default would drop links of larger batches. All of
    the SDK's ``OTEL_*`` variables of traces apply.
    """
    _propagator()
    exporters = _exporters()
    if not exporters:
        return False
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    from quire_proto.span_export import CountingSpanProcessor

    links = None if os.environ.get("OTEL_SPAN_LINK_COUNT_LIMIT") else max(_LINKS, max_links)
    provider = TracerProvider(resource=_resource(service), span_limits=SpanLimits(max_links=links))
    counts = Counter[DropReason]() if dropped is None else dropped
    for exporter in exporters:
        provider.add_span_processor(CountingSpanProcessor(exporter, counts))
    trace.set_tracer_provider(provider)
    is_recording.cache_clear()
    return True


def _exporters() -> list["SpanExporter"]:
    """Those of ``OTEL_TRACES_EXPORTER``. Without it that of OTLP, if an endpoint is set: no spans go to a collector
    that nobody named.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if _first(*ENDPOINT_VARIABLES) else "none"
    names = [name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or default).split(",")]
    return [_exporter(name) for name in names if name not in ("", "none")]


def _exporter(name: str) -> "SpanExporter":
    if name == "otlp":
        return _otlp_exporter(_first(*PROTOCOL_VARIABLES) or "grpc")
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = found.load()()
        return exporter
    raise ValueError(f"OTEL_TRACES_EXPORTER has {name}, which is not installed: install its package, or set otlp")


def _otlp_exporter(protocol: str) -> "SpanExporter":
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL cannot be {protocol}: set it to grpc or http/protobuf")


def _resource(service: str) -> "Resource":
    """What ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say; without a name there it is ``service``."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        return resource.merge(Resource({SERVICE_NAME: service}))
    return resource


def _first(*variables: str) -> str:
    """The value of the first of these that has one; else empty."""
    return next(filter(None, (os.environ.get(name, "").strip() for name in variables)), "")


@lru_cache(maxsize=8)
def is_recording(tracer: trace.Tracer) -> bool:
    """Whether spans of ``tracer`` go anywhere. Without a provider the API's own spans only take time: four of them a
    twentieth of a short request. Found out once: ``setup_tracing`` comes before the first request.
    """
    return not (
        isinstance(tracer, trace.ProxyTracer) and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    )


def shutdown_tracing() -> None:
    """Exports the remaining spans before the process ends, for at most ``SHUTDOWN_TIMEOUT`` seconds: an unreachable
    collector must not keep a pod from ending.
    """
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        exporting = Thread(target=shutdown, name="last spans", daemon=True)
        exporting.start()
        exporting.join(SHUTDOWN_TIMEOUT)


@lru_cache(maxsize=1)
def _propagator() -> TextMapPropagator:
    """How clients and other people's servers carry trace context: W3C's headers, unless ``OTEL_PROPAGATORS`` says
    otherwise. Raises ``ValueError`` for one that is not installed.
    """
    if not os.environ.get("OTEL_PROPAGATORS"):
        return _W3C
    from opentelemetry import propagate  # reads the variable when it is imported

    return propagate.get_global_textmap()


def extract(headers: Mapping[str, str]) -> Context:
    """The caller's trace context from headers with lower-case names; empty if there is none."""
    propagator = _propagator()
    return propagator.extract(headers) if any(name.lower() in headers for name in propagator.fields) else Context()


def extract_w3c(traceparent: str, tracestate: str) -> Context:
    """The trace context that a router sent with a request."""
    return _W3C.extract({"traceparent": traceparent, "tracestate": tracestate})


def w3c_headers(span: trace.Span) -> dict[str, str]:
    """The headers ``traceparent`` and, if there is such, ``tracestate`` of a span, whether it is sampled or not; none
    if it belongs to no trace.
    """
    carrier: dict[str, str] = {}
    if span.get_span_context().is_valid:
        _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier


def headers_for_servers(traceparent: str, tracestate: str) -> dict[str, str]:
    """The headers by which other people's servers get the trace context that a request has; none without one."""
    given = {"traceparent": traceparent, "tracestate": tracestate}
    carrier = {name: value for name, value in given.items() if value}
    if carrier and (propagator := _propagator()) is not _W3C:
        carrier = {}
        propagator.inject(carrier, extract_w3c(traceparent, tracestate))
    return carrier
