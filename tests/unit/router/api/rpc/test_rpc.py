"""``quire.v1.Inference`` over a real channel, also for a client that knows nothing but reflection."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason

from tests.support.scripted_api import ANSWER, MAX_MODEL_LEN, MODEL, ask, chat, open_stage

TEXT = "Hello wörld"
USER = pb.ChatMessage(role="user", content="hello")


def generate_request(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"model": MODEL, "text": "hello", **fields})


def chat_request(**fields) -> pb.ChatRequest:
    return pb.ChatRequest(**{"model": MODEL, "messages": [USER], **fields})


CALLS = [("Generate", generate_request()), ("Chat", chat_request())]


@pytest.mark.parametrize(("method", "request_"), CALLS)
async def test_an_answer_is_streamed_with_its_end_and_usage(method, request_):
    async with open_stage() as stage, stage.channel() as channel:
        call = getattr(InferenceStub(channel), method)(request_)
        answers = [answer async for answer in call]
        initial, trailing = dict(await call.initial_metadata()), dict(await call.trailing_metadata())

    assert "".join(answer.text for answer in answers) == TEXT
    assert [list(answer.token_ids) for answer in answers] == [[1], [2], [3], [4], []]
    assert [answer.finish_reason for answer in answers] == [0, 0, 0, 0, types_pb2.FINISH_REASON_STOP]
    generation = stage.runner.generations[0]
    assert answers[-1].usage.prompt_tokens == len(generation.prompt_token_ids)
    assert (answers[-1].usage.completion_tokens, answers[-1].usage.cached_tokens) == (4, 2)
    assert {answer.request_id for answer in answers} == {generation.request_id}
    assert initial["quire-request-id"] == trailing["quire-request-id"] == generation.request_id


async def test_both_apis_make_the_same_request_of_the_same_words():
    sampling = types_pb2.SamplingParams(temperature=0.5, top_p=0.75, top_k=3, seed=7, max_tokens=9, ignore_eos=True)
    sampling.stop_token_ids.extend([4, 5])
    fields = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "seed": 7, "max_tokens": 9, "ignore_eos": True}
    async with open_stage() as stage, stage.channel() as channel:
        async for _ in InferenceStub(channel).Chat(chat_request(sampling=sampling, stop=["a", "b"])):
            pass
        await ask(stage.port, "POST", "/v1/chat/completions", chat(**fields, stop=["a", "b"], stop_token_ids=[4, 5]))
        over_grpc, over_rest = stage.runner.generations

    assert over_grpc.prompt_token_ids == over_rest.prompt_token_ids
    assert (over_grpc.params, over_grpc.stop) == (over_rest.params, over_rest.stop)
    assert over_grpc.operation == over_rest.operation == "chat"


async def test_token_ids_are_used_as_they_are():
    async with open_stage() as stage, stage.channel() as channel:
        request = pb.GenerateRequest(model=MODEL, token_ids=types_pb2.TokenIds(ids=[5, 6, 7]))
        async for _ in InferenceStub(channel).Generate(request):
            pass

    assert list(stage.runner.generations[0].prompt_token_ids) == [5, 6, 7]


@pytest.mark.parametrize("method", ["Generate", "Chat", "Cancel", "ListModels"])
async def test_a_malformed_message_is_refused_and_not_logged(method, caplog):
    async with open_stage() as stage, stage.channel() as channel:
        call = channel.unary_unary(f"/quire.v1.Inference/{method}")(b"\xff\xff\xff")
        code, details = await call.code(), await call.details()
        error = types_pb2.Error.FromString(dict(await call.trailing_metadata())["quire-error-bin"])

    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == error.message == "The message is not what this method takes."
    assert error.code == types_pb2.ERROR_CODE_INVALID
    assert not caplog.records


@pytest.mark.parametrize("code", list(ErrorCode))
@pytest.mark.parametrize("before", [[], ["one"]], ids=["before the first piece", "after it"])
async def test_an_error_is_the_status_of_the_call(code, before):
    error = QuireError(code, "It is so: é.", param="model", retry_after=1.5)
    async with open_stage([*before, error]) as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in InferenceStub(channel).Chat(chat_request())]

    trailing = dict(refusal.value.trailing_metadata())
    assert refusal.value.code() == grpc.StatusCode[error.status.grpc]
    assert refusal.value.details() == "It is so: é."
    assert trailing["quire-request-id"] == stage.runner.generations[0].request_id
    assert trailing["retry-after"] in ("2", "3")
    told = types_pb2.Error.FromString(trailing["quire-error-bin"])
    assert (told.code, told.param) == (code.value, "model")
    assert told.retry_after == int(trailing["retry-after"])


async def test_an_internal_error_is_logged_and_its_reason_not_sent(caplog):
    async with open_stage([RuntimeError("the secret")]) as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in InferenceStub(channel).Chat(chat_request())]

    assert refusal.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in refusal.value.details()
    assert any(record.exc_info and "the secret" in str(record.exc_info[1]) for record in caplog.records)


async def test_an_answer_without_an_end_is_an_error():
    async with open_stage(["one"]) as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in InferenceStub(channel).Chat(chat_request())]

    assert refusal.value.code() == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("pieces", [[], ["one"]], ids=["before the first piece", "after it"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
async def test_a_client_that_leaves_cancels_its_request(pieces, how):
    async with open_stage([*pieces, asyncio.Event()]) as stage:
        channel, seconds, started = stage.channel(), 0.3, asyncio.create_task(stage.runner.started.wait())
        while not stage.runner.started.is_set():  # on a busy machine the deadline may pass before the request is there
            call = InferenceStub(channel).Chat(chat_request(), timeout=seconds if how == "deadline" else None)
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait([started, reading], return_when=asyncio.FIRST_COMPLETED)
            seconds *= 2
        if how == "cancel":
            call.cancel()
        elif how == "channel":
            await channel.close()
        async with asyncio.timeout(10):
            await stage.runner.abandoned.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await channel.close()


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
async def test_a_running_request_can_be_cancelled_by_its_id(prefix):
    async with open_stage(["one", asyncio.Event()]) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        call = stub.Chat(chat_request())
        first = await call.read()
        await stub.Cancel(pb.CancelRequest(request_id=prefix + first.request_id))
        last = await call.read()

    assert last.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert last.usage.completion_tokens == 1


async def test_a_rest_request_can_be_cancelled_too():
    async with open_stage(["one", asyncio.Event()]) as stage, stage.channel() as channel:
        asking = asyncio.create_task(ask(stage.port, "POST", "/v1/chat/completions", chat()))
        await stage.runner.started.wait()
        request_id = stage.runner.generations[0].request_id
        await InferenceStub(channel).Cancel(pb.CancelRequest(request_id=f"chatcmpl-{request_id}"))
        answer = await asking

    assert (answer.status, answer.json["error"]["code"]) == (409, "cancelled")


@pytest.mark.parametrize("request_id", ["", "x", "chatcmpl-", "é" * 1000])
async def test_an_unknown_request_cannot_be_cancelled(request_id):
    async with open_stage() as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await InferenceStub(channel).Cancel(pb.CancelRequest(request_id=request_id))

    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_request_of_another_key_cannot_be_cancelled():
    keys = ("key-of-one", "key-of-two")
    mine, other = ((("authorization", f"Bearer {key}"),) for key in keys)
    async with open_stage(["one", asyncio.Event()], keys=keys) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        call = stub.Chat(chat_request(), metadata=mine)
        cancel = pb.CancelRequest(request_id=(await call.read()).request_id)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Cancel(cancel, metadata=other)
        await stub.Cancel(cancel, metadata=mine)

    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


async def test_models_are_listed_whether_or_not_an_engine_is_ready():
    async with open_stage() as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        ready = (await stub.ListModels(pb.ListModelsRequest())).models[0]
        stage.fleet.engines, stage.fleet.model_limits = 0, None
        absent = (await stub.ListModels(pb.ListModelsRequest())).models[0]

    assert (ready.name, ready.ready_engines, ready.max_model_len) == (MODEL, 1, MAX_MODEL_LEN)
    assert (absent.name, absent.ready_engines, absent.max_model_len) == (MODEL, 0, 0)
    assert ready.created == absent.created > 0


async def test_health_follows_the_fleet():
    status = health_pb2.HealthCheckResponse
    async with open_stage() as stage, stage.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="quire.v1.Inference"))
        assert (await watch.read()).status == status.SERVING
        stage.fleet.engines = 0
        assert (await watch.read()).status == status.NOT_SERVING
        stage.fleet.engines = 1
        assert (await watch.read()).status == status.SERVING
        stage.service.concurrency.start_draining()
        assert (await watch.read()).status == status.NOT_SERVING


async def test_a_message_over_the_limit_is_refused():
    async with open_stage(max_body_bytes=1000) as stage, stage.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in InferenceStub(channel).Generate(generate_request(text="x" * 1000))]

    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_more_requests_than_allowed_are_refused_with_retry_info():
    release = asyncio.Event()
    async with open_stage([release, *ANSWER], concurrent=1) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        first = stub.Chat(chat_request())
        reading = asyncio.ensure_future(first.read())
        await stage.runner.started.wait()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Generate(generate_request()).read()
        release.set()
        assert (await reading).text == "Hel"

    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(refusal.value.trailing_metadata())["retry-after"]) >= 1


async def test_a_client_that_does_not_read_is_given_up():
    endless = ["x" * 100_000] * 1000
    async with open_stage([*endless, FinishReason.STOP], patience=0.1) as stage, stage.channel() as channel:
        call = InferenceStub(channel).Chat(chat_request())
        async with asyncio.timeout(30):
            await stage.runner.abandoned.wait()
        call.cancel()


# Reflection


REFLECTIONS = ["grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"]


async def reflected(
    channel: grpc.aio.Channel, reflection: str, service: str
) -> tuple[list[str], descriptor_pool.DescriptorPool]:
    """The services that the server names, and all it tells about one of them."""
    ask_for = reflection_pb2.ServerReflectionRequest
    reflect = channel.stream_stream(
        f"/{reflection}/ServerReflectionInfo",
        request_serializer=ask_for.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = reflect()
    await call.write(ask_for(list_services=""))
    names = [each.name for each in (await call.read()).list_services_response.service]
    await call.write(ask_for(file_containing_symbol=service))
    files = {}
    raw = list((await call.read()).file_descriptor_response.file_descriptor_proto)
    while raw:
        file = descriptor_pb2.FileDescriptorProto.FromString(raw.pop())
        files[file.name] = file
        for name in file.dependency:
            if name not in files:
                await call.write(ask_for(file_by_filename=name))
                raw += (await call.read()).file_descriptor_response.file_descriptor_proto
    call.cancel()
    pool = descriptor_pool.DescriptorPool()
    for name in sorted(files, key=lambda name: len(files[name].dependency)):
        pool.Add(files[name])
    return names, pool


@pytest.mark.parametrize("reflection", REFLECTIONS)
async def test_a_client_that_learns_the_api_by_reflection_can_chat(reflection):
    async with open_stage() as stage, stage.channel() as channel:
        names, pool = await reflected(channel, reflection, "quire.v1.Inference")
        method = pool.FindServiceByName("quire.v1.Inference").FindMethodByName("Chat")
        request_type, answer_type = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        call = channel.unary_stream(
            "/quire.v1.Inference/Chat",
            request_serializer=request_type.SerializeToString,
            response_deserializer=answer_type.FromString,
        )
        request = request_type(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        answers = [answer async for answer in call(request)]

    assert {"quire.v1.Inference", "grpc.health.v1.Health", *REFLECTIONS} == set(names)
    assert "".join(answer.text for answer in answers) == TEXT


@pytest.mark.parametrize("reflection", REFLECTIONS)
@pytest.mark.parametrize("described", REFLECTIONS)
async def test_reflection_describes_itself_under_both_names(reflection, described):
    async with open_stage() as stage, stage.channel() as channel:
        _, pool = await reflected(channel, reflection, described)

    method = pool.FindServiceByName(described).FindMethodByName("ServerReflectionInfo")
    package = described.rpartition(".")[0]
    assert method.input_type.full_name == f"{package}.ServerReflectionRequest"
    assert method.output_type.full_name == f"{package}.ServerReflectionResponse"
    fields = reflection_pb2.ServerReflectionResponse.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in method.output_type.fields_by_name.items()} == {
        name: field.number for name, field in fields.items()
    }


# Health


async def test_health_lists_each_service_and_logs_nothing(caplog):
    statuses = health_pb2.HealthCheckResponse
    async with open_stage() as stage, stage.channel() as channel:
        answer = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())

    assert {name: each.status for name, each in answer.statuses.items()} == dict.fromkeys(
        ("", "quire.v1.Inference"), statuses.SERVING
    )
    assert not caplog.records


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_client_that_leaves_while_its_status_is_sent_leaves_no_traceback(method, monkeypatch, caplog):
    """The gRPC library raises an error of its own where a status cannot be sent any more."""
    left = asyncio.Event()

    async def leave(*_):
        left.set()
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: the connection is gone")

    monkeypatch.setattr(health.aio.HealthServicer, method, leave)
    async with open_stage() as stage, stage.channel() as channel:
        call = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"")
        await left.wait()
        call.cancel()

    assert not caplog.records
