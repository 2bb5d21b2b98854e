"""The endpoint picker as gateways find it: a router's own components, stand-ins for servers of vLLM that take what
clients send, and a client that speaks ext_proc as Envoy does. The cases are those of the reference implementation's
integration tests, as far as they are about picking.
"""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from quire_proto.cli import read_settings
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.tls import ServerTls
from quire_router.api import service
from quire_router.app import Components
from quire_router.config import Settings
from quire_router.engines.load import EngineLoad
from quire_router.picker import picker
from quire_router.picker.server import (
    LIVENESS,
    READINESS,
    SERVICE,
    PickerLimits,
    PickerServer,
    picker_credentials,
    self_signed_certificate,
)
from quire_router.requests import dispatch

from tests.support.certificates import Authority
from tests.support.ext_proc import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    ExtProcStream,
    ForwardedEngine,
    Gateway,
    channel_to,
    destination,
    immediate,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.support.http_engines import DEMO, demo_tokenizer, serving
from tests.support.waiting import until

STORY = "There was once a fox who lived by the river and knew each of its stones. " * 12


ADMINISTRATION = (
    "/flush_cache", "/sleep", "/v1/load_lora_adapter", "/update_weights_from_disk", "/metrics", "/", "",
    "/flush_cache#/v1/chat/completions", "/flush_cache?/v1/chat/completions", "/metrics/v1/chat/completions",
    "/sleep/../v1/chat/completions", "//v1/chat/completions", "/a%3f/v1/completions", "/v1/models/../../sleep",
)  # fmt: skip


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


@dataclass
class Fleet:
    """A router with a picker, and the servers behind it."""

    components: Components
    channel: grpc.aio.Channel
    engines: Sequence[ForwardedEngine]

    def gateway(self, **options: Any) -> Gateway:
        return Gateway(self.channel, **options)

    def stream(self, *modes: Any) -> ExtProcStream:
        return ExtProcStream(self.channel, *modes)

    def load_of(self, engine: ForwardedEngine) -> tuple[int, int, int]:
        """Requests, prompt tokens to compute, and sequences that decode, as this router counts them."""
        return next(each.load.local for each in self.components.fleet.engines() if each.id == engine.address)

    @property
    def loads(self) -> list[int]:
        return [self.load_of(engine)[0] for engine in self.engines]

    async def idle(self) -> None:
        """Waits until nothing counts any more."""
        await until(lambda: not any(self.loads) and not self.picker.load("m"))

    async def ready(self, count: int) -> None:
        """Waits until so many servers are."""
        await until(lambda: self.components.fleet.ready("m") == count)

    @property
    def picker(self) -> Any:
        return self.components.picker


@asynccontextmanager
async def fleet(
    *engines: ForwardedEngine, flags: Sequence[str] = (), more_engines: Sequence[str] = (), body_timeout: float = 10.0
) -> AsyncIterator[Fleet]:
    arguments = [f"--model=m={DEMO}", "--picker-port=0", "--picker-insecure", "--http-port=0", *flags]
    arguments += [f"--engine={address}" for address in (*more_engines, *(each.address for each in engines))]
    configured = read_settings(Settings, arguments)
    async with serving(*engines), AsyncExitStack() as stack:
        components = Components(configured, dict.fromkeys(configured.models, demo_tokenizer()))
        assert components.picker is not None
        limits = PickerLimits(64, configured.max_body_bytes, body_timeout, configured.request_timeout)
        server = PickerServer(components.service, components.picker, "127.0.0.1:0", limits)
        await components.start(stack)
        await server.start()
        stack.push_async_callback(server.stop, 0.1)
        await until(lambda: components.fleet.ready("m") >= len(engines))
        yield Fleet(components, await stack.enter_async_context(channel_to(server.port)), engines)


