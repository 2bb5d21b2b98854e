"""The engine's Prometheus metrics: what steps are observed for, and the tables that are read at each scrape."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import time
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from quire_proto.telemetry import DropReason, Metric

from quire_engine.core.engine_core import EngineCoreOutputs
from quire_engine.core.lora import LoRAStats
from quire_engine.core.startup import PhaseTime
from quire_engine.core_client.client import CoreStats
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.metric_families import (
    DROPPED_SPANS,
    DUMMY_PASSES,
    LOAD,
    NO_LOAD,
    STARTUP,
    TOTALS,
    Family,
    FamilyCollector,
    Source,
    lora_families,
    weight_families,
)
from quire_engine.structured_output.compiler import CompileOutcome

_GRAMMAR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_AWAY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.2, 1.5, 2, 4, 8)


class EngineMetrics:
    """Gauges and counters of one engine: ``quire_*``, and the ``vllm:*`` names that dashboards already use.

    ``stats`` are the core's totals. ``loras`` are its adapters, in ``max_loras`` slots; None if it serves none.
    ``startup`` are the phases of the start; more may be added later.
    """

    def __init__(
        self,
        model: str,
        stats: CoreStats,
        heartbeat_age: Callable[[], float],
        dropped_spans: Mapping[DropReason, int] = MappingProxyType({}),
        *,
        loras: LoRARegistry | None = None,
        max_loras: int = 0,
        startup: Sequence[PhaseTime] = (),
    ) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._load, self._stepped = NO_LOAD, time()
        self._read(TOTALS, lambda: stats.scheduler)
        self._read(LOAD, lambda: self._load)
        self._read(DROPPED_SPANS, lambda: dropped_spans)
        self._read(STARTUP, lambda: startup)
        if (weights := stats.weights) is not None:
            self._read(weight_families(weights), lambda: weights)
        if (data_parallel := stats.data_parallel) is not None:
            self._read(DUMMY_PASSES, lambda: data_parallel)
        if loras is not None:
            self._read(lora_families(loras, max_loras), lambda: self._load)
            self.registry.register(_LoRAInfo(lambda: (self._load.loras, self._stepped), max_loras))
        self._gauge(Metric.ENGINE_HEARTBEAT_AGE, "Seconds since the loop last made progress").set_function(
            heartbeat_age
        )
        self._empty_slots = self._gauge(Metric.ENGINE_EMPTY_SLOTS, "Slots of held KV blocks without a token")
        self._unreachable = self._gauge(Metric.ENGINE_UNREACHABLE_BLOCKS, "KV blocks neither free nor held")
        self._phases = self._histogram(Metric.ENGINE_STEP_SECONDS, "Duration of a step", _STEP_BUCKETS, "phase")
        self._bounded = self._histogram(
            Metric.ENGINE_BOUNDED_STEP_RATIO,
            "Duration of a step that --max-step-seconds bounds, relative to its bound",
            _RATIO_BUCKETS,
        ).labels(model)
        self._away = self._histogram(
            Metric.ENGINE_AWAY_SECONDS,
            "Time from a preemption until the sequence is back where it was",
            _AWAY_BUCKETS,
            "mode",
        )
        self._grammars = self._counter(Metric.ENGINE_GRAMMARS, "Grammars that were asked for", "outcome")
        self._grammar_seconds = self._histogram(
            Metric.ENGINE_GRAMMAR_SECONDS, "Time to compile a grammar, or to refuse it", _GRAMMAR_BUCKETS
        ).labels(model)
        self._restarts = self._counter(Metric.ENGINE_TASK_RESTARTS, "Tasks that failed and were started again", "task")

    def on_grammar(self, outcome: CompileOutcome, seconds: float) -> None:
        """Counts a requested grammar, by outcome. Thread-safe."""
        self._grammars.labels(self._model, outcome).inc()
        if seconds:
            self._grammar_seconds.observe(seconds)

    def on_restart(self, task: str) -> None:
        """Counts a task of the service that failed and is restarted."""
        self._restarts.labels(self._model, task).inc()

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Updates the metrics after a step."""
        self._load, self._stepped = step.load, time()
        times = step.trace
        for phase, seconds in (
            ("schedule", times.schedule),
            ("swap", times.timings.swap),
            ("forward", times.timings.forward),
            ("sample", times.timings.sample),
            ("emit", times.update),
        ):
            self._phases.labels(self._model, phase).observe(seconds)
        if times.max_seconds:
            self._bounded.observe(times.seconds / times.max_seconds)
        for away in step.times_away:
            self._away.labels(self._model, away.mode).observe(away.seconds)
        if step.fragmentation is not None:
            self._empty_slots.set(step.fragmentation.empty_slots)
            if step.fragmentation.leaked_blocks is not None:
                self._unreachable.set(step.fragmentation.leaked_blocks)

    def _read(self, families: Sequence[Family[Source]], source: Callable[[], Source]) -> None:
        self.registry.register(FamilyCollector(self._model, families, source))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, ("model", *labels), buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model",), registry=self.registry).labels(self._model)


class _LoRAInfo(Collector):
    """The names of the last step's adapters, created at each scrape: a gauge would keep a series for every set of names
    that was once in its labels.
    """

    def __init__(self, last: Callable[[], tuple[LoRAStats, float]], max_loras: int) -> None:
        self._last = last
        self._max_loras = max_loras

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats, when = self._last()
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", "When a step last had these adapters", labels=labels)
        info.add_metric((str(self._max_loras), ",".join(stats.running), ",".join(stats.waiting)), when)
        yield info
