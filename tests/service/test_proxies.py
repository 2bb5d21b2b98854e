"""Behind real proxies, nginx and HAProxy: nothing of a stream is held back, no silence cuts one, refusals arrive as the
router said them, and a client that hangs up behind a proxy is gone for the engine as well.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.certificates import Authority
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Router, eventually
from tests.support.proxies import CURL, HAPROXY, NGINX, HAProxy, Nginx, Post, Proxy

NEEDED = {"nginx": NGINX, "haproxy": HAPROXY, "curl": CURL}
MISSING = [name for name, path in NEEDED.items() if path is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: not here; scripts/proxies.sh installs it")

KEEPALIVE = 0.2  # seconds; the timeouts of the proxies by themselves are 1.5
SILENCE = 10  # keep-alives, which together take longer than these timeouts
MAX_BODY = 512 << 10
LONG = 400  # tokens, far more than are made between a stream's first one and a freeze
TOO_LONG = 1900
TOLD = [{"role": "user", "content": "Tell me a story."}]


@dataclass(frozen=True)
class Route:
    """A stream of the REST API: what is asked, and the text that one of its events adds."""

    path: str
    asks: Mapping[str, Any]
    text: Callable[[dict[str, Any]], str]

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "stream": True, "temperature": 0, **self.asks, **fields}


def _if_type(event: dict[str, Any], kind: str, read: Callable[[dict[str, Any]], str]) -> str:
    return read(event) if event["type"] == kind else ""


ROUTES = {
    "completions": Route(
        "/v1/completions",
        {"prompt": "Once", "max_tokens": LONG, "ignore_eos": True},
        lambda event: event["choices"][0]["text"],
    ),
    "chat": Route(
        "/v1/chat/completions",
        {"messages": TOLD, "max_tokens": 20},
        lambda event: event["choices"][0]["delta"].get("content", ""),
    ),
    "responses": Route(
        "/v1/responses",
        {"input": TOLD, "max_output_tokens": 20},
        lambda event: _if_type(event, "response.output_text.delta", lambda each: each["delta"]),
    ),
    "messages": Route(
        "/v1/messages",
        {"messages": TOLD, "max_tokens": 20},
        lambda event: _if_type(event, "content_block_delta", lambda each: each["delta"]["text"]),
    ),
}
GENERATE = pb.GenerateRequest(
    model=MODEL, text="Once", sampling={"temperature": 0, "max_tokens": LONG, "ignore_eos": True}
)


class Stream:
    """The answer to a request that is read as it comes."""

    def __init__(self, post: Post, route: Route) -> None:
        self.post, self._route = post, route
        self.text = ""

    def silences(self, count: int) -> None:
        """Returns once so many keep-alives have come one after another."""
        found = 0
        while found < count:
            line = self.post.line()
            if line.startswith(":") or '"type":"ping"' in line:
                found += 1
            elif line != "event: ping":
                found = 0
                self._add(line)

    def begin(self) -> "Stream":
        """Returns with the first text."""
        while not self.text:
            self._add(self.post.line())
        return self

    def end(self) -> str:
        """The text of the whole answer."""
        status, rest = self.post.answer()
        for line in rest.splitlines():
            self._add(line)
        assert status == 200, rest
        return self.text

    def _add(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            self.text += self._route.text(event) if event.get("choices", True) else ""


@dataclass(frozen=True)
class Backend:
    engine: ForkedEngine
    router: Router

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing is generated meanwhile."""
        self.engine.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.engine.signal(signal.SIGCONT)

    def in_progress(self) -> float:
        return self.router.metric("quire_in_flight_requests")

    def running(self) -> float:
        return self.engine.metric("quire_engine_running_sequences")

    def generated(self) -> float:
        return self.engine.metric("quire_engine_generation_tokens_total")


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = tmp_path_factory.mktemp("behind-proxies")
    engine = ForkedEngine(DEMO, folder, *FLOAT32, *SMALL_POOLS)
    flags = (f"--sse-keepalive-seconds={KEEPALIVE}", f"--grpc-keepalive-seconds={KEEPALIVE}")
    router = ForkedRouter(DEMO, [engine.address], folder, *flags, f"--max-body-bytes={MAX_BODY}", "--hold-timeout=60")
    try:
        engine.wait_ready()
        router.wait_ready()
        yield Backend(engine, router)
    finally:
        codes = [router.stop(), engine.stop()]
    assert codes == [0, 0], (router.text, engine.text)


@pytest.fixture(scope="module")
def proxies(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Proxy]]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    started = {}
    for kind in (Nginx, HAProxy):
        for least in (False, True):
            name = f"{kind.__name__}{' by itself' if least else ''}"
            folder = tmp_path_factory.mktemp(f"proxy-{len(started)}")
            started[name] = kind(backend.router, authority, folder, least=least)
    try:
        for proxy in started.values():
            proxy.wait_ready()
        yield started
    finally:
        for proxy in started.values():
            proxy.stop()


@pytest.fixture
def proxy(proxies: dict[str, Proxy], request: pytest.FixtureRequest) -> Proxy:
    return proxies[request.param]


AS_DOCUMENTED = ("Nginx", "HAProxy")
EACH = (*AS_DOCUMENTED, "Nginx by itself", "HAProxy by itself")
each_proxy = pytest.mark.parametrize("proxy", EACH, indirect=True)
documented = pytest.mark.parametrize("proxy", AS_DOCUMENTED, indirect=True)


@pytest.fixture(scope="module")
def undisturbed(backend: Backend) -> dict[str, str]:
    """The text of each route, as the router itself sends it."""
    url = backend.router.url
    return {
        name: Stream(Post(f"{url}{route.path}", route.body(), "http1.1", None), route).end()
        for name, route in ROUTES.items()
    }