class TestPicking:
    @pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
    async def test_a_request_reaches_a_server_unchanged_in_either_mode(self, mode: Any) -> None:
        engine = ForwardedEngine()
        async with fleet(engine) as each:
            body = json.dumps(chat(STORY), indent=3).encode()
            answer = await each.gateway(mode=mode, piece=100).post(body)
            assert (answer.status, answer.endpoint) == (200, engine.endpoint)
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert engine.bodies == [body]
            await each.idle()

    async def test_a_stream_passes_through_event_by_event(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine) as each:
            answer = await each.gateway().post(chat(stream=True, max_tokens=7))
            assert answer.body.count(b"data: {") == 7
            assert answer.body.endswith(b"data: [DONE]\n\n")
            await each.idle()

    async def test_prompts_with_the_same_beginning_go_where_it_is_cached(self) -> None:
        engines = [ForwardedEngine() for _ in range(3)]
        async with fleet(*engines) as each:
            gateway, homes = each.gateway(), {}
            for topic in ("fox", "bear", "crow"):
                answer = await gateway.post(chat(f"{topic}: {STORY}"))
                homes[topic] = answer.endpoint
            for turn in range(6):
                for topic, home in homes.items():
                    answer = await gateway.post(chat(f"{topic}: {STORY} And then? {turn}"))
                    assert answer.endpoint == home

    async def test_load_goes_where_least_runs(self) -> None:
        engines = [ForwardedEngine() for _ in range(3)]
        async with fleet(*engines) as each:
            streams = [each.stream() for _ in range(6)]
            picked = []
            for number, stream in enumerate(streams):
                await stream.send(request_headers())
                picked += destination(await stream.ask(request_body(json.dumps(chat(f"{number} {STORY}")).encode())))
            assert sorted(picked) == sorted([engine.endpoint for engine in engines] * 2)
            assert each.loads == [2, 2, 2]
            for stream in streams:
                stream.cancel()
            await each.idle()

    async def test_requests_of_one_session_stay_together(self) -> None:
        async with fleet(*(ForwardedEngine() for _ in range(3))) as each:
            homes = set()
            for number in range(6):
                homes.add((await each.gateway().post(chat(str(number)), x_session_id="ada")).endpoint)
                await each.idle()
            assert len(homes) == 1

    async def test_a_request_without_a_body_goes_to_the_server_with_the_least_to_do(self) -> None:
        engines = [ForwardedEngine(), ForwardedEngine()]
        async with fleet(*engines) as each:
            busy = each.stream()
            await busy.send(request_headers(subset=[engines[0].endpoint]))
            await busy.ask(request_body(json.dumps(chat()).encode()))
            stream = each.stream()
            assert destination(await stream.ask(request_headers("/v1/models", end=True))) == [engines[1].endpoint]
            await stream.ask(response_headers(end=True))
            assert await stream.ended() is grpc.StatusCode.OK

    @pytest.mark.parametrize(
        ("path", "end", "status"),
        [
            *((path, end, 404) for path in ADMINISTRATION for end in (True, False)),
            ("/v1/models", False, 405),
            ("/v1/chat/completions", True, 405),
        ],
    )
    async def test_servers_get_no_request_that_is_not_of_an_api(self, path: str, end: bool, status: int) -> None:
        async with fleet(ForwardedEngine()) as each:
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers(path, end=end))).immediate_response)
        assert answer.status == status

    async def test_other_requests_go_on_where_the_operator_names_them(self) -> None:
        engine = ForwardedEngine()
        flags = ("--picker-forward=GET /version, POST /tokenize",)
        async with fleet(engine, flags=flags) as each:
            stream = each.stream()
            assert destination(await stream.ask(request_headers("/version?x=1", end=True))) == [engine.endpoint]
            stream = each.stream()
            await stream.send(request_headers("/tokenize"))
            picked = await stream.ask(request_body(json.dumps({"model": "m", "prompt": "x"}).encode()))
            assert destination(picked) == [engine.endpoint]
            refused = await each.stream().ask(request_headers("/tokenize", end=True))
            assert immediate(refused.immediate_response).status == 405

    async def test_what_only_the_server_knows_is_placed_by_load_and_not_refused(self) -> None:
        engine = ForwardedEngine()
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        bodies = [
            (chat(messages=[{"role": "user", "content": [image]}]), "/v1/chat/completions"),
            (chat(chat_template="{{ messages }}", guided_regex="a*"), "/v1/chat/completions"),
            ({"model": "m", "something": "else"}, "/v1/chat/completions"),
            (chat(temperature=-5, max_tokens=10**6), "/v1/chat/completions"),
        ]
        async with fleet(engine) as each:
            for body, path in bodies:
                stream = each.stream()
                await stream.send(request_headers(path))
                picked = await stream.ask(request_body(json.dumps(body).encode()))
                assert destination(picked) == [engine.endpoint]
                assert each.loads == [1]
                await stream.half_close()
                await each.idle()

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": STORY}),
            ("/v1/completions?beta=true", {"prompt": [STORY, "another"]}),
            ("/prefix/v1/chat/completions", {"messages": [{"role": "user", "content": STORY}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": STORY}], "max_tokens": 5}),
            ("/v1/responses", {"input": STORY}),
        ],
    )
    async def test_the_prompt_is_found_in_each_api(
        self, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
    ) -> None:
        # A prompt counts as computed after so long: not before this test has looked.
        monkeypatch.setattr(EngineLoad, "seconds_of_prompts", 600.0)
        engines = [ForwardedEngine(), ForwardedEngine()]
        async with fleet(*engines) as each:
            endpoints = []
            for _ in range(3):
                stream = each.stream()
                await stream.send(request_headers(path))
                endpoints += destination(await stream.ask(request_body(json.dumps({"model": "m", **body}).encode())))
                (tokens,) = (each.load_of(engine)[1] for engine in engines if each.load_of(engine)[0])
                if len(endpoints) == 1:
                    assert tokens > 150  # as many as the story has, and not what bytes suggest
                    first = tokens
                else:
                    assert tokens <= 32 + (first if "another" in str(body) else 0)
                # What the gateway sends next follows the response: the prompt is cached there then.
                await stream.read()
                await stream.ask(response_headers(200, "text/event-stream"))
                await stream.ask(response_body(b"data: {}\n\n"))
                await stream.half_close()
                await each.idle()
            assert len(set(endpoints)) == 1

    async def test_the_next_best_endpoints_follow_where_the_gateway_reads_them(self) -> None:
        engines = [ForwardedEngine() for _ in range(3)]
        async with fleet(*engines, flags=["--picker-fallbacks=1"]) as each:
            stream = each.stream()
            await stream.send(request_headers())
            first, second = destination(await stream.ask(request_body(json.dumps(chat(STORY)).encode())))
            assert first != second
            assert {first, second} < {engine.endpoint for engine in engines}
            await stream.read()
            # The first one failed, and the gateway has sent the request to the second.
            await stream.ask(response_headers(served=second))
            assert [engine.endpoint for engine in engines if each.load_of(engine)[0]] == [second]
            await stream.ask(response_body(b"{}", end=True))
            await each.idle()

    async def test_quires_own_engines_and_names_of_hosts_are_never_picked(self) -> None:
        engine = ForwardedEngine()
        named = ForwardedEngine()
        async with serving(named):
            others = ["127.0.0.1:1", f"vllm+http://localhost:{named.port}"]
            async with fleet(engine, more_engines=others) as each:
                await each.ready(2)
                for number in range(4):
                    assert (await each.gateway().post(chat(f"{number}{STORY}"))).endpoint == engine.endpoint


class TestSubsets:
    async def test_only_what_the_gateway_allows_is_picked(self) -> None:
        engines = [ForwardedEngine() for _ in range(3)]
        async with fleet(*engines) as each:
            for engine in engines:
                for subset in ([engine.endpoint, "192.0.2.1:8000"], f" {engine.endpoint},192.0.2.1 "):
                    assert (await each.gateway().post(chat(), subset=subset)).endpoint == engine.endpoint

    @pytest.mark.parametrize("subset", [[], ["192.0.2.99:8000"], ["127.0.0.1:1"]])
    async def test_a_subset_in_which_none_is_ready_is_a_503(self, subset: list[str]) -> None:
        async with fleet(ForwardedEngine()) as each:
            answer = await each.gateway().post(chat(), subset=subset)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "none_ready")
            assert int(answer.headers["retry-after"]) > 0
            await each.idle()


