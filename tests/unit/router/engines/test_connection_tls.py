"""Links to engines over TLS: whom they believe, what they say of whom they do not, and that nothing is ever sent in
plain text.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from quire_proto.certificates import ReloadingServerCredentials
from quire_proto.tls import CertKeyFiles, ClientTls, ServerTls
from quire_router.engines.connection import EngineConnection
from quire_router.engines.settings import ConnectionSettings

from tests.support.certificates import ENGINE_NAME, ROUTER_NAME, Authority
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until
from tests.unit.router.engines.test_connection import rest, submit, submitted

Meeting = tuple[ScriptedEngine, EngineConnection]
QUICK = ConnectionSettings(backoff=0.01, max_backoff=0.02, connect_timeout=5)


@pytest.fixture(autouse=True)
def quiet_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """An authority that nobody believes, which issues for the same names."""
    (tmp_path / "strange").mkdir()
    return Authority(tmp_path / "strange", "stranger")


@pytest.fixture
def server(authority: Authority) -> ServerTls:
    """An engine's files, which asks routers for a certificate."""
    return ServerTls(authority.issue(ENGINE_NAME), authority.ca)


@pytest.fixture
def client(authority: Authority) -> ClientTls:
    return ClientTls(authority.ca, authority.issue(ROUTER_NAME), ENGINE_NAME)


@asynccontextmanager
async def meeting(
    server: ServerTls | None, client: ClientTls | None
) -> AsyncIterator[tuple[ScriptedEngine, EngineConnection]]:
    """A link to an engine, each with its own idea of TLS."""
    engine = ScriptedEngine(credentials=None if server is None else ReloadingServerCredentials(server).credentials())
    link = EngineConnection(await engine.start(), replace(QUICK, tls=client))
    link.start()
    try:
        yield engine, link
    finally:
        await link.close()
        await engine.stop()


async def warning_of(link: EngineConnection, caplog: pytest.LogCaptureFixture) -> str:
    """What the link warns of. It is not patient with it, as it is with engines that start."""
    assert link.settings.start_patience > 60
    await until(lambda: any(record.levelno == logging.WARNING for record in caplog.records))
    assert not link.ready
    assert link.description is None
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return record.getMessage()


async def test_both_peers_authenticate_and_tokens_flow(server: ServerTls, client: ClientTls) -> None:
    async with meeting(server, client) as (engine, link):
        await until(lambda: link.ready)
        stream = await submitted(engine, link, submit("a"))
        engine.send(output("a", [5, 6], 0, STOP))
        assert (await rest(stream))[0] == [5, 6]


async def test_a_router_without_a_certificate_is_accepted_where_none_is_required(
    server: ServerTls, client: ClientTls
) -> None:
    async with meeting(replace(server, client_ca=None), replace(client, identity=None)) as (_, link):
        await until(lambda: link.ready)


async def test_without_a_server_name_the_certificate_must_match_the_address(
    authority: Authority, server: ServerTls, client: ClientTls
) -> None:
    by_address = replace(server, identity=authority.issue("127.0.0.1"))
    async with meeting(by_address, replace(client, name=None)) as (_, link):
        await until(lambda: link.ready)


async def refused(
    server: ServerTls | None, client: ClientTls | None, caplog: pytest.LogCaptureFixture, because: str
) -> None:
    async with meeting(server, client) as (engine, link):
        warning = await warning_of(link, caplog)
        assert warning == f"engine {engine.address} cannot be reached: {because}"
        assert engine.opened.empty()


async def test_an_engine_of_another_authority_is_refused(
    stranger: Authority, server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture
) -> None:
    because = "its certificate does not pass --engine-tls-ca (unable to get local issuer certificate)"
    await refused(replace(server, identity=stranger.issue(ENGINE_NAME)), client, caplog, because)


async def test_an_engine_whose_certificate_has_expired_is_refused(
    authority: Authority, server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture
) -> None:
    expired = replace(server, identity=authority.issue(ENGINE_NAME, expired=True))
    await refused(expired, client, caplog, "its certificate does not pass --engine-tls-ca (certificate has expired)")


@pytest.mark.parametrize(("name", "told"), [("other.test", "other.test"), (None, "its address")])
async def test_an_engine_of_another_name_is_refused(
    server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture, name: str | None, told: str
) -> None:
    because = f"its certificate is not for {told} (--engine-tls-name says for what it has to be)"
    await refused(server, replace(client, name=name), caplog, because)


