"""``InferenceService``: the public gRPC service, with the same requests as REST and one stream for each, whose messages
``DeltaMessages`` makes and ``MessageStream`` sends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeAlias

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServicer
from quire_proto.errors import QuireError, internal

from quire_router.api.output_parser import ReasoningCounter, create_parsers
from quire_router.api.pooled_requests import PooledAnswer, PreparedPooling, scores_of
from quire_router.api.prepared_request import RequestOptions
from quire_router.api.request_limits import WriteTimeout
from quire_router.api.response_opener import PENDING, Response
from quire_router.api.rpc import messages
from quire_router.api.rpc.context import Context, RpcCall, abort, client_may_leave
from quire_router.api.rpc.interceptors import authenticate
from quire_router.api.rpc.messages import add_parsed
from quire_router.api.schemas.openai import GenerationBody
from quire_router.api.schemas.pooling import PoolingBody
from quire_router.api.service import (
    ApiService,
    counting_rejections,
    ignored_parameters_header,
    new_request_id,
    target_header,
)
from quire_router.core.errors import stream_unread
from quire_router.core.generation import Delta, GenerationRequest

log = logging.getLogger(__name__)

Respond: TypeAlias = Callable[[GenerationRequest, Delta, str], Message]
"""Makes the message of a delta, with the id of its event."""


class DeltaMessages:
    """Makes the messages of one stream with ``respond``, each with the client's cursor after it. Does no I/O."""

    def __init__(self, answer: Response, respond: Respond) -> None:
        self._generation = answer.prepared.first
        self._cursor = answer.cursor
        self._respond = respond
        self._parsers = create_parsers(answer.prepared) if answer.prepared.is_parsed else None
        self._reasoning = ReasoningCounter(answer.prepared, self._parsers)

    def message(self, delta: Delta) -> Message | None:
        """Returns the message of a delta; None where it has nothing that the client lacks."""
        parsed = None if self._parsers is None else self._parsers[delta.index].parse(delta)
        self._reasoning.add(delta)
        if delta.usage is not None and self._cursor.usage:
            delta = replace(delta, usage=None)
        if delta.replayed:
            delta, parsed = Delta("", [], usage=delta.usage, index=delta.index), None
        if not _has_content(delta):
            return None
        self._cursor.advance(delta)
        self._cursor.usage |= delta.usage is not None
        if parsed is None:
            return self._respond(self._generation, delta, str(self._cursor))
        message = self._respond(self._generation, replace(delta, text=parsed.content), str(self._cursor))
        add_parsed(message, parsed, 0 if delta.usage is None else self._reasoning.total)
        return message

    def empty(self) -> Message:
        """Returns a message that only says which request it is of, and where the answer stands."""
        return self._respond(self._generation, Delta("", []), str(self._cursor))


def _has_content(delta: Delta) -> bool:
    """Whether a delta has anything: the last one may have only the usage, which the client may have already."""
    return bool(delta.token_ids or delta.text or delta.finish_reason or delta.usage or delta.prompt_logprobs)


KEEPALIVE: Final = 15.0


class MessageStream:
    """Writes the messages of one call and, whenever none was written for ``keepalive`` seconds (0: never), what
    ``empty`` makes: proxies count the silence of a stream, whatever pings pass on its connection. Messages never
    interleave. To be used as a context, by one task.
    """

    def __init__(self, context: Context, client_timeout: float, keepalive: float, empty: Callable[[], Message]) -> None:
        self._context = context
        self._write_timeout = WriteTimeout(client_timeout)
        self._keepalive = keepalive
        self._empty = empty
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._keepalive:
            self._task = self._loop.create_task(self._break_silence(), name="grpc keepalive")
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._write_timeout.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def write(self, message: Message) -> None:
        """Writes one message. Raises ``QuireError`` when the client does not read."""
        async with self._writing:
            await self._write(message)

    async def _write(self, message: Message) -> None:
        try:
            await self._write_timeout.wait(self._context.write(message))
        except TimeoutError:
            raise stream_unread(self._write_timeout.seconds) from None
        self._last_write = self._loop.time()

    async def _break_silence(self) -> None:
        """Ends when a message cannot be written; the next one of the answer then says why."""
        with suppress(QuireError), client_may_leave():
            while True:
                await asyncio.sleep(self._last_write + self._keepalive - self._loop.time())
                async with self._writing:
                    if self._loop.time() >= self._last_write + self._keepalive:
                        await self._write(self._empty())