class TestWithoutModel:
    async def test_a_body_without_a_model_is_for_the_only_one(self) -> None:
        async with fleet(engine := ForwardedEngine()) as each:
            answer = await each.gateway().post({"messages": chat()["messages"]})
            assert answer.endpoint == engine.endpoint


class TestContentCoding:
    async def test_a_body_in_gzip_is_read_and_sent_on_as_it_came(self) -> None:
        body = gzip.compress(json.dumps(chat()).encode())
        async with fleet(engine := ForwardedEngine()) as each:
            answer = await each.gateway().post(body, content_encoding="gzip")
            assert answer.endpoint == engine.endpoint


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "code", "words"),
        [
            (b"no healthy upstream", 400, "invalid", "not valid JSON"),
            (b"[]", 400, "invalid", "must be a JSON object"),
            (b"", 400, "invalid", "not valid JSON"),
            (b'{"model": "gpt-5", "messages": []}', 404, "model_not_found", "only 'm'"),
            (b"{" + b'"a":[],' * 20_000 + b'"model":"m"}', 400, "invalid", "more than"),
        ],
    )
    async def test_a_body_that_says_no_model(self, body: bytes, status: int, code: str, words: str) -> None:
        async with fleet(ForwardedEngine()) as each:
            for mode in (DUPLEX, BUFFERED):
                stream = each.stream(mode)
                await stream.send(request_headers())
                if mode == BUFFERED:
                    await stream.read()
                answer = immediate((await stream.ask(request_body(body))).immediate_response)
                assert (answer.status, answer.json()["error"]["code"]) == (status, code)
                assert words in answer.json()["error"]["message"]
                assert answer.headers["content-type"] == "application/json"
                assert await stream.ended() is grpc.StatusCode.OK

    async def test_errors_look_as_the_api_of_the_path_has_them(self) -> None:
        async with fleet(ForwardedEngine()) as each:
            answer = await each.gateway().post(b"[]", "/v1/messages")
            assert answer.json()["type"] == "error"

    async def test_a_body_that_is_too_large(self) -> None:
        async with fleet(ForwardedEngine(), flags=["--max-body-bytes=1000"]) as each:
            for mode in (DUPLEX, BUFFERED):
                answer = await each.gateway(mode=mode).post(chat("x" * 2000))
                assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")

    async def test_a_body_that_does_not_arrive(self) -> None:
        async with fleet(ForwardedEngine(), body_timeout=0.05) as each:
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers())).immediate_response)
            assert (answer.status, answer.json()["error"]["code"]) == (408, "body_too_slow")

    async def test_no_server_that_is_ready(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=["--hold-timeout=0.1"]) as each:
            await engine.stop()
            await each.ready(0)
            answer = await each.gateway().post(chat())
            assert (answer.status, answer.json()["error"]["code"]) == (503, "none_ready")
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers("/v1/models", end=True))).immediate_response)
            assert answer.status == 503

    async def test_more_requests_than_the_router_takes(self) -> None:
        async with fleet(ForwardedEngine(), flags=["--max-concurrent-requests=1"]) as each:
            held = each.stream()
            await held.send(request_headers())
            await held.ask(request_body(json.dumps(chat()).encode()))
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers())).immediate_response)
            assert (answer.status, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            await held.half_close()
            await each.idle()
            assert (await each.gateway().post(chat())).status == 200

    async def test_a_router_that_ends_takes_no_new_request(self) -> None:
        async with fleet(ForwardedEngine()) as each:
            each.components.service.concurrency.close()
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers())).immediate_response)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "stopping")

    async def test_a_mode_without_a_body_ends_the_stream(self) -> None:
        async with fleet(ForwardedEngine()) as each:
            for mode in (NONE, STREAMED):
                stream = each.stream(mode)
                await stream.send(request_headers())
                assert await stream.ended() is grpc.StatusCode.INVALID_ARGUMENT


