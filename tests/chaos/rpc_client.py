"""A client of the gRPC API: ``Generate`` or ``Chat``, then ``Resume`` at any router."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

from tests.chaos.client import Broken, Client, Pause, StreamClient
from tests.chaos.failure import UntypedError, of_rpc
from tests.chaos.workload import Request

# As any client that would rather connect again than wait for a former connection's back-off.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
BREAKS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""What the library says of a connection that broke."""
SILENCE = 10.0
"""Seconds of silence after which a message may say nothing: routers break one of 15, and a busy client reads late."""


class RpcClient(Client):
    """One stream a try."""

    _silence = 0.0  # before the last message

    async def _try(self, request: Request) -> bool:
        return await self._try_call(request)

    async def _try_call(self, request: Request) -> bool:
        address = self._chance.choice(self._stack.fronts).grpc_address
        had_all = self.answer.usage is not None  # it hung up before the last word over REST
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            try:
                return await self._read_call(self._call(InferenceStub(channel), request), request)
            except grpc.aio.AioRpcError as error:
                return self._judge(error, had_all)

    def _call(self, stub: InferenceStub, request: Request) -> Any:
        if self._id:
            metadata = _metadata(request.credentials)
            return stub.Resume(pb.ResumeRequest(request_id=self._id, after=self._last), metadata=metadata)
        metadata = _metadata(self._send(request))
        if request.is_chat:
            return stub.Chat(chat_request(request.body), metadata=metadata)
        return stub.Generate(generate_request(request.body), metadata=metadata)

    async def _read_call(self, call: Any, request: Request) -> bool:
        async for response in self._patiently(call):
            resumed = isinstance(response, pb.ResumeResponse)
            message = getattr(response, str(response.WhichOneof("response"))) if resumed else response
            if self._breaks_silence(message):
                continue
            if self.answer.usage is not None:
                self.answer.malformed.append(f"after the usage: {message}")
            self._take_message(message, request)
        if self.answer.usage is None:
            return self._give_up("the call ended well and without a usage")
        return True

    def _breaks_silence(self, message: Any) -> bool:
        """Whether it just shows, after a long silence, that the call is alive, and where the client is."""
        is_due = self._silence >= SILENCE and message.event_id == (self._last or message.event_id)
        return is_due and not has_content(message)

    def _take_message(self, message: Any, request: Request) -> None:
        if isinstance(message, pb.ChatResponse) is not request.is_chat:
            self.answer.malformed.append(f"an answer of another kind: {type(message).__name__}")
        self.answer.take_message(message)
        self.answer.name(id=message.request_id)
        if not has_content(message):
            self.answer.malformed.append(f"a message that says nothing: {message}")
        self.answer.reach(message.event_id, counts_tokens=not request.crosses)
        self._id, self._last = message.request_id, message.event_id
        if self.answer.usage is None and self._hangs_up():
            raise Pause

    async def _patiently(self, call: Any) -> AsyncIterator[Any]:
        try:
            while True:
                async with asyncio.timeout(self._manners.silence):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                self._silence = monotonic() - self._heard
                self._hear()
                yield message
        finally:
            call.cancel()

    def _judge(self, error: grpc.aio.AioRpcError, had_all: bool) -> bool:
        failure = of_rpc(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        is_complete = self.answer.usage is not None
        if failure is None and error.code() in BREAKS:
            if is_complete:
                return True  # a client that has the whole response does not need it
            raise Broken  # without our own words it is the connection that broke
        if failure is None or (is_complete and not had_all):
            raise UntypedError(f"{error.code()}: {error.details()}")
        return self._fail(failure)


class CrossingClient(StreamClient, RpcClient):
    """Begins over REST, and reads on over either API."""

    async def _try(self, request: Request) -> bool:
        by_rest = not self._id or self._chance.random() < 0.5
        return await (StreamClient._try(self, request) if by_rest else self._try_call(request))


def has_content(message: Any) -> bool:
    """Whether there is more in it than whose it is."""
    return any(field.name not in ("request_id", "event_id", "index") for field, _ in message.ListFields())


def generate_request(body: dict[str, Any]) -> pb.GenerateRequest:
    """The REST API's body as a message."""
    return pb.GenerateRequest(model=body["model"], text=body["prompt"], stop=body.get("stop"), sampling=_sampling(body))


def chat_request(body: dict[str, Any]) -> pb.ChatRequest:
    """As ``generate_request``."""
    message = pb.ChatRequest(sampling=_sampling(body), tools=[_tool(each) for each in body.get("tools", ())])
    choice = body.get("tool_choice", "")
    message.tool_choice = choice if isinstance(choice, str) else f"function:{choice['function']['name']}"
    return ParseDict({"model": body["model"], "messages": body["messages"]}, message)


def _tool(tool: dict[str, Any]) -> pb.Tool:
    function = tool["function"]
    parameters = json.dumps(function["parameters"]) if "parameters" in function else ""
    return pb.Tool(name=function["name"], parameters_json=parameters, strict=function.get("strict", False))


def _metadata(headers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in headers.items())


def _sampling(body: dict[str, Any]) -> Any:
    names = pb.GenerateRequest().sampling.DESCRIPTOR.fields_by_name
    sampling = ParseDict({name: value for name, value in body.items() if name in names}, pb.GenerateRequest().sampling)
    if "response_format" in body:
        sampling.structured.json_schema = json.dumps(body["response_format"]["json_schema"]["schema"])
    return sampling
