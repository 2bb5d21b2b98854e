"""``Engine``: one engine as its router knows it. And ``Dispatch``, one attempt of a request there."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType

from quire.v1 import engine_pb2

from quire_router.core.fleet_view import EngineCondition
from quire_router.core.generation import LoRA
from quire_router.core.model_version import UNKNOWN_VERSION, ModelVersion
from quire_router.discovery.base import Endpoint
from quire_router.engines.base import EngineClient
from quire_router.engines.load import ASSUMED_BLOCK_SIZE, EngineLoad, LedgerEntry
from quire_router.engines.model_matcher import ModelMatcher
from quire_router.engines.output_stream import OutputStream
from quire_router.placement.prefix_index import BlockNamespace


class Engine:
    """One engine, with its connection and its load: from its discovery until it left the fleet and its last request
    ended. ``served`` decides under which of its names it gets requests. What it says of itself counts from ``refresh``
    on. With ``needs_readiness`` it gets nothing new while discovery reports it as not ready.
    """

    def __init__(
        self,
        connection: EngineClient,
        load: EngineLoad,
        served: ModelMatcher | None = None,
        *,
        needs_readiness: bool = False,
    ) -> None:
        self.connection = connection
        self.load = load
        self._model_matcher = served
        self.endpoint = Endpoint(connection.address)
        self.known_since = monotonic()
        self.is_passed_on = False  # by another worker of this router, which hears it
        self._needs_readiness = needs_readiness
        self.retired = False
        self._description: engine_pb2.DescribeResponse | None = None
        self._models: frozenset[str] = frozenset()
        self._namespace: BlockNamespace | None = None
        self._version = UNKNOWN_VERSION

    @property
    def id(self) -> str:
        """Its address."""
        return self.connection.address

    @property
    def row(self) -> int:
        """Its row of the table."""
        return self.load.row

    @property
    def in_flight(self) -> int:
        """Requests of this router there."""
        return self.load.local[0] + self.load.best_effort

    @property
    def models(self) -> frozenset[str]:
        """The names under which it serves its model, also while it is not connected."""
        return self._models

    @property
    def described(self) -> bool:
        """Whether it has ever said what it is."""
        return self._description is not None

    @property
    def namespace(self) -> BlockNamespace | None:
        """The namespace of its block hashes; None until it has described itself."""
        return self._namespace

    @property
    def version(self) -> ModelVersion:
        """The version of its model, as far as it says."""
        return self._version

    def update(self, endpoint: Endpoint) -> None:
        """Applies what discovery reports. One that has become ready is connected at once."""
        if endpoint.ready and not self.endpoint.ready:
            self.connection.retry_now()
        self.endpoint = endpoint
        self.retired = endpoint.terminating

    def can_run(self, model: str, lora: LoRA | None = None) -> bool:
        """Whether it would run a request for the model, or for an adapter of it, now."""
        held_back = self.retired or (self._needs_readiness and not self.endpoint.ready)
        ready = self.connection.ready and not held_back and self.load.is_awake and model in self.models
        return ready and (lora is None or self.connection.loras.get(lora.name) == lora)

    @property
    def can_sleep(self) -> bool:
        """Whether it can be put to sleep, or woken up, now."""
        able = self._description is not None and self._description.can_sleep and bool(self._models)
        return able and self.connection.ready and not self.retired

    @property
    def shared_device(self) -> str:
        """The name of what it shares with engines that are awake in turns with it; empty if it is alone."""
        return "" if self._description is None else self._description.shared_device

    @property
    def condition(self) -> EngineCondition:
        """How it is, in a word."""
        condition = self.connection.condition
        return condition if condition != "ready" or self.load.is_awake else "sleeping"

    @property
    def description(self) -> engine_pb2.DescribeResponse | None:
        """What it said of itself last; None until it has."""
        return self._description

    @property
    def serves_loras(self) -> bool:
        """Whether adapters can be loaded there."""
        return self._description is not None and self._description.max_loras > 0

    def lacks_lora_slot(self) -> bool:
        """Whether as many adapters are in use there as can be at once."""
        most = 0 if self._description is None else self._description.max_loras
        return len(self.connection.active_loras) >= most

    def refresh(self) -> None:
        """Takes over what the engine says of itself, if that has changed. To be called when its connection reports a
        change, and never where its properties are read: a new size may be new capacity.
        """
        description = self.connection.description
        if description is None or description is self._description:
            return
        self._description = description
        names = frozenset(description.served_model_names)
        self._models = (
            names if self._model_matcher is None else self._model_matcher.matching_names(self.id, description)
        )
        self._namespace = BlockNamespace(description.model_revision, description.block_size or ASSUMED_BLOCK_SIZE)
        self._version = ModelVersion.of(description)
        self.load.describe(description)


class Dispatch:
    """One attempt of a request at one engine. Entering submits it and counts it with ``begin``; leaving, on every
    path, ends the count, cancels what has not ended and calls ``on_release``.

    Entering raises what ``EngineClient.submit`` raises, and then nothing is counted.
    """

    def __init__(
        self,
        engine: Engine,
        message: engine_pb2.Submit,
        begin: Callable[[], LedgerEntry],
        on_release: Callable[[Engine], None],
        tenant: str = "",
    ) -> None:
        self._engine = engine
        self._message = message
        self._tenant = tenant
        self._begin = begin
        self._on_release = on_release
        self._outputs: OutputStream | None = None
        self._entry: LedgerEntry | None = None

    def __enter__(self) -> OutputStream:
        self._outputs = self._engine.connection.submit(self._message, self._tenant)
        if self._message.lora_name:  # until the engine says so itself
            self._engine.connection.active_loras.add(self._message.lora_name)
        self._entry = self._begin()
        self._outputs.on_first = self._entry.on_first_output
        return self._outputs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outputs is None or self._entry is None:
            return
        self._entry.end()
        self._outputs.close()
        self._on_release(self._engine)
