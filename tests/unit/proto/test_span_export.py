"""Every sampled span reaches the collector, or is counted among the dropped."""

from collections import Counter
from collections.abc import Sequence
from itertools import count
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from quire_proto.span_export import CountingSpanProcessor, queue_size
from quire_proto.telemetry import DropReason


class StalledExporter(SpanExporter):
    """Takes no batch before it is released, and refuses or breaks on those whose numbers are given."""

    def __init__(self, refused: Sequence[int] = (), broken: Sequence[int] = ()) -> None:
        self.names: list[str] = []
        self.lost = 0
        self.exporting, self.released = Event(), Event()
        self._numbers = count()
        self._refused, self._broken = refused, broken

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.exporting.set()
        self.released.wait()
        number = next(self._numbers)
        if number in (*self._refused, *self._broken):
            self.lost += len(spans)
            if number in self._broken:
                raise RuntimeError("broken")
            return SpanExportResult.FAILURE
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS


def end_spans(processor: SpanProcessor, names: Sequence[str]) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    for name in names:
        provider.get_tracer("test").start_span(name).end()


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 60))
def test_what_a_stalled_collector_leaves_no_room_for_is_counted_exactly(room: int, batch: int, total: int) -> None:
    dropped, exporter = Counter[DropReason](), StalledExporter()
    batch = min(batch, room)
    processor = CountingSpanProcessor(exporter, dropped, max_queue_size=room, max_export_batch_size=batch)
    names = [str(number) for number in range(total)]
    end_spans(processor, names)
    exporter.released.set()
    processor.shutdown()
    assert len(exporter.names) + dropped[DropReason.QUEUE_FULL] == total
    assert exporter.names == sorted(set(exporter.names), key=int), "a span was repeated or overtaken"
    assert len(exporter.names) >= min(total, room)
    assert exporter.names[: min(total, room)] == names[: min(total, room)], "what had room was dropped"
    assert dropped[DropReason.EXPORT_FAILED] == 0


def test_the_library_alone_drops_without_a_count_that_one_could_read() -> None:
    """Otherwise nothing above is needed."""
    exporter = StalledExporter()
    processor = BatchSpanProcessor(exporter, max_queue_size=4, max_export_batch_size=4)
    end_spans(processor, [str(number) for number in range(60)])
    exporter.released.set()
    processor.shutdown()
    assert len(exporter.names) < 60


def test_threads_that_end_spans_at_once_lose_none_uncounted() -> None:
    dropped, exporter = Counter[DropReason](), StalledExporter()
    exporter.released.set()
    processor = CountingSpanProcessor(exporter, dropped, max_queue_size=8, max_export_batch_size=4)
    names = [[f"{thread} {number}" for number in range(400)] for thread in range(4)]
    threads = [Thread(target=end_spans, args=(processor, each)) for each in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    processor.shutdown()
    assert len(set(exporter.names)) == len(exporter.names)
    assert len(exporter.names) + dropped[DropReason.QUEUE_FULL] == 1600


def test_spans_of_batches_that_the_collector_did_not_take_are_counted() -> None:
    dropped, exporter = Counter[DropReason](), StalledExporter(refused=(0, 2), broken=(3,))
    processor = CountingSpanProcessor(exporter, dropped, max_queue_size=64, max_export_batch_size=5)
    end_spans(processor, [str(number) for number in range(33)])
    exporter.released.set()
    processor.shutdown()
    assert dropped == {DropReason.EXPORT_FAILED: exporter.lost}
    assert exporter.lost >= 15
    assert len(exporter.names) + exporter.lost == 33


def test_spans_that_are_not_sampled_are_not_dropped() -> None:
    dropped, exporter = Counter[DropReason](), StalledExporter()
    exporter.released.set()
    processor = CountingSpanProcessor(exporter, dropped, max_queue_size=1, max_export_batch_size=1)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    for _ in range(10):
        provider.get_tracer("test").start_span("x").end()
    processor.shutdown()
    assert not exporter.names
    assert not dropped


@pytest.mark.parametrize(("given_size", "expected"), [("", 2048), ("100", 100), ("many", 2048), ("0", 2048)])
def test_the_queue_is_as_long_as_opentelemetrys_variable_says(
    monkeypatch: pytest.MonkeyPatch, given_size: str, expected: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", given_size)
    assert queue_size() == expected


def test_a_queue_that_is_shorter_than_a_batch_has_shorter_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    exporter = StalledExporter()
    exporter.released.set()
    processor = CountingSpanProcessor(exporter, Counter[DropReason]())
    end_spans(processor, ["one"])
    processor.shutdown()
    assert exporter.names == ["one"]
