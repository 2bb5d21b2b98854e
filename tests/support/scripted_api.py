"""Both APIs on real sockets, in front of a runner that answers from a script instead of engines."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import openai
from quire_proto.errors import QuireError
from quire_proto.pooling import Task
from quire_proto.sampling import FinishReason, StopToken, TokenLogprobs
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.admission.tenants_file import TenantsFile
from quire_router.api.auth import Authenticator, TokenVerifier
from quire_router.api.conversations import Conversations
from quire_router.api.prepared_request import Runner
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.api.rest.batch_endpoints import BatchApi
from quire_router.api.rest.endpoints import FleetEndpoint
from quire_router.api.rest.http_server import ConnectionLimits, HttpServer, listen
from quire_router.api.rest.page import Page
from quire_router.api.rest.rest_app import RestApp, allow_origins, build_admin, build_api
from quire_router.api.rest.sse import KeepAlive
from quire_router.api.rpc.grpc_server import CallLimits, RpcServer
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.core.generation import (
    NO_USAGE,
    Delta,
    GenerationRequest,
    LoRA,
    OwnedDeltaStream,
    PromptGroup,
    StreamCursor,
    Usage,
)
from quire_router.engines.lora_updates import LoRAUpdater
from quire_router.engines.settings import ServedLoRA
from quire_router.journal.base import RecordedDelta, RequestRecord, encode_error

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.official_documents import problems_of_answer
from tests.support.tool_models import tokenizer_with

MODEL = "tiny"
MAX_MODEL_LEN = 64
VOCAB_SIZE = byte_level().get_vocab_size()
TOKENIZER = ModelTokenizer(byte_level(), None)
_NO_TLS = ssl.create_default_context()  # one for all clients, each of which would read the system's certificates
Script = Sequence[str | Delta | FinishReason | Exception | asyncio.Event]
ANSWER: Script = ("Hel", "lo ", "", "wörld", FinishReason.STOP)


@dataclass(frozen=True)
class Limits:
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    supported_tasks: tuple[Task, ...] | None = None
    pooled_size: int = 0
    matryoshka_dimensions: tuple[int, ...] = ()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ScriptedPool:
    """A fleet whose size and limits the test sets."""

    engines: int = 1
    model_limits: Limits | None = field(default_factory=Limits)
    served_loras: dict[str, ServedLoRA] = field(default_factory=dict)
    names_of_one: bool = False
    """Whether all models are names of one."""
    without_engine: set[str] = field(default_factory=set)
    all_heard: asyncio.Event = field(default_factory=_set_event)
    """Whether all engines have said what they have."""
    limits_of: dict[str, Limits] = field(default_factory=dict)
    """Those of models that have others than ``model_limits``."""

    def limits(self, model: str) -> Limits | None:
        return self.limits_of.get(model, self.model_limits)

    def ready(self, model: str, lora: LoRA | None = None) -> int:
        return 0 if model in self.without_engine else self.engines

    def num_sleeping(self, model: str) -> int:
        return 0

    def are_names_of_one(self, models: Collection[str]) -> bool:
        return self.names_of_one and bool(models)

    def loras(self) -> dict[str, ServedLoRA]:
        return self.served_loras

    def knows_loras(self) -> bool:
        return self.all_heard.is_set()

    async def wait_for_lora(self, name: str, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.all_heard.wait()


@dataclass
class ScriptedRun:
    """What the scripted runner keeps of one request. It is ``leased`` while a stream produces its deltas."""

    generation: GenerationRequest
    deltas: list[Delta] = field(default_factory=list)
    error: QuireError | None = None
    leased: bool = True
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def ended(self) -> bool:
        return self.error is not None or any(delta.usage is not None for delta in self.deltas)

    @property
    def reason(self) -> FinishReason | None:
        reasons = [delta.finish_reason for delta in self.deltas if delta.finish_reason]
        if not self.ended or self.error is not None:
            return FinishReason.ERROR if self.error is not None else None
        return FinishReason.ABORT if FinishReason.ABORT in reasons else reasons[-1]

    def record(self) -> RequestRecord:
        recorded = [
            RecordedDelta(
                each.index,
                each.token_ids,
                each.finish_reason,
                each.logprobs,
                each.prompt_logprobs,
                each.score,
                each.stop_token,
            )
            for each in self.deltas
        ]
        error = "" if self.error is None else encode_error(self.error)
        usages = [delta.usage for delta in self.deltas if delta.usage is not None]
        usage = usages[0] if usages else NO_USAGE
        return RequestRecord(self.generation, "router", 1, recorded, self.reason, error, usage, self.leased)

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@dataclass
class ScriptedRunner:
    """Answers every request by ``script``: texts and deltas go to every choice, a finish reason ends them all, an error
    is raised, an event is waited for. Log-probabilities are those of ``logprobs_of``. ``stop_token_id`` is the token
    that a choice stops with. ``runs`` keeps all requests.
    """

    script: Script = ANSWER
    returns_prompt_logprobs: bool = True
    stop_token_id: int | None = None
    generations: list[GenerationRequest] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    aborts: dict[str, asyncio.Event] = field(default_factory=dict)
    runs: dict[str, ScriptedRun] = field(default_factory=dict)
    background: set[asyncio.Task[None]] = field(default_factory=set)

    def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        return self._run(generation)

    async def run_once(
        self, generation: GenerationRequest, siblings: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        await asyncio.sleep(0)
        if generation.request_id in self.runs:
            return None
        run = self.runs[generation.request_id] = ScriptedRun(generation)

        async def release() -> None:
            run.leased = False

        return OwnedDeltaStream(self._run(generation), release)

    async def start(self, generation: GenerationRequest) -> bool:
        answer = await self.run_once(generation)
        if answer is not None:
            task = asyncio.create_task(self._exhaust(answer))
            self.background.add(task)
            task.add_done_callback(self.background.discard)
        return answer is not None

    async def record(self, request_id: str) -> RequestRecord | None:
        await asyncio.sleep(0)
        run = self.runs.get(request_id)
        return None if run is None else run.record()

    async def statuses(self, request_ids: Sequence[str], *, confirm_missing: bool = True) -> list[RequestRecord | None]:
        return [await self.record(request_id) for request_id in request_ids]

    def resume(self, record: RequestRecord, mark: StreamCursor, deadline: float | None = None) -> AsyncGenerator[Delta]:
        self.deadlines.append(deadline)
        return self._resume(self.runs[record.generation.request_id], mark)

    async def delete(self, request_id: str) -> bool:
        running = await self.cancel(request_id)
        if not running:
            self.runs.pop(request_id, None)
        return True

    async def cancel(self, request_id: str) -> bool:
        await asyncio.sleep(0)
        abort = self.aborts.get(request_id)
        if abort is not None:
            abort.set()
        return abort is not None

    async def _exhaust(self, answer: AsyncGenerator[Delta]) -> None:
        async for _ in answer:
            pass

    async def _run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        self.generations.append(generation)
        run = self.runs.setdefault(generation.request_id, ScriptedRun(generation))
        async for delta in self._make(run):
            yield delta

    async def _make(self, run: ScriptedRun) -> AsyncGenerator[Delta]:
        """The deltas of one request from the first on; those that were produced before are the same again."""
        generation, made = run.generation, 0
        self.aborts[generation.request_id] = asyncio.Event()
        run.leased = True
        try:
            async for delta in self._play(generation):
                made += 1
                if made > len(run.deltas):
                    run.deltas.append(delta)
                await run.notify()
                yield delta
        except QuireError as error:
            run.error = error
            raise
        finally:
            del self.aborts[generation.request_id]
            run.leased = False
            if not run.ended:
                self.abandoned.set()
            await run.notify()

    async def _resume(self, run: ScriptedRun, mark: StreamCursor) -> AsyncGenerator[Delta]:
        ends = [0] * run.generation.params.n
        async with aclosing(self._follow(run) if run.leased or run.ended else self._make(run)) as deltas:
            async for delta in deltas:
                ends[delta.index] += len(delta.token_ids)
                yield as_replayed(delta, ends[delta.index], mark)

    async def _follow(self, run: ScriptedRun) -> AsyncGenerator[Delta]:
        given = 0
        while True:
            for delta in run.deltas[given:]:
                given += 1
                yield delta
            if run.error is not None:
                raise run.error
            if run.ended:
                return
            async with run.changed:
                if len(run.deltas) == given and not run.ended:
                    await run.changed.wait()

    async def _play(self, generation: GenerationRequest) -> AsyncIterator[Delta]:
        self.started.set()
        count, tokens = 0, 0
        for step in self.script:
            if isinstance(step, asyncio.Event):
                if await self._aborted_before(step, generation.request_id):
                    for delta in ends(generation, FinishReason.ABORT, tokens):
                        yield delta
                    return
            elif isinstance(step, Exception):
                raise step
            elif isinstance(step, FinishReason):
                for delta in ends(generation, step, tokens, self.stop_token_id):
                    yield delta if count else with_prompt_logprobs(generation, delta, self.returns_prompt_logprobs)
            else:
                step_delta = Delta(step, [count + 1]) if isinstance(step, str) else step
                for index in range(generation.params.n):
                    delta = delta_of(generation, index, step_delta)
                    yield delta if count else with_prompt_logprobs(generation, delta, self.returns_prompt_logprobs)
                count += 1
                tokens += len(step_delta.token_ids)

    async def _aborted_before(self, event: asyncio.Event, request_id: str) -> bool:
        abort = self.aborts[request_id]
        waits = [asyncio.ensure_future(each.wait()) for each in (event, abort)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return abort.is_set()


def as_replayed(delta: Delta, end: int, cursor: StreamCursor) -> Delta:
    """The delta for a client that resumes at ``cursor``; ``end`` is the number of its choice's tokens up to its end."""
    had = cursor.started(delta.index) and end <= cursor.position(delta.index)
    had = had and (delta.finish_reason is None or cursor.ended(delta.index))
    return replace(delta, replayed=True, logprobs=[]) if had else delta


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """The scripted model's log-probabilities of a token: it is the second most probable one, after the next id."""
    logprob = -1 - token_id / 64
    ranked = [(token_id + 1, logprob / 2), (token_id, logprob)]
    ranked += [(token_id + rank, logprob - rank / 4) for rank in range(2, top)]
    return TokenLogprobs(logprob, tuple((each % VOCAB_SIZE, value) for each, value in ranked[:top]))