SERVICE = "quire.v1.Inference"


class InferenceService(InferenceServicer):
    """Serves ``quire.v1.Inference``. A client may leave its stream unread for ``client_timeout`` seconds, and gets an
    empty message after ``keepalive`` seconds of silence (0: never).
    """

    def __init__(self, service: ApiService, client_timeout: float, keepalive: float = KEEPALIVE) -> None:
        self._service = service
        self._client_timeout = client_timeout
        self._keepalive = keepalive

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Continues a text or tokens."""
        async with _errors_as_status(context) as call:
            options = call.options(has_deadline=not request.background)
            read = partial(messages.completion_request, request)
            await self._answer("Generate", read, messages.generate_response, call, options, size=request.ByteSize())

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Answers a conversation."""
        async with _errors_as_status(context) as call:
            options = call.options(has_deadline=not request.background)
            read = partial(messages.chat_request, request)
            await self._answer("Chat", read, messages.chat_response, call, options, size=request.ByteSize())

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Resumes the response to an earlier request."""
        async with _errors_as_status(context) as call:
            options = call.options(has_deadline=True)
            with self._request_scope("Resume", call):
                with counting_rejections():
                    stored = await self._service.find(request.request_id, call.caller)
                    call.request_id = stored.first.request_id
                    await call.begin({})
                    answer = await self._service.resume(stored, request.after, call.caller, options)
                call.end(await self._send(answer, messages.resume_response, context))

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:  # noqa: N802
        """Returns the state of a request."""
        response = pb.GetRequestResponse()
        async with _errors_as_status(context) as call:
            with self._request_scope("GetRequest", call):
                response = messages.request_response(await self._service.status(request.request_id, call.caller))
        return response

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """Cancels a request of the same caller."""
        async with _errors_as_status(context) as call:
            with self._request_scope("Cancel", call):
                await self._service.cancel(request.request_id, call.caller)
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Returns the tokens of a text or of a conversation."""
        response = pb.TokenizeResponse()
        async with _errors_as_status(context) as call:
            with (
                self._request_scope("Tokenize", call),
                self._service.bodies.reserve(call.caller.tenant, request.ByteSize()),
            ):
                response, ignored = await self._service.tokenize(
                    partial(messages.tokenize_request, request),
                    call.caller,
                    lambda result: (messages.tokenize_response(result), result.ignored),
                    size=request.ByteSize(),
                )
                await call.begin(ignored_parameters_header(ignored))
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Returns the text of tokens."""
        response = pb.DetokenizeResponse()
        async with _errors_as_status(context) as call:
            with (
                self._request_scope("Detokenize", call),
                self._service.bodies.reserve(call.caller.tenant, request.ByteSize()),
            ):
                read = partial(messages.detokenize_request, request)
                text, _ = await self._service.detokenize(read, call.caller, size=request.ByteSize())
                response = pb.DetokenizeResponse(text=text)
        return response

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Returns the embeddings of texts or of tokens."""
        response = pb.EmbedResponse()
        async with _errors_as_status(context) as call:
            read = partial(messages.embed_request, request)
            async with self._pooled("Embed", read, call, size=request.ByteSize()) as (prepared, answer):
                response = messages.embed_response(prepared.first.request_id, answer)
        return response

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:  # noqa: N802
        """Returns the scores of documents for a query."""
        response = pb.ScoreResponse()
        async with _errors_as_status(context) as call:
            read = partial(messages.score_request, request)
            async with self._pooled("Score", read, call, size=request.ByteSize()) as (prepared, answer):
                scores = await scores_of(prepared, answer)
                response = messages.score_response(prepared.first.request_id, scores, answer)
        return response

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Returns the configured models that the caller may use."""
        caller = authenticate(self._service.keys, context.invocation_metadata())
        return pb.ListModelsResponse(models=map(messages.model, self._service.models(caller)))

    @asynccontextmanager
    async def _pooled(
        self, method: str, read: Callable[[], PoolingBody], call: RpcCall, *, size: int
    ) -> AsyncIterator[tuple[PreparedPooling, PooledAnswer]]:
        """Yields a request whose prompts are pooled, with what became of them."""
        options = call.options(has_deadline=True)
        with self._request_scope(method, call), self._service.bodies.reserve(call.caller.tenant, size) as body:
            prepared = await self._service.prepare_pooling(read, call.request_id, call.caller, options, size=size)
            body.reserve(prepared.num_bytes)
            await call.begin(target_header(prepared.first) | ignored_parameters_header(prepared.ignored))
            yield prepared, await self._service.pool(prepared)
            call.end(self._service.rate_limit_headers(call.caller))

    async def _answer(
        self,
        method: str,
        read: Callable[[], GenerationBody],
        respond: Respond,
        call: RpcCall,
        options: RequestOptions,
        *,
        size: int,
    ) -> None:
        # The library keeps the message as long as its call.
        with self._request_scope(method, call), self._service.bodies.reserve(call.caller.tenant, size):
            keyed_id = await self._service.keyed_id(options, call.caller)
            if call.caller.tenant:  # else whoever has the key would learn it from any error
                call.request_id = keyed_id or call.request_id
            prepared = await self._service.prepare(read, keyed_id or call.request_id, call.caller, options, size=size)
            pending: dict[str, str] = {}
            if prepared.first.background:
                stored, replayed = await self._service.responses.start_background(prepared)
                call.request_id = stored.first.request_id
                await call.begin(self._service.response_headers(prepared))
                await call.context.write(respond(stored.first, Delta("", []), ""))
            else:
                answer = await self._service.responses.open(prepared, call.caller)
                call.request_id = prepared.first.request_id
                await call.begin(self._service.response_headers(prepared))
                replayed = answer.replayed
                pending = await self._send(answer, respond, call.context)
            call.end(
                {
                    **self._service.response_headers(prepared, replayed=replayed),
                    **pending,
                    **self._service.rate_limit_headers(call.caller),
                }
            )

    @contextmanager
    def _request_scope(self, method: str, call: RpcCall) -> Iterator[None]:
        """Authenticates one call, and holds its slot and span until its end."""
        call.caller = authenticate(self._service.keys, call.context.invocation_metadata())
        with self._service.request_scope(f"{SERVICE}/{method}", call.request_id, call.headers):
            yield

    async def _send(self, answer: Response, respond: Respond, context: Context) -> dict[str, str]:
        """Sends the messages of an answer; returns metadata that belong behind them."""
        delta_messages = DeltaMessages(answer, respond)
        sending = MessageStream(context, self._client_timeout, self._keepalive, delta_messages.empty)
        async with aclosing(answer.deltas) as deltas, sending as stream:
            async for delta in deltas:
                message = delta_messages.message(delta)
                if message is not None:
                    await stream.write(message)
                if delta.usage is not None:
                    return {"quire-journal": PENDING} if delta.pending else {}
        raise internal()


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[RpcCall]:
    """Turns what is raised inside into the status of the call."""
    call = RpcCall(context, new_request_id())
    try:
        yield call
    except QuireError as error:
        await abort(context, error, call.request_id)
    except Exception:
        log.exception("request %s failed", call.request_id)
        await abort(context, internal(), call.request_id)
