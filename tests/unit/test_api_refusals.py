"""What one API refuses the other refuses, with the same code and the same parameter."""

import json

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import STATUS, ErrorCode

from tests.support.api_stage import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, ask, chat, completion, open_stage

SAMPLING = {
    "temperature": [-0.5, 2.5, float("inf"), float("nan")],
    "top_p": [0.0, -0.5, 1.5, float("nan")],
    "top_k": [2**31],
    "max_tokens": [0, MAX_MODEL_LEN + 1, 2**32 - 1],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [2**31 - 1], list(range(17))],
}
STOPS = [[""], ["x" * 257], ["x"] * 17, ["ok", ""]]
PROMPTS = [[], [-1], [VOCAB_SIZE], [2**31 - 1], [1] * MAX_MODEL_LEN, "hello " * MAX_MODEL_LEN, "a long story " * 4000]
CONVERSATIONS = [
    ([], "messages"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "USER", "content": "x"}], "messages[1].role"),
    ([{"role": "user", "content": "hello " * MAX_MODEL_LEN}], "messages"),
    ([{"role": "user", "content": "x"}] * 5000, "messages"),
    ([{"role": "user", "content": "a long story " * 4000}], "messages"),
    ([{"role": "user", "content": "refuse"}], "messages"),
]
INVALID = [
    *((name, {name: value}, name) for name, values in SAMPLING.items() for value in values),
    *(("stop", {"stop": stop}, "stop") for stop in STOPS),
    *(("prompt", {"prompt": prompt}, "prompt") for prompt in PROMPTS),
    *(("messages", {"messages": messages}, param) for messages, param in CONVERSATIONS),
]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


def as_proto(fields: dict[str, object]):
    """The same request for the other API."""
    fields = dict(fields)
    sampling = types_pb2.SamplingParams(**{name: fields.pop(name) for name in list(fields) if name in SAMPLING})
    common = {"model": fields["model"], "sampling": sampling, "stop": fields.get("stop", [])}
    if "messages" in fields:
        return pb.ChatRequest(messages=[pb.ChatMessage(**each) for each in fields["messages"]], **common)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=prompt), **common)
    return pb.GenerateRequest(**({} if prompt is None else {"text": prompt}), **common)


async def verdict_of_rest(stage, fields) -> tuple[ErrorCode, str]:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = await ask(stage.port, "POST", path, json.dumps(fields).encode())
    code = ErrorCode[str(answer.error["code"]).upper()]
    assert answer.status == STATUS[code].http
    return code, str(answer.error["param"] or "")


async def verdict_of_grpc(stage, fields) -> tuple[ErrorCode, str]:
    async with stage.channel() as channel:
        stub = InferenceStub(channel)
        call = (stub.Chat if "messages" in fields else stub.Generate)(as_proto(fields))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            [answer async for answer in call]
    error = types_pb2.Error.FromString(dict(refusal.value.trailing_metadata())["quire-error-bin"])
    code = ErrorCode(error.code)
    assert refusal.value.code() == grpc.StatusCode[STATUS[code].grpc]
    assert refusal.value.details() == error.message
    return code, error.param


def requests_with(kind: str, fields: dict[str, object]) -> list[dict[str, object]]:
    """The faulty fields in each kind of request that has them."""
    if kind == "prompt":
        return [completion() | fields]
    return [chat() | fields] if kind == "messages" else [completion() | fields, chat() | fields]


@pytest.fixture
async def stage():
    async with open_stage(template=TEMPLATE, max_body_bytes=1_000_000) as stage:
        yield stage


@pytest.mark.parametrize(("kind", "fields", "param"), INVALID, ids=lambda value: str(value)[:40])
async def test_both_apis_refuse_it_alike(kind, fields, param, stage):
    for request in requests_with(kind, fields):
        assert await verdict_of_rest(stage, request) == (ErrorCode.INVALID, param)
        assert await verdict_of_grpc(stage, request) == (ErrorCode.INVALID, param)
    assert stage.runner.generations == []


@pytest.mark.parametrize("model", ["other", "../tiny", "tiny ", "TINY", "x" * 128])
async def test_an_unknown_model_is_not_found_in_both(model, stage):
    for request in (chat() | {"model": model}, completion() | {"model": model}):
        assert await verdict_of_rest(stage, request) == (ErrorCode.NOT_FOUND, "model")
        assert await verdict_of_grpc(stage, request) == (ErrorCode.NOT_FOUND, "model")


@pytest.mark.parametrize("model", ["", "x" * 129])
async def test_a_model_name_that_cannot_be_one_is_invalid_in_both(model, stage):
    request = chat() | {"model": model}

    assert await verdict_of_rest(stage, request) == (ErrorCode.INVALID, "model")
    assert await verdict_of_grpc(stage, request) == (ErrorCode.INVALID, "model")


async def test_a_prompt_is_needed_in_both(stage):
    request = {"model": MODEL}

    assert await verdict_of_rest(stage, request) == (ErrorCode.INVALID, "prompt")
    assert await verdict_of_grpc(stage, request) == (ErrorCode.INVALID, "prompt")


async def test_a_model_that_no_engine_offered_is_unavailable_in_both(stage):
    stage.fleet.told = None

    assert await verdict_of_rest(stage, chat()) == (ErrorCode.UNAVAILABLE, "")
    assert await verdict_of_grpc(stage, chat()) == (ErrorCode.UNAVAILABLE, "")


async def test_a_prompt_that_can_never_fit_is_refused_with_the_limit(stage):
    answer = await ask(stage.port, "POST", "/v1/completions", completion([1] * 60, max_tokens=5))

    assert answer.status == 400
    assert answer.error["param"] == "max_tokens"
    assert str(MAX_MODEL_LEN) in answer.error["message"]
