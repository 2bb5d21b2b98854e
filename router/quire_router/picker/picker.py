"""``EndpointPicker``: which server gets a request that a gateway sends itself. It is authenticated, limited, queued and
placed as one that runs here; what differs is that its answer does not come through here, and is only watched.

``Pick`` is the decision. Until it is left the request counts in the load of its server, and is in progress.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from time import time_ns

import numpy as np
from opentelemetry import context, trace
from opentelemetry.trace import SpanKind
from quire_proto.telemetry import PROVIDER_NAME, Attribute
from quire_proto.tracing import is_recording, w3c_headers

from quire_router.admission.limits import RateLimiter, Reservation
from quire_router.admission.queue import AdmissionQueue
from quire_router.api.auth import Identity
from quire_router.api.forwarded_requests import ForwardedRequest
from quire_router.api.prepared_request import options_from_headers
from quire_router.api.rest.http import KEY_HEADERS
from quire_router.api.service import ApiService, counting_rejections
from quire_router.core import metrics
from quire_router.core.errors import no_engine_ready
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.core.usage import Account
from quire_router.discovery.base import http_endpoint
from quire_router.engines.attempt import EngineLost
from quire_router.engines.forwarded import Forwarded
from quire_router.engines.pool import EnginePool
from quire_router.journal.base import Lease, unrecorded
from quire_router.picker.exchange import HttpRequest, is_in_subset
from quire_router.picker.forwarded_paths import MODELS, ForwardedPaths
from quire_router.placement.engine_table import ArrayCache, Rows
from quire_router.placement.placer import PlacementDecision, Placer, route_header
from quire_router.placement.prefix_index import HashesByNamespace
from quire_router.requests.dispatch import Dispatcher, queued_request, record_wait, tracer

endpoint_of = lru_cache(4096)(http_endpoint)
"""``http_endpoint``, which is asked for each server and each request."""

Values = Callable[[str], Sequence[str]]
"""Returns every value of a header."""


class GatewayLeftError(Exception):
    """The gateway has given the request up while it waited."""


class EndpointPicker:
    """Picks among the engines of ``pool`` that have an HTTP API of their own; requests for Quire's own engines have to
    come through the router. ``forwarded`` are further requests that are sent on (``ForwardedPaths``). So many
    ``fallbacks`` are named behind the best endpoint, the next best ones. No request
    may take more than ``request_timeout`` seconds. With ``expose_route`` responses say where they come from, and why.
    ``count_usage`` adds what a request has used to its account.
    """

    def __init__(
        self,
        service: ApiService,
        pool: EnginePool,
        placer: Placer,
        queue: AdmissionQueue,
        dispatcher: Dispatcher,
        *,
        limits: RateLimiter,
        fallbacks: int = 0,
        request_timeout: float,
        expose_route: bool = False,
        forwarded: Sequence[str] = (),
        count_usage: Callable[[Lease, Account, Usage], None] = lambda *_: None,
    ) -> None:
        self.on_load_changed: Callable[[], None] = lambda: None
        self.paths = ForwardedPaths(forwarded)
        self._service = service
        self._pool = pool
        self._placer = placer
        self._queue = queue
        self._dispatcher = dispatcher
        self._limits = limits
        self._fallbacks = fallbacks
        self._request_timeout = request_timeout
        self._expose_route = expose_route
        self._count_usage = count_usage
        self._reachable: ArrayCache[Rows] = ArrayCache()
        self._in_progress: Counter[str] = Counter()

    def load(self, model: str) -> int:
        """Requests of the model that wait for an endpoint, or run at one."""
        return self._in_progress[model]

    def authenticate(self, values: Values) -> Identity:
        """Returns whose headers these are. Raises ``QuireError`` UNAUTHENTICATED."""
        given = values("authorization") or [f"Bearer {key}" for name in KEY_HEADERS for key in values(name)]
        return self._service.keys.authenticate(*given)

    @property
    def removed_headers(self) -> Sequence[str]:
        """What servers do not get to see: the keys of this router's clients."""
        return ("authorization", *KEY_HEADERS) if self._service.keys.required else ()

    async def pick_any(self, request: HttpRequest, caller: Identity) -> str | None:
        """Returns an endpoint for a request without a body, such as that for the list of models: of the servers of the
        caller's models the one with the fewest requests. None for a list of models that no server has, as each of them
        also serves models of others. Charged as one that reaches no engine. Raises ``QuireError`` OVERLOADED and
        UNAVAILABLE.
        """
        await self._service.charge(caller)
        cards = self._service.models()
        own = {row for card in cards if caller.may_use(card.name) for row in self._pool.rows(card.name).tolist()}
        others = {row for card in cards if not caller.may_use(card.name) for row in self._pool.rows(card.name).tolist()}
        is_list = request.path == MODELS
        if is_list and own and own <= others:
            return None
        allowed = self._allowed(np.array(sorted(own - others if is_list else own), np.intp), request.subset)
        if not len(allowed):
            raise no_engine_ready()
        return self._endpoint(int(allowed[self._pool.table.requests[allowed].argmin()]))

    @asynccontextmanager
    async def pick(
        self,
        request: HttpRequest,
        path: str,
        request_id: str,
        caller: Identity,
        *,
        has_left: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator["Pick"]:
        """Waits for the turn of a request to a ``path`` of ``api_path``, and returns where it goes; the request is in
        progress until the block ends. ``has_left`` says when its turn has come whether the gateway has given it up
        meanwhile. Raises ``QuireError``, and ``GatewayLeftError`` if it has.
        """
        values = request.values
        options = options_from_headers(values)
        forwarded = await self._service.prepare_forwarded(path, request.body or b"", request_id, caller, options)
        seconds = min(self._request_timeout, options.timeout or self._request_timeout)
        first = replace(forwarded.first, deadline=forwarded.first.created + seconds)
        with ExitStack() as resources:
            reservation = await self._limits.reserve(caller.tenant, request_id, forwarded.max_cost)
            resources.callback(reservation.cancel)  # unless it is settled before: no server ran the request
            resources.enter_context(self._counted(first.model))
            hashes = await self._hash_blocks(first, request.subset)
            await self._wait_turn(first)
            if has_left():
                raise GatewayLeftError
            # The capacity is not kept: from here on nothing is awaited until the request counts in a server's load.
            forwarded = replace(forwarded, generations=(first, *forwarded.generations[1:]))
            with counting_rejections():
                pick = self._place(forwarded, request, hashes)
            pick.reservation = reservation
            pick.tenant = self._limits.label(caller.tenant)
            pick.count_usage = partial(self._count_usage, unrecorded(request_id), Account.of(first))
            yield resources.enter_context(pick)

    def abandon(self, request_id: str) -> None:
        """Ends the wait of a request, if it waits."""
        self._queue.abandon(request_id)

    async def _hash_blocks(self, first: GenerationRequest, subset: frozenset[str] | None) -> HashesByNamespace:
        hashes: HashesByNamespace = {}
        for _ in self._placer.compute_hashes(first, self._candidates(first, subset), hashes):
            await asyncio.sleep(0)
        return hashes

    async def _wait_turn(self, first: GenerationRequest) -> None:
        began = time_ns()
        try:
            await self._queue.acquire(queued_request(first))
        finally:
            record_wait(context.get_current(), began, "turn")

    def _place(self, forwarded: ForwardedRequest, request: HttpRequest, hashes: HashesByNamespace) -> "Pick":
        """Raises ``QuireError`` UNAVAILABLE if no server is ready that may be picked."""
        first, rows = forwarded.first, self._candidates(forwarded.first, request.subset)
        decision = self._dispatcher.place(
            first, rows, hashes, context.get_current(), explained=bool(self._fallbacks) or self._expose_route
        )
        if decision is None:
            raise no_engine_ready()
        self._placer.record_dispatch(decision, first)
        others = [engine_id for engine_id, _ in decision.scores if engine_id != decision.engine_id]
        engine_ids = [decision.engine_id, *others[: self._fallbacks]]
        route = route_header(decision) if self._expose_route else ""
        return Pick(self._pool, forwarded, decision, engine_ids, route)

    def _candidates(self, generation: GenerationRequest, subset: frozenset[str] | None) -> Rows:
        return self._allowed(self._pool.rows(generation.model, generation.lora), subset)

    def _allowed(self, rows: Rows, subset: frozenset[str] | None) -> Rows:
        """Those of the rows whose engines a gateway can reach, and of these the ones in its ``subset``."""
        reachable = self._reachable.get(rows)
        if reachable is None:
            ids = self._pool.table.ids
            kept = [row for row in rows.tolist() if endpoint_of(ids[row] or "") is not None]
            reachable = self._reachable.put(rows, np.array(kept, np.intp))
        if subset is None:
            return reachable
        return np.array([row for row in reachable.tolist() if is_in_subset(self._endpoint(row), subset)], np.intp)

    def _endpoint(self, row: int) -> str:
        endpoint = endpoint_of(self._pool.table.ids[row] or "")
        assert endpoint is not None, "only what a gateway can reach is picked"
        return endpoint

    @contextmanager
    def _counted(self, model: str) -> Iterator[None]:
        self._count(model, 1)
        try:
            yield
        finally:
            self._count(model, -1)

    def _count(self, model: str, more: int) -> None:
        self._in_progress[model] += more
        metrics.IN_FLIGHT.labels(model).inc(more)
        metrics.LOAD.labels(model).inc(more)
        self.on_load_changed()


class Pick:
    """Where a request goes: ``endpoints``, the best first. What is seen of the response is given to ``on_response``,
    ``on_output`` and ``on_end``; a request that is left before its end was broken off.
    """

    def __init__(
        self,
        pool: EnginePool,
        forwarded: ForwardedRequest,
        decision: PlacementDecision,
        engine_ids: Sequence[str],
        route: str,
    ) -> None:
        self.endpoints = [endpoint for each in engine_ids if (endpoint := endpoint_of(each)) is not None]
        self.response_headers = [("x-quire-route", route)] if route else []
        self.reservation: Reservation | None = None
        self.tenant = ""
        self.count_usage: Callable[[Usage], None] = lambda _usage: None
        self._pool = pool
        self._forwarded = forwarded
        self._decision = decision
        self._resources = ExitStack()
        self._at: Forwarded | None = None
        self._answer = AnswerReader()
        self._span: trace.Span = trace.INVALID_SPAN
        self._status = 0
        self._is_event_stream = self._has_ended = False

    @property
    def request_headers(self) -> dict[str, str]:
        """What the server gets besides what the client sent: the trace that the request belongs to."""
        return w3c_headers(self._span)

    def __enter__(self) -> "Pick":
        first, engine_id = self._forwarded.first, self._decision.engine_id
        if is_recording(tracer):
            attributes = {
                Attribute.OPERATION: first.operation,
                Attribute.PROVIDER: PROVIDER_NAME,
                Attribute.REQUEST_MODEL: first.model_name,
                Attribute.SERVER_ADDRESS: engine_id,
                Attribute.ENGINE: engine_id,
                Attribute.REQUEST_ID: first.request_id,
            }
            name = f"{first.operation} {first.model_name}"
            self._span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
        self._count_at(engine_id, self._forwarded.prompt_tokens - self._decision.cached_tokens)
        metrics.PROMPT_TOKENS.labels(first.model).inc(self._forwarded.prompt_tokens)
        return self

    def on_response(self, status: int, *, is_event_stream: bool, served: str) -> None:
        """The response has begun. It comes from the endpoint ``served``, where the gateway says so."""
        self._status, self._is_event_stream = status, is_event_stream
        if served and served not in self.endpoints[:1]:
            for engine_id in self._pool.table.ids:
                if engine_id and endpoint_of(engine_id) == served:
                    self._resources.close()
                    self._count_at(engine_id, self._forwarded.prompt_tokens)

    def on_output(self, data: bytes) -> None:
        """So much more of the response has come."""
        events = self._answer.read(data)
        if self._is_event_stream and self._is_success and self._at is not None:
            self._at.on_events(events)

    def on_end(self) -> None:
        """The response is complete."""
        self._has_ended = True
        if self._is_success and self._at is not None:
            self._at.on_computed()

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        first, usage = self._forwarded.first, self._usage()
        end = "closed" if not self._has_ended else "completed" if self._is_success else "failed"
        metrics.PICKS.labels(first.model, end).inc()
        self._span.set_attribute(Attribute.INPUT_TOKENS, usage.prompt_tokens)
        self._span.set_attribute(Attribute.OUTPUT_TOKENS, usage.completion_tokens)
        if end == "failed":
            self._span.set_attribute(Attribute.ERROR_TYPE, str(self._status))
        self._span.end()
        if self.reservation is None or end == "failed":
            return
        self.reservation.used = first.cost(usage.prompt_tokens, usage.completion_tokens)
        self.reservation.settle()
        self.count_usage(usage)
        counts = (1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        metrics.count_tenant(self.tenant, first.model, counts)

    @property
    def _is_success(self) -> bool:
        return 200 <= self._status < 300

    def _usage(self) -> Usage:
        """What the response says, or else what was seen of it: each event of a stream is about a token, and the prompt
        has as many as this router counts.
        """
        said = self._answer.usage
        return Usage(
            self._forwarded.prompt_tokens if said.prompt_tokens is None else said.prompt_tokens,
            self._answer.events if said.completion_tokens is None else said.completion_tokens,
            said.cached_tokens,
        )

    def _count_at(self, engine_id: str, uncached_tokens: int) -> None:
        try:
            forwarded = self._pool.forward(
                engine_id,
                pending_tokens=max(1, uncached_tokens),
                sequences=self._forwarded.num_sequences,
                block_hashes=self._decision.block_hashes,
            )
        except EngineLost:  # it has left the fleet since
            self._at = None
        else:
            self._at = self._resources.enter_context(forwarded)


_KEPT_BYTES = 4096
_EVENT_END = b"\n\n"
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*([0-9]{1,9})')
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*([0-9]{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*([0-9]{1,9})')
_READ_TOKENS = re.compile(rb'"cache_read_input_tokens"\s*:\s*([0-9]{1,9})')
_WRITTEN_TOKENS = re.compile(rb'"cache_creation_input_tokens"\s*:\s*([0-9]{1,9})')
"""Of the Messages API: what was read from a cache and written to it, which are not among ``input_tokens``."""


@dataclass(frozen=True, slots=True)
class SaidUsage:
    """The tokens that a response says it used; None for what it does not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0


class AnswerReader:
    """What the bytes of a response say beside the text: ``events``, how many of a stream have come, and its usage,
    which stands near the end, and in streams of the Messages API the prompt's at the beginning. A quotation mark in a
    text has a backslash before it, so a text cannot pretend to be one.
    """

    def __init__(self) -> None:
        self.events = 0
        self._head = self._tail = b""

    def read(self, data: bytes) -> int:
        """Returns how many events end in the next bytes."""
        ended = (self._tail[-1:] + data).count(_EVENT_END)
        self.events += ended
        if len(self._head) < _KEPT_BYTES:
            self._head += data[: _KEPT_BYTES - len(self._head)]
        self._tail = (self._tail + data)[-_KEPT_BYTES:]
        return ended

    @property
    def usage(self) -> SaidUsage:
        """The tokens that it says. What the Messages API counts beside the input is part of the prompt."""
        prompt = self._last(_PROMPT_TOKENS)
        read, written = (self._last(pattern) or 0 for pattern in (_READ_TOKENS, _WRITTEN_TOKENS))
        whole = None if prompt is None else prompt + read + written
        return SaidUsage(whole, self._last(_COMPLETION_TOKENS), self._last(_CACHED_TOKENS) or read)

    def _last(self, pattern: re.Pattern[bytes]) -> int | None:
        found = pattern.findall(self._tail) or pattern.findall(self._head)
        return int(found[-1]) if found else None
