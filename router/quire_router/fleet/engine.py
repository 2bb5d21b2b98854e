"""One engine as the router sees it: its link, and what this router has in flight there."""

from collections.abc import Callable
from types import TracebackType

from quire.v1 import engine_pb2

from quire_router.fleet.expected import most_tokens
from quire_router.fleet.link import EngineLink
from quire_router.fleet.stream import OutputStream
from quire_router.placement.view import EngineView


class Engine:
    """Counts belong to ``Dispatch`` objects and to nothing else, so that no way out of a stream can forget them."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.in_flight = 0
        self.in_flight_tokens = 0
        self.retired = False

    @property
    def id(self) -> str:
        """Its address."""
        return self.link.address

    def serves(self, model: str) -> bool:
        """Whether it said that it serves the model; engines that are away keep their word."""
        description = self.link.description
        return description is not None and model in description.served_model_names

    def can_run(self, model: str) -> bool:
        """Whether it would run a request for the model now."""
        return self.link.ready and not self.retired and self.serves(model)

    def view(self) -> EngineView:
        """What placement may know of it."""
        load = self.link.load
        return EngineView(
            engine_id=self.id,
            in_flight=self.in_flight,
            in_flight_tokens=self.in_flight_tokens,
            running=load.running,
            waiting=load.waiting,
            swapped=load.swapped,
            blocks_free=load.blocks_free,
        )


class Dispatch:
    """One attempt of a request at one engine. Entering counts and submits it; leaving, by whatever way, cancels what
    has not ended and gives the count back.

    Entering raises what ``EngineLink.submit`` raises, and then nothing is counted.
    """

    def __init__(self, engine: Engine, message: engine_pb2.Submit, on_release: Callable[[Engine], None]) -> None:
        self._engine = engine
        self._message = message
        self._on_release = on_release
        self._tokens = most_tokens(message)
        self._outputs: OutputStream | None = None

    def __enter__(self) -> OutputStream:
        self._outputs = self._engine.link.submit(self._message)
        self._engine.in_flight += 1
        self._engine.in_flight_tokens += self._tokens
        return self._outputs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outputs is None:
            return
        self._outputs.close()
        self._engine.in_flight -= 1
        self._engine.in_flight_tokens -= self._tokens
        self._on_release(self._engine)
