"""What the official documents allow is taken."""

import pytest
from quire_proto.structured_output import Structured, StructuredKind
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.auth import ANONYMOUS
from quire_router.api.conversations import Conversations
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.validation import Validator
from quire_router.journal.objects import MemoryObjectStore

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.scripted_api import MODEL, Limits, ask, chat, completion, open_stage

TOKENIZER = ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))
VALIDATOR = Validator({MODEL: TOKENIZER}, lambda _: Limits())


def params_of(kind, fields):
    return VALIDATOR.generations(kind.from_fields(fields), "id", ANONYMOUS)[0].params


@pytest.mark.parametrize(("kind", "fields"), [(ChatRequest, chat()), (CompletionRequest, completion())])
def test_a_top_p_of_zero_keeps_one_token(kind, fields):
    params = params_of(kind, {**fields, "top_p": 0, "temperature": 1.5})

    assert (params.top_k, params.top_p, params.temperature) == (1, 1.0, 1.5)


def test_a_seed_may_be_negative_and_minus_one_is_random():
    assert params_of(ChatRequest, chat(seed=-2)).seed == params_of(ChatRequest, chat(seed=2**64 - 2)).seed
    assert params_of(ChatRequest, chat(seed=-(2**63))).seed == 2**63
    assert len({params_of(ChatRequest, chat(seed=-1)).seed for _ in range(5)}) == 5


def test_as_many_choices_may_be_asked_for_as_openai_has():
    assert params_of(ChatRequest, chat(n=128, max_tokens=1)).n == 128


def test_a_json_schema_without_a_schema_is_any_json_object():
    form = {"type": "json_schema", "json_schema": {"name": "x"}}

    assert params_of(ChatRequest, chat(response_format=form)).structured == Structured(StructuredKind.JSON_OBJECT)


def test_a_json_schema_needs_no_name():
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}

    assert params_of(ChatRequest, chat(response_format=form)).structured.text == '{"const":1}'


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
async def test_a_conversation_is_created_without_a_body(headers):
    async with open_stage(conversations=Conversations(MemoryObjectStore(), 60.0)) as stage:
        answer = await ask(stage.port, "POST", "/v1/conversations", None, headers)

    assert (answer.status, answer.json["object"]) == (200, "conversation")


@pytest.mark.parametrize("body", [None, {}, {"input": None}, {"input": [], "instructions": None}])
async def test_the_tokens_of_no_input_are_none(body):
    async with open_stage(template=CHAT_TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", "/v1/responses/input_tokens", body)

    assert (answer.status, answer.json["input_tokens"]) == (200, 0)


async def test_the_tokens_of_instructions_alone_are_counted():
    async with open_stage(template=CHAT_TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", "/v1/responses/input_tokens", {"instructions": "Be brief."})

    assert answer.json["input_tokens"] > 0


@pytest.mark.parametrize("given", [{}, {"prompt": None}])
async def test_a_completion_without_a_prompt_begins_a_document(given):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/completions", {"model": MODEL, **given})

    assert answer.status == 200
    assert [*stage.runner.generations[0].prompt_token_ids] == TOKENIZER.encode("")


async def test_a_conversation_that_is_not_found_is_named_by_the_field_that_was_sent():
    body = {"model": MODEL, "input": "hi", "conversation": "conv_none"}
    async with open_stage(conversations=Conversations(MemoryObjectStore(), 60.0)) as stage:
        answer = await ask(stage.port, "POST", "/v1/responses", body)

    assert (answer.status, answer.json["error"]["param"]) == (404, "conversation")
