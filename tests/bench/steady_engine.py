"""An engine without a model: one token for each of its requests in every step, at a steady pace while it has any. For
benchmarks of what stands before engines. Speaks the engine's contract and nothing more. Grammars are compiled as an
engine does, and followed by nothing.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import grpc
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from quire_engine.structured_output.compiler import GrammarCompiler, ModelGrammars
from quire_proto.convert import sampling_from_proto
from quire_proto.errors import QuireError

MODEL = "quire-demo"
DEMO = Path(__file__).parents[2] / "demo" / "model"


class _Live:
    """The requests of one session, each with its position, its length and its handle."""

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}
        self._any = asyncio.Event()

    def add(self, submit: pb.Submit) -> None:
        self.places[submit.request_id] = [0, submit.sampling.max_tokens, submit.handle]
        self._any.set()

    async def wait(self) -> None:
        """Returns when there is one."""
        while not self.places:
            self._any.clear()
            await self._any.wait()


class SteadyEngine(EngineServicer):  # type: ignore[misc]
    """``pause`` seconds between steps; token ids are drawn below ``vocabulary``."""

    def __init__(self, model: str, pause: float, vocabulary: int) -> None:
        self._model = model
        self._pause = pause
        self._generation = random.getrandbits(63)
        self._grammars: GrammarCompiler | None = None
        self._tokens = [random.randrange(vocabulary // 2, vocabulary - 8) for _ in range(4096)]

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: object
    ) -> pb.DescribeResponse:
        return pb.DescribeResponse(
            served_model_names=[self._model],
            model_revision="steady",
            max_model_len=1 << 20,
            vocab_size=1024,
            block_size=16,
            blocks_total=1 << 20,
            max_num_seqs=4096,
            max_num_batched_tokens=1 << 16,
            generation=self._generation,
            prefix_caching=True,
            supported_tasks=[types_pb2.TASK_GENERATE, types_pb2.TASK_CLASSIFY],
            pooled_size=1,
        )

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        live = _Live()
        reading = asyncio.create_task(self._read(requests, live))
        load = pb.Load(blocks_total=1 << 20, blocks_free=1 << 20)
        yield pb.SessionResponse(snapshot=pb.Snapshot(generation=self._generation, load=load))
        try:
            for step in count(1):
                await live.wait()
                await asyncio.sleep(self._pause)
                yield pb.SessionResponse(step_batch=self._step(step, live.places, load))
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], live: _Live) -> None:
        async for request in requests:
            if request.WhichOneof("command") == "submit":
                live.add(request.submit)
                self._compile(request.submit)
            elif request.WhichOneof("command") == "cancel":
                live.places.pop(request.cancel.request_id, None)

    def _compile(self, submit: pb.Submit) -> None:
        structured = sampling_from_proto(submit.sampling).structured
        if structured is not None:
            self._grammars = self._grammars or GrammarCompiler(ModelGrammars(DEMO, 1024, [2]))
            with suppress(QuireError):
                self._grammars.submit(structured, submit.cache_salt)

    def _step(self, step: int, live: dict[str, list[int]], load: pb.Load) -> pb.StepBatch:
        batch = pb.StepBatch(sequence=step, step=step, load=load)
        for request_id, place in list(live.items()):
            position, most, handle = place
            place[0] += 1
            token_id = self._tokens[(position + len(live)) % 4096]
            if handle and 0 < position < most - 1:
                batch.tokens.handles.append(handle)
                batch.tokens.token_ids.append(token_id)
                batch.tokens.positions.append(position)
                continue
            output = batch.outputs.add(request_id=request_id, position=position, token_ids=[token_id])
            if place[0] == most:
                output.finish_reason = types_pb2.FINISH_REASON_LENGTH
                del live[request_id]
        return batch


async def serve(port: int, model: str, pause: float) -> None:
    server = grpc.aio.server()
    add_EngineServicer_to_server(SteadyEngine(model, pause, 1024), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--pause", type=float, default=0.025)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.model, options.pause))
