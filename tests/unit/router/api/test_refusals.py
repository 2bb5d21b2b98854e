"""What one API refuses the other refuses, with the same code and the same parameter."""

import json

import grpc
import pytest
from quire.v1 import types_pb2
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import STATUS, ErrorCode

from tests.support.both_apis import as_proto
from tests.support.scripted_api import MAX_MODEL_LEN, VOCAB_SIZE, ask, chat, completion, open_stage

SAMPLING = {
    "temperature": [-0.5, 2.5, float("inf"), float("nan")],
    "top_p": [-0.5, 1.5, float("nan")],
    "top_k": [2**31],
    "min_p": [-0.5, 1.5, float("nan")],
    "presence_penalty": [-2.5, 2.5, float("inf")],
    "frequency_penalty": [-2.5, 2.5, float("nan")],
    "repetition_penalty": [0.0, -1.0, 10.5, float("inf")],
    "logit_bias": [{"-1": 0}, {str(VOCAB_SIZE): 0}, {"1": 100.5}, {"1": -101}, {str(i): 0 for i in range(1025)}],
    "bad_words": [
        *([""], ["  "], ["x" * 257], ["x"] * 33, ["x"] * 65, [[]], [[-1]], [[VOCAB_SIZE]], [[1] * 33], [[1]] * 65),
        ["world"] * 32 + [[1]] * 64,
    ],
    "min_tokens": [17, 2**32 - 1],
    "n": [0, 129, 2**32 - 1],
    "best_of": [0, 129],
    "beam_width": [1, 33],
    "length_penalty": [-10.5, 10.5, float("nan")],
    "prompt_logprobs": [21, 2**32 - 1],
    "priority": [1, -1, 2**31 - 1],
    "max_tokens": [0, MAX_MODEL_LEN + 1, 2**32 - 1],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [2**31 - 1], list(range(17))],
}
STRUCTURED = [
    *(("regex", text) for text in ("", "x" * 65_537)),
    *(("json", text) for text in ("", "[]", "{", '{"a": 1e999}', "{" * 100_000)),
    *(("choice", options) for options in ([], [""], ["x"] * 1025, ["x" * 65_536])),
    *(("grammar", text) for text in ("", "x" * 65_537)),
]
EXCLUDED = [
    ({"beam_width": 2, "temperature": 0.5}, "beam_width"),
    ({"beam_width": 2, "stop": ["x"]}, "beam_width"),
    ({"beam_width": 2, "structured_outputs": {"regex": "x"}}, "beam_width"),
    ({"beam_width": 2, "n": 3}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"structured_outputs": {"regex": "x"}, "ignore_eos": True}, "regex"),
    ({"structured_outputs": {"json_object": True}, "min_tokens": 1}, "response_format"),
]
STOPS = [[""], ["x" * 257], ["x"] * 17, ["ok", ""]]
PROMPTS = [[], [-1], [VOCAB_SIZE], [2**31 - 1], [1] * MAX_MODEL_LEN, "hello " * MAX_MODEL_LEN, "a long story " * 4000]
CONVERSATIONS = [
    ([], "messages"),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ([{"role": "", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": "x"}, {"role": "USER", "content": "x"}], "messages[1].role"),
    ([{"role": "user", "content": "hello " * MAX_MODEL_LEN}], "messages"),
    ([{"role": "user", "content": "x"}] * 5000, "messages"),
    ([{"role": "user", "content": "a long story " * 4000}], "messages"),
    ([{"role": "user", "content": "refuse"}], "messages"),
]
INVALID = [
    *((name, {"max_tokens": 16} | {name: value}, name) for name, values in SAMPLING.items() for value in values),
    *(("sampling", fields, param) for fields, param in EXCLUDED),
    *(("sampling", {"structured_outputs": {kind: text}}, f"structured_outputs.{kind}") for kind, text in STRUCTURED),
    *(("stop", {"stop": stop}, "stop") for stop in STOPS),
    *(("prompt", {"prompt": prompt}, "prompt") for prompt in PROMPTS),
    *(("messages", {"messages": messages}, param) for messages, param in CONVERSATIONS),
]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


async def verdict_of_rest(stage, fields) -> tuple[ErrorCode, str]:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    answer = await ask(stage.port, "POST", path, json.dumps(fields).encode())
    word = str(answer.error["code"]).removeprefix("model_").upper()
    code = ErrorCode.INVALID if word == "CONTEXT_LENGTH_EXCEEDED" else ErrorCode[word]
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
        over_rest, over_grpc = await verdict_of_rest(stage, request), await verdict_of_grpc(stage, request)
        assert over_rest == over_grpc == (ErrorCode.INVALID, param)
    assert stage.runner.generations == []


@pytest.mark.parametrize("logprobs", [21, 2**32 - 1])
async def test_too_many_log_probabilities_are_refused_under_the_name_that_each_kind_of_request_has(logprobs, stage):
    requests = [
        (completion(logprobs=logprobs), "logprobs"),
        (chat(logprobs=True, top_logprobs=logprobs), "top_logprobs"),
    ]
    for request, param in requests:
        assert await verdict_of_rest(stage, request) == (ErrorCode.INVALID, param)
        assert await verdict_of_grpc(stage, request) == (ErrorCode.INVALID, param)


@pytest.mark.parametrize("model", ["other", "../tiny", "tiny ", "TINY", "x" * 128])
async def test_an_unknown_model_is_not_found_in_both(model, stage):
    for request in (chat() | {"model": model}, completion() | {"model": model}):
        assert await verdict_of_rest(stage, request) == (ErrorCode.NOT_FOUND, "model")
        assert await verdict_of_grpc(stage, request) == (ErrorCode.NOT_FOUND, "model")


@pytest.mark.parametrize("model", ["x" * 129])
async def test_a_model_name_that_cannot_be_one_is_invalid_in_both(model, stage):
    request = chat() | {"model": model}

    assert await verdict_of_rest(stage, request) == (ErrorCode.INVALID, "model")
    assert await verdict_of_grpc(stage, request) == (ErrorCode.INVALID, "model")


async def test_a_model_that_no_engine_offered_is_unavailable_in_both(stage):
    stage.fleet.model_limits = None
    answer = await ask(stage.port, "POST", "/v1/chat/completions", json.dumps(chat()).encode())

    assert (answer.status, answer.error["code"], answer.error["param"]) == (503, "none_ready", None)
    assert await verdict_of_grpc(stage, chat()) == (ErrorCode.UNAVAILABLE, "")


async def test_a_prompt_that_can_never_fit_is_refused_with_the_limit(stage):
    answer = await ask(stage.port, "POST", "/v1/completions", completion([1] * 60, max_tokens=5))

    assert answer.status == 400
    assert answer.error["param"] == "max_tokens"
    assert str(MAX_MODEL_LEN) in answer.error["message"]
