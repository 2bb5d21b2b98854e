"""Batches of spans on their way to a collector, in which no span is lost uncounted.

OpenTelemetry's ``BatchSpanProcessor`` drops spans that its queue has no room for, and an exporter those of a batch that
the collector did not take, and neither says how many in a way that a program can read.
"""

import os
from collections import Counter
from collections.abc import Sequence
from threading import Lock

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from quire_proto.telemetry import DropReason

QUEUE_SIZE_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE"
BATCH_SIZE_VARIABLE = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_QUEUE_SIZE, _BATCH_SIZE = 2048, 512  # OpenTelemetry's defaults


class CountingSpanProcessor(SpanProcessor):
    """A ``BatchSpanProcessor`` behind a gate that lets no more spans pass than it has room for, and counts the others
    in ``dropped``. When the queue is full the newest span is dropped, so that a gap is behind what has waited.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        dropped: Counter[DropReason],
        *,
        max_queue_size: int | None = None,
        max_export_batch_size: int | None = None,
    ) -> None:
        """The ``OTEL_BSP_*`` variables say what is not given, but a batch is never longer than the queue. Raises
        ``ValueError`` if one that is given is.
        """
        self._room = queue_size() if max_queue_size is None else max_queue_size
        self._waiting = 0
        self._dropped = dropped
        self._lock = Lock()
        batch = min(batch_size(), self._room) if max_export_batch_size is None else max_export_batch_size
        self._batches = BatchSpanProcessor(_CountingExporter(self, exporter), self._room, max_export_batch_size=batch)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing happens at the start of a span."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a sampled span, or drops it."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            if self._waiting >= self._room:
                self._dropped[DropReason.QUEUE_FULL] += 1
                return
            self._waiting += 1
        self._batches.on_end(span)

    def on_taken(self, count: int) -> None:
        """So many spans have left the queue."""
        with self._lock:
            self._waiting -= count

    def on_failed(self, count: int) -> None:
        """So many of them did not reach the collector."""
        with self._lock:
            self._dropped[DropReason.EXPORT_FAILED] += count

    def shutdown(self) -> None:
        """Exports what is queued, and ends."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Exports what is queued."""
        return bool(self._batches.force_flush(timeout_millis))


class _CountingExporter(SpanExporter):
    def __init__(self, processor: CountingSpanProcessor, exporter: SpanExporter) -> None:
        self._processor = processor
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._processor.on_taken(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._processor.on_failed(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def queue_size() -> int:
    """Spans that may wait, as ``OTEL_BSP_MAX_QUEUE_SIZE`` has it."""
    return _size(QUEUE_SIZE_VARIABLE, _QUEUE_SIZE)


def batch_size() -> int:
    """Spans that are sent at once, as ``OTEL_BSP_MAX_EXPORT_BATCH_SIZE`` has it."""
    return _size(BATCH_SIZE_VARIABLE, _BATCH_SIZE)


def _size(variable: str, default: int) -> int:
    given = os.environ.get(variable, "")
    return int(given) if given.isdecimal() and int(given) else default