TENANTS = """
[[tenants]]
name = "ada"
keys = ["ada-key-0123456789"]
max_concurrent = 1

[[tenants]]
name = "bob"
keys = ["bob-key-0123456789"]
tokens_per_minute = 50

[[tenants]]
name = "eve"
keys = ["eve-key-0123456789"]
requests_per_minute = 1
"""


class TestKeys:
    @pytest.fixture
    def flags(self, tmp_path: Path) -> list[str]:
        file = tmp_path / "tenants.toml"
        file.write_text(TENANTS)
        return [f"--tenants={file}"]

    async def test_clients_need_one_which_servers_do_not_get(self, flags: list[str]) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=flags) as each:
            gateway = each.gateway()
            assert (await gateway.post(chat())).status == 401
            assert (await gateway.post(chat(), authorization="Bearer nobody")).status == 401
            stream = each.stream()
            answer = immediate((await stream.ask(request_headers("/v1/models", end=True))).immediate_response)
            assert answer.status == 401
            assert (await gateway.post(chat(), authorization="Bearer ada-key-0123456789")).status == 200
            assert (await gateway.post(chat(), x_api_key="ada-key-0123456789")).status == 200
            assert not {"authorization", "x-api-key"} & {name for headers in engine.headers for name in headers}

    async def test_without_any_the_clients_header_goes_on(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine) as each:
            await each.gateway().post(chat(), authorization="Bearer for-the-server")
            assert engine.headers[0]["authorization"] == "Bearer for-the-server"

    async def test_limits_are_the_tenants(self, flags: list[str]) -> None:
        async with fleet(ForwardedEngine(), flags=flags) as each:
            held = each.stream()
            await held.send(request_headers(authorization="Bearer ada-key-0123456789"))
            await held.ask(request_body(json.dumps(chat()).encode()))
            gateway = each.gateway()
            answer = await gateway.post(chat(), authorization="Bearer ada-key-0123456789")
            assert (answer.status, answer.headers["x-quire-reason"]) == (429, "max_concurrent")
            await held.half_close()
            await each.idle()
            assert (await gateway.post(chat(), authorization="Bearer ada-key-0123456789")).status == 200

    @pytest.mark.parametrize("models", [["m"], ["n"]])
    async def test_a_caller_sees_its_own_models_alone(self, models: list[str], tmp_path: Path) -> None:
        file = tmp_path / "tenants.toml"
        file.write_text(f'[[tenants]]\nname = "ada"\nkeys = ["ada-key-0123456789"]\nmodels = {models}\n')
        engines, flags = (
            {name: ForwardedEngine(name) for name in ("m", "n")},
            [f"--tenants={file}", f"--model=n={DEMO}"],
        )
        more = [engines["n"].address]
        async with serving(engines["n"]), fleet(engines["m"], flags=flags, more_engines=more) as each:
            await until(lambda: each.components.fleet.ready("n") == 1)
            asked = request_headers("/v1/models", end=True, authorization="Bearer ada-key-0123456789")
            assert destination(await each.stream().ask(asked)) == [engines[models[0]].endpoint]

    async def test_a_list_that_would_show_models_of_others_is_the_routers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "tenants.toml"
        file.write_text('[[tenants]]\nname = "ada"\nkeys = ["ada-key-0123456789"]\nmodels = ["n"]\n')
        async with fleet(ForwardedEngine(), flags=[f"--tenants={file}", f"--model=n={DEMO}"]) as each:
            rows = each.components.fleet.rows
            monkeypatch.setattr(each.components.fleet, "rows", lambda _name, _lora=None: rows("m"))  # it has both names
            asked = request_headers("/v1/models", end=True, authorization="Bearer ada-key-0123456789")
            answer = immediate((await each.stream().ask(asked)).immediate_response)
        assert (answer.status, [each["id"] for each in answer.json()["data"]]) == (200, ["n"])

    async def test_a_request_without_a_body_is_charged(self, flags: list[str]) -> None:
        async with fleet(ForwardedEngine(), flags=flags) as each:
            for status in (None, 429):
                stream = each.stream()
                asked = request_headers("/v1/models", end=True, authorization="Bearer eve-key-0123456789")
                reply = await stream.ask(asked)
                answer = immediate(reply.immediate_response) if reply.HasField("immediate_response") else None
                assert (None if answer is None else answer.status) == status
            assert answer is not None
            assert answer.headers["x-quire-reason"] == "requests_per_minute"

    async def test_what_the_response_says_is_charged(self, flags: list[str]) -> None:
        async with fleet(ForwardedEngine(), flags=flags) as each:
            gateway, key = each.gateway(), "Bearer bob-key-0123456789"
            # Each may use up to 44 tokens, and the server says that it used 11 and 4.
            for _ in range(2):
                assert (await gateway.post(chat("Hi", max_tokens=4), authorization=key)).status == 200
                await each.idle()
            answer = await gateway.post(chat("Hi", max_tokens=30), authorization=key)
            assert (answer.status, answer.headers["x-quire-reason"]) == (429, "tokens_per_minute")

    async def test_what_a_server_refuses_is_not(self, flags: list[str]) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=flags) as each:
            gateway, key = each.gateway(), "Bearer eve-key-0123456789"
            engine.refusal = (500, {"error": {"message": "no"}})
            assert (await gateway.post(chat(), authorization=key)).status == 500
            await each.idle()
            engine.refusal = None
            assert (await gateway.post(chat(), authorization=key)).status == 200
            await each.idle()
            answer = await gateway.post(chat(), authorization=key)
            assert (answer.status, answer.headers["x-quire-reason"]) == (429, "requests_per_minute")

    async def test_what_was_given_up_while_it_waited_is_not(self, flags: list[str]) -> None:
        engine, key = ForwardedEngine(), "Bearer eve-key-0123456789"
        async with fleet(engine, flags=[*flags, "--hold-timeout=30"]) as each:
            await engine.stop()
            await each.ready(0)
            stream = each.stream()
            await stream.send(request_headers(authorization=key))
            await stream.send(request_body(json.dumps(chat()).encode()))
            await until(lambda: each.components.queue.waiting("m") == 1)
            stream.cancel()
            await each.idle()
            await engine.start()
            await each.ready(1)
            assert (await each.gateway().post(chat(), authorization=key)).status == 200


