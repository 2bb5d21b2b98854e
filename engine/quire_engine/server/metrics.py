"""The engine's Prometheus metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import time
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from quire_proto.telemetry import DropReason, Metric

from quire_engine.core.data_parallel import DPStats
from quire_engine.core.engine_core import EngineCoreOutputs
from quire_engine.core.executor import WeightStats
from quire_engine.core.lora import LoRAStats
from quire_engine.core.outputs import KVCacheFragmentation, SchedulerStats
from quire_engine.core.startup import PhaseTime
from quire_engine.server.loras import LoRARegistry
from quire_engine.structured_output.compiler import CompileOutcome

_GRAMMAR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_AWAY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_RATIO_BUCKETS = (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.2, 1.5, 2, 4, 8)


class EngineMetrics:
    """Gauges and counters of one engine: ``quire_*``, and the ``vllm:*`` names that dashboards already use.

    ``loras`` are its adapters, in ``max_loras`` slots; None if it serves none. ``weights`` are the statistics of layers
    on disk or in host memory; None without such layers. ``dp_stats`` are the statistics of a data-parallel engine; None
    for others. ``startup`` are the phases of the start; more may be added later.
    """

    def __init__(
        self,
        model: str,
        statistics: SchedulerStats,
        heartbeat_age: Callable[[], float],
        dropped_spans: Mapping[DropReason, int] = MappingProxyType({}),
        *,
        loras: LoRARegistry | None = None,
        max_loras: int = 0,
        weights: WeightStats | None = None,
        dp_stats: DPStats | None = None,
        startup: Sequence[PhaseTime] = (),
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_DroppedSpans(model, dropped_spans))
        self._loras = None if loras is None else _LoRAs(model, loras, max_loras)
        if self._loras is not None:
            self.registry.register(self._loras)
        if weights is not None:
            self.registry.register(_Weights(model, weights))
        if dp_stats is not None:
            self.registry.register(_DummyPasses(model, dp_stats))
        self.registry.register(_Startup(model, startup))
        self.registry.register(_WakeUps(model, statistics))
        self._model = model
        self._statistics = statistics
        self._running = self._gauge(Metric.ENGINE_RUNNING, "Sequences that hold device blocks")
        self._waiting = self._gauge(Metric.ENGINE_WAITING, "Sequences not admitted yet")
        self._swapped = self._gauge(Metric.ENGINE_SWAPPED, "Sequences in the host pool")
        self._blocks = self._gauge(Metric.ENGINE_BLOCKS_TOTAL, "KV blocks", ("tier",))
        self._free = self._gauge(Metric.ENGINE_BLOCKS_FREE, "KV blocks that are free or evictable", ("tier",))
        self._gauge(Metric.ENGINE_HEARTBEAT_AGE, "Seconds since the loop last made progress").set_function(
            heartbeat_age
        )
        self._phases = Histogram(
            Metric.ENGINE_STEP_SECONDS,
            "Duration of a step",
            ("model", "phase"),
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._bounded = Histogram(
            Metric.ENGINE_BOUNDED_STEP_RATIO,
            "Duration of a step that --max-step-seconds bounds, relative to its bound",
            ("model",),
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        ).labels(self._model)
        self._grammars = self._counter(Metric.ENGINE_GRAMMARS, "Grammars that were asked for", ("outcome",))
        self._grammar_seconds = Histogram(
            Metric.ENGINE_GRAMMAR_SECONDS,
            "Time to compile a grammar, or to refuse it",
            ("model",),
            buckets=_GRAMMAR_BUCKETS,
            registry=self.registry,
        )
        self._restarts = self._counter(
            Metric.ENGINE_TASK_RESTARTS, "Tasks that failed and were started again", ("task",)
        )
        self._preemptions = self._counter(Metric.ENGINE_PREEMPTIONS, "Sequences that gave way", ("mode", "reason"))
        self._away = Histogram(
            Metric.ENGINE_AWAY_SECONDS,
            "Time from a preemption until the sequence is back where it was",
            ("model", "mode"),
            buckets=_AWAY_BUCKETS,
            registry=self.registry,
        )
        self._disk_failures = self._counter(
            Metric.ENGINE_DISK_FAILURES, "KV blocks that the disk did not store or give back", ("reason",)
        )
        self._empty_slots = self._gauge(Metric.ENGINE_EMPTY_SLOTS, "Slots of held KV blocks without a token")
        self._sleeping = self._gauge(Metric.ENGINE_SLEEPING, "1 while the engine sleeps")
        self._unreachable = self._gauge(Metric.ENGINE_UNREACHABLE_BLOCKS, "KV blocks neither free nor held")
        self._vllm_totals: dict[str, Counter] = {}
        self._totals = self._counters()
        self._exported: dict[Counter, int] = {}
        self._vllm_waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting")
        self._vllm_running = self._gauge("vllm:num_requests_running", "Requests running")
        self._vllm_usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache in use, 0 to 1")

    def on_grammar(self, outcome: CompileOutcome, seconds: float) -> None:
        """Counts a requested grammar, by outcome. Thread-safe."""
        self._grammars.labels(self._model, outcome).inc()
        if seconds:
            self._grammar_seconds.labels(self._model).observe(seconds)

    def on_restart(self, task: str) -> None:
        """Counts a task of the service that failed and is restarted."""
        self._restarts.labels(self._model, task).inc()

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Updates the metrics after a step."""
        load, times = step.load, step.trace
        for gauge, value in (
            (self._running, load.running),
            (self._waiting, load.waiting),
            (self._swapped, load.swapped),
            (self._sleeping, int(load.is_sleeping)),
            (self._vllm_running, load.running),
            (self._vllm_waiting, load.waiting + load.swapped),
            (self._vllm_usage, 1 - load.blocks_free / max(1, load.blocks_total)),
        ):
            gauge.set(value)
        if self._loras is not None:
            self._loras.on_step(load.loras)
        self._set_blocks("device", load.blocks_total, load.blocks_free)
        self._set_blocks("host", load.host_blocks_total, load.host_blocks_free)
        self._set_blocks("disk", load.disk_blocks_total, load.disk_blocks_free)
        for phase, seconds in (
            ("schedule", times.schedule),
            ("swap", times.timings.swap),
            ("forward", times.timings.forward),
            ("sample", times.timings.sample),
            ("emit", times.emit),
        ):
            self._phases.labels(self._model, phase).observe(seconds)
        if times.max_seconds:
            self._bounded.observe(times.seconds / times.max_seconds)
        for away in step.times_away:
            self._away.labels(self._model, away.mode).observe(away.seconds)
        if step.fragmentation is not None:
            self._set_fragmentation(step.fragmentation)
        self._count()

    def _count(self) -> None:
        for counter, now in self._readings():
            counter.inc(now - self._exported.get(counter, 0))
            self._exported[counter] = now

    def _readings(self) -> Iterator[tuple[Counter, int]]:
        """Yields each counter with its current total."""
        for totals in (self._totals, self._vllm_totals):
            for name, counter in totals.items():
                yield counter, getattr(self._statistics, name)
        # Copied first, because the core's thread may add a reason meanwhile.
        for (mode, reason), count in list(self._statistics.preemptions.items()):
            yield self._preemptions.labels(self._model, mode, reason), count
        for failure, count in list(self._statistics.disk_failures.items()):
            yield self._disk_failures.labels(self._model, failure), count

    def _set_fragmentation(self, fragmentation: KVCacheFragmentation) -> None:
        self._empty_slots.set(fragmentation.empty_slots)
        if fragmentation.leaked_blocks is not None:
            self._unreachable.set(fragmentation.leaked_blocks)

    def _set_blocks(self, tier: str, total: int, free: int) -> None:
        self._blocks.labels(self._model, tier).set(total)
        self._free.labels(self._model, tier).set(free)

    def _counters(self) -> dict[str, Counter]:
        moved = self._counter(Metric.ENGINE_SWAP_BLOCKS, "KV blocks copied between the pools", ("direction",))
        totals = {
            "blocks_parted": (Metric.ENGINE_PARTED_BLOCKS, "KV blocks copied because a sequence wrote to a shared one"),
            "blocks_used_ahead": (
                Metric.ENGINE_USED_AHEAD_BLOCKS,
                "KV blocks swapped out by a copy made ahead of need",
            ),
            "out_of_memory": (Metric.ENGINE_OUT_OF_MEMORY, "Requests that were alone and could not grow"),
            "prefix_query_tokens": (Metric.ENGINE_PREFIX_QUERIES, "Prompt tokens looked up"),
            "computed_tokens": (Metric.ENGINE_COMPUTED_TOKENS, "Tokens computed"),
            "generated_tokens": (Metric.ENGINE_GENERATION_TOKENS, "Tokens generated"),
        }
        drafted = {
            "num_drafts": (Metric.ENGINE_DRAFTS, "Sequences whose tokens were guessed, in all steps"),
            "num_draft_tokens": (Metric.ENGINE_DRAFT_TOKENS, "Tokens guessed and computed"),
            "num_accepted_tokens": (Metric.ENGINE_ACCEPTED_TOKENS, "Guessed tokens that were right"),
        }
        totals |= drafted
        counters = {key: self._counter(name, text).labels(self._model) for key, (name, text) in totals.items()}
        hits = self._counter(Metric.ENGINE_PREFIX_HITS, "Prompt tokens found", ("tier",))
        counters["prefix_device_tokens"] = hits.labels(self._model, "device")
        counters["prefix_host_tokens"] = hits.labels(self._model, "host")
        counters["prefix_disk_tokens"] = hits.labels(self._model, "disk")
        on_disk = self._counter(Metric.ENGINE_DISK_BLOCKS, "KV blocks written to disk and read from it", ("direction",))
        num_bytes = self._counter(Metric.ENGINE_DISK_BYTES, "Bytes of these blocks", ("direction",))
        for direction in ("stored", "loaded"):
            counters[f"disk_blocks_{direction}"] = on_disk.labels(self._model, direction)
            counters[f"disk_bytes_{direction}"] = num_bytes.labels(self._model, direction)
        counters["blocks_copied_out"] = moved.labels(self._model, "out")
        counters["blocks_copied_in"] = moved.labels(self._model, "in")
        counters["blocks_copied_ahead"] = moved.labels(self._model, "ahead")
        for key, (_, text) in drafted.items():
            self._vllm_totals[key] = self._counter(f"vllm:spec_decode_{key}", text).labels(self._model)
        return counters

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        model = "model_name" if name.startswith("vllm:") else "model"
        return Counter(name, text, (model, *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        model = "model_name" if name.startswith("vllm:") else "model"  # the label name in dashboards made for vLLM
        gauge = Gauge(name, text, (model, *labels), registry=self.registry)
        return gauge if labels else gauge.labels(self._model)


class _DroppedSpans(Collector):
    """Reads the counts at each scrape, because an exporter also drops spans between steps."""

    def __init__(self, model: str, counts: Mapping[DropReason, int]) -> None:
        self._model = model
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            Metric.ENGINE_DROPPED_SPANS, "Spans that were not exported", labels=("model", "reason")
        )
        for reason in DropReason:
            family.add_metric((self._model, reason), self._counts.get(reason, 0))
        yield family


class _Startup(Collector):
    """Reads the phases at each scrape, because the last one ends with the first session."""

    def __init__(self, model: str, phases: Sequence[PhaseTime]) -> None:
        self._model = model
        self._phases = phases

    def collect(self) -> Iterator[GaugeMetricFamily]:
        seconds = GaugeMetricFamily(
            Metric.ENGINE_STARTUP_SECONDS, "Duration of a phase of the start", labels=("model", "phase")
        )
        cpu_seconds = GaugeMetricFamily(
            Metric.ENGINE_STARTUP_CPU_SECONDS, "Processor time of a phase of the start", labels=("model", "phase")
        )
        for each in tuple(self._phases):
            seconds.add_metric((self._model, each.phase), each.seconds)
            cpu_seconds.add_metric((self._model, each.phase), each.cpu_seconds)
        yield seconds
        yield cpu_seconds


class _WakeUps(Collector):
    """Reads the totals at each scrape."""

    def __init__(self, model: str, stats: SchedulerStats) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        count = CounterMetricFamily(Metric.ENGINE_WAKE_UPS, "Times that the engine woke up", labels=("model",))
        count.add_metric((self._model,), self._stats.wake_ups)
        yield count
        seconds = CounterMetricFamily(Metric.ENGINE_WAKE_SECONDS, "Time that it took to wake up", labels=("model",))
        seconds.add_metric((self._model,), self._stats.wake_seconds)
        yield seconds


class _DummyPasses(Collector):
    """Reads the count at each scrape, because an engine that only runs dummy batches has no steps."""

    def __init__(self, model: str, stats: DPStats) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            Metric.ENGINE_DUMMY_PASSES, "Passes of other engines of the group, made without tokens", labels=("model",)
        )
        family.add_metric((self._model,), self._stats.dummy_passes)
        yield family


