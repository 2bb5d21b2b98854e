"""Whatever JSON a body holds, the answer is one of the client's: never an error of our own."""

import json
import re
from codecs import BOM_UTF8
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import QuireError
from quire_proto.pooling import Task
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.auth import ANONYMOUS
from quire_router.api.forwarded_requests import read_forwarded
from quire_router.api.rest.batch_endpoints import BatchBody
from quire_router.api.rest.conversation_endpoints import ConversationBody, ConversationUpdate, NewItems
from quire_router.api.rest.loras import LoadLoRABody, UnloadLoRABody
from quire_router.api.schemas.anthropic import CountTokensRequest, MessagesRequest
from quire_router.api.schemas.base import StrictModel
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest, GenerationBody
from quire_router.api.schemas.pooling import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from quire_router.api.schemas.response_items import History, list_items
from quire_router.api.schemas.responses import InputTokensRequest, ResponsesRequest
from quire_router.api.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    input_to_tokenize,
    to_tokenize,
    tokenize,
)
from quire_router.api.validation import Validator, check_stream

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.scripted_api import MODEL, Limits, ask, open_stage

TOKENIZER = ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))
GENERATING = Validator({MODEL: TOKENIZER}, lambda _: Limits())
EMBEDDING = Validator({MODEL: TOKENIZER}, lambda _: Limits(supported_tasks=(Task.EMBED,), pooled_size=4))
CLASSIFYING = Validator({MODEL: TOKENIZER}, lambda _: Limits(supported_tasks=(Task.CLASSIFY,), pooled_size=1))


def generate(request: GenerationBody) -> None:
    check_stream(request)
    request, _ = GENERATING.drop_ignored(request, MODEL)
    GENERATING.generations(request, "id", ANONYMOUS)


def pool(request: PoolingBody) -> None:
    for validator in (EMBEDDING, CLASSIFYING):
        body, _ = validator.drop_ignored(request, MODEL)
        validator.pooling(body, "id", ANONYMOUS)


def count(request: TokenizeRequest) -> None:
    request, _ = GENERATING.drop_ignored(request, MODEL)
    tokenize(request, TOKENIZER, 64, ())


def keep(request: ConversationBody | NewItems) -> None:
    list_items(request.items or (), "id", kept=0)


