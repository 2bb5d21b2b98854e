"""Export of spans: OTLP over gRPC if ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set; otherwise nothing is recorded."""

import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from threading import Thread

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire_proto.telemetry import DropReason

SHUTDOWN_TIMEOUT = 2.0  # seconds
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROPAGATOR = TraceContextTextMapPropagator()


def setup_tracing(service: str, *, max_links: int = 128, dropped: Counter[DropReason] | None = None) -> bool:
    """Starts exporting this process's spans as ``service``. Returns False if no endpoint is configured; then spans cost
    nothing. Spans that do not reach the collector are counted in ``dropped``.

    ``max_links`` must cover the sequences of a step: OpenTelemetry's default would drop links of larger batches. The
    usual ``OTEL_*`` variables apply (service name, resource attributes, sampler, headers).
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return False
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    from quire_proto.span_export import CountingSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}),
        span_limits=SpanLimits(max_links=max(128, max_links)),
    )
    provider.add_span_processor(CountingSpanProcessor(OTLPSpanExporter(), Counter() if dropped is None else dropped))
    trace.set_tracer_provider(provider)
    is_recording.cache_clear()
    return True


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


def extract(headers: Mapping[str, str]) -> Context:
    """The caller's trace context from W3C headers with lower-case names; empty if there is none."""
    return _PROPAGATOR.extract(headers)


def traceparent(span: trace.Span) -> str:
    """The W3C ``traceparent`` header of ``span``; empty if the span is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")
