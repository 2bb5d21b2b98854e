"""Paths are short: how many files a decode step, a streamed token and a request pass, as in docs/architecture.md."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import torch
from quire.v1.engine_pb2 import TokenColumns
from quire_engine import LLM, SamplingParams
from quire_engine.core.engine_core import EngineCore
from quire_engine.kernels.bindings import library
from quire_engine.kernels.packed_linear import is_fast
from quire_proto.cli import read_settings
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.app import Router
from quire_router.config import Settings

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.ports import free_port
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.traced_calls import ROOT, Trace, common, table, table_in, traced_calls

ROUTER = ("router/quire_router", "proto/quire_proto")
TOKEN_TEXT = json.dumps(byte_level().decode([80])).encode() + b"}"
KEY = "a-key-of-enough-characters"
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PAGE = "architecture.md"
STEP_FILES = 20
REQUEST_FILES = 50  # each has a part of the request, of its text, its placement or its way to the engine
HAS_KERNELS = library() is not None and is_fast(torch.bfloat16)


@dataclass
class StreamingRouter:
    """A router, and the connection of one client to it, with one engine that is idle. In this process."""

    engine: ScriptedEngine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    handle: int = 0

    async def start_stream(self, prompt: str, path: str = CHAT) -> str:
        """Sends a chat and returns the id of its request once its first token has reached the client."""
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": 8}
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        submit = await self.engine.submit()
        self.handle = submit.handle
        self.engine.send(output(submit.request_id, [80], 0))
        await self._read_until(TOKEN_TEXT)
        return submit.request_id

    async def next_token(self, position: int) -> None:
        """Has the engine send one token of the last stream, and waits until the client has it."""
        self.engine.send(tokens=TokenColumns(handles=[self.handle], token_ids=[80], positions=[position]))
        await self._read_until(TOKEN_TEXT)

    async def end_stream(self, request_id: str, position: int) -> None:
        """Has the engine end the request, and reads its answer to the end."""
        self.engine.send(output(request_id, [], position, STOP))
        await self._read_until(b"0\r\n\r\n")

    async def _read_until(self, end: bytes) -> None:
        async with asyncio.timeout(20):
            await self.reader.readuntil(end)


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Stops the clock of the running loop: nothing that runs every second runs beside what is traced, however long that
    takes on a busy machine.
    """
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now
    try:
        yield
    finally:
        del loop.time


@asynccontextmanager
async def streaming_router() -> AsyncIterator[StreamingRouter]:
    """A whole router with an engine that the test speaks for, and a client's connection."""
    engine = ScriptedEngine(models=("m",), vocab_size=byte_level().get_vocab_size())
    address = await engine.start()
    port = free_port()
    flags = ["--http-port", str(port), "--grpc-port", str(free_port()), "--metrics-port", str(free_port())]
    flags += ["--model", "m=/nowhere", "--engine", address, "--api-key", KEY]
    tokenizers = {"m": ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))}
    router = Router(read_settings(Settings, flags), tokenizers)
    running = asyncio.create_task(router.run())
    await asyncio.wait_for(engine.opened.get(), 20)
    await asyncio.sleep(0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with stopped_clock():
            yield StreamingRouter(engine, reader, writer)
    finally:
        writer.close()
        router.stop()
        router.stop()
        await running
        await engine.stop()


async def trace_request() -> Trace:
    """From the bytes of a request to its first token, of three requests that have nothing in common."""
    traces = []
    async with streaming_router() as router:
        for prompt in ("warm", "the first", "another one", "something else"):
            with traced_calls(*ROUTER) as trace:
                request_id = await router.start_stream(prompt)
            traces.append(trace)
            await router.end_stream(request_id, 1)
    return common(traces[1:])


async def trace_token(path: str = CHAT) -> Trace:
    """From a batch of the engine to the bytes that the client has, of three tokens of one stream."""
    traces = []
    async with streaming_router() as router:
        request_id = await router.start_stream("a prompt", path)
        await router.next_token(1)
        for position in (2, 3, 4):
            with traced_calls(*ROUTER) as trace:
                await router.next_token(position)
            traces.append(trace)
        await router.end_stream(request_id, 5)
    return common(traces)


def trace_steps(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """What three decode steps of two greedy sequences have in common, without what the outputs are published to."""
    traces: list[Trace] = []
    step = EngineCore.step

    def traced_step(core: EngineCore) -> None:
        with traced_calls("engine/quire_engine") as trace:
            step(core)
        traces.append({file: names for file, names in trace.items() if not file.startswith("quire_engine/llm/")})

    monkeypatch.setattr(EngineCore, "step", traced_step)
    llm = LLM(str(ROOT / "demo/model"))
    llm.generate(["once upon a time", "hello there"], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    llm.close()
    return common(traces[4:7])


def check_path(trace: Trace, heading: str, files: int) -> None:
    """The trace is what the table under ``heading`` says, in whatever order, and has at most so many ``files``."""
    rows = table(trace)
    assert len(trace) <= files, f"{len(trace)} files:\n{rows}"
    assert functions_of(table_in(PAGE, heading)) == functions_of(rows), f"the table under {heading!r} is now\n{rows}"


def functions_of(rows: str) -> dict[str, set[str]]:
    """The functions of each file of a table."""
    cells = (row.strip("| ").split(" | ") for row in rows.splitlines()[2:])
    return {file: set(functions.split(", ")) for file, functions in cells}


async def test_a_streamed_token_passes_few_files():
    check_path(await trace_token(), "## One streamed token, file by file", 10)


async def test_a_token_of_a_message_passes_as_few_functions_as_one_of_a_chat():
    chat, message = await trace_token(), await trace_token(MESSAGES)
    assert chat.pop("quire_router/api/rest/openai_format.py") == ["ChunkEncoder.encode_token"]
    assert message.pop("quire_router/api/rest/messages_format.py") == ["MessageEncoder.encode_token"]
    assert message == chat


async def test_a_request_passes_few_files_before_its_first_token():
    check_path(await trace_request(), "## One request, file by file", REQUEST_FILES)


@pytest.mark.skipif(not HAS_KERNELS, reason="the kernels cannot be compiled here, or are slower than torch")
def test_a_decode_step_passes_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    check_path(trace_steps(monkeypatch), "## One decode step, file by file", STEP_FILES)