class TestEnds:
    async def test_a_stream_that_is_closed_in_mid_response_counts_no_more(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine) as each:
            for close in ("half_close", "cancel"):
                stream = each.stream()
                await stream.send(request_headers())
                await stream.ask(request_body(json.dumps(chat(STORY, stream=True)).encode()))
                await stream.read()
                assert each.load_of(engine)[:2][0] == 1
                await stream.ask(response_headers(200, "text/event-stream"))
                await stream.ask(response_body(b"data: {}\n\n"))
                assert each.load_of(engine) == (1, 0, 1)  # its prompt is computed, and it decodes
                if close == "cancel":
                    stream.cancel()
                else:
                    await stream.half_close()
                await each.idle()
            assert ends_of("closed") >= 2

    async def test_a_response_that_is_complete_counts_no_more_though_the_stream_is_open(self) -> None:
        async with fleet(ForwardedEngine()) as each:
            before = ends_of("completed")
            stream = each.stream()
            await stream.send(request_headers())
            await stream.ask(request_body(json.dumps(chat()).encode()))
            await stream.read()
            await stream.ask(response_headers())
            await stream.ask(response_body(b"{}", end=True))
            await each.idle()
            assert await stream.ended() is grpc.StatusCode.OK
            assert ends_of("completed") == before + 1

    @pytest.mark.parametrize("close", ["half_close", "cancel"])
    async def test_a_request_that_waits_is_given_up_with_its_stream(self, close: str) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=["--hold-timeout=30"]) as each:
            await engine.stop()
            await each.ready(0)
            stream = each.stream()
            await stream.send(request_headers())
            await stream.send(request_body(json.dumps(chat()).encode()))
            await until(lambda: each.components.queue.waiting("m") == 1)
            assert each.picker.load("m") == 1
            if close == "cancel":
                stream.cancel()
            else:
                await stream.half_close()
            await each.idle()
            assert not each.components.queue.waiting("m")

    async def test_a_request_that_waits_goes_on_when_a_server_is_there(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=["--hold-timeout=30"]) as each:
            await engine.stop()
            await each.ready(0)
            stream = each.stream()
            await stream.send(request_headers())
            await stream.send(request_body(json.dumps(chat()).encode()))
            await engine.start()
            assert destination(await stream.read()) == [engine.endpoint]

    async def test_a_server_that_fails_is_charged_to_nobody(self) -> None:
        engine = ForwardedEngine()
        engine.refusal = (400, {"error": {"message": "no"}})
        async with fleet(engine) as each:
            before = ends_of("failed")
            answer = await each.gateway().post(chat(STORY))
            assert (answer.status, answer.json()) == (400, {"error": {"message": "no"}})
            await each.idle()
            assert ends_of("failed") == before + 1

    async def test_a_request_takes_no_longer_than_any_may(self) -> None:
        async with fleet(ForwardedEngine(), flags=["--request-timeout=0.2"]) as each:
            stream = each.stream()
            await stream.send(request_headers())
            await stream.ask(request_body(json.dumps(chat()).encode()))
            await stream.read()
            assert await stream.ended() is grpc.StatusCode.DEADLINE_EXCEEDED
            await each.idle()