def delta_of(generation: GenerationRequest, index: int, delta: Delta) -> Delta:
    """A delta of one choice, with log-probabilities if the request asks for them."""
    top = generation.params.logprobs
    logprobs = [] if top is None else [logprobs_of(token_id, top) for token_id in delta.token_ids]
    return replace(delta, index=index, logprobs=logprobs)


def with_prompt_logprobs(generation: GenerationRequest, delta: Delta, returns_prompt_logprobs: bool) -> Delta:
    """The first delta of a choice; that of choice 0 has the prompt's log-probabilities."""
    prompt, top = generation.prompt_token_ids, generation.params.prompt_logprobs
    has_them = returns_prompt_logprobs and top is not None and delta.index == 0
    logprobs = [logprobs_of(token_id, top or 0) for token_id in prompt[1:]] if has_them else []
    return replace(delta, prompt_logprobs=logprobs)


def ends(
    generation: GenerationRequest, reason: FinishReason, tokens: int, stop_token_id: int | None = None
) -> Iterator[Delta]:
    """The end of each choice; the usage with the last."""
    top = generation.params.logprobs
    shown = stop_token_id is not None and top is not None and reason is FinishReason.STOP
    stop_token = StopToken(stop_token_id, logprobs_of(stop_token_id, top)) if shown else None
    n, score = generation.params.n, 0.5 if generation.params.beam_width else None
    for index in range(n):
        usage = Usage(len(generation.prompt_token_ids), tokens * n, 2) if index == n - 1 else None
        yield Delta("", [], reason, usage, index, score=score, stop_token=stop_token)


