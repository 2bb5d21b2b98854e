"""The fleet as ``GET /v1/fleet/events`` shows it: the messages of that stream, and ``FleetLog``, in which requests
leave what happens to them. Nothing here has a prompt, an answer, a tenant, or a whole request id: without keys an id
is all that reading an answer takes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Literal

ID_CHARACTERS = 8
EXPLAINED = 8
_KEPT = 100
_KEPT_INCIDENTS = 20

EngineCondition = Literal["connecting", "ready", "sleeping", "silent", "failing", "leaving", "reconnecting", "lost"]
Quantiles = tuple[float, float, float]
"""At p50, p95 and p99."""
EventKind = Literal["placed", "attempt_lost", "engine_full", "preempted", "engine_ready", "engine_lost", "engine_left"]


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that happened at ``time`` (Unix time). ``number`` counts them. Of a request that was ``placed`` the
    ``scores`` have, for some of the best engines, what each term of the placement's cost was in seconds, best first;
    empty where more were placed than are explained. ``count`` is how many sequences were ``preempted``.
    """

    number: int
    time: float
    kind: EventKind
    engine: str
    request: str = ""
    model: str = ""
    attempt: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    policy: str = ""
    scores: Sequence[tuple[str, dict[str, float]]] = ()
    reason: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class KvPoolView:
    """The blocks of one tier of an engine: ``used`` by sequences, ``cached`` for none but findable, and the rest free.
    ``cells`` (base64) has a byte for each ``blocks_per_cell`` blocks, what most of them are: 0 free, 1 cached, 2 in
    use, 3 in use by several sequences. Empty, with ``cached`` None, while the engine has not said so: then ``used`` is
    all that is known.
    """

    total: int
    used: int
    cached: int | None = None
    cells: str = ""
    blocks_per_cell: int = 1


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine: what it said of itself (empty or 0 if it has not), how it is, and why it is away (``problem``), as
    observed. ``requests`` are in flight there from all routers, with ``pending_tokens`` of their prompts to
    compute and so many sequences ``decoding``; ``waiting`` and ``swapped`` sequences are as the engine reports them.
    The figures after the pools are None until it answered twice: tokens that it draws in a second, the part of all
    prompt tokens that was cached, and sequences that gave way, both since its start (``started``, Unix time).
    """

    id: str
    condition: EngineCondition
    problem: str
    models: Sequence[str]
    device_name: str
    dtype: str
    version: str
    max_model_len: int
    started: float
    requests: int
    decoding: int
    waiting: int
    swapped: int
    pending_tokens: int
    max_sequences: int
    block_size: int
    device: KvPoolView
    host: KvPoolView
    tokens_per_second: float | None = None
    hit_rate: float | None = None
    preemptions: int | None = None


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model: engines that can run it now, and requests of this router that wait in its queue and that are in
    progress, the former included. And over the last 10 seconds at this router: tokens per second (over the last 2),
    seconds to the first token and between tokens, and the part of prompt tokens that was cached, of requests that
    ended; None if there was nothing to measure.
    """

    name: str
    ready_engines: int
    queued: int
    in_progress: int
    tokens_per_second: float
    ttft: Quantiles | None
    itl: Quantiles | None
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Incident:
    """An engine was lost, or fell silent, at ``lost`` (Unix time), because of ``reason``. ``moved`` requests had to
    leave it, of which ``continued`` found the engines ``on``. It was seen again at ``back``, 0 until then. ``number``
    counts incidents.
    """

    number: int
    engine: str
    lost: float
    reason: str
    moved: int = 0
    continued: int = 0
    on: Sequence[str] = ()
    back: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterView:
    """The router that is asked: its version, since when it runs (Unix time), its policy of placement, and the port of
    its metrics.
    """

    version: str
    started: float
    policy: str
    metrics_port: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request in progress at this router. ``engine`` is where it was sent last, empty while it waits; ``attempt``
    counts the engines; ``created`` is Unix time.
    """

    id: str
    model: str
    engine: str
    attempt: int
    created: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The first event of the stream, ``snapshot``: everything. Of many requests the oldest are in ``requests``, and
    ``omitted_requests`` are not. ``events`` and ``incidents`` are the latest ones.
    """

    time: float
    router: RouterView
    engines: Sequence[EngineView]
    models: Sequence[ModelView]
    requests: Sequence[RequestView]
    omitted_requests: int
    events: Sequence[FleetEvent]
    incidents: Sequence[Incident]


