"""Tables of the metrics that are read at each scrape: their names, their texts, and where their values are."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from quire_proto.telemetry import DropReason, Metric

from quire_engine.core.data_parallel import DPStats
from quire_engine.core.executor import WeightStats
from quire_engine.core.outputs import EngineLoad, SchedulerStats
from quire_engine.core.startup import PhaseTime
from quire_engine.server.loras import LoRARegistry

Source = TypeVar("Source")
Values = Mapping[tuple[str, ...], float]
NO_LOAD = EngineLoad(0, 0, 0, 0, 0, 0, 0, 0)
"""The load before the first step."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Source]):
    """The series of one metric. ``read`` returns their values by the values of ``labels``, in addition to the model."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    read: Callable[[Source], Values]
    labels: tuple[str, ...] = ()


class FamilyCollector(Collector):
    """Reads ``families`` from what ``source`` returns, at each scrape."""

    def __init__(self, model: str, families: Sequence[Family[Source]], source: Callable[[], Source]) -> None:
        self._model = model
        self._families = families
        self._source = source

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yields the families with their values now."""
        source = self._source()
        for each in self._families:
            family = each.kind(each.name, each.text, labels=(model_label(each.name), *each.labels))
            for labels, value in each.read(source).items():
                family.add_metric((self._model, *labels), value)
            yield family


def model_label(name: str) -> str:
    """Returns the name of the model's label, which is another in dashboards that were made for vLLM."""
    return "model_name" if name.startswith("vllm:") else "model"


def _counter(name: str, text: str, read: Callable[[Any], Values], *labels: str) -> Family[Any]:
    return Family(CounterMetricFamily, name, text, read, labels)


def _gauge(name: str, text: str, read: Callable[[Any], Values], *labels: str) -> Family[Any]:
    return Family(GaugeMetricFamily, name, text, read, labels)


def _of(read: Callable[[Any], float]) -> Callable[[Any], Values]:
    """Reads one value without further labels."""
    return lambda source: {(): read(source)}


def _field(name: str) -> Callable[[Any], Values]:
    return _of(attrgetter(name))


def _fields(names: Mapping[str, str]) -> Callable[[Any], Values]:
    """Reads the field of each value of a label."""
    return lambda source: {(value,): getattr(source, name) for value, name in names.items()}


_DRAFTED = {
    Metric.ENGINE_DRAFTS: ("num_drafts", "Sequences whose tokens were guessed, in all steps"),
    Metric.ENGINE_DRAFT_TOKENS: ("num_draft_tokens", "Tokens guessed and computed"),
    Metric.ENGINE_ACCEPTED_TOKENS: ("num_accepted_tokens", "Guessed tokens that were right"),
}

# Counters with reasons are copied first, because the core's thread may add a reason meanwhile.
TOTALS: Sequence[Family[SchedulerStats]] = (
    _counter(
        Metric.ENGINE_PARTED_BLOCKS,
        "KV blocks copied because a sequence wrote to a shared one",
        _field("blocks_parted"),
    ),
    _counter(
        Metric.ENGINE_USED_AHEAD_BLOCKS,
        "KV blocks swapped out by a copy made ahead of need",
        _field("blocks_used_ahead"),
    ),
    _counter(Metric.ENGINE_OUT_OF_MEMORY, "Requests that were alone and could not grow", _field("out_of_memory")),
    _counter(Metric.ENGINE_PREFIX_QUERIES, "Prompt tokens looked up", _field("prefix_query_tokens")),
    _counter(
        Metric.ENGINE_PREFIX_HITS,
        "Prompt tokens found",
        _fields({tier: f"prefix_{tier}_tokens" for tier in ("device", "host", "disk")}),
        "tier",
    ),
    _counter(Metric.ENGINE_COMPUTED_TOKENS, "Tokens computed", _field("computed_tokens")),
    _counter(Metric.ENGINE_GENERATION_TOKENS, "Tokens generated", _field("generated_tokens")),
    *(_counter(name, text, _field(field)) for name, (field, text) in _DRAFTED.items()),
    *(_counter(f"vllm:spec_decode_{field}", text, _field(field)) for field, text in _DRAFTED.values()),
    _counter(
        Metric.ENGINE_SWAP_BLOCKS,
        "KV blocks copied between the pools",
        _fields({way: f"blocks_copied_{way}" for way in ("out", "in", "ahead")}),
        "direction",
    ),
    _counter(
        Metric.ENGINE_DISK_BLOCKS,
        "KV blocks written to disk and read from it",
        _fields({way: f"disk_blocks_{way}" for way in ("stored", "loaded")}),
        "direction",
    ),
    _counter(
        Metric.ENGINE_DISK_BYTES,
        "Bytes of these blocks",
        _fields({way: f"disk_bytes_{way}" for way in ("stored", "loaded")}),
        "direction",
    ),
    _counter(
        Metric.ENGINE_DISK_FAILURES,
        "KV blocks that the disk did not store or give back",
        lambda stats: {(failure,): count for failure, count in list(stats.disk_failures.items())},
        "reason",
    ),
    _counter(
        Metric.ENGINE_PREEMPTIONS,
        "Sequences that gave way",
        lambda stats: dict(list(stats.preemptions.items())),
        *("mode", "reason"),
    ),
    _counter(Metric.ENGINE_WAKE_UPS, "Times that the engine woke up", _field("wake_ups")),
    _counter(Metric.ENGINE_WAKE_SECONDS, "Time that it took to wake up", _field("wake_seconds")),
)


