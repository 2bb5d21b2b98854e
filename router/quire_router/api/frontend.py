"""What REST and gRPC share between reading a request and writing its answer."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from secrets import token_hex
from time import time

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.telemetry import Attribute, Span
from quire_proto.text.model_text import ModelText
from quire_proto.tracing import extract

from quire_router import metrics
from quire_router.api.backend import FleetView, Runner
from quire_router.api.echo import echoed
from quire_router.api.identity import Caller, Keys
from quire_router.api.running import Running
from quire_router.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from quire_router.api.together import Together
from quire_router.api.validate import Validator, unknown_model
from quire_router.generation import Delta, Generation

_TRACER = trace.get_tracer("quire.router")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MESSAGE = 64  # what a template makes of an empty message, in characters
_LONG_TEXT = 2048  # characters from which tokenising would hold up the streams of others


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One configured model. ``max_model_len`` is 0 while no engine has told it."""

    name: str
    created: int
    ready_engines: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed the validator: as it came, one generation for each of its prompts (at least one), and the
    text side of its model.
    """

    request: GenerationRequest
    generations: tuple[Generation, ...]
    text: ModelText

    @property
    def first(self) -> Generation:
        """The first prompt's; the others differ from it in prompt, id and seed."""
        return self.generations[0]


class Frontend:
    """The common half of both APIs: who asks, what is running, validation, the models and their health."""

    def __init__(
        self,
        texts: Mapping[str, ModelText],
        fleet: FleetView,
        runner: Runner,
        keys: Keys,
        running: Running,
        *,
        allow_priority: bool = False,
    ) -> None:
        self.keys = keys
        self.running = running
        self._models = tuple(texts)
        self._fleet = fleet
        self._runner = Together(runner, running)
        self._validator = Validator(texts, fleet.limits, allow_priority=allow_priority)
        self._threads = ThreadPoolExecutor(2, "text")
        self._created = int(time())

    @contextmanager
    def exchange(self, name: str, request_id: str, caller: Caller, headers: Mapping[str, str]) -> Iterator[None]:
        """One request from the door to its end, as a span named ``name`` that continues the caller's trace. Raises
        ``QuireError`` at the door when there is no room.
        """
        with _server_span(name, request_id, headers) as span:
            try:
                with ExitStack() as stack:
                    with counting_rejections():
                        stack.enter_context(self.running.enter(request_id, caller))
                    yield
            except QuireError as error:
                _note(span, error)
                raise

    async def admit(self, read: Callable[[], GenerationRequest], request_id: str, caller: Caller) -> Admitted:
        """The request that ``read`` gives, as it came and as it was validated. Raises ``QuireError``, and counts the
        refusal.
        """
        with counting_rejections(), _internal_span(Span.ADMIT):
            request = read()
            check = self._validator.generations
            if _is_long(request):
                loop = asyncio.get_running_loop()
                generations = await loop.run_in_executor(self._threads, check, request, request_id, caller)
            else:
                generations = check(request, request_id, caller)
            return Admitted(request, generations, self._validator.text(request.model))

    def run(self, admitted: Admitted) -> AsyncGenerator[Delta]:
        """The answer, piece by piece, as ``Runner.run`` gives it; its choices are those of all prompts in order, and
        begin with their prompt where it is echoed.
        """
        deltas = self._runner.run(admitted.generations)
        return echoed(deltas, admitted.generations, admitted.text) if admitted.first.echo else deltas

    def cancel(self, request_id: str, caller: Caller) -> None:
        """Ends a running request of this caller. Raises ``QuireError`` NOT_FOUND."""
        bare = request_id.rpartition("-")[2]  # the ids that REST shows have the kind of answer before a dash
        if not (self.running.belongs(bare, caller) and self._runner.cancel(bare)):
            raise QuireError(ErrorCode.NOT_FOUND, "There is no such request running here.", param="request_id")

    def models(self) -> list[ModelCard]:
        """The configured models, in order."""
        return [self._card(name) for name in self._models]

    def model(self, name: str) -> ModelCard:
        """One configured model. Raises ``QuireError`` NOT_FOUND."""
        if name not in self._models:
            raise unknown_model(name)
        return self._card(name)

    def serving(self) -> bool:
        """Whether new requests are accepted and some model has an engine."""
        return self.running.accepting and any(self._fleet.ready(name) for name in self._models)

    def close(self) -> None:
        """Lets go of threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _card(self, name: str) -> ModelCard:
        limits = self._fleet.limits(name)
        return ModelCard(name, self._created, self._fleet.ready(name), limits.max_model_len if limits else 0)


def new_request_id() -> str:
    """An opaque id, 32 hexadecimal digits."""
    return token_hex(16)


@contextmanager
def counting_rejections() -> Iterator[None]:
    """Counts a request that is refused before it reaches an engine."""
    try:
        yield
    except QuireError as error:
        metrics.REJECTIONS.labels(error.code.name.lower()).inc()
        raise


def _internal_span(name: str) -> AbstractContextManager[trace.Span]:
    return _TRACER.start_as_current_span(name, record_exception=False, set_status_on_exception=False)


def _server_span(name: str, request_id: str, headers: Mapping[str, str]) -> AbstractContextManager[trace.Span]:
    attributes = {Attribute.REQUEST_ID: request_id}
    label = headers.get("x-request-id", "")
    if _LABEL.fullmatch(label):
        attributes[Attribute.CLIENT_REQUEST_ID] = label
    return _TRACER.start_as_current_span(
        name,
        context=extract(headers),
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    )


def _note(span: trace.Span, error: QuireError) -> None:
    span.set_attribute(Attribute.ERROR_TYPE, error.code.name.lower())
    if error.status.http >= 500:
        span.set_status(StatusCode.ERROR, error.message)


def _is_long(request: GenerationRequest) -> bool:
    if isinstance(request, ChatRequest):
        return sum(len(message.content) + _MESSAGE for message in request.messages) > _LONG_TEXT
    return isinstance(request, CompletionRequest) and sum(map(len, request.prompt)) > _LONG_TEXT