def text_of(token_ids: Sequence[int]) -> str:
    output = TOKENIZER.new_output_stream([], ())
    return output.push(list(token_ids)) + output.finish()


def script_of(text: str) -> Script:
    """A script that answers ``text`` with its tokens."""
    output = TOKENIZER.new_output_stream([], ())
    return [*(Delta(output.push([each]), [each]) for each in TOKENIZER.encode_plain(text)), FinishReason.STOP]


@dataclass
class Stage:
    """A running service and how to reach it."""

    service: ApiService
    fleet: ScriptedPool
    runner: ScriptedRunner
    app: RestApp
    port: int
    admin_port: int
    rpc_port: int
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.rpc_port}")

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        """A client that is closed with the stage: one that is left to the collector logs an error into a later test."""
        http = openai.DefaultAsyncHttpxClient(verify=_NO_TLS)
        self._clients.append(
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http)
        )
        return self._clients[-1]

    async def close_clients(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def open_stage(
    script: Script = ANSWER,
    *,
    keys: Sequence[str] = (),
    concurrent: int = 64,
    max_body_bytes: int = 100_000,
    patience: float = 20.0,
    template: str = CHAT_TEMPLATE,
    limits: ConnectionLimits | None = None,
    call_limits: CallLimits | None = None,
    heartbeat: float = 5.0,
    keepalive: float = 15.0,
    rpc_keepalive: float = 15.0,
    runner: Runner | None = None,
    file: TenantsFile | None = None,
    tokens: TokenVerifier | None = None,
    origins: Sequence[str] = (),
    page: Page | None = None,
    fleet_endpoint: FleetEndpoint | None = None,
    lora_updater: LoRAUpdater | None = None,
    batches: Callable[[ApiService], BatchApi] | None = None,
    conversations: Conversations | None = None,
    quota: ResponseQuota | None = None,
    models: Sequence[str] = (MODEL,),
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Serves until the block ends. Streams with ids have a comment after ``heartbeat`` seconds of silence, others after
    ``keepalive``, and those over gRPC an empty message after ``rpc_keepalive``. ``runner`` may take the place of the
    scripted one, and ``settings`` are the service's.
    """
    tokenizers = dict.fromkeys(models, tokenizer_with(template))
    fleet, scripted = ScriptedPool(), ScriptedRunner(script)
    service = ApiService(
        tokenizers,
        fleet,
        runner or scripted,
        Authenticator(keys, file, tokens),
        ConcurrencyLimit(concurrent),
        **settings,
    )
    silence = KeepAlive(keepalive, heartbeat)
    app = build_api(
        service,
        max_body_bytes=max_body_bytes,
        client_timeout=patience,
        keepalive=silence,
        page=page,
        fleet=fleet_endpoint,
        lora_updater=lora_updater,
        batches=None if batches is None else batches(service),
        conversations=conversations,
        quota=quota,
    )
    server = HttpServer(allow_origins(app, origins) if origins else app, listen("127.0.0.1", 0, "--http-port"), limits)
    admin = HttpServer(build_admin(service, client_timeout=patience), listen("127.0.0.1", 0, "--http-port"))
    rpc = RpcServer(
        service,
        "127.0.0.1:0",
        max_message_bytes=max_body_bytes,
        client_timeout=patience,
        keepalive=rpc_keepalive,
        limits=call_limits,
    )
    await rpc.start()
    async with asyncio.TaskGroup() as serving:
        for each in (server, admin):
            serving.create_task(each.run_until_stopped())
        stage = Stage(service, fleet, scripted, app, server.port, admin.port, rpc.port)
        try:
            yield stage
        finally:
            await stage.close_clients()
            server.should_exit = admin.should_exit = True
            await rpc.stop(0)
            service.close()


@dataclass
class Answer:
    """A raw HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, object]:
        return self.json["error"]

    @property
    def sse(self) -> list[tuple[str | None, object]]:
        """The events of a stream with their ids; the end mark as the string it is."""
        return events_of(self.body)

    @property
    def events(self) -> list[object]:
        """The events of a stream; the end mark as the string it is."""
        return [data for _, data in self.sse]


def events_of(body: bytes) -> list[tuple[str | None, object]]:
    """The complete events of a stream with the ids that they have themselves."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = [line.partition(": ")[::2] for line in block.split("\n")]
        if fields == [("", "keep-alive")]:
            continue
        assert {name for name, _ in fields} <= {"id", "data", "retry", ""}
        said = dict(fields)
        data = said["data"]
        events.append((said.get("id"), data if data == "[DONE]" else json.loads(data)))
    return events


async def ask(port: int, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
    """One request over a connection of its own, exactly as written. Its answer is as official documents say."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(payload)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + payload)
        answer = await read_answer(reader, has_body=method != "HEAD")
    finally:
        writer.close()
    if method != "HEAD":
        content_type = answer.headers.get("content-type", "")
        problems = problems_of_answer(method, path, answer.status, content_type, answer.body)
        assert not problems, "\n".join(problems)
    return answer


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer:
    """The next answer on a connection."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        return Answer(int(status.split()[1]), headers, await _read_chunks(reader))
    length = int(headers["content-length"]) if has_body else 0
    return Answer(int(status.split()[1]), headers, await reader.readexactly(length))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int(await reader.readline(), 16)
        body += (await reader.readexactly(size + 2))[:size]
        if size == 0:
            return body


def chat(content: object = "hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt: object = "hello", **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, **fields}
