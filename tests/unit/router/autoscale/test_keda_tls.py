"""KEDA's port over TLS with a gRPC client like KEDA's: which clients are answered, and certificate rotation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from quire.keda.externalscaler_pb2 import GetMetricsRequest, ScaledObjectRef
from quire.keda.externalscaler_pb2_grpc import ExternalScalerStub
from quire_proto.tls import CertKeyFiles, ServerTls, TlsError
from quire_router.autoscale.keda import KedaServer, Scaler

from tests.support.autoscalers import KnownLoad
from tests.support.certificates import Authority

NAME, KEDA = "quire-router.test", "keda-operator.test"
TRIGGER = ScaledObjectRef(scalerMetadata={"model": "llama"})
QUESTION = GetMetricsRequest(scaledObjectRef=TRIGGER, metricName="quire_load")


@pytest.fixture(autouse=True)
def quiet_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority) -> ServerTls:
    return ServerTls(authority.issue(NAME), authority.ca)


@asynccontextmanager
async def serving(tls: ServerTls, load: KnownLoad | None = None) -> AsyncIterator[int]:
    """The port of a router that tells ``load``, or 7."""
    server = KedaServer(Scaler(load or KnownLoad(llama=7), {"llama": "llama"}), "127.0.0.1", 0, tls)
    await server.start()
    yield server.port
    await server.stop()


def channel(port: int, ca: Path, shown: CertKeyFiles | None = None) -> grpc.aio.Channel:
    identity = {} if shown is None else {"private_key": shown.key.read_bytes()}
    chain = {} if shown is None else {"certificate_chain": shown.certificate.read_bytes()}
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), **identity, **chain)
    # A pool of its own, or the library would take up a connection that was refused a moment ago.
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)


async def load_or_none(channel: grpc.aio.Channel) -> int | None:
    """The load; None if the call fails."""
    async with channel:
        try:
            answer = await ExternalScalerStub(channel).GetMetrics(QUESTION, timeout=10)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None
    return int(answer.metricValues[0].metricValueFloat)


async def test_keda_with_a_certificate_is_answered_and_others_are_not(authority: Authority, server: ServerTls) -> None:
    (strange := server.identity.certificate.parent / "strange").mkdir()
    stranger = Authority(strange, "stranger")
    async with serving(server) as port:
        assert await load_or_none(channel(port, authority.ca, authority.issue(KEDA))) == 7
        assert await load_or_none(channel(port, authority.ca)) is None
        assert await load_or_none(channel(port, authority.ca, stranger.issue(KEDA))) is None
        assert await load_or_none(channel(port, authority.ca, authority.issue(KEDA, expired=True))) is None
        assert await load_or_none(channel(port, stranger.ca, authority.issue(KEDA))) is None, "KEDA does not believe it"
        assert await load_or_none(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) is None


async def test_without_an_authority_for_clients_any_client_is_answered(authority: Authority, server: ServerTls) -> None:
    async with serving(ServerTls(server.identity)) as port:
        assert await load_or_none(channel(port, authority.ca)) == 7
        assert await load_or_none(grpc.aio.insecure_channel(f"127.0.0.1:{port}")) is None


async def test_certificates_are_replaced_while_streams_go_on(authority: Authority, server: ServerTls) -> None:
    (folder := authority.ca.parent / "new").mkdir()
    new = Authority(folder)
    load = KnownLoad(llama=7)
    async with serving(server, load) as port, channel(port, authority.ca, authority.issue(KEDA)) as old:
        stream = ExternalScalerStub(old).StreamIsActive(TRIGGER)
        async with asyncio.timeout(10):
            assert (await stream.read()).result is True
        fresh = new.issue(NAME)
        server.identity.key.write_bytes(fresh.key.read_bytes())
        assert await load_or_none(channel(port, authority.ca, authority.issue(KEDA))) == 7, "half of a pair is not used"
        server.identity.certificate.write_bytes(fresh.certificate.read_bytes())
        new.write_ca(authority.ca)
        assert await load_or_none(channel(port, new.ca, new.issue(KEDA))) == 7
        load.load["llama"] = 0
        async with asyncio.timeout(10):
            assert (await stream.read()).result is False


async def test_files_that_do_not_go_together_are_refused(authority: Authority, server: ServerTls) -> None:
    other = CertKeyFiles(server.identity.certificate, authority.issue(KEDA).key)
    with pytest.raises(TlsError, match="is not the key of"):
        KedaServer(Scaler(KnownLoad(), {}), "127.0.0.1", 0, ServerTls(other))
