"""The public gRPC service: the same exchange as over REST, one stream a request."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from google.protobuf.message import Message
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServicer
from quire_proto.errors import ErrorCode, QuireError, internal

from quire_router.api.output_parser import create_parsers
from quire_router.api.request_limits import WriteTimeout
from quire_router.api.request_options import NO_OPTIONS, RequestOptions
from quire_router.api.responses import Response
from quire_router.api.rpc import messages
from quire_router.api.rpc import messages as tools
from quire_router.api.rpc.context import Context, RpcCall, abort
from quire_router.api.rpc.interceptors import authenticate
from quire_router.api.rpc.messages import write_said
from quire_router.api.schemas.openai import GenerationBody
from quire_router.api.service import ApiService, counting_rejections, ignored_parameters_header, new_request_id
from quire_router.core.generation import Delta, GenerationRequest

log = logging.getLogger(__name__)

# The messages of one stream, each with the mark of where its reader then stands. Does no I/O.


Respond: TypeAlias = Callable[[GenerationRequest, Delta, str], Message]
"""Writes the message of a piece, with the id of its event."""


class DeltaMessages:
    """Makes messages of the answer's pieces. ``respond`` writes one."""

    def __init__(self, answer: Response, respond: Respond) -> None:
        self._generation = answer.prepared.first
        self._mark = answer.cursor
        self._respond = respond
        self._readers = create_parsers(answer.prepared) if answer.prepared.is_parsed else None

    def piece(self, delta: Delta) -> Message | None:
        """The message of a piece; None where it says nothing that the reader has not had."""
        said = None if self._readers is None else self._readers[delta.index].parse(delta)
        if delta.usage is not None and self._mark.usage:
            delta = replace(delta, usage=None)
        if delta.replayed:
            delta, said = Delta("", [], usage=delta.usage, index=delta.index), None
        if not _says_anything(delta):
            return None
        self._mark.advance(delta)
        self._mark.usage |= delta.usage is not None
        if said is None:
            return self._respond(self._generation, delta, str(self._mark))
        message = self._respond(self._generation, replace(delta, text=said.content), str(self._mark))
        write_said(message, said)
        return message


def _says_anything(delta: Delta) -> bool:
    """Whether a piece adds something: that with the usage may be empty but for it, and its reader may have that."""
    return bool(delta.token_ids or delta.text or delta.finish_reason or delta.usage or delta.prompt_logprobs)


SERVICE = "quire.v1.Inference"


