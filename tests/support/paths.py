"""Traces a decode step, a request and a streamed token; ``python -m tests.support.paths`` writes the traces to
docs/reference/paths.md.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from quire.v1.engine_pb2 import TokenColumns
from quire_engine import LLM, SamplingParams
from quire_engine.core.engine_core import EngineCore
from quire_proto.cli import read_settings
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.app import Router
from quire_router.config import Settings

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.ports import free_port
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.traced_calls import ROOT, Trace, common, table, traced_calls

PAGE = ROOT / "docs" / "reference" / "paths.md"
DECODE_STEP, REQUEST, STREAMED_TOKEN = "One decode step", "One request", "One streamed token"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"

_ROUTER = ("router/quire_router", "proto/quire_proto")
_TOKEN_TEXT = json.dumps(byte_level().decode([80])).encode() + b"}"
_KEY = "a-key-of-enough-characters"
_HEAD = """# Files and functions on the hot paths

This page lists the functions that a decode step, a request and a streamed token pass through, file by file.
Read it with [the architecture](../architecture.md), which explains the parts.

`.venv/bin/python -m tests.support.paths` writes this page from traces, omitting third-party code.
`tests/unit/house/test_paths.py` compares the page with new traces and limits the number of files on each path.
"""
_TEXTS = {
    DECODE_STEP: """`EngineCore.step` on the CPU, from scheduling until `publish` gets the outputs.
The batch has two greedy sequences. Neither needs a new block, a grammar, a swap or log-probabilities.
On a GPU, steps overlap, and `worker/cuda_graph.py` and `attention/flashinfer.py` replace `worker/cpu_graph.py` and
`attention/cpu.py`. `scatter_pending`, `HostCopy` and `StepEvent` are called too.

The main calls, in their order:

1. `Scheduler.schedule` makes a `SchedulerOutput`. `BatchScheduler` fills its columns.
2. `LaunchedStep.get_output` calls `TorchExecutor.execute_model`, which calls `Worker.execute`.
3. `RequestStates.update` applies the step's changes to the worker's rows.
4. `prepare_inputs` gathers the rows into an `InputBatch`.
5. `AsyncStep.launch` calls `ModelRunner.forward`, here a `CpuGraph.replay`.
6. `AsyncStep.sample_tokens` computes logits and samples.
7. `AsyncStep.get_output` writes the sampled tokens into the worker's rows.
8. `Scheduler.update_from_output` appends them to the sequences and returns the outputs to publish.""",
    REQUEST: """`POST /v1/chat/completions` with `stream` and an API key, from the request's bytes to its first token.
The router has one idle engine and no Redis.""",
    STREAMED_TOKEN: """From the engine's `StepBatch` to the bytes in the client's transport.
The request has one choice and no stop string, and the journal is in memory.
This path has no task switch and no generator.

If a client reads too slowly, and for a choice's first and last output, `OutputStream` queues the output for the task
that runs the request. That task sends everything in the queue as one event. Log-probabilities, stop strings and
outputs of several tokens make an `Output` and a `Delta` (`OutputStream.push`, `RequestState.try_direct_write`).
Both paths write the same bytes.""",
}


@dataclass
class StreamingRouter:
    """A router in this process with one idle engine, and one client's connection to it."""

    engine: ScriptedEngine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    handle: int = 0

    async def start_stream(self, prompt: str, path: str = CHAT) -> str:
        """Sends a chat and returns the id of its request once its first token has reached the client."""
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 8}
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {_KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        submit = await self.engine.submit()
        self.handle = submit.handle
        self.engine.send(output(submit.request_id, [80], 0))
        await self._read_until(_TOKEN_TEXT)
        return submit.request_id

    async def next_token(self, position: int) -> None:
        """Sends one token of the last stream from the engine, and waits until the client has it."""
        self.engine.send(tokens=TokenColumns(handles=[self.handle], token_ids=[80], positions=[position]))
        await self._read_until(_TOKEN_TEXT)

    async def end_stream(self, request_id: str, position: int) -> None:
        """Ends the request at the engine, and reads the rest of its answer."""
        self.engine.send(output(request_id, [], position, STOP))
        await self._read_until(b"0\r\n\r\n")

    async def _read_until(self, end: bytes) -> None:
        async with asyncio.timeout(20):
            await self.reader.readuntil(end)


@asynccontextmanager
async def streaming_router() -> AsyncIterator[StreamingRouter]:
    """Runs a whole router with an engine that the caller speaks for, and opens a client's connection."""
    engine = ScriptedEngine(models=("m",), vocab_size=byte_level().get_vocab_size())
    address = await engine.start()
    port = free_port()
    flags = ["--http-port", str(port), "--grpc-port", str(free_port()), "--metrics-port", str(free_port())]
    flags += ["--model", "m=/nowhere", "--engine", address, "--api-key", _KEY]
    tokenizers = {"m": ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
    router = Router(read_settings(Settings, flags), tokenizers)
    running = asyncio.create_task(router.run())
    await asyncio.wait_for(engine.opened.get(), 20)
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with _stopped_clock():
            yield StreamingRouter(engine, reader, writer)
    finally:
        writer.close()
        router.stop()
        router.stop()
        await running
        await engine.stop()


@contextmanager
def _stopped_clock() -> Iterator[None]:
    """Stops the clock of the running loop, so that no timer runs during a trace, however slow the machine is."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now
    try:
        yield
    finally:
        del loop.time


async def trace_request() -> Trace:
    """Returns the path from a request's bytes to its first token: what three unrelated requests have in common."""
    traces = []
    async with streaming_router() as router:
        for prompt in ("warm", "the first", "another one", "something else"):
            with traced_calls(*_ROUTER) as trace:
                request_id = await router.start_stream(prompt)
            traces.append(trace)
            await router.end_stream(request_id, 1)
    return common(traces[1:])


async def trace_token(path: str = CHAT) -> Trace:
    """Returns the path from an engine's batch to the client: what three tokens of one stream have in common."""
    traces = []
    async with streaming_router() as router:
        request_id = await router.start_stream("a prompt", path)
        await router.next_token(1)
        for position in (2, 3, 4):
            with traced_calls(*_ROUTER) as trace:
                await router.next_token(position)
            traces.append(trace)
        await router.end_stream(request_id, 5)
    return common(traces)


def trace_steps() -> Trace:
    """Returns what three decode steps of two greedy sequences have in common, without the receiver of the outputs."""
    traces: list[Trace] = []
    step = EngineCore.step

    def traced_step(core: EngineCore) -> None:
        with traced_calls("engine/quire_engine") as trace:
            step(core)
        traces.append({file: names for file, names in trace.items() if not file.startswith("quire_engine/llm/")})

    with patch.object(EngineCore, "step", traced_step):
        llm = LLM(str(ROOT / "demo/model"))
        greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        llm.generate(["once upon a time", "hello there"], greedy)
        llm.close()
    return common(traces[4:7])


def page(traces: Mapping[str, Trace]) -> str:
    """Returns the page as Markdown, with one section for each of ``traces``, which are by heading."""
    sections = (f"## {heading}\n\n{_TEXTS[heading]}\n\n{table(trace)}\n" for heading, trace in traces.items())
    return "\n".join([_HEAD, *sections])


async def trace_all() -> dict[str, Trace]:
    """Returns the three traces by the headings of the page, in its order."""
    return {DECODE_STEP: trace_steps(), REQUEST: await trace_request(), STREAMED_TOKEN: await trace_token()}


if __name__ == "__main__":
    PAGE.write_text(page(asyncio.run(trace_all())), encoding="utf-8")