class TestWhatIsSeen:
    async def test_a_request_is_one_trace_which_the_server_continues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("test")
        for module, name in ((service, "_TRACER"), (dispatch, "tracer"), (picker, "tracer")):
            monkeypatch.setattr(module, name, tracer)
        engine = ForwardedEngine()
        async with fleet(engine) as each:
            parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            await each.gateway().post(chat(), traceparent=parent)
            await each.idle()
            await until(lambda: len(exporter.get_finished_spans()) == 4)
        spans = {span.name: span for span in exporter.get_finished_spans()}
        server, attempt = spans["ext_proc /v1/chat/completions"], spans["chat m"]
        assert {format(span.context.trace_id, "032x") for span in spans.values()} == {parent.split("-")[1]}
        assert format(server.parent.span_id, "016x") == parent.split("-")[2]
        assert {spans[name].parent.span_id for name in ("quire.admit", "quire.route", "chat m")} == {
            server.context.span_id
        }
        assert spans["quire.route"].attributes["quire.route.engine"] == engine.address
        assert attempt.attributes["gen_ai.usage.output_tokens"] == 4
        assert engine.headers[0]["traceparent"].split("-")[2] == format(attempt.context.span_id, "016x")

    async def test_tenants_metrics_have_what_the_response_says(self, tmp_path: Path) -> None:
        file = tmp_path / "tenants.toml"
        file.write_text(TENANTS)
        labels = {"tenant": "ada", "model": "m"}

        def value(name: str) -> float:
            return REGISTRY.get_sample_value(f"quire_tenant_{name}_total", labels) or 0.0

        names = ("requests", "prompt_tokens", "completion_tokens")
        async with fleet(ForwardedEngine(), flags=[f"--tenants={file}"]) as each:
            before = [value(name) for name in names]
            for stream in (False, True):
                body = chat(stream=stream, max_tokens=6)
                assert (await each.gateway().post(body, authorization="Bearer ada-key-0123456789")).status == 200
                await each.idle()
            after = [value(name) for name in names]
        requests, prompt, completion = (new - old for new, old in zip(after, before, strict=True))
        assert requests == 2
        assert prompt > 11  # which the whole answer says; of the stream it is the router's count
        assert completion == 6 + 7  # the stream's last event says that it is done

    async def test_the_ledger_has_what_the_response_says_or_else_what_was_seen_of_it(self, tmp_path: Path) -> None:
        file = tmp_path / "tenants.toml"
        file.write_text(TENANTS)
        key, engine = "Bearer ada-key-0123456789", ForwardedEngine()
        async with fleet(engine, flags=[f"--tenants={file}"]) as each:

            async def used() -> list[tuple[int, ...]]:
                rows = await each.components.journal.usage(0, 1e11)
                return [(row.tenant, row.model, *row.counts) for row in rows]

            gateway = each.gateway()
            assert (await gateway.post(chat(max_tokens=6), authorization=key)).status == 200
            await each.idle()
            assert await used() == [("ada", "m", 1, 11, 0, 6)]
            engine.refusal = (500, {"error": {"message": "no"}})
            assert (await gateway.post(chat(), authorization=key)).status == 500
            await each.idle()
            assert await used() == [("ada", "m", 1, 11, 0, 6)], "no server ran it"
            stream = each.stream()
            await stream.send(request_headers(authorization=key))
            await stream.ask(request_body(json.dumps(chat(stream=True)).encode()))
            await stream.read()
            await stream.ask(response_headers(200, "text/event-stream"))
            await stream.ask(response_body(b"data: {}\n\ndata: {}\n\n"))
            await stream.half_close()
            await each.idle()
            [(_, _, requests, prompt, _, completion)] = await used()
            assert (requests, completion) == (2, 6 + 2)
            assert prompt > 11

    async def test_responses_say_where_they_come_from_if_that_is_asked_for(self) -> None:
        engine = ForwardedEngine()
        async with fleet(engine, flags=["--debug-route"]) as each:
            answer = await each.gateway().post(chat())
            assert answer.headers["x-quire-route"].startswith(f"{engine.address}; policy=cost")

    async def test_load_is_what_models_are_scaled_by(self) -> None:
        async with fleet(ForwardedEngine()) as each:
            stream = each.stream()
            await stream.send(request_headers())
            await stream.ask(request_body(json.dumps(chat()).encode()))
            assert await each.components.load.read() == {"m": 1}
            await stream.half_close()
            await each.idle()
            assert await each.components.load.read() == {"m": 0}


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_the_usage_is_read_however_a_response_is_cut(size: int) -> None:
    text = {"content": 'say "usage": {"completion_tokens": 99}'}
    usage = {"prompt_tokens": 7, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 3}}
    events = [*([{"choices": [{"delta": text}]}] * 40), {"choices": [], "usage": usage}]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    reader = picker.AnswerReader()
    for start in range(0, len(data), size):
        reader.read(data[start : start + size])
    assert (reader.events, reader.usage) == (41, picker.SaidUsage(7, 10, 3))


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_the_prompt_of_a_message_is_said_at_its_beginning_without_what_was_cached(size: int) -> None:
    begun = {"input_tokens": 7, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2, "output_tokens": 1}
    text = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "well " * 20}}
    end = {"type": "message_delta", "usage": {"output_tokens": 90, "output_tokens_details": {"thinking_tokens": 5}}}
    events = [{"type": "message_start", "message": {"usage": begun}}, *([text] * 60), end]
    data = b"".join(b"event: x\ndata: " + json.dumps(event).encode() + b"\n\n" for event in events)
    reader = picker.AnswerReader()
    for start in range(0, len(data), size):
        reader.read(data[start : start + size])
    assert reader.usage == picker.SaidUsage(12, 90, 3)


