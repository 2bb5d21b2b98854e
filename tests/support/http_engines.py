"""Stand-ins for servers of vLLM, SGLang and the OpenAI API, over real HTTP. What the first one answers is compared with
a recording of a real one (``vllm_contract``); the others are written after their sources.

Each next token is a function of all tokens before it, so that whether a stream goes on correctly at another server can
be told. As a process of its own: ``python -m tests.support.http_engines KIND PORT MODEL SECONDS_PER_TOKEN``.
"""

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aiohttp import web
from quire_proto.hashing import pack
from quire_proto.text.tokenizer import ModelTokenizer

from tests.support.ports import free_port

VOCABULARY = 1024
EOS = 2
MODEL_LENGTH = 2048
DEMO = Path(__file__).parents[2] / "demo" / "model"

Event = dict[str, Any]


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows these, of those that are letters or words in the demo model's vocabulary."""
    return 100 + int.from_bytes(blake2b(pack(tokens), digest_size=4).digest(), "big") % 700


def continuation(tokens: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens."""
    written = list(tokens)
    for _ in range(count):
        written.append(next_token(written))
    return written[len(tokens) :]


@cache
def demo_tokenizer() -> ModelTokenizer:
    """That of all stand-ins."""
    return ModelTokenizer.load(DEMO)


class HttpEngine(ABC):
    """A server on a port of its own. ``requests`` are the bodies that it got, ``running`` counts open streams, and
    ``aborted`` those that their client closed, and ``polls`` all
    other questions. After ``hold_after`` tokens a stream waits for ``released``, after
    ``break_after`` its connection is cut, and with ``refusal`` requests get that status and body instead. Without
    ``healthy`` polls are refused, and until it is ``thawed`` a frozen one answers nothing at all. An id
    that it has had is refused, as vLLM and SGLang refuse one that still runs: whether they have noticed that a client
    left is not known to it.
    """

    kind: str
    path: str

    def __init__(self, model: str = "m", *, seconds_per_token: float = 0.0, host: str = "127.0.0.1") -> None:
        self.model = model
        self.host = host
        self.requests: list[Event] = []
        self.headers: list[dict[str, str]] = []
        self._ids: set[str] = set()
        self.running = self.aborted = self.polls = 0
        self.hold_after: int | None = None
        self.break_after: int | None = None
        self.refusal: tuple[int, Event] | None = None
        self.healthy = True
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.released = asyncio.Event()
        self.changed = asyncio.Event()
        self.waiting = 0
        self.api_key: str | None = None
        self.port = free_port()
        self._seconds_per_token = seconds_per_token
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_post(self.path, self._generate)
        for path, answer in self.answers().items():
            app.router.add_get(path, answer)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @abstractmethod
    def answers(self) -> dict[str, Any]:
        """Handlers of what is only asked."""

    @abstractmethod
    def tokens_of(self, body: Event) -> list[int]:
        """The prompt of a request."""

    @abstractmethod
    def max_tokens_of(self, body: Event) -> int:
        """The most tokens to write."""

    @abstractmethod
    def event(self, body: Event, written: list[int], reason: str | None, matched: int | None) -> Event:
        """What is sent for the last of the tokens ``written``."""

    def next_token(self, tokens: list[int]) -> int:
        return next_token(tokens)

    def stop_tokens_of(self, body: Event) -> list[int]:
        return list(body.get("stop_token_ids") or ())

    def bias_of(self, body: Event) -> dict[str, float]:
        return dict(body.get("logit_bias") or {})

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self.thawed.wait()
        self.polls += request.method == "GET"
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        self.changed.set()
        if self.refusal is not None:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        request_id = self.id_of(body, request.headers.get("X-Request-Id", ""))
        if request_id in self._ids:
            return web.json_response({"error": {"message": f"Request id {request_id} already running."}}, status=400)
        self._ids.add(request_id)
        if (refused := self.refuse(body)) is not None:
            return web.json_response(refused, status=400)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._stream(request, response, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
            self.changed.set()
        return response

    def id_of(self, body: Event, header: str) -> str:
        """By which name it knows a request."""
        return header

    def refuse(self, body: Event) -> Event | None:
        """An error before the stream begins."""
        return None

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: Event) -> None:
        prompt, written = self.tokens_of(body), list[int]()
        biased = next((int(token) for token, bias in self.bias_of(body).items() if bias >= 100), None)
        stops = {EOS, *self.stop_tokens_of(body)}
        while True:
            if len(written) == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                raise ConnectionResetError
            if len(written) == self.hold_after:
                await self.released.wait()
            if self._seconds_per_token:
                await asyncio.sleep(self._seconds_per_token)
            token = self.next_token([*prompt, *written]) if biased is None else biased
            written.append(token)
            reason = "stop" if token in stops else "length" if len(written) == self.max_tokens_of(body) else None
            matched = token if reason == "stop" and token != EOS else None
            await self._send(response, self.event(body, written, reason, matched))
            if reason is not None:
                break
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, event: Event) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = demo_tokenizer().encode_plain((await request.json())["prompt"])
        return web.json_response({"count": len(tokens), "max_model_len": MODEL_LENGTH, "tokens": tokens})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)


class VllmEngine(HttpEngine):
    """As vLLM 0.32."""

    kind = "vllm"
    path = "/v1/completions"

    def answers(self) -> dict[str, Any]:
        return {
            "/health": self.health,
            "/version": self._version,
            "/v1/models": self._models,
            "/metrics": self._metrics,
        }

    def tokens_of(self, body: Event) -> list[int]:
        return list(body["prompt"])

    def max_tokens_of(self, body: Event) -> int:
        return int(body["max_tokens"])

    def refuse(self, body: Event) -> Event | None:
        if len(body["prompt"]) + body["max_tokens"] <= MODEL_LENGTH:
            return None
        message = f"max_tokens={body['max_tokens']} cannot be greater than max_model_len={MODEL_LENGTH}."
        return {"error": {"message": message, "type": "BadRequestError", "param": "max_tokens", "code": 400}}

    def event(self, body: Event, written: list[int], reason: str | None, matched: int | None) -> Event:
        if any(int(token) >= VOCABULARY for token in self.bias_of(body)):
            message = "token_id(s) in logit_bias contain out-of-vocab token ids."
            return {"error": {"message": message, "type": "BadRequestError", "param": "logit_bias", "code": 400}}
        token, logprobs = written[-1], None
        if body.get("logprobs") is not None:
            top = {f"token_id:{token}": -0.25} | {f"token_id:{10 + i}": -2.0 - i for i in range(body["logprobs"])}
            logprobs = {
                "text_offset": [0],
                "token_logprobs": [-0.25],
                "tokens": [f"token_id:{token}"],
                "top_logprobs": [top],
            }
        first = {"prompt_token_ids": body["prompt"]} if len(written) == 1 else {"prompt_token_ids": None}
        choice = {
            "index": 0,
            "text": "x",
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": matched,
            "token_ids": [token],
        }
        event = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": self.model}
        end = {} if reason is None else {"system_fingerprint": "vllm-0.32.0-00000000"}
        return {**event, "choices": [choice | first], **end}

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/m"}
        permission = {
            "id": "modelperm-0", "object": "model_permission", "created": 1, "allow_create_engine": False,
            "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False, "allow_view": True,
            "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
        }  # fmt: skip
        whole = {**entry, "parent": None, "max_model_len": MODEL_LENGTH, "permission": [permission]}
        return web.json_response({"object": "list", "data": [whole]})

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP vllm:num_requests_running Number of requests in model execution batches.",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{labels}}} {float(self.waiting)}",
            "# TYPE vllm:num_requests_waiting_by_reason gauge",
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} {float(self.waiting)}',
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
            "# TYPE vllm:cache_config_info gauge",
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="400"} 1.0',
        ]
        return web.Response(text="\n".join(lines) + "\n")


class SglangEngine(HttpEngine):
    """As SGLang. ``incremental`` is ``--incremental-streaming-output``: events have the new tokens alone."""

    kind = "sglang"
    path = "/generate"

    def __init__(self, model: str = "m", *, seconds_per_token: float = 0.0, incremental: bool = False) -> None:
        super().__init__(model, seconds_per_token=seconds_per_token)
        self.incremental = incremental
        self.more_metrics: list[str] = []

    def answers(self) -> dict[str, Any]:
        return {
            "/health": self.health,
            "/v1/models": self._models,
            "/get_server_info": self._server_info,
            "/metrics": self._metrics,
        }

    def tokens_of(self, body: Event) -> list[int]:
        return list(body["input_ids"])

    def max_tokens_of(self, body: Event) -> int:
        return int(body["sampling_params"]["max_new_tokens"])

    def id_of(self, body: Event, header: str) -> str:
        return str(body["rid"])

    def stop_tokens_of(self, body: Event) -> list[int]:
        return list(body["sampling_params"]["stop_token_ids"])

    def bias_of(self, body: Event) -> dict[str, float]:
        return dict(body["sampling_params"].get("logit_bias") or {})

    def event(self, body: Event, written: list[int], reason: str | None, matched: int | None) -> Event:
        if len(body["input_ids"]) + self.max_tokens_of(body) > MODEL_LENGTH:
            return {"error": {"message": "Requested token count exceeds the model's maximum context length."}}
        shown = written[-1:] if self.incremental else list(written)
        finish: Event | None = None
        if reason == "length":
            finish = {"type": "length", "length": len(written)}
        elif reason == "stop":
            finish = {"type": "stop", "matched": written[-1] if matched is None else matched}
        info: Event = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(written),
            "cached_tokens": 3,
        }
        if body.get("return_logprob"):
            info["output_token_logprobs"] = [[-0.25, token, None] for token in shown]
            top = body["top_logprobs_num"]
            info["output_top_logprobs"] = [[[-0.25 - i, 10 + i, None] for i in range(top)] for _ in shown]
        return {"text": "x" * len(shown), "output_ids": shown, "meta_info": info}

    async def _models(self, _: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "root": self.model, "max_model_len": MODEL_LENGTH}
        return web.json_response({"object": "list", "data": [entry]})

    async def _server_info(self, _: web.Request) -> web.Response:
        states = [{"effective_max_running_requests_per_dp": 48}]
        info = {"model_path": "/models/m", "max_total_num_tokens": 6400, "enable_metrics": True, "version": "0.5.9"}
        return web.json_response({**info, "internal_states": states})

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = f'model_name="{self.model}"'
        lines = [
            "# TYPE sglang:num_running_reqs gauge",
            f"sglang:num_running_reqs{{{labels}}} {float(self.running)}",
            "# TYPE sglang:num_queue_reqs gauge",
            f"sglang:num_queue_reqs{{{labels}}} {float(self.waiting)}",
            *self.more_metrics,
            "# TYPE sglang:token_usage gauge",
            f"sglang:token_usage{{{labels}}} 0.5",
        ]
        return web.Response(text="\n".join(lines) + "\n")


class OpenAIEngine(HttpEngine):
    """A server that knows nothing but text, with the demo model's tokenizer. What it writes are words of one token,
    each a function of the text before it.
    """

    kind = "openai"
    path = "/v1/completions"

    def __init__(self, model: str = "m", *, seconds_per_token: float = 0.0) -> None:
        super().__init__(model, seconds_per_token=seconds_per_token)
        self.tokenizer = demo_tokenizer()
        texts = [(token, self.tokenizer.decode([token])) for token in range(100, VOCABULARY)]
        self._words = [token for token, text in texts if text.startswith(" ") and text.strip().isalpha()]

    def answers(self) -> dict[str, Any]:
        return {"/v1/models": self._models}

    def tokens_of(self, body: Event) -> list[int]:
        return self.tokenizer.encode_plain(body["prompt"])

    def max_tokens_of(self, body: Event) -> int:
        return int(body["max_tokens"])

    def next_token(self, tokens: list[int]) -> int:
        text = self.tokenizer.decode(tokens).encode()
        return self._words[int.from_bytes(blake2b(text, digest_size=4).digest(), "big") % len(self._words)]

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """The next ``count`` words."""
        written = list(tokens)
        for _ in range(count):
            written.append(self.next_token(written))
        return written[len(tokens) :]

    def event(self, body: Event, written: list[int], reason: str | None, matched: int | None) -> Event:
        text = "" if reason == "stop" else self.tokenizer.decode(written[-1:])
        return {
            "id": "c",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": reason}],
        }

    async def _models(self, _: web.Request) -> web.Response:
        status = 200 if self.healthy else 503
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]}, status=status)


ENGINES: dict[str, type[VllmEngine | SglangEngine | OpenAIEngine]] = {
    each.kind: each for each in (VllmEngine, SglangEngine, OpenAIEngine)
}


@asynccontextmanager
async def serving(*engines: HttpEngine) -> AsyncIterator[None]:
    """The servers run within the block."""
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        for engine in engines:
            await engine.stop()


async def _serve(kind: str, port: str, model: str, seconds_per_token: str) -> None:
    engine = ENGINES[kind](model, seconds_per_token=float(seconds_per_token))
    engine.port = int(port)
    await engine.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
