"""The gRPC service ``quire.v1.Engine``: one stream per router, as ``engine.proto`` describes it."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import ServicerContext
from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc
from quire_proto.errors import ErrorCode, QuireError, invalid

from quire_engine.core.outputs import SchedulerStats
from quire_engine.server.messages import pool_to_proto
from quire_engine.server.session import Session as RouterSession  # the contract has a method Session
from quire_engine.server.session_manager import SessionManager
from quire_engine.server.sleep_control import SleepControl

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 10.0
INSPECT_TIMEOUT = 5.0
MAX_CELLS = 1024
_MAX_DETAILS = 512  # characters, each of at most 12 bytes when percent-encoded
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_Requests = AsyncIterator[pb.SessionRequest]
_Context = ServicerContext[pb.SessionRequest, pb.SessionResponse]


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Serves the methods of ``engine.proto``. ``stats`` are the scheduler's totals."""

    def __init__(
        self, sessions: SessionManager, description: pb.DescribeResponse, stats: SchedulerStats | None = None
    ) -> None:
        self._sessions = sessions
        self._description = description
        self._stats = stats or SchedulerStats()
        self._sleep = SleepControl(sessions, sessions.core)

    async def Describe(  # noqa: N802 - named by the contract
        self, request: pb.DescribeRequest, context: ServicerContext[pb.DescribeRequest, pb.DescribeResponse]
    ) -> pb.DescribeResponse:
        """Returns what this engine serves."""
        del request, context
        return self._description

    async def Session(  # noqa: N802 - named by the contract
        self, request_iterator: _Requests, context: _Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Runs one stream of a router's session until it ends."""
        try:
            session, number, snapshot = await self._sessions.open(await _first_open(request_iterator))
        except QuireError as error:
            await context.abort(grpc.StatusCode[error.status.grpc], error.message)
        reader = asyncio.create_task(self._read_commands(session, number, request_iterator))
        try:
            yield snapshot
            async for batch in session.stream(number):
                yield pb.SessionResponse(step_batch=batch)
            if reader.done() and reader.exception() is not None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "A command could not be read.")
            await context.abort(grpc.StatusCode.ABORTED, "The session was closed or taken over.")
        finally:
            reader.cancel()
            self._sessions.detach(session, number)

    async def Inspect(  # noqa: N802 - named by the contract
        self, request: pb.InspectRequest, context: ServicerContext[pb.InspectRequest, pb.InspectResponse]
    ) -> pb.InspectResponse:
        """Returns the state of each block between two steps, and totals since the start."""
        cells = min(request.max_cells or MAX_CELLS, MAX_CELLS)
        try:
            async with asyncio.timeout(INSPECT_TIMEOUT):
                device, host = await self._sessions.block_states()
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The engine does not answer between steps.")
        stats = self._stats
        return pb.InspectResponse(
            device=pool_to_proto(device, cells),
            host=pool_to_proto(host, cells),
            generated_tokens=stats.generated_tokens,
            prompt_tokens=stats.prefix_query_tokens,
            cached_prompt_tokens=stats.prefix_hit_tokens,
            preemptions=sum(list(stats.preemptions.values())),  # copied: the core's thread may add a reason
        )

    async def LoadLora(  # noqa: N802 - named by the contract
        self, request: pb.LoadLoraRequest, context: ServicerContext[pb.LoadLoraRequest, pb.LoadLoraResponse]
    ) -> pb.LoadLoraResponse:
        """Loads an adapter."""
        try:
            lora = await self._sessions.loras.load(request.lora_name, request.lora_path, request.digest)
        except QuireError as error:
            metadata = (("quire-param", error.param or ""),)
            await context.abort(grpc.StatusCode[error.status.grpc], _shortened(error.message), metadata)
        return pb.LoadLoraResponse(lora=pb.Lora(name=lora.lora_name, digest=lora.digest))

    async def UnloadLora(  # noqa: N802 - named by the contract
        self, request: pb.UnloadLoraRequest, context: ServicerContext[pb.UnloadLoraRequest, pb.UnloadLoraResponse]
    ) -> pb.UnloadLoraResponse:
        """Unloads an adapter and waits for its last request."""
        try:
            await self._sessions.loras.unload(request.lora_name)
        except QuireError as error:
            await context.abort(grpc.StatusCode[error.status.grpc], error.message)
        return pb.UnloadLoraResponse()

    async def Sleep(  # noqa: N802 - named by the contract
        self, request: pb.SleepRequest, context: ServicerContext[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        """Puts the engine to sleep."""
        try:
            await self._sleep.sleep(request.wait_seconds)
        except QuireError as error:
            await context.abort(grpc.StatusCode[error.status.grpc], error.message)
        return pb.SleepResponse()

    async def WakeUp(  # noqa: N802 - named by the contract
        self, request: pb.WakeUpRequest, context: ServicerContext[pb.WakeUpRequest, pb.WakeUpResponse]
    ) -> pb.WakeUpResponse:
        """Wakes the engine up."""
        del request
        try:
            await self._sleep.wake_up()
        except QuireError as error:
            await context.abort(grpc.StatusCode[error.status.grpc], error.message)
        return pb.WakeUpResponse()

    async def IsSleeping(  # noqa: N802 - named by the contract
        self, request: pb.IsSleepingRequest, context: ServicerContext[pb.IsSleepingRequest, pb.IsSleepingResponse]
    ) -> pb.IsSleepingResponse:
        """Returns whether the engine sleeps."""
        del request, context
        return pb.IsSleepingResponse(is_sleeping=self._sleep.is_sleeping)

    async def _read_commands(self, session: RouterSession, number: int, requests: _Requests) -> None:
        """Handles the router's commands. If the router half-closes, the stream to it continues. If a command cannot be
        read or handled, the stream ends, because later commands could depend on it.
        """
        try:
            async for message in requests:
                if not session.is_attached(number):
                    return
                self._handle_command(session, message)
        except grpc.aio.AioRpcError:
            return
        except Exception:
            if self._sessions.draining:
                return  # the server was stopped meanwhile
            log.exception("a command of session %s failed", session.session_id)
            session.break_stream(number)
            raise

    def _handle_command(self, session: RouterSession, message: pb.SessionRequest) -> None:
        match message.WhichOneof("command"):
            case "submit":
                self._sessions.submit(session, message.submit)
            case "cancel":
                self._sessions.cancel(session, message.cancel.request_id, tuple(message.cancel.indexes))
            case "ack":
                session.batches.acknowledge(message.ack.sequence)
            case "set_updates":
                self._sessions.set_updates(session, message.set_updates)
            case _:
                pass  # a second Open changes nothing, and a newer router may know commands that this engine does not


def _shortened(message: str) -> str:
    """Cuts the middle out of a long message, for example one with a file's name, because gRPC would refuse the
    trailers: percent-encoded they may have 8 KiB.
    """
    half = _MAX_DETAILS // 2
    return message if len(message) <= _MAX_DETAILS else f"{message[:half]} … {message[-half:]}"


async def _first_open(requests: _Requests) -> pb.Open:
    """Returns the ``Open`` that must come first. Raises ``QuireError`` INVALID if another message comes, DEADLINE if
    none comes.
    """
    try:
        async with asyncio.timeout(OPEN_TIMEOUT):
            first = await anext(aiter(requests))
    except StopAsyncIteration:
        raise invalid("open", "The stream ended before it was opened.") from None
    except DecodeError:
        raise invalid("open", "The first message could not be read.") from None
    except TimeoutError:
        raise QuireError(ErrorCode.DEADLINE, "No Open came in time.") from None
    if first.WhichOneof("command") != "open":
        raise invalid("open", "The first message of a session must be Open.")
    if not _SESSION_ID.fullmatch(first.open.session_id):
        raise invalid("session_id", "A session id is 1 to 64 letters, digits, dashes or underscores.")
    return first.open
