"""KEDA's external scaler, asked by a client made from KEDA's contract: the same numbers as everywhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest
from quire.keda.externalscaler_pb2 import DESCRIPTOR, GetMetricsRequest, MetricSpec, MetricValue, ScaledObjectRef
from quire.keda.externalscaler_pb2_grpc import ExternalScalerStub
from quire_router.autoscale import keda
from quire_router.autoscale.keda import KedaServer, Scaler
from quire_router.config import labels_of

from tests.support.autoscalers import KnownLoad

MODELS = ("llama", "qwen/small")


@dataclass
class Stage:
    load: KnownLoad
    server: KedaServer
    stub: ExternalScalerStub
    channel: grpc.aio.Channel


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(keda, "_PERIOD", 0.01)
    load = KnownLoad(**dict.fromkeys(MODELS, 0))
    server = KedaServer(Scaler(load, labels_of(MODELS)), "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Stage(load, server, ExternalScalerStub(channel), channel)
    await server.stop()


def trigger(**metadata: str) -> ScaledObjectRef:
    return ScaledObjectRef(name="engine", namespace="serving", scalerMetadata={"model": "llama"} | metadata)


def metrics(name: str = "quire_load", **metadata: str) -> GetMetricsRequest:
    return GetMetricsRequest(scaledObjectRef=trigger(**metadata), metricName=name)


def test_the_contract_is_kedas() -> None:
    """Names and numbers that KEDA's own stubs put on the wire."""
    service = DESCRIPTOR.services_by_name["ExternalScaler"]
    assert service.full_name == "externalscaler.ExternalScaler"
    assert [method.name for method in service.methods] == ["IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"]
    assert [method.server_streaming for method in service.methods] == [False, True, False, False]
    assert ScaledObjectRef(name="n", namespace="s", scalerMetadata={"k": "v"}).SerializeToString() == (
        b"\n\x01n\x12\x01s\x1a\x06\n\x01k\x12\x01v"
    )
    assert GetMetricsRequest(metricName="m").SerializeToString() == b"\x12\x01m"
    assert MetricValue(metricName="m", metricValue=1, metricValueFloat=1).SerializeToString() == (
        b"\n\x01m\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0?"
    )
    assert MetricSpec(metricName="m", targetSize=1, targetSizeFloat=1).SerializeToString() == (
        b"\n\x01m\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0?"
    )


async def test_the_metric_and_its_target_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        (spec,) = (await stage.stub.GetMetricSpec(trigger(target="2.5"))).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("quire_load", 3, 2.5)
        (spec,) = (await stage.stub.GetMetricSpec(trigger())).metricSpecs
        assert spec.targetSizeFloat == keda.DEFAULT_TARGET
        stage.load.load["llama"] = 37
        (value,) = (await stage.stub.GetMetrics(metrics())).metricValues
        assert (value.metricName, value.metricValue, value.metricValueFloat) == ("quire_load", 37, 37.0)