_TIERS = {"device": "", "host": "host_", "disk": "disk_"}  # the prefixes of fields


def _blocks(kind: str) -> Callable[[EngineLoad], Values]:
    read = _fields({tier: f"{prefix}blocks_{kind}" for tier, prefix in _TIERS.items()})
    return lambda load: {} if load is NO_LOAD else read(load)


def _usage(load: EngineLoad) -> float:
    return 1 - load.blocks_free / load.blocks_total if load.blocks_total else 0.0


LOAD: Sequence[Family[EngineLoad]] = (
    _gauge(Metric.ENGINE_RUNNING, "Sequences that hold device blocks", _field("running")),
    _gauge(Metric.ENGINE_WAITING, "Sequences not admitted yet", _field("waiting")),
    _gauge(Metric.ENGINE_SWAPPED, "Sequences in the host pool", _field("swapped")),
    _gauge(Metric.ENGINE_BLOCKS_TOTAL, "KV blocks", _blocks("total"), "tier"),
    _gauge(Metric.ENGINE_BLOCKS_FREE, "KV blocks that are free or evictable", _blocks("free"), "tier"),
    _gauge(Metric.ENGINE_SLEEPING, "1 while the engine sleeps", _of(lambda load: int(load.is_sleeping))),
    _gauge("vllm:num_requests_waiting", "Requests waiting", _of(lambda load: load.waiting + load.swapped)),
    _gauge("vllm:num_requests_running", "Requests running", _field("running")),
    _gauge("vllm:kv_cache_usage_perc", "KV cache in use, 0 to 1", _of(_usage)),
)


DUMMY_PASSES: Sequence[Family[DPStats]] = (
    _counter(
        Metric.ENGINE_DUMMY_PASSES,
        "Passes of other engines of the group, made without tokens",
        _field("dummy_passes"),
    ),
)
DROPPED_SPANS: Sequence[Family[Mapping[DropReason, int]]] = (
    _counter(
        Metric.ENGINE_DROPPED_SPANS,
        "Spans that were not exported",
        lambda counts: {(reason,): counts.get(reason, 0) for reason in DropReason},
        "reason",
    ),
)
STARTUP: Sequence[Family[Sequence[PhaseTime]]] = (
    _gauge(
        Metric.ENGINE_STARTUP_SECONDS,
        "Duration of a phase of the start",
        lambda phases: {(each.phase,): each.seconds for each in tuple(phases)},
        "phase",
    ),
    _gauge(
        Metric.ENGINE_STARTUP_CPU_SECONDS,
        "Processor time of a phase of the start",
        lambda phases: {(each.phase,): each.cpu_seconds for each in tuple(phases)},
        "phase",
    ),
)


def weight_families(stats: WeightStats) -> Sequence[Family[WeightStats]]:
    """Returns the metrics of layers on disk or in host memory. A GPU waits by itself, for an unknown time."""
    families = [
        _gauge(
            Metric.ENGINE_WEIGHT_BYTES,
            "Bytes of the layers' weights",
            _fields({tier: f"{tier}_bytes" for tier in ("memory", "host", "disk")}),
            "tier",
        ),
        _counter(
            Metric.ENGINE_WEIGHT_READ_BYTES,
            "Bytes of weights read from disk or from the host",
            _field("read_bytes"),
        ),
    ]
    if not stats.host_bytes:
        text = "Time that steps waited for weights"
        families.append(_counter(Metric.ENGINE_WEIGHT_WAIT_SECONDS, text, _field("wait_seconds")))
    return families


def lora_families(loras: LoRARegistry, max_loras: int) -> Sequence[Family[EngineLoad]]:
    """Returns the metrics of adapters, of which a step may have ``max_loras``."""
    return (
        _gauge(Metric.ENGINE_LORAS, "Adapters that requests may name", _of(lambda _: loras.num_loaded)),
        _gauge(Metric.ENGINE_LORA_SLOTS, "Adapters that a step may have", _of(lambda _: max_loras)),
        _gauge(
            Metric.ENGINE_USED_LORA_SLOTS,
            "Adapters of the sequences that are admitted",
            _field("loras.num_used_slots"),
        ),
        _gauge(
            Metric.ENGINE_LORA_WAITING,
            "Sequences that wait while all slots are those of other adapters",
            _field("loras.num_waiting_for_slot"),
        ),
    )