def opened(proxy: Proxy, name: str, version: str) -> Stream:
    route = ROUTES[name]
    return Stream(proxy.post(route.path, route.body(), version), route)


class Begun:
    """The same long answer in each version of HTTP, and over gRPC."""

    def __init__(self, proxy: Proxy, channel: grpc.Channel) -> None:
        self.streams = [opened(proxy, "completions", version) for version in proxy.versions]
        self._call = InferenceStub(channel).Generate(GENERATE, timeout=120)
        self._said = ""

    def begin(self) -> None:
        """Returns when all have their first text."""
        for stream in self.streams:
            stream.begin()
        while not self._said:
            self._said += next(self._call).text

    def silences_of_call(self, count: int) -> str:
        """Returns what was said before so many empty messages have come one after another."""
        found = 0
        while found < count:
            message = next(self._call)
            found = 0 if message.token_ids else found + 1
            self._said += message.text
        return self._said

    def ends(self) -> set[str]:
        """The texts of all, whole."""
        said = self._said + "".join(message.text for message in self._call)
        return {said, *(stream.end() for stream in self.streams)}


@each_proxy
def test_streams_arrive_at_once_and_outlast_the_proxys_timeouts(
    proxy: Proxy, backend: Backend, undisturbed: dict[str, str]
) -> None:
    """Keep-alives that come in a silence are the proof of both: they are behind all that was sent before."""
    count = 2 if proxy.ca else SILENCE
    names = ("chat", "responses", "messages")
    with proxy.channel() as channel:
        with backend.frozen():
            begun = Begun(proxy, channel)
            others = {name: opened(proxy, name, proxy.versions[-1]) for name in names}
            for stream in (*begun.streams, *others.values()):
                stream.silences(count)
            assert begun.silences_of_call(count) == ""
        begun.begin()
        with backend.frozen():
            for stream in begun.streams:
                stream.silences(count)
            begun.silences_of_call(count)
        assert begun.ends() == {undisturbed["completions"]}
        assert {name: stream.end() for name, stream in others.items()} == {name: undisturbed[name] for name in names}


def hang_up_on_rest(proxy: Proxy, version: str, *, stream: bool, wait: Callable[[Stream], None]) -> None:
    route = ROUTES["completions"]
    client = Stream(proxy.post(route.path, route.body(max_tokens=TOO_LONG, stream=stream), version), route)
    wait(client)
    client.post.hang_up()


@each_proxy
def test_a_client_that_hangs_up_in_its_stream_is_not_worked_for(proxy: Proxy, backend: Backend) -> None:
    eventually(lambda: backend.in_progress() == backend.running() == 0)
    before = backend.generated()
    for version in proxy.versions:
        hang_up_on_rest(proxy, version, stream=True, wait=Stream.begin)
    with proxy.channel() as channel:
        request = pb.GenerateRequest()
        request.CopyFrom(GENERATE)
        request.sampling.max_tokens = TOO_LONG
        call = InferenceStub(channel).Generate(request)
        next(call)
        call.cancel()
    eventually(lambda: backend.running() == 0, message="a request runs on")
    assert backend.generated() - before < TOO_LONG * (len(proxy.versions) + 1) / 2


@documented
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_while_it_waits_is_not_waited_for(proxy: Proxy, backend: Backend, stream: bool) -> None:
    eventually(lambda: backend.in_progress() == 0)
    with backend.frozen():
        for version in proxy.versions:
            hang_up_on_rest(
                proxy, version, stream=stream, wait=lambda _: eventually(lambda: backend.in_progress() == 1)
            )
            eventually(lambda: backend.in_progress() == 0, message=f"the router works on for a client of {version}")


def padded(size: int) -> bytes:
    """A request for one token, of so many bytes."""
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()
    return body + b" " * (size - len(body))


@each_proxy
def test_a_body_above_its_limit_is_refused_by_the_router(proxy: Proxy) -> None:
    for version in proxy.versions:
        assert proxy.post("/v1/completions", padded(MAX_BODY), version).answer()[0] == 200
        for _ in range(4):
            assert_refused(proxy, MAX_BODY + 1, version)
    with proxy.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        next(InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, text="x" * (MAX_BODY + 1))))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def assert_refused(proxy: Proxy, size: int, version: str) -> None:
    for left in reversed(range(4)):
        try:
            status, body = proxy.post("/v1/completions", padded(size), version).answer()
        except AssertionError:
            # HAProxy may reset a connection whose client still sends, and which has not read the answer yet.
            if not (left and isinstance(proxy, HAProxy)):
                raise
        else:
            break
    assert status == 413
    error = json.loads(body)["error"]
    assert error["code"] == "body_too_large"
    assert str(MAX_BODY) in error["message"]


@each_proxy
def test_a_body_far_above_the_limit_is_refused_by_the_router_or_by_an_nginx_with_default_limits(proxy: Proxy) -> None:
    for version in proxy.versions:
        if isinstance(proxy, Nginx) and proxy.ca is None:
            status, page = proxy.post("/v1/completions", padded(16 * MAX_BODY), version).answer()
            assert (status, "413 Request Entity Too Large" in page) == (413, True)
        else:
            assert_refused(proxy, 16 * MAX_BODY, version)


@documented
def test_a_reload_of_the_proxy_ends_no_stream(proxy: Proxy, backend: Backend, undisturbed: dict[str, str]) -> None:
    with proxy.channel() as channel:
        with backend.frozen():
            begun = Begun(proxy, channel)
        begun.begin()
        with backend.frozen():
            before = proxy.reload()
        assert opened(proxy, "chat", "http1.1").end() == undisturbed["chat"]
        assert begun.ends() == {undisturbed["completions"]}
    eventually(lambda: not before & proxy.workers, message="there was no reload")