class InferenceService(InferenceServicer):
    """Serves ``quire.v1.Inference``. ``patience`` is how many seconds a client may leave its stream unread."""

    def __init__(self, frontend: ApiService, patience: float) -> None:
        self._frontend = frontend
        self._patience = patience

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Continues a text or tokens."""
        async with _errors_as_status(context) as call:
            terms = call.terms(has_deadline=not request.background)
            read = partial(messages.completion_request, request)
            await self._answer("Generate", read, messages.generate_response, call, terms, size=request.ByteSize())

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Answers a conversation."""
        async with _errors_as_status(context) as call:
            terms = call.terms(has_deadline=not request.background)
            read = partial(messages.chat_request, request)
            await self._answer("Chat", read, messages.chat_response, call, terms, size=request.ByteSize())

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Goes on with the answer to an earlier request."""
        async with _errors_as_status(context) as call:
            terms = call.terms(has_deadline=True)
            with self._request_scope("Resume", call):
                with counting_rejections():
                    earlier = await self._frontend.find(request.request_id, call.caller)
                    call.request_id = earlier.first.request_id
                    await call.begin({})
                    answer = await self._frontend.resume(earlier, request.after, call.caller, terms)
                await self._send(answer, messages.resume_response, context)
                call.end({})

    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:  # noqa: N802
        """How far a request has come."""
        response = pb.GetRequestResponse()
        async with _errors_as_status(context) as call:
            with self._request_scope("GetRequest", call):
                response = messages.request_response(await self._frontend.status(request.request_id, call.caller))
        return response

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """Ends what has not ended of a request of the same caller."""
        async with _errors_as_status(context) as call:
            with self._request_scope("Cancel", call):
                await self._frontend.cancel(request.request_id, call.caller)
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """The tokens of a text or of a conversation."""
        response = pb.TokenizeResponse()
        async with _errors_as_status(context) as call:
            with (
                self._request_scope("Tokenize", call),
                self._frontend.bodies.reserve(call.caller.tenant, request.ByteSize()),
            ):
                response, ignored = await self._frontend.tokenize(
                    partial(tools.tokenize_request, request),
                    call.caller,
                    lambda told: (tools.tokenize_response(told), told.ignored),
                    size=request.ByteSize(),
                )
                await call.begin(ignored_parameters_header(ignored))
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """The text of tokens."""
        response = pb.DetokenizeResponse()
        async with _errors_as_status(context) as call:
            with (
                self._request_scope("Detokenize", call),
                self._frontend.bodies.reserve(call.caller.tenant, request.ByteSize()),
            ):
                read = partial(tools.detokenize_request, request)
                text, _ = await self._frontend.detokenize(read, call.caller, size=request.ByteSize())
                response = pb.DetokenizeResponse(text=text)
        return response

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """The configured models that the caller may use."""
        caller = authenticate(self._frontend.keys, context.invocation_metadata())
        return pb.ListModelsResponse(models=map(messages.model, self._frontend.models(caller)))

    async def _answer(
        self,
        method: str,
        read: Callable[[], GenerationBody],
        respond: Respond,
        call: RpcCall,
        terms: RequestOptions,
        *,
        size: int,
    ) -> None:
        # The library keeps the message as long as its call.
        with self._request_scope(method, call, terms), self._frontend.bodies.reserve(call.caller.tenant, size):
            admitted = await self._frontend.prepare(read, call.request_id, call.caller, terms, size=size)
            await call.begin(self._frontend.response_headers(admitted))
            if admitted.first.background:
                earlier, replayed = await self._frontend.start(admitted)
                await call.context.write(respond(earlier.first, Delta("", []), ""))
            else:
                answer = await self._frontend.answer(admitted, call.caller)
                replayed = answer.replayed
                await self._send(answer, respond, call.context)
            call.end(
                {
                    **self._frontend.response_headers(admitted, replayed=replayed),
                    **self._frontend.rate_limit_headers(call.caller),
                }
            )

    @contextmanager
    def _request_scope(self, method: str, call: RpcCall, terms: RequestOptions = NO_OPTIONS) -> Iterator[None]:
        """One call from the door to its end."""
        call.caller = authenticate(self._frontend.keys, call.context.invocation_metadata())
        call.request_id = terms.request_id(call.caller) or call.request_id
        with self._frontend.request_scope(f"{SERVICE}/{method}", call.request_id, call.headers):
            yield

    async def _send(self, answer: Response, respond: Respond, context: Context) -> None:
        pieces = DeltaMessages(answer, respond)
        async with aclosing(answer.deltas) as deltas:
            with closing(WriteTimeout(self._patience)) as patience:
                async for delta in deltas:
                    message = pieces.piece(delta)
                    if message is not None:
                        await _write(context, message, patience)
                    if delta.usage is not None:
                        return
        raise internal()


async def _write(context: Context, response: Message, patience: WriteTimeout) -> None:
    try:
        await patience.wait(context.write(response))
    except TimeoutError:
        message = f"The client left its stream unread for {patience.seconds:g} seconds."
        raise QuireError(ErrorCode.DEADLINE, message) from None


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[RpcCall]:
    """Turns whatever is raised inside into the status of the call."""
    call = RpcCall(context, new_request_id())
    try:
        yield call
    except QuireError as error:
        await abort(context, error, call.request_id)
    except Exception:
        log.exception("request %s failed", call.request_id)
        await abort(context, internal(), call.request_id)
