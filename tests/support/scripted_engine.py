"""An engine over real gRPC that sends exactly the messages of a test."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from quire.v1 import engine_pb2, types_pb2
from quire.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server

STOP = types_pb2.FINISH_REASON_STOP
LENGTH = types_pb2.FINISH_REASON_LENGTH
ABORT = types_pb2.FINISH_REASON_ABORT
ERROR = types_pb2.FINISH_REASON_ERROR


def output(
    request_id: str,
    token_ids: Sequence[int] = (),
    position: int = 0,
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    error: types_pb2.Error | None = None,
    cached_tokens: int = 0,
    **more: Any,
) -> engine_pb2.SequenceOutput:
    """``more`` are other fields of the message, such as ``index``."""
    return engine_pb2.SequenceOutput(
        request_id=request_id,
        token_ids=token_ids,
        position=position,
        finish_reason=finish_reason,
        error=error,
        cached_tokens=cached_tokens,
        **more,
    )


def logprobs(*values: float) -> list[types_pb2.TokenLogprobs]:
    """Log-probabilities of so many tokens, without others beside them."""
    return [types_pb2.TokenLogprobs(logprob=value) for value in values]


class ScriptedEngine(EngineServicer):
    """Keeps batches until they are acknowledged and replays them, as an engine must, while ``resumes`` is true."""

    def __init__(
        self,
        *,
        generation: int = 1,
        models: Sequence[str] = ("m",),
        credentials: grpc.ServerCredentials | None = None,
        **description: Any,
    ) -> None:
        self.generation = generation
        self.resumes = True
        self.draining = False
        self.commands: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()
        self.opened: asyncio.Queue[engine_pb2.Open] = asyncio.Queue()
        self.acked = 0
        self.sequence = 0
        self.cached: list[engine_pb2.KvStored] = []
        self.inspection = engine_pb2.InspectResponse()
        self.inspections = 0
        self.loras: dict[str, bytes] = {}
        self.lora_paths: dict[str, str] = {}
        self.lora_gate = asyncio.Event()  # LoadLora waits for it
        self.lora_gate.set()
        self.unloaded: list[str] = []
        self.says_loras_after = 0.0  # seconds, after the answer
        self.lora_requests: list[engine_pb2.LoadLoraRequest] = []
        self.lora_refusal: grpc.StatusCode | None = None
        self._description = {"max_model_len": 4096, "vocab_size": 1000, **description}
        self._models = models
        self._credentials = credentials
        self._session_id = ""
        self._kept: list[engine_pb2.StepBatch] = []
        self._outgoing: asyncio.Queue[engine_pb2.StepBatch | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self.address = ""

    # The test's side

    async def start(self) -> str:
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
        add_EngineServicer_to_server(self, self._server)
        address = self.address or "127.0.0.1:0"
        if self._credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self.address

    async def stop(self) -> None:
        """Every connection breaks, and none can be made."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def freeze(self) -> None:
        """It still listens, but says nothing to whoever asks."""
        self._awake.clear()

    def thaw(self) -> None:
        """Ends ``freeze``."""
        self._awake.set()

    def restart_as(self, generation: int) -> None:
        """What a new process would be: another generation, nothing remembered. Follows or precedes a broken stream."""
        self.generation, self._session_id, self.sequence, self._kept = generation, "", 0, []

    def send(
        self,
        *outputs: engine_pb2.SequenceOutput,
        load: engine_pb2.Load | None = None,
        kv_events: Sequence[engine_pb2.KvEvent] = (),
        skip: int = 0,
        tokens: engine_pb2.TokenColumns | None = None,
        active_loras: Sequence[str] | None = None,
    ) -> None:
        """The next batch; ``skip`` loses so many before it. Without a stream it waits to be replayed."""
        self.sequence += 1 + skip
        batch = engine_pb2.StepBatch(
            sequence=self.sequence,
            step=self.sequence,
            outputs=outputs,
            load=load,
            kv_events=kv_events,
            draining=self.draining,
            tokens=tokens,
            active_loras=None if active_loras is None else engine_pb2.ActiveLoras(names=active_loras),
        )
        self._keep(batch)

    def set_loras(self, loras: dict[str, bytes]) -> None:
        """The next batch says that these are the adapters, with their digests."""
        self.loras = loras
        self.sequence += 1
        self._keep(engine_pb2.StepBatch(sequence=self.sequence, loras=self._loras()))

    def _set_loras_late(self, loras: dict[str, bytes]) -> None:
        asyncio.get_running_loop().call_later(self.says_loras_after, self.set_loras, loras)

    def _loras(self) -> engine_pb2.Loras:
        paths = self.lora_paths
        return engine_pb2.Loras(
            loras=[engine_pb2.Lora(name=name, digest=of, path=paths.get(name, "")) for name, of in self.loras.items()]
        )

    def _keep(self, batch: engine_pb2.StepBatch) -> None:
        self._kept.append(batch)
        self._outgoing.put_nowait(batch)

    def break_stream(self) -> None:
        """Ends the stream after what was sent."""
        self._outgoing.put_nowait(None)

    async def submit(self) -> engine_pb2.Submit:
        """The next Submit that arrives."""
        return (await self._command("submit")).submit

    async def cancel(self) -> engine_pb2.Cancel:
        """The next Cancel that arrives."""
        return (await self._command("cancel")).cancel

    async def ack(self) -> int:
        """The next Ack that arrives."""
        return (await self._command("ack")).ack.sequence

    async def updates(self) -> engine_pb2.SetUpdates:
        """The next SetUpdates that arrives."""
        return (await self._command("set_updates")).set_updates

    async def _command(self, kind: str) -> engine_pb2.SessionRequest:
        while True:
            command = await asyncio.wait_for(self.commands.get(), 10)
            if command.WhichOneof("command") == kind:
                return command

    # The router's side

    async def Inspect(  # noqa: N802 - the name in the proto file
        self, request: engine_pb2.InspectRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.InspectResponse:
        self.inspections += 1
        return self.inspection

    async def LoadLora(  # noqa: N802 - the name in the proto file
        self, request: engine_pb2.LoadLoraRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.LoadLoraResponse:
        if self.lora_refusal is not None:
            await context.abort(self.lora_refusal, "No such folder.", (("quire-param", "lora_path"),))
        self.lora_requests.append(request)
        await self.lora_gate.wait()
        self.lora_paths[request.lora_name] = request.lora_path
        digest = request.lora_path.encode()
        self._set_loras_late({**self.loras, request.lora_name: digest})
        return engine_pb2.LoadLoraResponse(lora=engine_pb2.Lora(name=request.lora_name, digest=digest))

    async def UnloadLora(  # noqa: N802 - the name in the proto file
        self, request: engine_pb2.UnloadLoraRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.UnloadLoraResponse:
        self.unloaded.append(request.lora_name)
        self._set_loras_late({name: digest for name, digest in self.loras.items() if name != request.lora_name})
        return engine_pb2.UnloadLoraResponse()

    async def Describe(  # noqa: N802 - the name in the proto file
        self, request: engine_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.DescribeResponse:
        await self._awake.wait()
        return engine_pb2.DescribeResponse(
            served_model_names=self._models, generation=self.generation, **self._description
        )

    async def Session(  # noqa: N802 - the name in the proto file
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        opening = (await anext(request_iterator)).open
        outgoing: asyncio.Queue[engine_pb2.StepBatch | None] = asyncio.Queue()
        self._outgoing = outgoing
        yield engine_pb2.SessionResponse(snapshot=self._snapshot(opening))
        self.opened.put_nowait(opening)
        reader = asyncio.create_task(self._listen(request_iterator))
        try:
            while (batch := await outgoing.get()) is not None:
                yield engine_pb2.SessionResponse(step_batch=batch)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the script says so")
        finally:
            reader.cancel()

    def _snapshot(self, opening: engine_pb2.Open) -> engine_pb2.Snapshot:
        resumed = self.resumes and opening.session_id == self._session_id and opening.last_sequence > 0
        if resumed:
            for batch in self._kept:
                if batch.sequence > opening.last_sequence:
                    self._outgoing.put_nowait(batch)
        else:
            self._session_id, self.sequence, self._kept = opening.session_id, 0, []
        return engine_pb2.Snapshot(
            generation=self.generation,
            sequence=opening.last_sequence if resumed else 0,
            resumed=resumed,
            cached=() if resumed else self.cached,
            draining=self.draining,
            loras=self._loras(),
        )

    async def _listen(self, requests: AsyncIterator[engine_pb2.SessionRequest]) -> None:
        async for command in requests:
            if command.WhichOneof("command") == "ack":
                self.acked = max(self.acked, command.ack.sequence)
                self._kept = [batch for batch in self._kept if batch.sequence > self.acked]
            self.commands.put_nowait(command)
