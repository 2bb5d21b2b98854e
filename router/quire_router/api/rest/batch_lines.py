"""``BatchLines``: runs the lines of batches as requests of the routes that they name, behind all others. What is
generated is a background request with a record, by which it runs once; what is embedded has none, and is the same
whenever it is computed.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import time
from typing import Final, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.priority import BEST_EFFORT
from quire_proto.telemetry import Attribute, Span
from quire_proto.tracing import is_recording

from quire_router.admission.tenants import Tenants
from quire_router.api.auth import Identity
from quire_router.api.multi_prompt import total_usage
from quire_router.api.pooled_requests import PooledAnswer, PreparedPooling
from quire_router.api.prepared_request import PreparedRequest, RequestOptions
from quire_router.api.rest.answer_format import AnswerFormat
from quire_router.api.rest.openai_format import CHAT, COMPLETION
from quire_router.api.rest.pooling_routes import embeddings_json
from quire_router.api.rest.response_history import prepare_response
from quire_router.api.rest.responses_format import RESPONSES
from quire_router.api.rest.sse import collect
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.schemas.pooling import EmbeddingRequest
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.api.stored_requests import StoredRequest
from quire_router.batches.batch import EMBEDDINGS, Batch, Line, LineAnswer
from quire_router.core.errors import batch_waits

_INPUTS_AT_ONCE = 8  # of one line that is embedded
MAX_RUNS = 4
"""Requests that a line is run as, one after the other, where each ends with an error that passes. That of the last is
the answer: each was tried on several engines, and what brings engines down must not be tried for the whole window.
"""
_SPARE_RETENTION: Final = 3_600.0  # seconds after the window for which the records of lines are kept
_SPARE_SECONDS: Final = 60.0  # after the window until a line ends by itself, where its batch has not ended it
_NOT_THE_LINES = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED, ErrorCode.DEADLINE)
"""Errors that are no answer to a line: they pass, or the window of its batch has ended."""
_PASSING = (ErrorCode.UNAVAILABLE, ErrorCode.OVERLOADED)
PrepareLine = Callable[[Line, str, Identity, RequestOptions], Awaitable[PreparedRequest]]
"""Returns the request in a line, with this id. Raises ``QuireError``."""
T = TypeVar("T")
tracer = trace.get_tracer("quire.router")


class BatchLines:
    """See ``LineRunner``. Lines are prepared and answered as at the routes that they name; a response waits until there
    is room for it in its tenant's ``quota``. Lines of a tenant that was removed from the tenants' file wait until it is
    there again, or their window ends.
    """

    def __init__(self, service: ApiService, tenants: Tenants, quota: ResponseQuota | None = None) -> None:
        self._service = service
        self._quota = quota
        self._tenants = tenants
        self._routes: Mapping[str, tuple[PrepareLine, AnswerFormat]] = {
            "/v1/chat/completions": (self._preparing(ChatRequest), CHAT),
            "/v1/completions": (self._preparing(CompletionRequest), COMPLETION),
            "/v1/responses": (self._prepare_response, RESPONSES),
        }
        self._under_way: Counter[str] = Counter()

    async def run(self, batch: Batch, line: Line) -> LineAnswer:
        """See ``LineRunner``. The ids of a line's requests follow from the batch and the line's number, as from
        idempotency keys that no client can send.
        """
        caller = self._caller(batch)
        if batch.listed and not caller.policy.listed:
            raise batch_waits()  # its tenant was removed from the file, and with it its limits
        most = caller.policy.max_concurrent
        if most is not None and self._under_way[caller.tenant] >= max(1, most // 2):
            raise batch_waits()
        self._under_way[caller.tenant] += 1
        try:
            request_id = _options(batch, line.number).request_id(caller)
            with _line_span(batch, request_id):
                if batch.endpoint == EMBEDDINGS:
                    return await self._embed(batch, line, request_id, caller)
                return await self._generate(batch, line, caller)
        finally:
            self._under_way[caller.tenant] -= 1
            if not self._under_way[caller.tenant]:
                del self._under_way[caller.tenant]

    async def cancel(self, batch: Batch, number: int) -> None:
        """See ``LineRunner``. What is embedded ends with the task that waits for it."""
        if batch.endpoint != EMBEDDINGS:
            for run in range(MAX_RUNS):
                await self._service.end(_options(batch, number, run).request_id(self._caller(batch)))

    async def offload(self, batch: Batch, size: int, work: Callable[[], T]) -> T:
        """See ``LineRunner``."""
        return await self._service.offload(self._caller(batch), size, work)

    async def _generate(self, batch: Batch, line: Line, caller: Identity) -> LineAnswer:
        answer_format, request_id = self._routes[batch.endpoint][1], ""
        try:
            for run in range(MAX_RUNS):
                options = _options(batch, line.number, run)
                request_id = options.request_id(caller)
                stored = await self._begin(batch, line, request_id, caller, options)
                error = stored.error
                if error is None or error.code not in _PASSING:
                    return LineAnswer(200, request_id, await self._answer(stored, caller, answer_format))
        except QuireError as raised:
            if raised.code in _NOT_THE_LINES:
                raise
            error = raised
        assert error is not None  # there is a run
        status, body, _ = answer_format.error_response(error, request_id)
        return LineAnswer(status, request_id, body)

    async def _begin(
        self, batch: Batch, line: Line, request_id: str, caller: Identity, options: RequestOptions
    ) -> StoredRequest:
        """Begins a request of a line, unless it was begun. Returns it."""
        prepare, answer_format = self._routes[batch.endpoint]
        prepared = _as_line(await prepare(line, request_id, caller, options), batch)
        if self._quota is not None and answer_format is RESPONSES:
            await self._quota.charge(prepared)
        try:
            await self._service.responses.start_background(prepared)
        except QuireError as error:
            # No client has this key: the line was begun with another prompt, as templates may name the date.
            if error.code is not ErrorCode.CONFLICT:
                if self._quota is not None:
                    await self._quota.discharge(request_id, caller.tenant)
                raise
        with _begun_again_if_lost():
            return await self._service.recorded(request_id, caller)

    async def _answer(self, stored: StoredRequest, caller: Identity, answer_format: AnswerFormat) -> bytes:
        with _begun_again_if_lost():
            answer = await self._service.responses.resume(stored, "", caller)
            return (await collect(answer, answer_format))[0]

    async def _embed(self, batch: Batch, line: Line, request_id: str, caller: Identity) -> LineAnswer:
        """Embeds the inputs of a line, some at a time."""
        requests: list[EmbeddingRequest] = []

        def read() -> EmbeddingRequest:
            requests.append(EmbeddingRequest.from_json(line.body()))
            return requests[0]

        try:
            prepared = await self._service.prepare_pooling(read, request_id, caller, size=len(line.text))
            deadline = batch.expires_at + _SPARE_SECONDS
            generations = [replace(each, priority=BEST_EFFORT, deadline=deadline) for each in prepared.generations]
            answers: list[PooledAnswer] = []
            for start in range(0, len(generations), _INPUTS_AT_ONCE):
                some = PreparedPooling(tuple(generations[start : start + _INPUTS_AT_ONCE]))
                answers.append(await self._service.pool(some))
        except QuireError as error:
            if error.code in _NOT_THE_LINES:
                raise
            status, body, _ = CHAT.error_response(error, request_id)
            return LineAnswer(status, request_id, body)
        pooled = [each for answer in answers for each in answer.pooled]
        whole = PooledAnswer(pooled, total_usage([answer.usage for answer in answers]))
        return LineAnswer(200, request_id, await embeddings_json(requests[0], prepared, whole))

    def _preparing(self, body_type: type[ChatRequest] | type[CompletionRequest]) -> PrepareLine:
        async def prepare(line: Line, request_id: str, caller: Identity, options: RequestOptions) -> PreparedRequest:
            return await self._service.prepare(
                lambda: body_type.from_json(line.body()), request_id, caller, options, size=len(line.text)
            )

        return prepare

    async def _prepare_response(
        self, line: Line, request_id: str, caller: Identity, options: RequestOptions
    ) -> PreparedRequest:
        return await prepare_response(self._service, line.body, len(line.text), request_id, caller, options)

    def _caller(self, batch: Batch) -> Identity:
        return Identity(batch.tenant, bytes.fromhex(batch.cache_salt), self._tenants[batch.tenant])


def _options(batch: Batch, number: int, run: int = 0) -> RequestOptions:
    return RequestOptions(key=f"\0batch\0{batch.id}\0{number}" + (f"\0{run}" if run else ""))


@contextmanager
def _begun_again_if_lost() -> Iterator[None]:
    """A request whose record the journal has lost is begun again."""
    try:
        yield
    except QuireError as error:
        raise batch_waits() if error.code is ErrorCode.NOT_FOUND else error from None


def _as_line(prepared: PreparedRequest, batch: Batch) -> PreparedRequest:
    """Returns the request as one that goes behind all others. Its record is kept until the window of its batch has
    ended, whatever the request or its tenant says: a router that stalls, and begins the line again later, finds it.
    """
    if len(prepared.generations) > 1:
        raise invalid("prompt", "A request of a batch takes one prompt: give each a line of its own.")
    left = max(0.0, batch.expires_at - time())
    first = replace(
        prepared.first,
        background=True,
        priority=BEST_EFFORT,
        deadline=batch.expires_at + _SPARE_SECONDS,
        retention=left + _SPARE_RETENTION,
    )
    return replace(prepared, generations=(first,))


@contextmanager
def _line_span(batch: Batch, request_id: str) -> Iterator[None]:
    """The span of one line, the root of its trace, as a request's is."""
    if not is_recording(tracer):
        yield
        return
    attributes = {Attribute.BATCH_ID: batch.id, Attribute.REQUEST_ID: request_id}
    with tracer.start_as_current_span(Span.BATCH_LINE, Context(), attributes=attributes, record_exception=False):
        yield
