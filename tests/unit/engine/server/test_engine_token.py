"""The engine's port asks each call for its token, whatever its method, and a router sends it with each."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import engine_pb2
from quire_engine.config import EngineConfig
from quire_proto import engine_token
from quire_proto.cli import read_settings
from quire_proto.engine_token import EngineTokens, TokenError, Tokens, read_tokens
from quire_router.engines.settings import ConnectionSettings

from tests.support.waiting import until
from tests.unit.engine.server.test_drain import Served, served

TOKEN, NEXT = "a-token-of-enough-letters", "the-token-that-comes-next"
REFUSED = grpc.StatusCode.UNAUTHENTICATED
EXPIRED, LATER = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))


@pytest.fixture(autouse=True)
def reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_token, "RELOAD_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens", f"{TOKEN}\n")


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def methods() -> Iterator[str]:
    """Each method of each service of the port, and one that is not there."""
    files = (engine_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for service in (service for each in files for service in each.services_by_name.values()):
        yield from (f"/{service.full_name}/{name}" for name in service.methods_by_name)
    yield "/quire.v1.Engine/Unknown"


async def status_of(engine: Served, method: str, *headers: str) -> grpc.StatusCode:
    """What a call with an empty message comes to that has these ``authorization`` headers.

    The message goes with the headers, as for a method with one request. As a stream it would go after them, and where
    the refusal comes first, gRPC's client says INTERNAL ("Internal error from Core") instead of what the engine said.
    """
    async with grpc.aio.insecure_channel(f"127.0.0.1:{engine.port}") as channel:
        call = channel.unary_stream(method)(b"", metadata=[("authorization", each) for each in headers])
        with suppress(grpc.aio.AioRpcError):
            if await call.read() is not grpc.aio.EOF:
                return grpc.StatusCode.OK  # also where more would come
        return await call.code()


async def test_every_method_of_the_port_asks_for_the_token(file: Path) -> None:
    settings = ConnectionSettings(tokens=EngineTokens(file))
    async with served(engine_token_file=file, settings=settings) as (engine, _):
        assert len(await engine.tokens("a", 4)) == 4
        assert await engine.link.inspect() is not None
        every = list(methods())
        assert {"/quire.v1.Engine/Session", "/quire.v1.Engine/Sleep", "/grpc.health.v1.Health/Check"} <= {*every}
        for method in every:
            for headers in ((), ("Bearer wrong",), (TOKEN,), (f"Bearer {TOKEN}", f"Bearer {TOKEN}")):
                assert await status_of(engine, method, *headers) is REFUSED, method
            assert await status_of(engine, method, f"Bearer {TOKEN}") is not REFUSED, method


async def test_tokens_are_replaced_without_a_restart_and_open_streams_stay(file: Path) -> None:
    settings = ConnectionSettings(tokens=EngineTokens(file))
    async with served(engine_token_file=file, settings=settings) as (engine, _):
        write(file, f"# the new one is sent, and both are taken\n{NEXT}\n{TOKEN}\n")
        assert await status_of(engine, "/quire.v1.Engine/Describe", f"Bearer {TOKEN}") is not REFUSED
        assert settings.tokens is not None
        assert settings.tokens.metadata == (("authorization", f"Bearer {NEXT}"),)
        write(file, NEXT)
        assert await status_of(engine, "/quire.v1.Engine/Describe", f"Bearer {TOKEN}") is REFUSED
        assert len(await engine.tokens("a", 4)) == 4
        assert await engine.link.inspect() is not None, "a later call of the same connection has the new token"
        write(file, "short")
        assert await status_of(engine, "/quire.v1.Engine/Describe", f"Bearer {NEXT}") is not REFUSED


async def test_routers_of_a_release_without_tokens_are_let_in_until_the_file_says(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, f"{TOKEN}\noptional-until {LATER.isoformat()}\n")
    async with served(engine_token_file=file) as (engine, _):
        assert engine.link.settings.tokens is None
        assert len(await engine.tokens("old", 4)) == 4
        assert await status_of(engine, "/quire.v1.Engine/Describe", "Bearer wrong") is REFUSED
        assert len([each for each in caplog.records if "accepted a caller without a token" in each.message]) == 1
        write(file, f"{TOKEN}\noptional-until {EXPIRED.isoformat()}\n")
        assert await status_of(engine, "/quire.v1.Engine/Describe") is REFUSED


async def test_a_router_says_why_it_is_not_let_in(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = ConnectionSettings(tokens=EngineTokens(file))
    async with served(engine_token_file=file, settings=settings) as (engine, _):
        other = write(file.with_name("other"), NEXT)
        for tokens, reason in ((None, "This engine asks for a token"), (EngineTokens(other), "none of the engine's")):
            caplog.clear()
            link = type(engine.link)(engine.link.address, ConnectionSettings(backoff=0.01, tokens=tokens))
            link.start()
            await until(lambda: any(each.levelname == "WARNING" for each in caplog.records))
            await link.close()
            assert "it does not let this router in: " in caplog.text
            assert reason in caplog.text


@given(
    tokens=st.lists(st.text("!Aaz09~", min_size=16, max_size=20), min_size=1, max_size=3, unique=True), data=st.data()
)
def test_a_header_is_accepted_if_and_only_if_it_has_one_of_the_tokens(tokens: list[str], data: st.DataObject) -> None:
    held = Tokens(tuple(token.encode() for token in tokens))
    sent = data.draw(st.one_of(st.sampled_from(tokens), st.text(max_size=20)))
    scheme = data.draw(st.sampled_from(["Bearer ", "bearer ", "Basic ", ""]))
    assert held.accept([scheme + sent]) == (scheme == "Bearer " and sent in tokens)
    assert not held.accept([])
    assert not held.accept([f"Bearer {tokens[0]}"] * 2)


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ("", "has no token"),
        ("# nothing\n\n", "has no token"),
        ("short\n", "has a line that is not a token"),
        (f"{TOKEN}\nwith a space of any\n", "has a line that is not a token"),
        (f"{TOKEN}\noptional-until soon\n", "optional-until without a time"),
        (f"{TOKEN}\noptional-until 2027-01-31T12:00:00\n", "optional-until without a time"),
        ("x" * 20_000, "has more than 16 KiB"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, contents: str, problem: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(contents)
    with pytest.raises(TokenError, match=problem) as refusal:
        read_tokens(file)
    assert str(refusal.value).startswith(str(file))


def flags(file: Path, *more: str) -> Sequence[str]:
    return ["--model", str(file.parent), *more]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "engine.example", "", "127.0.0.1.example"])
def test_an_address_that_others_reach_needs_a_token_or_certificates(
    file: Path, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(EngineConfig, flags(file, "--host", host))
    assert "would let anyone use the engine" in capsys.readouterr().err
    assert read_settings(EngineConfig, flags(file, "--host", host, "--insecure")).host == host
    assert read_settings(EngineConfig, flags(file, "--host", host, "--engine-token-file", str(file))).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_none(file: Path, host: str) -> None:
    assert not read_settings(EngineConfig, flags(file, "--host", host)).insecure


def test_insecure_and_a_token_exclude_each_other(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(EngineConfig, flags(file, "--insecure", "--engine-token-file", str(file)))
    assert "--insecure excludes" in capsys.readouterr().err
