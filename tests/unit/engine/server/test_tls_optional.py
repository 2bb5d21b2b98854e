"""While a fleet changes from plain text to TLS or back, each router reaches each engine that is one step away."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from quire.v1.engine_pb2 import DescribeRequest
from quire.v1.engine_pb2_grpc import EngineStub
from quire_engine.config import EngineConfig
from quire_engine.server.connection_mux import ConnectionMux
from quire_proto.cli import read_settings
from quire_proto.tls import ClientTls, ServerTls
from quire_router.engines.connection import EngineConnection
from quire_router.engines.settings import ConnectionSettings

from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority
from tests.support.waiting import until
from tests.unit.engine.server.test_drain import served

STATES = ("plain", "optional", "tls")
QUICK = ConnectionSettings(backoff=0.01, max_backoff=0.02)


@pytest.fixture(autouse=True)
def quiet_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def flags(state: str, authority: Authority) -> dict[str, object]:
    """The engine's."""
    if state == "plain":
        return {}
    files = ServerTls(authority.issue(ENGINE_NAME), authority.ca)
    named = {"tls_cert": files.identity.certificate, "tls_key": files.identity.key, "tls_client_ca": files.client_ca}
    return {**named, "tls_optional": state == "optional"}


def settings(state: str, authority: Authority) -> ConnectionSettings:
    """The router's."""
    tls = ClientTls(authority.ca, authority.issue(ROUTER_NAME), ENGINE_NAME, optional=state == "optional")
    return replace(QUICK, tls=None if state == "plain" else tls)


@pytest.mark.parametrize("state", STATES)
async def test_a_router_one_step_away_reaches_the_engine(
    authority: Authority, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step of a change is between neighbours, of engines and routers in any order."""
    async with served(settings=settings(state, authority), **flags(state, authority)) as (engine, _):
        assert len(await engine.tokens("same", 4)) == 4
        for other in STATES:
            caplog.clear()
            link = EngineConnection(engine.link.address, settings(other, authority))
            link.start()
            if abs(STATES.index(other) - STATES.index(state)) <= 1:
                await until(lambda link=link: link.ready)
                in_plain_text = "using plain text (--engine-tls-optional)" in caplog.text
                assert in_plain_text == (state == "plain" and other == "optional")
            else:
                await until(lambda: "cannot be reached" in caplog.text)
                assert not link.ready
            await link.close()


@pytest.mark.parametrize(
    ("host", "asked"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]
)
async def test_the_port_is_reached_over_ipv4_and_ipv6(host: str, asked: str) -> None:
    mux = ConnectionMux()
    try:
        _, writer = await asyncio.open_connection(asked, await mux.listen(host, 0))
        writer.close()
    finally:
        mux.close()


async def test_a_port_that_is_taken_leaves_no_folder_behind() -> None:
    first, second = ConnectionMux(), ConnectionMux()
    port = await first.listen("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await second.listen("127.0.0.1", port)
    first.close()
    assert not any(Path(mux.tls_address.removeprefix("unix:")).parent.exists() for mux in (first, second))


async def test_tls_on_such_a_port_still_asks_for_the_certificate(authority: Authority) -> None:
    async with served(settings=settings("tls", authority), **flags("optional", authority)) as (engine, _):
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        options = [("grpc.ssl_target_name_override", ENGINE_NAME)]
        async with grpc.aio.secure_channel(engine.link.address, credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await EngineStub(channel).Describe(DescribeRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_plain_text_beside_tls_needs_a_token_where_others_reach_it(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = flags("optional", authority)
    given = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if name != "tls_optional"]
    given += ["--model", str(tmp_path), "--host", "0.0.0.0"]
    assert read_settings(EngineConfig, given).tls is not None
    with pytest.raises(SystemExit):
        read_settings(EngineConfig, [*given, "--tls-optional"])
    assert "would let anyone use the engine" in capsys.readouterr().err
    (tmp_path / "token").write_text("a-token-of-enough-letters")
    assert read_settings(
        EngineConfig, [*given, "--tls-optional", "--engine-token-file", str(tmp_path / "token")]
    ).tls_optional
    with pytest.raises(SystemExit):
        read_settings(EngineConfig, ["--model", str(tmp_path), "--tls-optional"])
    assert "--tls-optional needs --tls-cert" in capsys.readouterr().err
