"""A gRPC client that knows nothing of Quire learns the API by reflection and uses it."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.service.conftest import MODEL, Stack
from tests.support.processes import eventually


class ReflectedClient:
    """Calls methods that it found by asking the server."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        database = ProtoReflectionDescriptorDatabase(channel)
        self.services = list(database.get_services())
        self._pool = DescriptorPool(database)

    def call(self, service: str, method: str, **fields: object) -> Iterator[object]:
        described = self._pool.FindServiceByName(service).methods_by_name[method]
        request = GetMessageClass(described.input_type)(**fields)
        kind = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        answer = kind(
            f"/{service}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )(request, timeout=60)
        return answer if described.server_streaming else iter([answer])


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[ReflectedClient]:
    with grpc.insecure_channel(stack.router.grpc_address) as channel:
        yield ReflectedClient(channel)


INFERENCE = "quire.v1.Inference"


def test_the_services_are_found(client: ReflectedClient) -> None:
    assert {INFERENCE, "grpc.health.v1.Health"} <= set(client.services)


def test_chat_streams_the_same_answer_as_rest(client: ReflectedClient, stack: Stack) -> None:
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    answers = list(client.call(INFERENCE, "Chat", model=MODEL, messages=messages, sampling={"temperature": 0}))
    rest = stack.openai.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert "".join(answer.text for answer in answers) == rest.choices[0].message.content
    assert answers[-1].usage.completion_tokens == rest.usage.completion_tokens
    assert len(answers) > 2


def test_generate_takes_tokens(client: ReflectedClient) -> None:
    answers = list(
        client.call(
            INFERENCE,
            "Generate",
            model=MODEL,
            token_ids={"ids": [10, 11, 12]},
            sampling={"temperature": 0, "max_tokens": 5},
        )
    )
    assert sum(len(answer.token_ids) for answer in answers) == answers[-1].usage.completion_tokens <= 5


def test_models_are_listed(client: ReflectedClient) -> None:
    (answer,) = client.call(INFERENCE, "ListModels")
    assert [(model.name, model.ready_engines, model.max_model_len) for model in answer.models] == [(MODEL, 2, 2048)]


def test_cancel_ends_a_running_request(client: ReflectedClient) -> None:
    stream = client.call(
        INFERENCE, "Generate", model=MODEL, text="Once", sampling={"max_tokens": 2000, "ignore_eos": True}
    )
    first = next(iter(stream))
    list(client.call(INFERENCE, "Cancel", request_id=first.request_id))
    last = list(stream)[-1]
    assert last.finish_reason == 3, "the finish reason is not ABORT"
    list(client.call(INFERENCE, "Cancel", request_id=first.request_id))  # what has ended need not be ended again


def test_an_unknown_request_cannot_be_cancelled(client: ReflectedClient) -> None:
    def is_not_found() -> bool:
        with pytest.raises(grpc.RpcError) as refused:
            list(client.call(INFERENCE, "Cancel", request_id="unknown"))
        # For some seconds after Redis was late, a record that is missing may yet appear, and clients try again.
        assert refused.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
        return refused.value.code() is grpc.StatusCode.NOT_FOUND

    eventually(is_not_found, message="it is never told to be unknown")


def test_engines_answer_reflection_and_health_too(stack: Stack) -> None:
    with grpc.insecure_channel(stack.engines[0].address) as channel:
        client = ReflectedClient(channel)
        (description,) = client.call("quire.v1.Engine", "Describe")
        assert list(description.served_model_names) == [MODEL]
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="quire.v1.Engine"))
        assert health.status == health_pb2.HealthCheckResponse.SERVING
