"""``/tokenize`` and ``/detokenize``: the tokens are those that a request for an answer has."""

import json

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_router.api import tokenize as tokens
from quire_router.api.schemas.base import MAX_PROMPT_TOKENS

from tests.support.scripted_api import MODEL, TOKENIZER, VOCAB_SIZE, Limits, ask, chat, completion, open_stage
from tests.support.tool_models import HERMES_TEMPLATE, tool

LONG = "hello world " * 400  # tokenised on a thread
TEMPLATE_MESSAGES = "chat_template_kwargs.messages"


async def tokenize(stage, **body):
    return await ask(stage.port, "POST", "/tokenize", {"model": MODEL, **body})


@pytest.mark.parametrize("prompt", ["", "hello café", LONG])
async def test_the_tokens_of_a_text_are_those_of_a_completion(prompt):
    async with open_stage() as stage:
        stage.fleet.model_limits = Limits(4096)
        answer = await tokenize(stage, prompt=prompt)
        if prompt:
            await ask(stage.port, "POST", "/v1/completions", completion(prompt))
            assert answer.json["tokens"] == list(stage.runner.generations[0].prompt_token_ids)
    ids = TOKENIZER.encode(prompt)
    assert answer.json == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}


async def test_the_tokens_of_a_conversation_are_those_of_a_chat():
    fields = {"messages": chat()["messages"], "tools": [tool()]}
    async with open_stage(template=HERMES_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        answer = await tokenize(stage, **fields)
        await ask(stage.port, "POST", "/v1/chat/completions", {"model": MODEL, **fields})
        assert answer.json["tokens"] == list(stage.runner.generations[0].prompt_token_ids)
        bare = await tokenize(stage, **fields, add_generation_prompt=False)
    assert TOKENIZER.decode(answer.json["tokens"]) == TOKENIZER.decode(bare.json["tokens"]) + "<|start|>assistant\n"


async def test_tokens_can_be_named_and_special_ones_left_out():
    async with open_stage() as stage:
        answer = await tokenize(stage, prompt="hello", add_special_tokens=False, return_token_strs=True)
        with_begin = await tokenize(stage, prompt="hello", return_token_strs=True)
    assert "".join(answer.json["token_strs"]) == "hello"
    assert with_begin.json["token_strs"] == ["<|begin|>", *answer.json["token_strs"]]


@pytest.mark.parametrize("text", ["", "hello café 😀", LONG])
async def test_what_was_tokenised_can_be_detokenised(text):
    async with open_stage() as stage:
        ids = (await tokenize(stage, prompt=text)).json["tokens"]
        answer = await ask(stage.port, "POST", "/detokenize", {"model": MODEL, "tokens": ids})
    assert answer.json == {"prompt": f"<|begin|>{text}"}


async def test_both_apis_give_the_same_tokens():
    async with open_stage(template=HERMES_TEMPLATE) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        over_rest = await tokenize(stage, messages=chat()["messages"], tools=[tool()], return_token_strs=True)
        request = pb.TokenizeRequest(
            model=MODEL,
            messages=[pb.ChatMessage(role="user", content="hello")],
            tools=[pb.Tool(name="get", parameters_json=json.dumps(tool()["function"]["parameters"]))],
            return_token_strs=True,
        )
        over_grpc = await stub.Tokenize(request)
        text = await stub.Detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=over_grpc.token_ids))
    assert list(over_grpc.token_ids) == over_rest.json["tokens"]
    assert list(over_grpc.token_strs) == over_rest.json["token_strs"]
    assert over_grpc.max_model_len == over_rest.json["max_model_len"]
    assert text.text == TOKENIZER.decode(over_grpc.token_ids)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": chat()["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [tool()]}, "tools"),
        ("/tokenize", {"messages": chat()["messages"], "chat_template_kwargs": {"messages": 1}}, TEMPLATE_MESSAGES),
        ("/tokenize", {"messages": chat()["messages"], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [0] * (MAX_PROMPT_TOKENS + 1)}, "tokens"),
    ],
)
async def test_what_makes_no_sense_is_refused(path, fields, param):
    async with open_stage(max_body_bytes=2**21) as stage:
        answer = await ask(stage.port, "POST", path, {"model": MODEL, **fields})
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize("size", [2, 20])
async def test_a_text_of_too_many_tokens_is_refused(size, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_PROMPT_TOKENS", 1000)
    async with open_stage() as stage:
        answer = await tokenize(stage, prompt="z" * size * 1000)
        enough = await tokenize(stage, prompt="z" * 999)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert answer.error["message"] == "prompt has more than 1000 tokens, which is the limit here."
    assert enough.json["count"] == 1000


async def test_a_key_and_a_model_are_needed():
    async with open_stage(keys=["secret"]) as stage:
        for path in ("/tokenize", "/detokenize"):
            assert (await ask(stage.port, "POST", path, {"model": MODEL, "prompt": "x"})).status == 401
        headers = {"authorization": "Bearer secret"}
        unknown = await ask(stage.port, "POST", "/tokenize", {"model": "other", "prompt": "x"}, headers)
        assert unknown.status == 404
        async with stage.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceStub(channel).Tokenize(pb.TokenizeRequest(model=MODEL, text="x"))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
