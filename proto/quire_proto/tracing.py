"""How spans leave a process: OTLP over gRPC when ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set, otherwise nothing is
recorded at all.
"""

import os
from collections.abc import Mapping
from threading import Thread

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SHUTDOWN_TIMEOUT = 2.0
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROPAGATOR = TraceContextTextMapPropagator()


def setup_tracing(service: str, *, max_links: int = 128) -> bool:
    """Starts exporting this process's spans as ``service``; False, and no cost afterwards, when no endpoint is
    configured.

    ``max_links`` must cover the sequences of a step: OpenTelemetry's default would drop links of larger batches. The
    usual ``OTEL_*`` variables apply (service name, resource attributes, sampler, headers).
    """
    if not os.environ.get(ENDPOINT_VARIABLE):
        return False
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}),
        span_limits=SpanLimits(max_links=max(128, max_links)),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def shutdown_tracing() -> None:
    """Sends what is still held back, for at most ``SHUTDOWN_TIMEOUT`` seconds: a collector that is gone must not keep a
    pod from ending. Call it before the process ends.
    """
    shutdown = getattr(trace.get_tracer_provider(), "shutdown", None)
    if shutdown is not None:
        sending = Thread(target=shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(SHUTDOWN_TIMEOUT)


def extract(headers: Mapping[str, str]) -> Context:
    """The caller's trace context from W3C headers with lower-case names; empty when there is none."""
    return _PROPAGATOR.extract(headers)


def traceparent(span: trace.Span) -> str:
    """The W3C trace context of ``span`` for the other side, empty when the span is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent", "")
