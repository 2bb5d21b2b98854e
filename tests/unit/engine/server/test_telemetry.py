"""Spans of requests with several choices, and the counters of grammars."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, time

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from quire_engine.core.absence import PreemptionMode, TimeAway
from quire_engine.core.data_parallel import DPStats
from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.core.executor import WeightStats
from quire_engine.core.lora import LoRAStats
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad
from quire_engine.core.request import Request, SequenceEvent, SequenceTimings
from quire_engine.core.startup import StartupPhase, StartupTimer, process_start
from quire_engine.core.step import StepTimings
from quire_engine.core_client.client import CoreStats
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.metrics import EngineMetrics
from quire_engine.server.tracing import TraceExporter
from quire_engine.structured_output.compiler import CompileOutcome
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.span_export import CountingSpanProcessor
from quire_proto.telemetry import Attribute, DropReason, Event, Span

from tests.support.otlp import collector
from tests.support.processes import eventually

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = StepTrace(1, 0, StepTimings(), 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, False, [])
LOAD = EngineLoad(*[0] * 8)


def step(*outputs: EngineCoreOutput) -> EngineCoreOutputs:
    return EngineCoreOutputs(list(outputs), LOAD, [], TRACE)


def end(index: int, finished: int, *, last: bool = False) -> EngineCoreOutput:
    times = SequenceTimings(arrived=1, admitted=2, first_token=3, finished=finished)
    return EngineCoreOutput("k", index=index, finish_reason=FinishReason.STOP, timings=times, ends_request=last)


def test_a_request_with_several_choices_waits_once_and_decodes_each() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1000, tracer=provider.get_tracer("test"))
    builder.on_submit(Request("k", [1, 2], SamplingParams(n=2), traceparent=PARENT))
    builder.on_step(step(end(1, 5)))
    builder.on_step(step(end(0, 9, last=True)))
    builder.on_step(step(end(0, 11, last=True)))  # of a request that has ended
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [Span.WAIT, Span.PREFILL, Span.DECODE, Span.DECODE]
    assert [summary(span) for span in spans[2:]] == [(1, 5), (0, 9)]


def timed_start() -> StartupTimer:
    """A start whose processor works half of the time: its phases take 1, 2 and 3 seconds."""
    seconds = iter([101.0, 103.0, 106.0, 200.0])
    cpu_seconds = iter([0.5, 1.5, 3.0, 50.0])
    timer = StartupTimer(100.0, lambda: next(seconds), lambda: next(cpu_seconds))
    timer.begin(StartupPhase.WEIGHTS)
    timer.begin(StartupPhase.REGISTERED)
    timer.end()
    timer.end()  # once more changes nothing
    return timer


def test_the_phases_of_a_start_follow_each_other_below_one_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1000, tracer=provider.get_tracer("test"))
    builder.export_startup(timed_start().phases)
    spans = exporter.get_finished_spans()
    assert [(span.name, span.start_time // 10**9, span.end_time // 10**9) for span in spans] == [
        ("imports", 100, 101),
        ("weights", 101, 103),
        ("registered", 103, 106),
        (Span.STARTUP, 100, 106),
    ]
    assert [span.attributes[Attribute.CPU_SECONDS] for span in spans[:3]] == [0.5, 1.0, 1.5]
    assert {span.parent and span.parent.span_id for span in spans} == {spans[3].context.span_id, None}


def test_phases_are_exported_as_they_end() -> None:
    timer = timed_start()
    registered = timer.phases.pop()
    metrics = EngineMetrics("m", CoreStats(), lambda: 0.0, startup=timer.phases)
    assert 'startup_seconds{model="m",phase="weights"} 2.0' in generate_latest(metrics.registry).decode()
    timer.phases.append(registered)
    text = generate_latest(metrics.registry).decode()
    assert 'startup_seconds{model="m",phase="registered"} 3.0' in text
    assert 'startup_cpu_seconds{model="m",phase="imports"} 0.5' in text


def test_a_process_began_before_now_and_not_before_the_machine() -> None:
    assert time() - clock_gettime(CLOCK_BOOTTIME) <= process_start() <= time()


def test_where_the_system_does_not_say_when_the_process_began_it_begins_now(tmp_path: Path) -> None:
    before = time()
    assert before <= process_start(tmp_path) <= time()


@pytest.mark.parametrize("passed", [18.0, 40.0])
def test_the_parts_of_a_step_follow_each_other_until_its_end(passed: float) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=2, tracer=provider.get_tracer("test"))
    trace = replace(
        TRACE, step=2, started=5, timings=StepTimings(2.0, 8.0, 4.0), schedule=1.0, update=3.0, elapsed=passed
    )
    builder.on_step(EngineCoreOutputs([], LOAD, [], trace))
    *parts, root = [(span.name, span.start_time - 5, span.end_time - 5) for span in exporter.get_finished_spans()]
    late = int(passed) - 15
    assert [(name, start // 10**9, end // 10**9) for name, start, end in parts] == [
        (Span.STEP_SCHEDULE, 0, 1),
        (Span.STEP_SWAP, 1, 3),
        (Span.STEP_FORWARD, late, late + 8),
        (Span.STEP_SAMPLE, late + 8, late + 12),
        (Span.STEP_EMIT, late + 12, late + 15),
    ]
    assert root == (Span.STEP, 0, int(passed) * 10**9)


def test_every_step_is_one_span_with_its_phases_when_the_interval_is_one() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1, tracer=provider.get_tracer("test"))
    trace = replace(TRACE, timings=StepTimings(0.0, 10.0, 4.0), schedule=1.0, update=3.0, elapsed=40.0)
    for number in range(500):  # many times the rate of an interval above one
        builder.on_step(EngineCoreOutputs([], LOAD, [], replace(trace, step=number, started=number)))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [Span.STEP] * 500
    assert [dict(span.attributes or {})[Attribute.STEP_ID] for span in spans] == list(range(500))
    assert {(span.end_time or 0) - (span.start_time or 0) for span in spans} == {40 * 10**9}
    attributes = dict(spans[0].attributes or {})
    names = ("pause", "schedule", "forward", "sample", "emit")
    assert [attributes[f"quire.step.{name}_seconds"] for name in names] == [22.0, 1.0, 10.0, 4.0, 3.0]
    assert Attribute.STEP_SWAP_SECONDS not in attributes, "what is 0 is left out"


def test_each_of_all_steps_is_linked_to_the_requests_that_were_not_in_the_one_before() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1, tracer=provider.get_tracer("test"))
    for name in "abc":
        traceparent = f"00-{ord(name):032x}-{ord(name):016x}-01"
        builder.on_submit(Request(name, [1], SamplingParams(), traceparent=traceparent))
    steps = ["a", "ab", "abz", "bc", "c", "ac"]
    for number, names in enumerate(steps):
        builder.on_step(EngineCoreOutputs([], LOAD, [], replace(TRACE, step=number, request_ids=list(names))))
    linked = ["".join(chr(link.context.span_id) for link in span.links) for span in exporter.get_finished_spans()]
    assert linked == ["a", "b", "", "c", "", "a"]


@pytest.mark.parametrize("refuses", [False, True])
def test_the_steps_that_a_trace_lacks_are_as_many_as_the_metric_says(refuses: bool) -> None:
    """The collector stalls, or refuses what it gets first."""
    dropped = Counter[DropReason]()
    metrics = EngineMetrics("demo", CoreStats(), lambda: 0.0, dropped)
    with collector() as received:
        received.answers.clear()
        received.refuses = refuses
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{received.port}", insecure=True)
        processor = CountingSpanProcessor(exporter, dropped, max_queue_size=64, max_export_batch_size=16)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(processor)
        builder = TraceExporter(enabled=True, step_interval=1, tracer=provider.get_tracer("test"), dropped=dropped)
        for number in range(500):
            builder.on_step(EngineCoreOutputs([], LOAD, [], replace(TRACE, step=number)))
        if refuses:
            received.answers.set()
            eventually(lambda: dropped[DropReason.EXPORT_FAILED] > 0)
            received.refuses = False
        received.answers.set()
        processor.shutdown()
        steps = [span.attributes[Attribute.STEP_ID] for span in received.spans]
    told = {
        reason: metrics.registry.get_sample_value(
            "quire_engine_dropped_spans_total", {"model": "demo", "reason": reason}
        )
        for reason in DropReason
    }
    assert len(set(steps)) == len(steps)
    assert 500 - len(steps) == sum(told.values())
    assert told[DropReason.QUEUE_FULL] >= 500 - 64 - 2 * 16
    assert (told[DropReason.EXPORT_FAILED] > 0) == refuses


def test_steps_that_the_rate_leaves_out_are_counted() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    dropped = Counter[DropReason]()
    builder = TraceExporter(enabled=True, step_interval=1000, tracer=provider.get_tracer("test"), dropped=dropped)
    for number in range(500):
        builder.on_step(EngineCoreOutputs([], LOAD, [], replace(TRACE, step=number, preempted=1)))
    steps = [span for span in exporter.get_finished_spans() if span.name == Span.STEP]
    assert len(steps) + dropped[DropReason.RATE] == 500
    assert dropped[DropReason.RATE] > 0


def test_a_preemption_is_an_event_of_the_span_that_it_falls_into() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1000, tracer=provider.get_tracer("test"))
    builder.on_submit(Request("k", [1, 2], SamplingParams(), traceparent=PARENT))
    output = end(0, 90, last=True)
    output.timings = SequenceTimings(
        10, 20, 50, 90, events=[SequenceEvent("recompute", 40), SequenceEvent("recompute", 60)]
    )
    builder.on_step(step(output))
    events = {span.name: [event.timestamp for event in span.events] for span in exporter.get_finished_spans()}
    assert events == {Span.WAIT: [], Span.PREFILL: [40], Span.DECODE: [50, 60]}


def test_a_preemption_and_the_return_from_it_say_how_and_how_long() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    builder = TraceExporter(enabled=True, step_interval=1000, tracer=provider.get_tracer("test"))
    builder.on_submit(Request("k", [1, 2], SamplingParams(), traceparent=PARENT))
    output = end(0, 90, last=True)
    events = [SequenceEvent("recompute", 60, reason="configured"), SequenceEvent("recomputed", 80, away_seconds=2.5)]
    output.timings = SequenceTimings(10, 20, 50, 90, num_preemptions=1, away_seconds=2.5, events=events)
    builder.on_step(step(output))
    (decode,) = [span for span in exporter.get_finished_spans() if span.name == Span.DECODE]
    told = dict(decode.attributes or {})
    assert (told[Attribute.PREEMPTIONS], told[Attribute.AWAY_SECONDS]) == (1, 2.5)
    _, preempted, resumed = decode.events
    assert (preempted.name, resumed.name) == (Event.PREEMPTED, Event.RESUMED)
    assert dict(preempted.attributes or {})[Attribute.PREEMPTION_REASON] == "configured"
    assert dict(resumed.attributes or {})[Attribute.AWAY_SECONDS] == 2.5


def test_times_away_are_counted_by_the_mode_of_the_preemption() -> None:
    metrics = EngineMetrics("demo", CoreStats(), lambda: 0.0)
    away = [TimeAway(PreemptionMode.SWAP, 0.2), TimeAway(PreemptionMode.RECOMPUTE, 3.0)]
    for _ in range(2):
        metrics.on_step(EngineCoreOutputs([], LOAD, [], TRACE, times_away=away))
    text = generate_latest(metrics.registry).decode()
    assert 'quire_engine_away_seconds_sum{mode="swap",model="demo"} 0.4' in text
    assert 'quire_engine_away_seconds_count{mode="recompute",model="demo"} 2.0' in text


def summary(span: ReadableSpan) -> tuple[object, int | None]:
    assert span.attributes is not None
    return span.attributes[Attribute.CHOICE], span.end_time


def test_grammars_are_counted_by_outcome() -> None:
    metrics = EngineMetrics("demo", CoreStats(), lambda: 0.0)
    for outcome, seconds in (
        (CompileOutcome.COMPILED, 0.004),
        (CompileOutcome.KNOWN, 0.0),
        (CompileOutcome.REFUSED, 0.2),
    ):
        metrics.on_grammar(outcome, seconds)
    text = generate_latest(metrics.registry).decode()
    for outcome in ("compiled", "known", "refused"):
        assert f'quire_engine_grammars_total{{model="demo",outcome="{outcome}"}} 1.0' in text
    assert 'quire_engine_grammar_compile_seconds_count{model="demo"} 2.0' in text


async def test_adapters_are_counted_and_named_in_one_series_at_a_time() -> None:
    loras = LoRARegistry(lambda lora: lora, ["demo"])
    for name in "abc":
        await loras.load(name, f"/{name}")
    metrics = EngineMetrics("demo", CoreStats(), lambda: 0.0, loras=loras, max_loras=2)
    before = time()
    assert lora_info(metrics)[0] == {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    for stats in (LoRAStats(("a",), (), 1), LoRAStats(("a", "b"), ("b", "c"), 2, 5)):
        metrics.on_step(EngineCoreOutputs([], replace(LOAD, loras=stats), [], TRACE))
    labels, value = lora_info(metrics)
    assert labels == {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b,c"}
    assert before <= value <= time()
    text = generate_latest(metrics.registry).decode()
    for name, count in (("loras", 3), ("lora_slots", 2), ("used_lora_slots", 2), ("lora_waiting_sequences", 5)):
        assert f'quire_engine_{name}{{model="demo"}} {count}.0' in text
    await loras.unload("c")
    assert 'quire_engine_loras{model="demo"} 2.0' in generate_latest(metrics.registry).decode()


def test_an_engine_without_adapters_has_no_metrics_of_them() -> None:
    assert "lora" not in generate_latest(EngineMetrics("demo", CoreStats(), lambda: 0.0).registry).decode()


def test_weights_on_disk_are_counted_as_they_are_when_they_are_asked_for() -> None:
    stats = WeightStats(memory_bytes=3, disk_bytes=7)
    metrics = EngineMetrics("demo", CoreStats(weights=stats), lambda: 0.0)
    stats.read_bytes, stats.wait_seconds = 14, 2.5
    text = generate_latest(metrics.registry).decode()
    for sample in (
        'bytes{model="demo",tier="memory"} 3.0',
        'bytes{model="demo",tier="host"} 0.0',
        'bytes{model="demo",tier="disk"} 7.0',
        'read_bytes_total{model="demo"} 14.0',
        'wait_seconds_total{model="demo"} 2.5',
    ):
        assert f"\nquire_engine_weight_{sample}\n" in text


def test_a_gpu_that_waits_for_weights_of_the_host_says_how_many_it_copied_and_not_for_how_long() -> None:
    metrics = EngineMetrics("demo", CoreStats(weights=WeightStats(3, host_bytes=7, read_bytes=14)), lambda: 0.0)
    text = generate_latest(metrics.registry).decode()
    assert 'quire_engine_weight_bytes{model="demo",tier="host"} 7.0\n' in text
    assert 'quire_engine_weight_read_bytes_total{model="demo"} 14.0\n' in text
    assert "quire_engine_weight_wait_seconds" not in text


def test_an_engine_whose_weights_are_in_memory_has_no_metrics_of_them() -> None:
    assert "weight" not in generate_latest(EngineMetrics("demo", CoreStats(), lambda: 0.0).registry).decode()


def lora_info(metrics: EngineMetrics) -> tuple[dict[str, str], float]:
    """The labels and the value of the only series that names adapters."""
    families = [each for each in metrics.registry.collect() if each.name == "vllm:lora_requests_info"]
    ((sample,),) = (family.samples for family in families)
    return sample.labels, sample.value


def test_an_engine_of_a_group_counts_its_dummy_passes_though_it_has_no_steps() -> None:
    stats = DPStats()
    metrics = EngineMetrics("demo", CoreStats(data_parallel=stats), lambda: 0.0)
    stats.dummy_passes = 7
    assert 'quire_engine_dummy_passes_total{model="demo"} 7.0' in generate_latest(metrics.registry).decode()
    assert "dummy" not in generate_latest(EngineMetrics("demo", CoreStats(), lambda: 0.0).registry).decode()