class _LoRAs(Collector):
    """The metrics of adapters, created at each scrape: a gauge would keep a series for every set of names that was once
    in its labels.
    """

    def __init__(self, model: str, registry: LoRARegistry, max_loras: int) -> None:
        self._model = model
        self._registry = registry
        self._max_loras = max_loras
        self._last = LoRAStats(), time()

    def on_step(self, stats: LoRAStats) -> None:
        """Records the adapters of a step."""
        self._last = stats, time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        stats, when = self._last
        for name, text, value in (
            (Metric.ENGINE_LORAS, "Adapters that requests may name", self._registry.num_loaded),
            (Metric.ENGINE_LORA_SLOTS, "Adapters that a step may have", self._max_loras),
            (Metric.ENGINE_USED_LORA_SLOTS, "Adapters of the sequences that are admitted", stats.num_used_slots),
            (
                Metric.ENGINE_LORA_WAITING,
                "Sequences that wait while all slots are those of other adapters",
                stats.num_waiting_for_slot,
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=("model",))
            family.add_metric((self._model,), value)
            yield family
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily("vllm:lora_requests_info", "When a step last had these adapters", labels=labels)
        info.add_metric((str(self._max_loras), ",".join(stats.running), ",".join(stats.waiting)), when)
        yield info


class _Weights(Collector):
    """Reads the statistics at each scrape, because layers are read in the middle of a step."""

    def __init__(self, model: str, stats: WeightStats) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats
        held = GaugeMetricFamily(Metric.ENGINE_WEIGHT_BYTES, "Bytes of the layers' weights", labels=("model", "tier"))
        held.add_metric((self._model, "memory"), stats.memory_bytes)
        held.add_metric((self._model, "host"), stats.host_bytes)
        held.add_metric((self._model, "disk"), stats.disk_bytes)
        yield held
        read = CounterMetricFamily(
            Metric.ENGINE_WEIGHT_READ_BYTES, "Bytes of weights read from disk or from the host", labels=("model",)
        )
        read.add_metric((self._model,), stats.read_bytes)
        yield read
        if not stats.host_bytes:  # a GPU waits by itself, for an unknown time
            waited = CounterMetricFamily(
                Metric.ENGINE_WEIGHT_WAIT_SECONDS, "Time that steps waited for weights", labels=("model",)
            )
            waited.add_metric((self._model,), stats.wait_seconds)
            yield waited
