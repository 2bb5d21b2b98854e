"""Exports the engine's spans from the core's records, off the step loop. Costs nothing if tracing is disabled.

A request's spans are children of the router's attempt. A step is a root span, because a batch has many parents; it is
*linked* to its requests. Steps are traced once per interval, and whenever they are slow, swap, preempt or fail, within
a rate limit. With an interval of 1 every step is traced, without a rate limit, as one compact span. Its phases are
attributes instead of child spans, zeros are left out, and only requests that were not in the step before are linked.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Tracer
from quire_proto.telemetry import Attribute, DropReason, Event, Span
from quire_proto.tracing import extract_w3c

from quire_engine.core.engine_core import EngineCoreOutputs, StepTrace
from quire_engine.core.outputs import EngineCoreOutput, EngineLoad
from quire_engine.core.request import Request, SequenceEvent, SequenceTimings
from quire_engine.core.startup import PhaseTime

SLOW_FACTOR = 4.0
MAX_STEPS_PER_SECOND = 20.0
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _TracedRequest:
    context: Context
    link: Link | None  # to a span that is exported
    prompt_tokens: int
    prompt_exported: bool = False


class TraceExporter:
    """Keeps the trace contexts of traced requests, and exports the spans of requests and steps. Steps that were not
    traced because of the rate limit are counted in ``dropped``.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        step_interval: int,
        tracer: Tracer | None = None,
        dropped: Counter[DropReason] | None = None,
    ) -> None:
        self._enabled = enabled
        self._interval = step_interval
        self._every_step = step_interval == 1
        self._tracer = tracer or trace.get_tracer("quire.engine")
        self._dropped = Counter[DropReason]() if dropped is None else dropped
        self._traced: dict[str, _TracedRequest] = {}
        self._linked: set[str] = set()  # the requests of the last exported step
        self._average_duration = 0.0
        self._tokens = MAX_STEPS_PER_SECOND
        self._refilled = monotonic()

    def export_startup(self, phases: Sequence[PhaseTime]) -> None:
        """Exports the engine's start as a root span, with a child for each phase."""
        if not (self._enabled and phases):
            return
        begun, last = phases[0].started, phases[-1]
        root = self._tracer.start_span(Span.STARTUP, Context(), start_time=round(begun * _NANOSECONDS))
        parent = trace.set_span_in_context(root, Context())
        for each in phases:
            started, ended = round(each.started * _NANOSECONDS), round((each.started + each.seconds) * _NANOSECONDS)
            attributes = {Attribute.CPU_SECONDS: each.cpu_seconds}
            self._tracer.start_span(each.phase, parent, start_time=started, attributes=attributes).end(ended)
        root.end(round((last.started + last.seconds) * _NANOSECONDS))

    def on_submit(self, request: Request) -> None:
        """Keeps the trace context of a request, if it has one."""
        if not (self._enabled and request.traceparent):
            return
        context = extract_w3c(request.traceparent, request.tracestate)
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid:
            link = Link(parent) if parent.trace_flags.sampled else None
            self._traced[request.request_id] = _TracedRequest(context, link, len(request.prompt_token_ids))

    def on_abandoned(self, key: str) -> None:
        """Drops a request that no output will end."""
        self._traced.pop(key, None)

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Exports the step, if it is to be traced, and the choices that ended with it."""
        if not self._enabled:
            return
        if self._should_trace(step.trace):
            self._export_step(step.trace, step.load)
        for output in step.outputs:
            if output.finish_reason and (traced := self._traced.get(output.request_id)):
                self._export_choice(traced, output)
            if output.ends_request:
                self._traced.pop(output.request_id, None)

    def _should_trace(self, step: StepTrace) -> bool:
        if self._every_step:
            return True
        slow = step.duration > SLOW_FACTOR * self._average_duration > 0
        self._average_duration += 0.05 * (step.duration - self._average_duration)
        should_trace = slow or step.failed or step.preempted or step.swapped_blocks or step.step % self._interval == 0
        return bool(should_trace) and self._take_token()

    def _take_token(self) -> bool:
        now = monotonic()
        self._tokens = min(MAX_STEPS_PER_SECOND, self._tokens + (now - self._refilled) * MAX_STEPS_PER_SECOND)
        self._refilled = now
        if self._tokens < 1:
            self._dropped[DropReason.RATE] += 1
            return False
        self._tokens -= 1
        return True

    def _export_step(self, step: StepTrace, load: EngineLoad) -> None:
        linked = self._linked if self._every_step else ()
        found = (self._traced.get(key) for key in step.request_ids if key not in linked)
        links = [traced.link for traced in found if traced is not None and traced.link is not None]
        attributes: dict[str, int | float] = {
            Attribute.STEP_ID: step.step,
            Attribute.STEP_PREFILL: step.num_prefill,
            Attribute.STEP_DECODE: step.num_decode,
            Attribute.STEP_TOKENS: step.num_tokens,
            Attribute.STEP_PREEMPTED: step.preempted,
            Attribute.BLOCKS_FREE: load.blocks_free,
            Attribute.BLOCKS_TOTAL: load.blocks_total,
        }
        phases = _phases(step)
        if self._every_step:
            attributes |= {phase.attribute: phase.seconds for phase in phases}
            attributes[Attribute.STEP_PAUSE_SECONDS] = step.pause
            attributes = {name: value for name, value in attributes.items() if value or name == Attribute.STEP_ID}
            self._linked = set(step.request_ids)
        root = self._tracer.start_span(
            Span.STEP,
            context=Context(),
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            links=links,
            start_time=step.started,
        )
        if not self._every_step:
            self._export_phases(phases, root)
        root.end(phases[-1].end)

    def _export_phases(self, phases: Sequence["_Phase"], root: trace.Span) -> None:
        context = trace.set_span_in_context(root)
        for phase in phases:
            self._span(phase.span, context, phase.start, phase.end)

    def _export_choice(self, traced: _TracedRequest, output: EngineCoreOutput) -> None:
        """Exports the spans of a choice. The choices of a request share its waiting and prefill spans, which are
        exported with the first choice.
        """
        times = output.timings
        if times is None:
            return
        if not traced.prompt_exported:
            self._export_prompt(traced, output, times)
            traced.prompt_exported = True
        if times.first_token:
            self._export_decode(traced, output, times)
        self._export_swaps(traced, times)

    def _export_prompt(self, traced: _TracedRequest, output: EngineCoreOutput, times: SequenceTimings) -> None:
        end = times.finished
        self._span(Span.WAIT, traced.context, times.arrived, times.admitted or end)
        if times.admitted:
            attributes = {
                Attribute.INPUT_TOKENS: traced.prompt_tokens,
                Attribute.CACHED_TOKENS: output.cached_tokens,
                Attribute.FIRST_STEP: times.first_step,
            }
            prefilled = times.first_token or end
            early = [event for event in times.events if event.time < prefilled]
            self._span(Span.PREFILL, traced.context, times.admitted, prefilled, attributes, events=early)

    def _export_decode(self, traced: _TracedRequest, output: EngineCoreOutput, times: SequenceTimings) -> None:
        span = self._tracer.start_span(
            Span.DECODE,
            context=traced.context,
            start_time=times.first_token,
            attributes={
                Attribute.CHOICE: output.index,
                Attribute.OUTPUT_TOKENS: output.position + len(output.token_ids),
                Attribute.FINISH_REASONS: (str(output.finish_reason),),
                Attribute.LAST_STEP: times.last_step,
            },
        )
        if times.num_preemptions:
            span.set_attribute(Attribute.PREEMPTIONS, times.num_preemptions)
            span.set_attribute(Attribute.AWAY_SECONDS, times.away_seconds)
        span.add_event(Event.FIRST_TOKEN, timestamp=times.first_token)
        _add_events(span, [event for event in times.events if event.time >= times.first_token])
        span.end(times.finished)

    def _export_swaps(self, traced: _TracedRequest, times: SequenceTimings) -> None:
        """Exports the swaps. A ``swap_out`` span lasts as long as the sequence was off the device."""
        for index, event in enumerate(times.events):
            attributes = {Attribute.BLOCKS: event.blocks}
            if event.name == "swap_out":
                later = times.events[index + 1 :]
                end = next((other.time for other in later if other.name == "swap_in"), times.finished)
                self._span(Span.SWAP_OUT, traced.context, event.time, end, attributes)
            elif event.name == "swap_in":
                self._span(Span.SWAP_IN, traced.context, event.time, event.time, attributes)

    def _span(
        self,
        name: str,
        context: Context,
        start: int,
        end: int,
        attributes: dict[str, int] | None = None,
        *,
        events: Sequence[SequenceEvent] = (),
    ) -> None:
        span = self._tracer.start_span(name, context=context, start_time=start, attributes=attributes)
        _add_events(span, events)
        span.end(end)


def _add_events(span: trace.Span, events: Sequence[SequenceEvent]) -> None:
    for event in events:
        name = Event.RESUMED if event.name in ("swap_in", "recomputed") else Event.PREEMPTED
        span.add_event(name, _preemption(event), timestamp=event.time)


def _preemption(event: SequenceEvent) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {Attribute.PREEMPTION: event.name, Attribute.BLOCKS: event.blocks}
    if event.reason:
        attributes[Attribute.PREEMPTION_REASON] = str(event.reason)
    if event.away_seconds:
        attributes[Attribute.AWAY_SECONDS] = event.away_seconds
    return attributes


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a step: its span or its attribute, and when it began and ended, in nanoseconds since 1970."""

    span: str
    attribute: str
    seconds: float
    start: int
    end: int


def _phases(step: StepTrace) -> list[_Phase]:
    """Returns the phases of a step in order. The pause is before the forward pass."""
    phases, now = list[_Phase](), step.started
    for span, attribute, seconds in (
        (Span.STEP_SCHEDULE, Attribute.STEP_SCHEDULE_SECONDS, step.schedule),
        (Span.STEP_SWAP, Attribute.STEP_SWAP_SECONDS, step.timings.swap),
        (Span.STEP_FORWARD, Attribute.STEP_FORWARD_SECONDS, step.timings.forward),
        (Span.STEP_SAMPLE, Attribute.STEP_SAMPLE_SECONDS, step.timings.sample),
        (Span.STEP_EMIT, Attribute.STEP_EMIT_SECONDS, step.update),
    ):
        if span == Span.STEP_FORWARD:
            now += int(step.pause * _NANOSECONDS)
        phases.append(_Phase(span, attribute, seconds, now, now + int(seconds * _NANOSECONDS)))
        now = phases[-1].end
    return phases
