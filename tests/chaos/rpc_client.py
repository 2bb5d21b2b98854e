"""A client of the gRPC API: ``Generate`` or ``Chat``, then ``Resume`` at any router."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

from tests.chaos.client import Broken, Client
from tests.chaos.workload import Request

# As any client that would rather connect again than wait for a former connection's back-off.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class RpcClient(Client):
    """One stream a try."""

    async def _try(self, request: Request) -> bool:
        address = self._chance.choice(self._stack.routers).process.grpc_address
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            try:
                return await self._read(self._call(InferenceStub(channel), request))
            except grpc.aio.AioRpcError as error:
                return self._judge(error)

    def _call(self, stub: InferenceStub, request: Request) -> Any:
        if self._id:
            return stub.Resume(pb.ResumeRequest(request_id=self._id, after=self._last))
        metadata = (("idempotency-key", self._key),)
        if request.path.endswith("chat/completions"):
            return stub.Chat(chat_request(request.body), metadata=metadata)
        return stub.Generate(generate_request(request.body), metadata=metadata)

    async def _read(self, call: Any) -> bool:
        async for response in self._patiently(call):
            resumed = isinstance(response, pb.ResumeResponse)
            message = getattr(response, str(response.WhichOneof("response"))) if resumed else response
            self.answer.take_message(message)
            self._id, self._last = message.request_id, message.event_id
            if message.HasField("usage"):
                return True
            if self._hangs_up():
                raise Broken
        raise Broken

    async def _patiently(self, call: Any) -> AsyncIterator[Any]:
        try:
            while True:
                async with asyncio.timeout(self._manners.silence):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                self._hear()
                yield message
        finally:
            call.cancel()

    def _judge(self, error: grpc.aio.AioRpcError) -> bool:
        typed = any(name == "quire-error-bin" for name, _ in error.trailing_metadata() or ())
        if error.code() in PASSING or not typed:
            raise Broken  # without our own words it is the connection that broke
        return self._fail(f"{error.code()}: {error.details()}")


def generate_request(body: dict[str, Any]) -> pb.GenerateRequest:
    """The REST API's body as a message."""
    return pb.GenerateRequest(model=body["model"], text=body["prompt"], stop=body.get("stop"), sampling=_sampling(body))


def chat_request(body: dict[str, Any]) -> pb.ChatRequest:
    """As ``generate_request``."""
    return ParseDict({"model": body["model"], "messages": body["messages"]}, pb.ChatRequest(sampling=_sampling(body)))


def _sampling(body: dict[str, Any]) -> Any:
    names = pb.GenerateRequest().sampling.DESCRIPTOR.fields_by_name
    sampling = ParseDict({name: value for name, value in body.items() if name in names}, pb.GenerateRequest().sampling)
    if "response_format" in body:
        sampling.structured.json_schema = json.dumps(body["response_format"]["json_schema"]["schema"])
    return sampling
