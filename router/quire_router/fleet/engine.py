"""One engine as the router sees it: its link, and its account of what is in flight there."""

from collections.abc import Callable
from types import TracebackType

from quire.v1 import engine_pb2

from quire_router.fleet.account import ASSUMED_BLOCK_SIZE, EngineLoad
from quire_router.fleet.endpoint import Endpoint
from quire_router.fleet.ledger import LedgerEntry
from quire_router.fleet.link import EngineConnection
from quire_router.fleet.served import ModelMatcher
from quire_router.fleet.stream import OutputStream
from quire_router.placement.namespace import BlockNamespace


class Engine:
    """Known from when it is found until it has left and its last request ended. ``served`` says which of its names
    are believed.
    """

    def __init__(self, link: EngineConnection, account: EngineLoad, served: ModelMatcher | None = None) -> None:
        self.connection = link
        self.load = account
        self._model_matcher = served
        self.endpoint = Endpoint(link.address)
        self.retired = False
        self._description: engine_pb2.DescribeResponse | None = None
        self._models: frozenset[str] = frozenset()
        self._namespace: BlockNamespace | None = None

    @property
    def id(self) -> str:
        """Its address."""
        return self.connection.address

    @property
    def row(self) -> int:
        """Where it stands in the table."""
        return self.load.row

    @property
    def in_flight(self) -> int:
        """Requests of this router there."""
        return self.load.local[0]

    @property
    def models(self) -> frozenset[str]:
        """The names under which it serves its model; engines that are away keep their word."""
        self._refresh()
        return self._models

    @property
    def namespace(self) -> BlockNamespace | None:
        """Which names its blocks have; None until it has said what it is."""
        self._refresh()
        return self._namespace

    def update(self, endpoint: Endpoint) -> None:
        """What discovery says of it now. One that was not ready and is has just begun to listen."""
        if endpoint.ready and not self.endpoint.ready:
            self.connection.retry_now()
        self.endpoint = endpoint
        self.retired = endpoint.terminating

    def can_run(self, model: str) -> bool:
        """Whether it would run a request for the model now."""
        return self.connection.ready and not self.retired and model in self.models

    def _refresh(self) -> None:
        description = self.connection.description
        if description is None or description is self._description:
            return
        self._description = description
        told = frozenset(description.served_model_names)
        self._models = told if self._model_matcher is None else self._model_matcher.matching_names(self.id, description)
        self._namespace = BlockNamespace(description.model_revision, description.block_size or ASSUMED_BLOCK_SIZE)
        self.load.describe(description)


class Dispatch:
    """One attempt of a request at one engine. Entering submits it and counts it with ``begin``; leaving, by whatever
    way, gives the count back, cancels what has not ended and calls ``on_release``.

    Entering raises what ``EngineConnection.submit`` raises, and then nothing is counted.
    """

    def __init__(
        self,
        engine: Engine,
        message: engine_pb2.Submit,
        begin: Callable[[], LedgerEntry],
        on_release: Callable[[Engine], None],
    ) -> None:
        self._engine = engine
        self._message = message
        self._begin = begin
        self._on_release = on_release
        self._outputs: OutputStream | None = None
        self._entry: LedgerEntry | None = None

    def __enter__(self) -> OutputStream:
        self._outputs = self._engine.connection.submit(self._message)
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