ROUTES = {
    "chat": (ChatRequest, generate),
    "completions": (CompletionRequest, generate),
    "messages": (MessagesRequest, lambda request: generate(request.to_chat())),
    "responses": (ResponsesRequest, lambda request: generate(request.to_chat(History(), "id"))),
    "count_tokens": (CountTokensRequest, lambda request: count(to_tokenize(request))),
    "input_tokens": (InputTokensRequest, lambda request: count(input_to_tokenize(request, History()))),
    "embeddings": (EmbeddingRequest, pool),
    "score": (ScoreRequest, pool),
    "rerank": (RerankRequest, pool),
    "tokenize": (TokenizeRequest, count),
    "detokenize": (DetokenizeRequest, lambda request: detokenize(request, TOKENIZER)),
    "batches": (BatchBody, lambda _: None),
    "conversations": (ConversationBody, keep),
    "conversation": (ConversationUpdate, lambda _: None),
    "items": (NewItems, keep),
    "load": (LoadLoRABody, lambda _: None),
    "unload": (UnloadLoRABody, lambda _: None),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x", "auto", "none", "text", "json_schema", "function", "tool", "user", "\ud83d", "\x00"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "id", "schema"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
TEXTS = [{"text": "x"}, "y", 3, None, ["z"], {"text": 3}, {}]
USER = {"role": "user", "content": "hi"}
VALID = {
    "chat": {"messages": [USER]},
    "completions": {"prompt": "hi"},
    "messages": {"messages": [USER], "max_tokens": 4},
    "responses": {"input": "hi"},
    "count_tokens": {"messages": [USER]},
    "input_tokens": {"input": "hi"},
    "embeddings": {"input": "hi"},
    "score": {"text_1": "a", "text_2": "b"},
    "rerank": {"query": "a", "documents": ["b"]},
    "tokenize": {"prompt": "hi"},
    "detokenize": {"tokens": [1]},
    "batches": {"input_file_id": "a", "endpoint": "/v1/embeddings", "completion_window": "24h"},
    "items": {"items": [USER]},
}


def handle(route: str, body: bytes) -> None:
    kind, use = ROUTES[route]
    try:
        use(kind.from_json(body))
    except QuireError as error:
        assert error.status.http in (400, 404), error  # noqa: PT017 - it need not be raised


def names_of(kind: type[StrictModel]) -> list[str]:
    return [each.alias or name for name, each in kind.model_fields.items()] + sorted(kind.foreign)


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_body_is_an_error_of_ours(route: str, data: st.DataObject) -> None:
    names = names_of(ROUTES[route][0])
    mixed = st.lists(st.sampled_from(TEXTS), max_size=3)
    fields = data.draw(st.dictionaries(st.sampled_from(names), VALUES | mixed, max_size=3))
    handle(route, json.dumps({"model": MODEL, **VALID.get(route, {}), **fields}).encode())


@pytest.mark.parametrize("route", ["completions", "embeddings", "score", "rerank"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_mixed_list_works_or_is_refused(route: str, data: st.DataObject) -> None:
    listed = data.draw(st.lists(st.sampled_from(TEXTS), max_size=4))
    name = {"completions": "prompt", "embeddings": "input", "score": "text_2", "rerank": "documents"}[route]
    handle(route, json.dumps({"model": MODEL, **VALID[route], name: listed}).encode())


@pytest.mark.parametrize("documents", [[{"text": "x"}, "y"], ["y", {"text": "x", "more": 1}]])
def test_documents_may_be_texts_beside_objects(documents: list[object]) -> None:
    request = RerankRequest.from_fields({"model": MODEL, "query": "q", "documents": documents})

    assert sorted(request.texts) == ["x", "y"]


@pytest.mark.parametrize("route", VALID)
def test_a_byte_order_mark_is_skipped(route: str) -> None:
    kind, _ = ROUTES[route]
    body = json.dumps({"model": MODEL, **VALID[route]}).encode()

    assert kind.from_json(BOM_UTF8 + body) == kind.from_json(bytearray(body))


def test_a_gateway_may_send_one_too() -> None:
    assert read_forwarded("/v1/completions", BOM_UTF8 + b'{"model":"m","prompt":"a"}').model == "m"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"n": -1, "stream": True}, "n"),
        ("completions", {"best_of": 3, "stream": True}, "best_of"),
        ("completions", {"use_beam_search": True, "n": 33}, "n"),
        ("completions", {"use_beam_search": True, "best_of": 40}, "best_of"),
        ("completions", {"use_beam_search": True, "n": 2, "temperature": 0.5}, "use_beam_search"),
        ("completions", {"max_tokens": -1}, "max_tokens"),
        ("completions", {"max_new_tokens": -1}, "max_new_tokens"),
        ("chat/completions", {"max_completion_tokens": -1}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ("responses", {"max_output_tokens": -1}, "max_output_tokens"),
        ("messages", {"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_the_field_at_fault_is_the_one_that_was_sent(path: str, fields: dict[str, Any], param: str) -> None:
    body = {"completions": {"prompt": "hi"}, "responses": {"input": "hi"}}.get(path, {"messages": [USER]})
    async with open_stage(template=CHAT_TEMPLATE) as stage:
        answer = await ask(stage.port, "POST", f"/v1/{path}", {"model": MODEL, **body, **fields})

    details = answer.error.get("details", answer.error)
    assert (answer.status, details["param"]) == (400, param)
    named = set(re.findall(r"\b(?:max_\w*tokens|best_of|beam_width)\b", str(answer.error["message"])))
    assert named <= set(fields)
