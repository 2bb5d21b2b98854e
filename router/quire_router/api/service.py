"""``ApiService``: what REST and gRPC share between reading a request and writing its response: authentication, limits,
validation, spans, the models with their readiness. Its ``responses`` open them (``ResponseOpener``).
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import replace
from functools import cache
from secrets import token_hex
from time import monotonic
from typing import Any, Protocol, Self, TypeVar

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import Task
from quire_proto.telemetry import Attribute, Span
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tracing import extract, is_recording

from quire_router.admission.limits import RateLimiter
from quire_router.admission.model_targets import ModelTargets
from quire_router.admission.tenants import rate_limit_headers
from quire_router.api.auth import ANONYMOUS, Authenticator, Identity
from quire_router.api.forwarded_requests import ForwardedBody, ForwardedRequest, forwarded_generations, read_forwarded
from quire_router.api.model_cards import ModelCard, ModelCards
from quire_router.api.multi_prompt import MultiPromptRunner
from quire_router.api.pooled_requests import PooledAnswer, PreparedPooling, collect, pool_all
from quire_router.api.prepared_request import (
    NO_OPTIONS,
    EnginePoolView,
    PreparedRequest,
    RequestOptions,
    Runner,
    apply_options,
    build_response_options,
)
from quire_router.api.request_limits import BodyBudget, ConcurrencyLimit
from quire_router.api.response_opener import Response, ResponseOpener
from quire_router.api.schemas.base import as_header_value
from quire_router.api.schemas.openai import GenerationBody
from quire_router.api.schemas.pooling import PoolingBody
from quire_router.api.stored_requests import RequestStatus, RequestStore, StoredRequest
from quire_router.api.target_selection import TargetSelection, TargetSelector
from quire_router.api.tokenize import DetokenizeRequest, TokenizeRequest, TokenizeResult, detokenize, tokenize
from quire_router.api.tokenizer_pool import TokenizerPool
from quire_router.api.validation import Validator
from quire_router.core import metrics
from quire_router.core.errors import MODEL_NOT_KNOWN_YET, model_missing, model_not_known_yet, unknown_model
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.core.response_options import Api
from quire_router.core.tenant_ids import former_id
from quire_router.core.usage import UsageRow
from quire_router.journal.fleet_secret import FleetSecret

_TRACER = trace.get_tracer("quire.router")
_REQUEST_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONG_TEXT = 2048  # characters or tokens above which a text is tokenised on a thread: other streams would stall
_LONG_BODY = 16 * 1024  # bytes above which a body is parsed on a thread
_CLIENT_ERRORS = (ErrorCode.INVALID, ErrorCode.FORBIDDEN, ErrorCode.NOT_FOUND)
T = TypeVar("T")
BeforeDelete = Callable[[StoredRequest, Identity], Awaitable[None]]
UsageReader = Callable[[float, float, str], Awaitable[list[UsageRow]]]
"""``Journal.usage``, of one tenant."""


class SizedRequest(Protocol):
    """A request for a ``model``, with about ``size`` characters or tokens of text."""

    @property
    def model(self) -> str: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def tasks(self) -> Sequence[Task]: ...  # noqa: D102

    def with_model(self, model: str) -> Self: ...  # noqa: D102


SizedT = TypeVar("SizedT", bound=SizedRequest)
PreparedT = TypeVar("PreparedT", PreparedRequest, PreparedPooling, ForwardedRequest)


class ApiService:
    """The common half of both APIs. No request may take more than ``request_timeout`` seconds, and one for an adapter
    waits ``hold_timeout`` at most until it is known which there are. ``durable`` returns whether the requests of these
    ids are recorded in the journal, and ``read_usage`` what a tenant used. Responses of the Responses API are kept for
    ``responses_retention`` seconds, others as long as the journal keeps them; a tenant's own retention comes first. A
    request may name what has ``targets``, and gets one of them. ``sampling_defaults``: see ``Validator``.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, ModelTokenizer],
        fleet: EnginePoolView,
        runner: Runner,
        keys: Authenticator,
        concurrency: ConcurrencyLimit,
        *,
        allow_priority: bool = False,
        refuse_unknown: bool = False,
        request_timeout: float | None = None,
        hold_timeout: float = 10.0,
        durable: Callable[[Sequence[str]], bool] = lambda _request_ids: True,
        tenant_limits: RateLimiter | None = None,
        bodies: BodyBudget | None = None,
        responses_retention: float | None = None,
        read_usage: UsageReader | None = None,
        sampling_defaults: Mapping[str, Mapping[str, Any]] | None = None,
        targets: ModelTargets | None = None,
        fleet_secret: FleetSecret | None = None,
        threads: TokenizerPool | None = None,
    ) -> None:
        self.keys = keys
        self.concurrency = concurrency
        self.bodies = bodies or BodyBudget()
        self._models = tuple(tokenizers)
        self._engine_pool = fleet
        self._runner = MultiPromptRunner(runner, concurrency)
        self._targets = ModelTargets() if targets is None else targets
        self._selector = None if targets is None else TargetSelector(targets, fleet, runner)
        self._store = RequestStore(runner, tokenizers)
        self.responses = ResponseOpener(runner, self._runner, self._store)
        self._request_timeout = request_timeout
        self._hold_timeout = hold_timeout
        self._responses_retention = responses_retention
        self._durable = durable
        self._fleet_secret = fleet_secret
        self._read_usage = read_usage
        self._tenant_limits = tenant_limits
        self._validator = Validator(
            tokenizers,
            fleet.limits,
            fleet.loras,
            self._targets,
            allow_priority=allow_priority,
            refuse_unknown=refuse_unknown,
            sampling_defaults=sampling_defaults,
        )
        self._tokenizer_pool = threads or TokenizerPool()
        self._cards = ModelCards(self._models, self._targets, fleet, self._validator)

    @contextmanager
    def request_scope(self, name: str, request_id: str, headers: Mapping[str, str]) -> Iterator[None]:
        """Holds a slot and a server span named ``name``, which continues the caller's trace, from a request's arrival
        to its end. Raises ``QuireError`` when there is no capacity.
        """
        with _server_span(name, request_id, headers) as span:
            try:
                with ExitStack() as stack:
                    with counting_rejections():
                        stack.enter_context(self.concurrency.acquire())
                    yield
            except QuireError as error:
                _record_error(span, error)
                raise

    async def keyed_id(self, options: RequestOptions, caller: Identity) -> str:
        """Returns the id of a request with an idempotency key, empty without one: the same at each router. Without API
        keys nobody can compute it from the idempotency key, which is all that a stranger would need to read the answer.
        """
        if not options.key:
            return ""
        if not caller.tenant and self._fleet_secret is not None:
            return options.request_id(caller, await self._fleet_secret.shared())
        if former := former_id(caller.tenant):
            before = options.request_id(replace(caller, tenant=former))
            with suppress(QuireError):  # where records cannot be read now, it is a new request
                if await self._store.exists(before):
                    return before
        return options.request_id(caller)

    async def prepare(
        self,
        read: Callable[[], GenerationBody],
        request_id: str,
        caller: Identity,
        options: RequestOptions = NO_OPTIONS,
        *,
        size: int = 0,
    ) -> PreparedRequest:
        """Validates the request that ``read`` parses from a body of ``size`` bytes. Raises ``QuireError``, and counts
        the refusal; a refusal for the request's content is charged as a request.
        """

        def validated(request: GenerationBody, selection: TargetSelection | None) -> PreparedRequest:
            session = options.session or request.prompt_cache_key or ""
            target = "" if selection is None else selection.target(request.model, session)
            request, ignored = self._validator.drop_ignored(request, target or request.model)
            generations = self._validator.generations(request, request_id, caller, target)
            ids = request.include_event_ids or bool(options.key)
            tokenizer = self._validator.tokenizer(target or request.model)
            response_options = build_response_options(request, generations[0].params.max_tokens)
            prepared = PreparedRequest(generations, response_options, tokenizer, ids, ignored)
            retention = caller.policy.retention
            if retention is None and request.api is Api.RESPONSES:
                retention = self._responses_retention
            timeout = self._request_timeout
            return apply_options(request, prepared, options, caller, timeout=timeout, retention=retention)

        return await self._admit(read, validated, request_id, caller, options, size=size)

    async def prepare_pooling(
        self,
        read: Callable[[], PoolingBody],
        request_id: str,
        caller: Identity,
        options: RequestOptions = NO_OPTIONS,
        *,
        size: int = 0,
    ) -> PreparedPooling:
        """As ``prepare``, for prompts that are pooled. Of ``options`` only the timeout counts: a request that comes
        again is answered the same, by an engine.
        """

        def validated(request: PoolingBody, selection: TargetSelection | None) -> PreparedPooling:
            target = "" if selection is None else selection.target(request.model, options.session)
            request, ignored = self._validator.drop_ignored(request, target or request.model)
            prepared = self._validator.pooling(request, request_id, caller, target)
            seconds = min((each for each in (options.timeout, self._request_timeout) if each), default=None)
            deadline = None if seconds is None else prepared.first.created + seconds
            generations = tuple(replace(each, deadline=deadline) for each in prepared.generations)
            return replace(prepared, generations=generations, ignored=ignored)

        return await self._admit(read, validated, request_id, caller, options, size=size)

    async def prepare_forwarded(
        self, path: str, body: bytes, request_id: str, caller: Identity, options: RequestOptions = NO_OPTIONS
    ) -> ForwardedRequest:
        """As ``prepare``, for a request to ``path`` that a gateway sends to a server itself."""

        def validated(read: ForwardedBody, selection: TargetSelection | None) -> ForwardedRequest:
            target = "" if selection is None else selection.target(read.model, options.session)
            return forwarded_generations(read, self._validator, request_id, caller, options, target)

        return await self._admit(
            lambda: read_forwarded(path, body), validated, request_id, caller, options, size=len(body)
        )

    async def pool(self, prepared: PreparedPooling) -> PooledAnswer:
        """Returns what became of all prompts of a request. Raises ``QuireError``."""
        return await pool_all(prepared.generations, self._pool_one)

    async def _pool_one(self, generation: GenerationRequest, own: int) -> tuple[bytes, Usage]:
        with self.concurrency.acquire(own=own) if own else nullcontext():
            return await collect(await self.responses.run([generation]))

    async def _admit(
        self,
        read: Callable[[], SizedT],
        validated: Callable[[SizedT, TargetSelection | None], PreparedT],
        request_id: str,
        caller: Identity,
        options: RequestOptions,
        *,
        size: int,
    ) -> PreparedT:
        with counting_rejections(), _internal_span(Span.ADMIT):
            async with self._charging_refusals(caller):
                selection = None if self._selector is None else await self._selector.select(request_id, caller, options)
                prepared = await self._run_or_offload(read, lambda body: validated(body, selection), caller, size)
                if selection is not None:
                    selection.record()
                if self._tenant_limits is not None:
                    tokens = [generation.max_cost for generation in prepared.generations]
                    self._tenant_limits.check_size(caller.tenant, tokens)
                return prepared

    async def offload(self, caller: Identity, size: int, work: Callable[[], T]) -> T:
        """Returns what ``work`` makes of ``size`` bytes that a client has sent or stored. Runs on a thread, in its
        tenant's turn, what would stall other streams. Raises ``QuireError`` OVERLOADED, too, where too much waits.
        """
        if size <= _LONG_BODY:
            return work()
        return await self._tokenizer_pool.run(caller.tenant, size, work)

    async def parse(self, read: Callable[[], SizedT], caller: Identity, *, size: int = 0) -> SizedT:
        """Returns the request that ``read`` parses, where more is to be known before it is prepared. Raises as
        ``prepare``.
        """
        with counting_rejections():
            async with self._charging_refusals(caller):
                return await self._run_or_offload(read, lambda request: request, caller, size)

    async def status(self, request_id: str, caller: Identity) -> StoredRequest:
        """See ``RequestStore.status``. Raises as ``find``."""
        self.count_poll(caller)
        return await self._store.status(request_id, caller)

    async def find(self, request_id: str, caller: Identity) -> StoredRequest:
        """See ``RequestStore.get``. Raises ``QuireError`` OVERLOADED, too, when the caller reads too often."""
        self.count_poll(caller)
        return await self._store.get(request_id, caller)

    async def recorded(self, request_id: str, caller: Identity) -> StoredRequest:
        """As ``find``, for a request that needs it: it is charged, and not counted as reading."""
        return await self._store.get(request_id, caller)

    async def replay(self, stored: StoredRequest, caller: Identity, deadline: float | None = None) -> Response:
        """Opens the whole response to a request whose status is known, until ``deadline`` by the monotonic clock.
        Raises as ``find``.
        """
        recorded = await self._store.get(stored.first.request_id, caller)
        return await self.responses.resume(recorded, "", caller, deadline)

    async def reread(self, stored: StoredRequest, caller: Identity) -> PreparedRequest:
        """Returns what writing the response to a request needs, whose status is known. Raises as ``find``."""
        return self._store.prepare(await self._store.get(stored.first.request_id, caller))

    async def resume(
        self, stored: StoredRequest, after: str, caller: Identity, options: RequestOptions = NO_OPTIONS
    ) -> Response:
        """See ``ResponseOpener.resume``. Of ``options`` only the timeout counts."""
        deadline = None if options.timeout is None else monotonic() + options.timeout
        return await self.responses.resume(stored, after, caller, deadline)

    async def cancel(self, request_id: str, caller: Identity) -> StoredRequest:
        """Ends what runs of a request of this caller; returns its state just before. Raises as ``find``."""
        stored = await self.status(request_id, caller)
        if await self._runner.cancel(stored.request_ids) or stored.status is not RequestStatus.RUNNING:
            return stored
        return await self._store.status(request_id, caller)  # it has ended meanwhile by itself

    async def end(self, request_id: str) -> None:
        """Ends the request of exactly this id, if it runs anywhere. Raises ``QuireError`` UNAVAILABLE."""
        await self._runner.cancel((request_id,))

    async def delete(self, request_id: str, caller: Identity, before: BeforeDelete) -> StoredRequest:
        """Ends and forgets a request of this caller, once ``before`` has taken from it what is to stay; returns its
        state just before. Raises as ``find``, and as ``before`` does.
        """
        stored = await self.status(request_id, caller)
        await before(stored, caller)
        await self._runner.delete(stored.request_ids)
        return stored

    async def usage(self, since: float, until: float, caller: Identity) -> list[UsageRow]:
        """Returns what the caller's tenant used in the hours that begin from ``since`` until before ``until``. Raises
        ``QuireError``: UNAVAILABLE if it cannot be read now, OVERLOADED when the caller reads too often.
        """
        self.count_poll(caller)
        return [] if self._read_usage is None else await self._read_usage(since, until, caller.tenant)

    async def tokenize(
        self,
        read: Callable[[], TokenizeRequest],
        caller: Identity,
        write: Callable[[TokenizeResult], T],
        *,
        size: int = 0,
    ) -> T:
        """Returns what ``write`` makes of the tokens of a text (see ``tokenize``), parsed by ``read`` from a body of
        ``size`` bytes. Charged as a request. Raises ``QuireError``, and counts the refusal.
        """

        def written(request: TokenizeRequest) -> T:
            request, ignored = self._validator.drop_ignored(request, request.model)
            max_model_len = self._cards.card(request.model).max_model_len
            return write(tokenize(request, self._validator.tokenizer(request.model), max_model_len, ignored))

        with counting_rejections():
            await self.charge(caller)
            return await self._run_or_offload(read, written, caller, size)

    async def detokenize(
        self, read: Callable[[], DetokenizeRequest], caller: Identity, *, size: int = 0
    ) -> tuple[str, Sequence[str]]:
        """Returns the text of tokens, and the parameters that are ignored. Charged and raises as ``tokenize``."""

        def text_of(request: DetokenizeRequest) -> tuple[str, Sequence[str]]:
            request, ignored = self._validator.drop_ignored(request, request.model)
            return detokenize(request, self._validator.tokenizer(request.model)), ignored

        with counting_rejections():
            await self.charge(caller)
            return await self._run_or_offload(read, text_of, caller, size)

    def response_headers(self, prepared: PreparedRequest, *, replayed: bool = False) -> dict[str, str]:
        """Returns what a response says of itself before it begins, by the names of headers and metadata."""
        request_ids = [generation.request_id for generation in prepared.generations]
        headers = {} if self._durable(request_ids) else {"quire-journal": "unavailable"}
        headers |= target_header(prepared.first) | ignored_parameters_header(prepared.ignored)
        return {**headers, "quire-idempotent-replay": "true"} if replayed else headers

    def rate_limit_headers(self, caller: Identity) -> dict[str, str]:
        """Returns the caller's rate limits and what is left of them, by the names of headers and metadata."""
        status = None if self._tenant_limits is None else self._tenant_limits.status(caller.tenant)
        return {} if status is None else rate_limit_headers(status)

    def models(self, caller: Identity = ANONYMOUS) -> list[ModelCard]:
        """Returns what requests of the caller may name: models, in order, what has targets, and then the adapters."""
        return [self._cards.card(name) for name in self._cards.names() if caller.may_use(name)]

    async def model(self, name: str, caller: Identity = ANONYMOUS) -> ModelCard:
        """Returns what requests name so, once it is known. Raises ``QuireError`` FORBIDDEN and NOT_FOUND, and
        UNAVAILABLE as long as it is not.
        """
        try:
            self._check_model(name, caller)
        except QuireError as error:
            if error.reason != MODEL_NOT_KNOWN_YET:
                raise
            await self._engine_pool.wait_for_lora(name, self._hold_timeout)
            self._check_model(name, caller)
        return self._cards.card(name)

    def serving(self) -> bool:
        """Whether new requests are accepted and some model has an engine, be it one that sleeps."""
        pool = self._engine_pool
        has_engine = any(pool.ready(name) or pool.num_sleeping(name) for name in self._models)
        return has_engine and not self.concurrency.draining

    def close(self) -> None:
        """Ends the threads of the tokenizer pool."""
        self._tokenizer_pool.close()

    async def _run_or_offload(
        self, read: Callable[[], SizedT], make: Callable[[SizedT], T], caller: Identity, size: int
    ) -> T:
        """Returns ``make(read())``. Runs on a thread what would stall other streams: parsing a body of many bytes
        (``size``), tokenising a long text. A model that no engine has named waits until all were heard.
        """
        read_once = cache(read)
        try:
            return await self._run_now(read_once, make, caller, size)
        except QuireError as error:
            if error.reason != MODEL_NOT_KNOWN_YET:
                raise
        await self._engine_pool.wait_for_lora(read_once().model, self._hold_timeout)
        return await self._run_now(read_once, make, caller, size)

    async def _run_now(self, read: Callable[[], SizedT], make: Callable[[SizedT], T], caller: Identity, size: int) -> T:
        def checked() -> SizedT:
            request = read()
            if not request.model:
                return request.with_model(self._only_model(caller, request.tasks))
            self._check_model(request.model, caller)
            return request

        if size > _LONG_BODY:
            return await self.offload(caller, size, lambda: make(checked()))
        request = checked()
        if request.size <= _LONG_TEXT and not self._validator.tokenizer(request.model).renders_slowly:
            return make(request)
        return await self._tokenizer_pool.run(caller.tenant, request.size, lambda: make(request))

    @asynccontextmanager
    async def _charging_refusals(self, caller: Identity) -> AsyncIterator[None]:
        """Charges a refusal for the request's content as one request: validating it was work, too. Raises
        ``QuireError`` before anything is read when the tenant has no request left.
        """
        if self._tenant_limits is not None:
            self._tenant_limits.check_rate(caller.tenant)
        try:
            yield
        except QuireError as error:
            if error.code in _CLIENT_ERRORS:
                with suppress(QuireError):  # no request is left by now; the first error says more
                    await self.charge(caller)
            raise

    def count_poll(self, caller: Identity) -> None:
        """Counts one read of what is stored. Raises ``QuireError`` OVERLOADED when the caller reads too often."""
        if self._tenant_limits is not None:
            with counting_rejections():
                self._tenant_limits.count_poll(caller.tenant)

    def charge_read(self, caller: Identity, size: int) -> None:
        """Counts the ``size`` bytes that a read of what is stored took: later reads wait for it."""
        if self._tenant_limits is not None:
            self._tenant_limits.charge_read(caller.tenant, size)

    async def charge(self, caller: Identity) -> None:
        """Charges one request that reaches no engine. Raises ``QuireError`` OVERLOADED when none is left."""
        if self._tenant_limits is not None:
            await self._tenant_limits.consume_request(caller.tenant)

    def _only_model(self, caller: Identity, tasks: Sequence[Task]) -> str:
        """Returns the one model that the caller may use for one of these ``tasks``, by the first of its names. Adapters
        count where there is nothing else. Raises ``QuireError`` INVALID with the models there are, and UNAVAILABLE
        where there is none yet. May be called on any thread.
        """
        knows_all = self._engine_pool.knows_loras()
        names = [name for name in self._cards.names() if caller.may_use(name)]
        if not (names or knows_all):
            raise model_not_known_yet("")
        loras = self._engine_pool.loras()
        usable = [name for name in names if name not in loras] or names
        fitting = [name for name in usable if self._validator.can_do(name, tasks)]
        if len(fitting) != 1 and not self._engine_pool.are_names_of_one(fitting):
            raise model_missing(fitting or usable)
        return fitting[0]

    def _check_model(self, name: str, caller: Identity) -> None:
        """Raises ``QuireError`` FORBIDDEN for a model that the caller may not use, NOT_FOUND with names of those that
        there are, and UNAVAILABLE where not all are known yet. May be called on any thread.
        """
        caller.check_model(name)
        if name in self._models or name in self._targets or name in self._engine_pool.loras():
            return
        if not self._engine_pool.knows_loras():
            raise model_not_known_yet(name)
        if name not in self._engine_pool.loras():  # it may have become known just now
            raise unknown_model(name, [served for served in self._cards.names() if caller.may_use(served)])