@pytest.mark.parametrize("name", ["qwen/small", "qwen_small"])
async def test_a_model_is_known_by_its_name_and_by_its_label(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        stage.load.load["qwen/small"] = 2
        (value,) = (await stage.stub.GetMetrics(metrics(model=name))).metricValues
        assert value.metricValueFloat == 2


@pytest.mark.parametrize(
    ("load", "activation", "active"), [(0, "", False), (1, "", True), (3, "3", False), (4, "3", True)]
)
async def test_a_model_is_active_above_the_activation_value(
    load: int, activation: str, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(monkeypatch) as stage:
        stage.load.load["llama"] = load
        assert (await stage.stub.IsActive(trigger(activation=activation))).result is active


async def test_a_stream_sends_the_state_once_and_then_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        call = stage.stub.StreamIsActive(trigger())
        async with asyncio.timeout(10):
            assert (await call.read()).result is False
            for load, active in ((3, True), (0, False), (1, True)):
                stage.load.load["llama"] = load
                assert (await call.read()).result is active
        pending = asyncio.create_task(call.read())
        stage.load.load["llama"] = 2
        await was_read(stage.load)
        assert not pending.done(), "another number is no change"
        stage.load.known = False
        await was_read(stage.load)
        assert not pending.done(), "an outage is no change"
        stage.load.known = True
        stage.load.load["llama"] = 0
        async with asyncio.timeout(10):
            assert (await pending).result is False
        call.cancel()


async def was_read(load: KnownLoad) -> None:
    """Waits until the stream has looked some more times."""
    reads = load.reads
    async with asyncio.timeout(10):
        while load.reads < reads + 5:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


async def test_a_stream_that_begins_in_an_outage_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        stage.load.known = False
        call = stage.stub.StreamIsActive(trigger())
        pending = asyncio.create_task(call.read())
        await was_read(stage.load)
        assert not pending.done()
        stage.load.known = True
        async with asyncio.timeout(10):
            assert (await pending).result is False
        call.cancel()


async def test_streams_end_well_with_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error KEDA would wait up to a minute before it comes again."""
    async with serving(monkeypatch) as stage:
        monkeypatch.setattr(keda, "_PERIOD", 60.0)
        calls = [stage.stub.StreamIsActive(trigger()) for _ in range(5)]
        for call in calls:
            assert (await call.read()).result is False
        await stage.server.stop()
        async with asyncio.timeout(10):
            assert [await call.code() for call in calls] == [grpc.StatusCode.OK] * 5


async def test_streams_are_bounded_and_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keda, "_MAX_STREAMS", 3)
    async with serving(monkeypatch) as stage:
        calls = [stage.stub.StreamIsActive(trigger()) for _ in range(3)]
        for call in calls:
            await call.read()
        assert await status(stage.stub.StreamIsActive(trigger()).read()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        async with asyncio.timeout(10):
            while await status(stage.stub.StreamIsActive(trigger()).read()) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def status(call: object) -> grpc.StatusCode | None:
    """How a call ended that was refused."""
    try:
        await asyncio.wait_for(call, 10)  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


async def test_a_load_that_is_not_known_is_an_error_and_never_0(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        stage.load.known = False
        assert await status(stage.stub.GetMetrics(metrics())) is grpc.StatusCode.UNAVAILABLE
        assert await status(stage.stub.IsActive(trigger())) is grpc.StatusCode.UNAVAILABLE
        assert await status(stage.stub.GetMetricSpec(trigger())) is None


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"target": "0"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"target": "-1"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"target": "many"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"target": "nan"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"target": "inf"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"activation": "x"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_trigger_that_cannot_be_is_refused_by_every_call(
    metadata: dict[str, str], code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(monkeypatch) as stage:
        asked = trigger(**metadata)
        assert await status(stage.stub.IsActive(asked)) is code
        assert await status(stage.stub.GetMetricSpec(asked)) is code
        assert await status(stage.stub.StreamIsActive(asked).read()) is code
        assert await status(stage.stub.GetMetrics(metrics(**metadata))) is code


async def test_another_metric_and_another_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as stage:
        assert await status(stage.stub.GetMetrics(metrics("s0-quire_load"))) is grpc.StatusCode.NOT_FOUND
        call = stage.channel.unary_stream(
            "/externalscaler.ExternalScaler/StreamMetricSpec", lambda m: m.SerializeToString()
        )
        assert await status(call(trigger()).read()) is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("address", ["127.0.0.2", "127.0.0.1"], ids=["another's", "the same"])
@pytest.mark.parametrize(
    "sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], ids=["nothing", "HTTP/2"]
)
async def test_connections_that_are_left_idle_do_not_keep_keda_out(
    address: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(monkeypatch) as stage:
        idle = []
        for _ in range(300):
            idle.append((await asyncio.open_connection("127.0.0.1", stage.server.port, local_addr=(address, 0)))[1])
            idle[-1].write(sent)
        for _ in range(3):
            assert not (await stage.stub.IsActive(trigger(), timeout=20, wait_for_ready=True)).result
        for writer in idle:
            writer.close()
