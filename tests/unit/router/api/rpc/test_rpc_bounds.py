"""How many calls and connections a client may hold open over gRPC, and for how long without a word."""

import asyncio
from contextlib import AsyncExitStack, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_router.api.rpc.grpc_server import CallLimits

from tests.support.ports import cut_off
from tests.support.scripted_api import ANSWER, MODEL, open_stage

KEY = "k" * 20
CHAT = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="hello")])
HEALTH = health_pb2.HealthCheckRequest()
CHECK, WATCH, MODELS = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/quire.v1.Inference/ListModels"
AUTHORIZED = (("authorization", f"Bearer {KEY}"),)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LONG = 20  # seconds, after which a test has failed


@pytest.fixture(autouse=True)
async def _limit():
    async with asyncio.timeout(2 * LONG):
        yield


def apart(stage):
    """A channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{stage.rpc_port}", options=options)


async def unsent(channel, method, metadata=None):
    """A call that has begun, and whose message does not come."""
    call = channel.stream_stream(method)(metadata=metadata)
    await channel.channel_ready()
    return call


async def watch(channel):
    call = health_pb2_grpc.HealthStub(channel).Watch(HEALTH)
    return call if await call.read() is not grpc.aio.EOF else None


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value


async def until(is_so):
    """Waits until ``is_so`` says so."""
    for _ in range(50 * LONG):
        if await is_so():
            return
        await asyncio.sleep(0.02)
    pytest.fail("It never was so.")


@pytest.mark.parametrize("keys", [[], [KEY]], ids=["open", "with keys"])
async def test_health_watches_are_bounded_and_do_not_block_other_calls(keys):
    metadata = AUTHORIZED if keys else None
    async with open_stage(keys=keys, call_limits=CallLimits(auxiliary=3)) as stage, AsyncExitStack() as channels:
        first, second = [await channels.enter_async_context(apart(stage)) for _ in range(2)]
        watching = [await watch(first), await watch(first), await watch(second)]
        refusal = await refused(watch(second))
        assert refusal.code() == EXHAUSTED
        assert "3 calls of Watch are open" in refusal.details()
        assert int(dict(refusal.trailing_metadata())["retry-after"]) >= 1

        answer = await health_pb2_grpc.HealthStub(second).Check(HEALTH)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        texts = [each.text async for each in InferenceStub(second).Chat(CHAT, metadata=metadata)]
        assert "".join(texts) == "Hello wörld"

        watching[0].cancel()

        async def has_room():
            try:
                return await watch(second)
            except grpc.aio.AioRpcError:
                return False

        await until(has_room)
        assert (await refused(watch(first))).code() == EXHAUSTED


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_is_bounded(version):
    async with open_stage(call_limits=CallLimits(auxiliary=2)) as stage, stage.channel() as channel:
        reflect = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        held = [reflect() for _ in range(2)]
        for call in held:  # an answer shows that it has its place
            await call.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
            assert await call.read()
        assert (await refused(reflect().read())).code() == EXHAUSTED
        assert not any(call.done() for call in held)


@pytest.mark.parametrize("method", [CHECK, WATCH, MODELS, "/quire.v1.Inference/Chat"])
async def test_a_message_that_does_not_arrive_times_out(method):
    """Nor does its call keep a place."""
    async with open_stage(patience=0.1, call_limits=CallLimits(auxiliary=1)) as stage, stage.channel() as channel:
        for _ in range(2):
            call = await unsent(channel, method)
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "The message did not arrive within 0.1 seconds."


async def test_a_call_that_is_awaited_has_a_place():
    async with open_stage(call_limits=CallLimits(auxiliary=1)) as stage, stage.channel() as channel:
        call = await unsent(channel, CHECK)
        check = health_pb2_grpc.HealthStub(channel).Check

        async def is_taken():
            try:
                return not await check(HEALTH)
            except grpc.aio.AioRpcError as error:
                return error.code() == EXHAUSTED

        await until(is_taken)
        call.cancel()


@pytest.mark.parametrize("method", [MODELS, "/quire.v1.Inference/Chat", "/quire.v1.Inference/None", "/no/method"])
async def test_without_a_key_no_message_is_awaited(method):
    async with open_stage(keys=[KEY]) as stage, stage.channel() as channel:
        call = await unsent(channel, method)
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", [CHECK, MODELS])
@pytest.mark.parametrize("sent", [None, b"\xff\xff"], ids=["nothing", "no message"])
async def test_calls_without_a_message_are_refused_and_not_logged(method, sent, caplog):
    async with open_stage() as stage, stage.channel() as channel:
        call = await unsent(channel, method)
        if sent is not None:
            await call.write(sent)
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(20):
            (await unsent(channel, method)).cancel()
        await asyncio.sleep(0.05)
    assert not caplog.records


async def test_calls_are_bounded_in_all_again_and_again():
    """Refused calls give back no place that they did not have."""
    limits = CallLimits(requests=1, auxiliary=1, short=3)
    async with open_stage(call_limits=limits) as stage, apart(stage) as first, apart(stage) as second:
        for _ in range(3):
            held = [await unsent(first, MODELS) for _ in range(limits.calls)]

            async def is_full():
                call = InferenceStub(second).ListModels(pb.ListModelsRequest())
                return await call.code() == EXHAUSTED

            async def becomes_full(held=held):
                for number, call in enumerate(held):
                    if call.done():  # refused, as a cancelled call of the round before was still counted
                        held[number] = await unsent(first, MODELS)
                return await is_full()

            await until(becomes_full)
            for _ in range(limits.calls):
                assert await is_full()
            for call in held:
                call.cancel()

            async def has_room():
                return not await is_full()

            await until(has_room)


async def test_calls_are_bounded_on_one_connection():
    limits = CallLimits(requests=1, auxiliary=1, short=3)
    async with open_stage(call_limits=limits) as stage, stage.channel() as channel:
        held = [await unsent(channel, MODELS) for _ in range(limits.calls)]
        waiting: list[asyncio.Future[pb.ListModelsResponse]] = []

        async def one_more_waits():
            """At once on an idle machine; on a busy one calls may not have reached the router yet."""
            waiting[:] = [asyncio.ensure_future(InferenceStub(channel).ListModels(pb.ListModelsRequest()))]
            return not (await asyncio.wait(waiting, timeout=0.2))[0]

        await until(one_more_waits)
        held[0].cancel()
        with suppress(grpc.aio.AioRpcError):  # our own count may hear of the end a moment later
            await waiting[0]


async def test_connections_are_bounded():
    async with open_stage(call_limits=CallLimits(connections=2)) as stage:
        held = [await asyncio.open_connection("127.0.0.1", stage.rpc_port) for _ in range(2)]
        assert all([await reader.read(1) for reader, _ in held])

        async def is_let_in():
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.rpc_port)
            try:
                return await reader.read(1) != b""
            except ConnectionError:
                return False
            finally:
                writer.close()

        assert not await is_let_in()
        held[0][1].close()
        await until(is_let_in)
        held[1][1].close()


async def test_a_silent_connection_is_closed():
    async with open_stage(patience=0.2) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.rpc_port)
        async with asyncio.timeout(LONG):
            await reader.read()
        writer.close()


async def test_a_connection_without_calls_is_closed_and_one_with_calls_is_not():
    go_on = asyncio.Event()
    async with open_stage(["one", go_on, *ANSWER], call_limits=CallLimits(idle=0.1)) as stage, apart(stage) as channel:
        call = InferenceStub(channel).Chat(CHAT)
        assert (await call.read()).text == "one"
        await asyncio.sleep(0.5)
        go_on.set()
        assert (await call.read()).text == ANSWER[0]
        call.cancel()
        while channel.get_state() is not grpc.ChannelConnectivity.IDLE:
            await channel.wait_for_state_change(channel.get_state())


async def test_a_request_whose_client_vanished_is_cancelled():
    script = ["one", asyncio.Event()]
    async with (
        open_stage(script, call_limits=CallLimits(silence=0.3)) as stage,
        cut_off(stage.rpc_port) as (port, dead),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = InferenceStub(channel).Chat(CHAT)
        assert (await call.read()).text == "one"
        await asyncio.sleep(0.6)
        assert not stage.runner.abandoned.is_set()
        dead.set()
        await stage.runner.abandoned.wait()
        call.cancel()


async def test_a_stream_that_is_silent_has_empty_messages_that_say_where_it_stands():
    first, second = asyncio.Event(), asyncio.Event()
    script = [first, "one", second, *ANSWER]
    async with open_stage(script, rpc_keepalive=0.02) as stage, stage.channel() as channel:
        call = InferenceStub(channel).Chat(CHAT)
        messages = aiter(call)
        before = await anext(messages)
        assert before == pb.ChatResponse(request_id=before.request_id, event_id=before.event_id)
        assert before.request_id
        first.set()
        while not (begun := await anext(messages)).text:
            assert begun == before
        between = await anext(messages)
        assert between == pb.ChatResponse(request_id=before.request_id, event_id=begun.event_id)
        second.set()
        rest = [message async for message in messages]
        assert begun.text + "".join(message.text for message in rest) == "oneHello wörld"
        assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_may_be_silent_where_that_is_set():
    go_on = asyncio.Event()
    async with open_stage([go_on, *ANSWER], rpc_keepalive=0) as stage, stage.channel() as channel:
        call = InferenceStub(channel).Chat(CHAT)
        await stage.runner.started.wait()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        assert all([message.token_ids or message.finish_reason async for message in call])


async def test_metadata_are_bounded():
    async with open_stage() as stage, stage.channel() as channel:
        call = InferenceStub(channel).ListModels(pb.ListModelsRequest(), metadata=(("x-long", "x" * 20_000),))
        assert await call.code() == EXHAUSTED
        assert (await InferenceStub(channel).ListModels(pb.ListModelsRequest())).models