async def test_a_router_without_a_certificate_is_refused_where_one_is_required(
    server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture
) -> None:
    because = "it closes the connection at once; no certificate is shown to it (--engine-tls-cert)"
    await refused(server, replace(client, identity=None), caplog, because)


@pytest.mark.parametrize("of", ["stranger", "past"])
async def test_a_router_with_a_bad_certificate_is_refused(
    authority: Authority,
    stranger: Authority,
    server: ServerTls,
    client: ClientTls,
    caplog: pytest.LogCaptureFixture,
    of: str,
) -> None:
    shown = stranger.issue(ROUTER_NAME) if of == "stranger" else authority.issue(ROUTER_NAME, expired=True)
    because = "it closes the connection at once; it may not accept the certificate (--engine-tls-cert)"
    await refused(server, replace(client, identity=shown), caplog, because)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_router_without_tls_is_refused(server: ServerTls, caplog: pytest.LogCaptureFixture, asks: bool) -> None:
    because = "it closes the connection at once, as one does that speaks TLS (--engine-tls-ca)"
    await refused(server if asks else replace(server, client_ca=None), None, caplog, because)


async def test_an_engine_without_tls_is_refused(client: ClientTls, caplog: pytest.LogCaptureFixture) -> None:
    because = "it does not speak TLS (--tls-cert of the engine), and plain text is not tried"
    await refused(None, client, caplog, because)


async def test_nothing_but_handshakes_is_ever_sent(client: ClientTls, caplog: pytest.LogCaptureFixture) -> None:
    """An engine may answer whatever it likes, or nothing."""
    begun: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(await reader.read(3))
        if len(begun) % 2:
            writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")  # as an engine without TLS begins
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    link = EngineConnection(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", replace(QUICK, tls=client))
    link.start()
    try:
        await until(lambda: len(begun) >= 6)
    finally:
        await link.close()
        listener.close()
    assert {each[:2] for each in begun} == {b"\x16\x03"}  # a handshake, of some version of TLS


# Files that are replaced


async def test_new_files_count_from_the_next_connection_on(
    stranger: Authority, server: ServerTls, client: ClientTls, authority: Authority, tmp_path: Path
) -> None:
    """Both sides go over to another authority; a stream that is open notices nothing."""
    async with meeting(server, client) as (engine, link):
        await until(lambda: link.ready)
        stream = await submitted(engine, link, submit("a"))
        for name, files in ((ENGINE_NAME, server.identity), (ROUTER_NAME, client.identity)):
            replace_by(stranger.issue(name), files)
        stranger.write_ca(authority.ca)
        engine.send(output("a", [1], 0))
        assert (await anext(stream)).token_ids == [1]
        engine.break_stream()
        engine.send(output("a", [2], 1, STOP))
        assert (await rest(stream))[0] == [2]
        assert link.ready


async def test_a_refused_connection_succeeds_once_its_files_are_right(
    stranger: Authority, server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = stranger.issue(ROUTER_NAME)
    async with meeting(server, replace(client, identity=wrong)) as (_, link):
        await warning_of(link, caplog)
        replace_by(client.identity, wrong)
        await until(lambda: link.ready)


async def test_an_unreadable_certificate_file_is_named(
    server: ServerTls, client: ClientTls, caplog: pytest.LogCaptureFixture
) -> None:
    saved = client.ca.read_bytes()
    async with meeting(server, replace(client, ca=client.ca.with_name("routers.pem"))) as (engine, link):
        because = f"{link.settings.tls.ca} cannot be read: No such file or directory"
        assert await warning_of(link, caplog) == f"engine {engine.address} cannot be reached: {because}"
        link.settings.tls.ca.write_bytes(saved)
        await until(lambda: link.ready)


async def test_an_engine_keeps_its_certificate_while_its_files_are_invalid(
    server: ServerTls, client: ClientTls, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with meeting(server, client) as (engine, link):
        await until(lambda: link.ready)
        replace_by(replace(authority.issue("other.test"), key=server.identity.key), server.identity)
        for _ in range(3):
            engine.break_stream()
            await asyncio.wait_for(engine.opened.get(), 10)
            await until(lambda: link.ready)
    (warning,) = [record.getMessage() for record in caplog.records if "stay in use" in record.getMessage()]
    assert warning.startswith(f"{server.identity.key} is not the key of {server.identity.certificate}:")


def replace_by(new: CertKeyFiles | None, old: CertKeyFiles | None) -> None:
    """Puts new contents into files, without new names."""
    assert new is not None
    assert old is not None
    old.certificate.write_bytes(new.certificate.read_bytes())
    old.key.write_bytes(new.key.read_bytes())
