"""The fleet as ``GET /v1/fleet/events`` shows it: the messages of that stream, and ``FleetLog``, in which requests
leave what happens to them. Nothing here has a prompt, an answer, a tenant, or a whole request id: without keys an id
is all that reading an answer takes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import time
from typing import Literal

ID_CHARACTERS = 8
EXPLAINED = 8
_KEPT = 100

EngineCondition = Literal["connecting", "ready", "sleeping", "silent", "failing", "leaving", "reconnecting", "lost"]
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
    """One engine. ``requests`` are in flight there from all routers, with ``pending_tokens`` of their prompts to
    compute and so many sequences ``decoding``; ``waiting`` and ``swapped`` sequences are as the engine reports them.
    The figures after the pools are None until it answered twice: tokens that it draws in a second, the part of all
    prompt tokens that was cached, and sequences that gave way, both since its start.
    """

    id: str
    condition: EngineCondition
    models: Sequence[str]
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
    progress, the former included.
    """

    name: str
    ready_engines: int
    queued: int
    in_progress: int


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
    ``omitted_requests`` are not. ``events`` are the latest ones.
    """

    time: float
    policy: str
    engines: Sequence[EngineView]
    models: Sequence[ModelView]
    requests: Sequence[RequestView]
    omitted_requests: int
    events: Sequence[FleetEvent]


@dataclass(frozen=True, slots=True)
class FleetDelta:
    """Every later event, ``delta``: what has changed. Engines that are new or differ, the ids of those that left, and
    new events; models and requests are whole, and None if they are as before.
    """

    time: float
    engines: Sequence[EngineView]
    removed: Sequence[str]
    models: Sequence[ModelView] | None
    requests: Sequence[RequestView] | None
    omitted_requests: int
    events: Sequence[FleetEvent]


class FleetLog:
    """The latest events. ``watched`` is whether somebody looks, and ``explain`` how many more placements are explained
    in this sample; without a viewer only losses are recorded, which are rare.
    """

    def __init__(self) -> None:
        self.watched = False
        self.explain = 0
        self._events: deque[FleetEvent] = deque(maxlen=_KEPT)
        self._number = 0

    def add(self, kind: EventKind, engine: str, request: str = "", **details: object) -> None:
        """Records an event now; ``details`` are further fields of ``FleetEvent``."""
        self._number += 1
        event = FleetEvent(self._number, time(), kind, engine, request[:ID_CHARACTERS], **details)  # type: ignore[arg-type]
        self._events.append(event)

    @property
    def last(self) -> int:
        """The number of the last event; 0 if there was none."""
        return self._number

    def since(self, number: int) -> Iterator[FleetEvent]:
        """Yields the events after one that are still kept, in order."""
        return (event for event in self._events if event.number > number)
