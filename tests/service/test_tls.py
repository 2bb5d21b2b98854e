"""TLS between real routers and a real engine: they believe each other or they say why not, and certificates are
replaced while streams go on.
"""

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from openai import OpenAI
from quire_proto.tls import CertKeyFiles, ClientTls

from tests.service.conftest import DEMO, MODEL, SMALL_POOLS
from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.ports import free_port
from tests.support.processes import Engine, Router, eventually, fetch


@dataclass(frozen=True)
class Secured:
    """An engine that asks for certificates, and who vouches for it and for routers."""

    engine: Engine
    authority: Authority
    files: CertKeyFiles
    folder: Path

    @contextmanager
    def router(self, tls: ClientTls | None) -> Iterator[Router]:
        """A router of this engine, until the block ends."""
        router = ForkedRouter(DEMO, [self.engine.address], self.folder, *flags_of(tls))
        try:
            yield router
        finally:
            assert router.stop() == 0, router.text


def flags_of(tls: ClientTls | None) -> list[str]:
    if tls is None:
        return []
    flags = ["--engine-tls-ca", str(tls.ca), "--engine-tls-name", str(tls.name)]
    if tls.identity is not None:
        flags += ["--engine-tls-cert", str(tls.identity.certificate), "--engine-tls-key", str(tls.identity.key)]
    return flags


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder)
    files = authority.issue(ENGINE_NAME)
    flags = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--tls-client-ca", str(authority.ca)]
    engine = ForkedEngine(DEMO, folder, *SMALL_POOLS, *flags, "--shutdown-delay", "0.2")
    try:
        yield Secured(engine.wait_ready(), authority, files, folder)
    finally:
        assert engine.stop() == 0, engine.text
        assert engine.text.index("shutting down: new requests are accepted for 0.2 more") < engine.text.index(
            "stopping:"
        )


@pytest.fixture
def client(secured: Secured) -> ClientTls:
    """What a router needs to be let in."""
    return ClientTls(secured.authority.ca, secured.authority.issue(ROUTER_NAME), ENGINE_NAME)


def openai_of(router: Router) -> OpenAI:
    return OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)


def shown_by(engine: Engine) -> bytes:
    """The certificate that whoever connects now is shown."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=10) as plain:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(plain) as secure:
            shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_certificates_are_replaced_during_a_stream(secured: Secured, client: ClientTls) -> None:
    with secured.router(client) as router:
        router.wait_ready()
        chunks = openai_of(router).completions.create(
            model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        texts = [next(chunks).choices[0].text]
        before = shown_by(secured.engine)
        secured.authority.issue(ENGINE_NAME)
        assert shown_by(secured.engine) != before
        texts += [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert len(texts) > 100
        assert router.text.count("is connected") == 1
    with secured.router(client) as successor:
        successor.wait_ready()
        answer = openai_of(successor).completions.create(model=MODEL, prompt="Once", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
    assert secured.engine.text.count("using new certificates") == 1


def test_a_router_with_a_refused_certificate_logs_why_and_holds_requests(
    secured: Secured, client: ClientTls, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    reasons = {
        ClientTls(stranger.ca, client.identity, ENGINE_NAME): "its certificate does not pass --engine-tls-ca",
        ClientTls(client.ca, client.identity, "other.test"): "its certificate is not for other.test",
        ClientTls(client.ca, None, ENGINE_NAME): "no certificate is shown to it (--engine-tls-cert)",
        ClientTls(client.ca, stranger.issue(ROUTER_NAME), ENGINE_NAME): "it may not accept the certificate",
        None: "as one does that speaks TLS (--engine-tls-ca)",
    }
    with ExitStack() as running:
        routers = {reason: running.enter_context(secured.router(tls)) for tls, reason in reasons.items()}
        for reason, router in routers.items():
            eventually(lambda router=router: "cannot be reached" in router.text, 60, router.text)
            (line,) = [line for line in router.text.splitlines() if "cannot be reached" in line]
            assert f"WARNING quire_router.engines.channel: engine {secured.engine.address} " in line
            assert reason in line
            assert fetch(router.metrics_port, "/health")[0] == 503
            assert fetch(router.metrics_port, "/ready")[0] == 200


def test_an_engine_whose_certificate_expires_is_refused_by_new_connections(secured: Secured, client: ClientTls) -> None:
    with secured.router(client) as router:
        router.wait_ready()
        secured.authority.issue(ENGINE_NAME, expired=True)
        with secured.router(client) as late:
            eventually(lambda: "certificate has expired" in late.text, 60, late.text)
            assert fetch(late.http_port, "/health")[0] == 503
            answer = openai_of(router).completions.create(model=MODEL, prompt="Once", max_tokens=3)
            assert answer.choices[0].finish_reason == "length"
            secured.authority.issue(ENGINE_NAME)
            late.wait_ready()


@pytest.mark.soak
@pytest.mark.parametrize("first", ["router", "engine"])
def test_tls_is_turned_on_and_off_with_one_engine_and_no_answer_is_lost(tmp_path: Path, first: str) -> None:
    """Each step replaces the router and the only engine, one after the other, while answers are asked for."""
    authority = Authority(tmp_path)
    engine_files, router_files = authority.issue(ENGINE_NAME), authority.issue(ROUTER_NAME)
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-letters")
    asked = ["--engine-token-file", str(token)]
    engine_tls = ["--tls-cert", str(engine_files.certificate), "--tls-key", str(engine_files.key)]
    engine_tls += ["--tls-client-ca", str(authority.ca)]
    router_tls = flags_of(ClientTls(authority.ca, router_files, ENGINE_NAME))
    states = {
        "plain": ([], []),
        "optional": ([*engine_tls, "--tls-optional"], [*router_tls, "--engine-tls-optional"]),
        "tls": (engine_tls, router_tls),
    }
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]

    def start_engine(state: str, number: int) -> Engine:
        flags = (*SMALL_POOLS, *asked, *states[state][0])
        return ForkedEngine(DEMO, tmp_path, *flags, port=ports[number % 2]).wait_ready()

    def start_router(state: str) -> Router:
        router = ForkedRouter(DEMO, addresses, tmp_path, *asked, *states[state][1])
        return router.wait_ready()

    engine, router = start_engine("plain", 0), start_router("plain")
    answers: list[str] = []
    stopped = Event()

    def ask() -> None:
        while not stopped.is_set():
            answer = openai_of(router).completions.create(model=MODEL, prompt="Once", max_tokens=40, seed=1)
            answers.append(answer.choices[0].text)

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask) for _ in range(3)]
        try:
            for number, state in enumerate(("optional", "tls", "optional", "plain"), 1):
                for part in ("router", "engine") if first == "router" else ("engine", "router"):
                    if part == "router":
                        former, router = router, start_router(state)
                        time.sleep(0.5)  # what was asked for at the former one has begun
                        assert former.stop() == 0
                    else:
                        old, engine = engine, start_engine(state, number)
                        connected = f"engine {addresses[number % 2]} is connected"
                        eventually(lambda: connected in router.text)  # noqa: B023 - called at once
                        assert old.stop() == 0
                    seen = len(answers)
                    eventually(lambda: len(answers) > seen + 3 or any(each.done() for each in asking))  # noqa: B023
        finally:
            stopped.set()
    for each in asking:
        each.result()
    assert len({*answers}) == 1, "an answer has changed"
    assert router.stop() == 0
    assert engine.stop() == 0
