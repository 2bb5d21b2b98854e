"""A request may leave its model out where its caller can mean only one."""

import json

import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.pooling import Task
from quire_router.admission.tenants import Tenant
from quire_router.api.auth import Identity
from quire_router.core.generation import LoRA
from quire_router.engines.settings import ServedLoRA

from tests.support.scripted_api import Limits, ask, open_stage

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "hello"}]
GENERATING = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
}
COUNTING = {
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
POOLING = {
    "/v1/embeddings": {"input": "hello"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
}
WITHOUT = [{}, {"model": None}, {"model": ""}]


@pytest.mark.parametrize("without", WITHOUT, ids=str)
@pytest.mark.parametrize(("path", "body"), (GENERATING | COUNTING).items(), ids=(GENERATING | COUNTING).keys())
async def test_the_only_model_answers_on_every_route(path, body, without):
    async with open_stage(template=TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", path, body | without)

    assert answer.status == 200, answer.body
    assert answer.json.get("model", "tiny") == "tiny"


@pytest.mark.parametrize(("path", "body"), POOLING.items(), ids=POOLING.keys())
async def test_a_route_that_pools_finds_the_only_model_too(path, body):
    async with open_stage(models=("words", "vectors")) as stage:
        stage.fleet.limits_of = {
            "words": Limits(supported_tasks=(Task.GENERATE,)),
            "vectors": Limits(supported_tasks=(Task.EMBED,), pooled_size=2),
        }
        await ask(stage.port, "POST", path, body)

        assert {each.model for each in stage.runner.generations} == {"vectors"}


@pytest.mark.parametrize(
    ("path", "body"), (GENERATING | COUNTING | POOLING).items(), ids=(GENERATING | COUNTING | POOLING).keys()
)
async def test_of_several_models_one_has_to_be_named(path, body):
    async with open_stage(models=("one", "two"), template=TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", path, body)

    details = answer.error.get("details", answer.error)
    assert (answer.status, details["param"]) == (400, "model")
    assert answer.error["message"] == "model is missing: there is not exactly one; send 'one' or 'two'."


async def test_names_of_one_model_are_no_choice():
    async with open_stage(models=("one", "two")) as stage:
        stage.fleet.names_of_one = True
        answer = await ask(stage.port, "POST", "/v1/completions", {"prompt": "hello"})

    assert (answer.status, answer.json["model"]) == (200, "one")


async def test_an_adapter_is_not_meant_by_a_request_that_names_nothing():
    async with open_stage() as stage:
        stage.fleet.served_loras = {"extra": ServedLoRA("tiny", LoRA("extra", b""))}
        answer = await ask(stage.port, "POST", "/v1/completions", {"prompt": "hello"})

    assert answer.json["model"] == "tiny"


async def test_grpc_takes_a_request_without_a_model():
    async with open_stage(template=TEMPLATE) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        messages = [pb.ChatMessage(role="user", content="hello")]
        chat = [each async for each in stub.Chat(pb.ChatRequest(messages=messages))]
        text = [each async for each in stub.Generate(pb.GenerateRequest(text="hello"))]
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="hello"))

    assert (bool(chat), bool(text), bool(tokens.token_ids)) == (True, True, True)


async def test_a_key_that_opens_one_of_several_models_means_that_one(tmp_path):
    async with open_stage(models=("one", "two")) as stage:
        allowed = Identity("team", b"", Tenant("team", models=frozenset({"two"})))
        stage.service.keys.authenticate = lambda *_: allowed
        answer = await ask(stage.port, "POST", "/v1/completions", {"prompt": "hello"})

    assert json.loads(answer.body)["model"] == "two"