@dataclass(frozen=True, slots=True)
class FleetDelta:
    """Every later event, ``delta``: what has changed. Engines that are new or differ, the ids of those that left, and
    new events; models, requests and incidents are whole, and None if they are as before.
    """

    time: float
    engines: Sequence[EngineView]
    removed: Sequence[str]
    models: Sequence[ModelView] | None
    requests: Sequence[RequestView] | None
    omitted_requests: int
    events: Sequence[FleetEvent]
    incidents: Sequence[Incident] | None


class FleetLog:
    """The latest events. ``watched`` is whether somebody looks, and ``explain`` how many more placements are explained
    in this sample; without a viewer only losses are recorded, and where their requests go on, which is rare.
    """

    def __init__(self) -> None:
        self.watched = False
        self.explain = 0
        self._events: deque[FleetEvent] = deque(maxlen=_KEPT)
        self._number = 0
        self._incidents: deque[Incident] = deque(maxlen=_KEPT_INCIDENTS)
        self._num_incidents = 0
        self._moving: dict[str, int] = {}  # the incidents of requests that have left an engine, by their ids

    def add(self, kind: EventKind, engine: str, request: str = "", **details: object) -> None:
        """Records an event now; ``details`` are further fields of ``FleetEvent``."""
        self._number += 1
        event = FleetEvent(self._number, time(), kind, engine, request[:ID_CHARACTERS], **details)  # type: ignore[arg-type]
        self._events.append(event)
        if kind == "engine_lost":
            self._open_incident(event)
        elif kind == "attempt_lost":
            incident = self._open_incident(event)
            self._replace(replace(incident, moved=incident.moved + 1))
            if len(self._moving) < _KEPT:
                self._moving[event.request] = incident.number
        elif kind == "placed" and event.request in self._moving:
            self._on_continued(self._moving.pop(event.request), engine)
        elif kind == "engine_ready":
            self._on_back(event)

    @property
    def incidents(self) -> list[Incident]:
        """Returns the latest incidents, the first one first."""
        return list(self._incidents)

    def _open_incident(self, event: FleetEvent) -> Incident:
        """Returns the incident of an engine that is not back, or a new one."""
        known = next((each for each in self._incidents if each.engine == event.engine and not each.back), None)
        if known is None:
            self._num_incidents += 1
            known = Incident(self._num_incidents, event.engine, event.time, event.reason)
            self._incidents.append(known)
        return known

    def _on_continued(self, number: int, engine: str) -> None:
        for each in self._incidents:
            if each.number == number:
                on = each.on if engine in each.on else (*each.on, engine)
                self._replace(replace(each, continued=each.continued + 1, on=on))
                return

    def _on_back(self, event: FleetEvent) -> None:
        for each in self._incidents:
            if each.engine == event.engine and not each.back:
                self._replace(replace(each, back=event.time))
                return

    def _replace(self, incident: Incident) -> None:
        """Puts a newer state of an incident in its place."""
        index = next(index for index, each in enumerate(self._incidents) if each.number == incident.number)
        self._incidents[index] = incident

    @property
    def last(self) -> int:
        """The number of the last event; 0 if there was none."""
        return self._number

    def since(self, number: int) -> Iterator[FleetEvent]:
        """Yields the events after one that are still kept, in order."""
        return (event for event in self._events if event.number > number)