def test_a_response_without_usage_has_none() -> None:
    reader = picker.AnswerReader()
    reader.read(b'{"choices": [{"message": {"content": "\\"prompt_tokens\\": 5"}}]}')
    assert reader.usage == picker.SaidUsage(None, None)


def ends_of(end: str) -> float:
    return REGISTRY.get_sample_value("quire_picks_total", {"model": "m", "end": end}) or 0.0


def picker_settings() -> Settings:
    flags = [f"--model=m={DEMO}", "--picker-port=0", "--picker-insecure", "--engine=vllm+http://192.0.2.1:1"]
    return read_settings(Settings, flags)


class TestTheServer:
    async def test_health_is_what_the_protocol_asks_for(self) -> None:
        components = Components(
            picker_settings(),
            {"m": ModelTokenizer.load(DEMO)},
        )
        assert components.picker is not None
        server = PickerServer(components.service, components.picker, "127.0.0.1:0", PickerLimits(8, 1000, 5, 5))
        await server.start()
        serving, leaving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        async with channel_to(server.port) as channel:
            health = HealthStub(channel)  # type: ignore[no-untyped-call]

            async def status(name: str) -> int:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                return int(answer.status)

            assert SERVICE == "envoy.service.ext_proc.v3.ExternalProcessor"
            assert [await status(name) for name in (LIVENESS, READINESS, SERVICE, "")] == [serving] * 4
            await server.leave()
            assert [await status(name) for name in (LIVENESS, READINESS, SERVICE)] == [serving, leaving, leaving]
        await server.stop(0)
        components.service.close()

    async def test_it_speaks_tls_with_a_certificate_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key, certificate = self_signed_certificate()
        monkeypatch.setattr("quire_router.picker.server.self_signed_certificate", lambda: (key, certificate))
        components = Components(
            picker_settings(),
            {"m": ModelTokenizer.load(DEMO)},
        )
        assert components.picker is not None
        limits = PickerLimits(8, 1000, 5, 5)
        server = PickerServer(components.service, components.picker, "127.0.0.1:0", limits, picker_credentials(None))
        await server.start()
        async with channel_to(server.port, certificate) as channel:
            stream = ExtProcStream(channel)
            answer = immediate((await stream.ask(request_headers("/v1/models", end=True))).immediate_response)
            assert answer.status == 503
        await server.stop(0)
        components.service.close()

    async def test_a_gateway_without_a_certificate_of_the_authority_asks_in_vain(self, tmp_path: Path) -> None:
        authority, other = Authority(tmp_path), Authority(tmp_path, "other")
        own, gateway, stranger = authority.issue("picker"), authority.issue("gateway"), other.issue("stranger")
        components = Components(picker_settings(), {"m": ModelTokenizer.load(DEMO)})
        assert components.picker is not None
        limits, tls = PickerLimits(8, 1000, 5, 5), picker_credentials(ServerTls(own, authority.ca))
        server = PickerServer(components.service, components.picker, "127.0.0.1:0", limits, tls)
        await server.start()
        for shown, allowed in ((gateway, True), (stranger, False), (None, False)):
            pair = (None, None) if shown is None else (shown.key.read_bytes(), shown.certificate.read_bytes())
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)
            options = [("grpc.ssl_target_name_override", "picker")]
            async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", credentials, options) as channel:
                asking = ExtProcStream(channel).ask(request_headers("/v1/models", end=True))
                if allowed:
                    assert immediate((await asking).immediate_response).status == 503
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await asking
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.stop(0)
        components.service.close()


def test_the_same_server_is_picked_however_the_body_is_cut() -> None:
    """A property over pieces of the body; one router answers all of them."""
    body = json.dumps(chat(STORY)).encode()

    async def ask(each: Fleet, pieces: Sequence[bytes]) -> str:
        stream = each.stream()
        await stream.send(request_headers())
        for number, piece in enumerate(pieces):
            await stream.send(request_body(piece, end=number == len(pieces) - 1))
        answer = await stream.read()
        assert await stream.read_body() == body
        await stream.ask(response_headers(200, "text/event-stream"))
        await stream.ask(response_body(b"data: {}\n\n"))
        await stream.half_close()
        await each.idle()
        return destination(answer)[0]

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        each = runner.run(stack.enter_async_context(fleet(ForwardedEngine(), ForwardedEngine(), ForwardedEngine())))
        home = runner.run(ask(each, [body]))

        @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.integers(0, len(body)), max_size=8))
        def holds(places: list[int]) -> None:
            edges = [0, *sorted(places), len(body)]
            pieces = [body[start:end] for start, end in pairwise(edges)]
            assert runner.run(ask(each, pieces)) == home

        holds()
        runner.run(stack.aclose())
