"""The public gRPC service: the same exchange as over REST, one stream a request."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing
from typing import TypeAlias, TypeVar

from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceServicer
from quire_proto.errors import ErrorCode, QuireError, internal

from quire_router.api.frontend import Admitted, Frontend, new_request_id
from quire_router.api.identity import Caller
from quire_router.api.patience import Patience
from quire_router.api.rpc import messages
from quire_router.api.rpc.authentication import caller_of
from quire_router.api.rpc.errors import REQUEST_ID, abort
from quire_router.api.rpc.types import Context
from quire_router.api.schemas import GenerationRequest
from quire_router.generation import Delta, Generation

log = logging.getLogger(__name__)
SERVICE = "quire.v1.Inference"
Response = TypeVar("Response", pb.GenerateResponse, pb.ChatResponse)
Respond: TypeAlias = Callable[[Generation, Delta], Response]


class Inference(InferenceServicer):
    """Serves ``quire.v1.Inference``. ``patience`` is how many seconds a client may leave its stream unread."""

    def __init__(self, frontend: Frontend, patience: float) -> None:
        self._frontend = frontend
        self._patience = patience

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Continues a text or tokens."""
        await self._stream(
            "Generate", lambda: messages.completion_request(request), messages.generate_response, context
        )

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Answers a conversation."""
        await self._stream("Chat", lambda: messages.chat_request(request), messages.chat_response, context)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """Ends a running request of the same caller."""
        request_id = new_request_id()
        async with _told(context, request_id):
            self._frontend.cancel(request.request_id, self._caller(context))
        return pb.CancelResponse()

    async def ListModels(  # noqa: N802
        self, _request: pb.ListModelsRequest, _context: Context
    ) -> pb.ListModelsResponse:
        """The configured models."""
        return pb.ListModelsResponse(models=map(messages.model, self._frontend.models()))

    async def _stream(
        self,
        method: str,
        read: Callable[[], GenerationRequest],
        respond: Respond[Response],
        context: Context,
    ) -> None:
        request_id = new_request_id()
        name, headers = f"{SERVICE}/{method}", _headers(context)
        async with _told(context, request_id):
            caller = self._caller(context)
            with self._frontend.exchange(name, request_id, caller, headers):
                admitted = await self._frontend.admit(read, request_id, caller)
                await context.send_initial_metadata(((REQUEST_ID, request_id),))
                await self._send(admitted, respond, context)
                context.set_trailing_metadata(((REQUEST_ID, request_id),))

    async def _send(self, admitted: Admitted, respond: Respond[Response], context: Context) -> None:
        async with aclosing(self._frontend.run(admitted)) as deltas:
            with closing(Patience(self._patience)) as patience:
                async for delta in deltas:
                    await _write(context, respond(admitted.first, delta), patience)
                    if delta.usage is not None:
                        return
        raise internal()

    def _caller(self, context: Context) -> Caller:
        return caller_of(self._frontend.keys, context.invocation_metadata())


async def _write(context: Context, response: Response, patience: Patience) -> None:
    try:
        await patience.wait(context.write(response))
    except TimeoutError:
        message = f"The client left its stream unread for {patience.seconds:g} seconds."
        raise QuireError(ErrorCode.DEADLINE, message) from None


@asynccontextmanager
async def _told(context: Context, request_id: str) -> AsyncIterator[None]:
    """Turns whatever is raised inside into the status of the call."""
    try:
        yield
    except QuireError as error:
        await abort(context, error, request_id)
    except Exception:
        log.exception("request %s failed", request_id)
        await abort(context, internal(), request_id)


def _headers(context: Context) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
