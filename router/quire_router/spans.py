"""The spans of one request behind the API: where it waited, where it was sent, and each attempt."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode
from quire_proto import telemetry
from quire_proto.errors import QuireError
from quire_proto.telemetry import PROVIDER_NAME, Attribute

from quire_router.fleet.output import EngineFull, EngineLost
from quire_router.generation import GenerationRequest
from quire_router.progress import RequestState

tracer = trace.get_tracer("quire.router")


def record_wait_span(caller: Context, began: int, reason: str) -> None:
    """The request was held from ``began`` (nanoseconds since 1970) until now."""
    attributes = {Attribute.QUEUE_REASON: reason}
    tracer.start_span(telemetry.Span.QUEUE, caller, attributes=attributes, start_time=began).end()


def route_span(progress: RequestState) -> Span:
    """The span of one choice of an engine, to be ended."""
    return tracer.start_span(telemetry.Span.ROUTE, progress.trace_context)


@contextmanager
def attempt_span(progress: RequestState, engine_id: str, zone: str | None = None) -> Iterator[Span]:
    """The span of one attempt, which tells how it ended. ``zone`` is the engine's, where it is known."""
    generation = progress.generation
    name = f"{generation.operation} {generation.model}"
    attributes = _attributes(generation, engine_id, progress.attempt)
    if zone is not None:
        attributes[Attribute.ZONE] = zone
    span = tracer.start_span(name, progress.trace_context, SpanKind.CLIENT, attributes)
    try:
        yield span
    except (EngineFull, EngineLost, QuireError) as error:
        kind = error.code.name.lower() if isinstance(error, QuireError) else error.kind
        span.set_attribute(Attribute.ERROR_TYPE, kind)
        span.set_status(StatusCode.ERROR, kind)
        raise
    finally:
        _describe_end(span, progress)
        span.end()


def _attributes(generation: GenerationRequest, engine_id: str, attempt: int) -> dict[str, str | int | float]:
    return {
        Attribute.OPERATION: generation.operation,
        Attribute.PROVIDER: PROVIDER_NAME,
        Attribute.REQUEST_MODEL: generation.model,
        Attribute.REQUEST_MAX_TOKENS: generation.params.max_tokens,
        Attribute.REQUEST_TEMPERATURE: generation.params.temperature,
        Attribute.REQUEST_TOP_P: generation.params.top_p,
        Attribute.REQUEST_TOP_K: generation.params.top_k,
        Attribute.REQUEST_STREAM: generation.stream,
        Attribute.SERVER_ADDRESS: engine_id,
        Attribute.ENGINE: engine_id,
        Attribute.REQUEST_ID: generation.request_id,
        Attribute.ATTEMPT: attempt,
    }


def _describe_end(span: Span, progress: RequestState) -> None:
    if not span.is_recording():
        return
    usage = progress.usage
    span.set_attribute(Attribute.INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(Attribute.OUTPUT_TOKENS, usage.completion_tokens)
    span.set_attribute(Attribute.CACHED_TOKENS, usage.cached_tokens)
    if progress.finish_reason is not None:
        span.set_attribute(Attribute.FINISH_REASONS, [reason.value for reason in progress.finish_reasons])