def ignored_parameters_header(params: Sequence[str]) -> dict[str, str]:
    """Returns the header or metadata that names the parameters that changed nothing."""
    return {"quire-ignored-parameters": as_header_value(params)} if params else {}


def target_header(request: GenerationRequest) -> dict[str, str]:
    """Returns the header or metadata that names the target of a request for what has several."""
    return {"quire-model-target": request.model} if request.served_name else {}


def new_request_id() -> str:
    """Returns a random id, 32 hexadecimal digits."""
    return token_hex(16)


@contextmanager
def counting_rejections() -> Iterator[None]:
    """Counts requests that are refused before they reach an engine. Refusals by limits are counted by their reason
    elsewhere (``admission.limits.counting_refusals``).
    """
    try:
        yield
    except QuireError as error:
        if error.code is ErrorCode.OVERLOADED and error.reason is not None:
            raise
        metrics.REJECTIONS.labels(error.code.name.lower()).inc()
        raise


def _internal_span(name: str) -> AbstractContextManager[trace.Span]:
    if not is_recording(_TRACER):
        return nullcontext(trace.INVALID_SPAN)
    return _TRACER.start_as_current_span(name, record_exception=False, set_status_on_exception=False)


def _server_span(name: str, request_id: str, headers: Mapping[str, str]) -> AbstractContextManager[trace.Span]:
    caller = extract(headers)
    if not is_recording(_TRACER):
        return trace.use_span(trace.get_current_span(caller)) if caller else nullcontext(trace.INVALID_SPAN)
    attributes = {Attribute.REQUEST_ID: request_id}
    label = headers.get("x-request-id", "")
    if _REQUEST_LABEL.fullmatch(label):
        attributes[Attribute.CLIENT_REQUEST_ID] = label
    return _TRACER.start_as_current_span(
        name,
        context=caller,
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    )


def _record_error(span: trace.Span, error: QuireError) -> None:
    span.set_attribute(Attribute.ERROR_TYPE, error.code.name.lower())
    if error.status.http >= 500:
        span.set_status(StatusCode.ERROR, error.message)
