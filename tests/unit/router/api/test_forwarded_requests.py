"""What is known of a request that a gateway sends on: its prompt, in tokens, wherever the router's own API would know
it, and otherwise its model and its size.
"""

import json
from array import array
from typing import Any

import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_router.api.auth import ANONYMOUS, Identity
from quire_router.api.forwarded_requests import (
    ASSUMED_OUTPUT_TOKENS,
    ForwardedRequest,
    api_path,
    forwarded_generations,
    read_forwarded,
)
from quire_router.api.prepared_request import NO_OPTIONS, RequestOptions
from quire_router.api.validation import Validator
from quire_router.engines.settings import ServedModelLimits

from tests.support.http_engines import demo_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "Once upon a time there was a fox."
MESSAGES = [{"role": "user", "content": TEXT}]
TOKENIZER = demo_tokenizer()


def validator() -> Validator:
    limits = ServedModelLimits(max_model_len=512, vocab_size=1024)
    return Validator({"m": TOKENIZER}, lambda _model: limits)


def forwarded(
    path: str, body: dict[str, Any], caller: Identity = ANONYMOUS, options: RequestOptions = NO_OPTIONS
) -> ForwardedRequest:
    read = read_forwarded(path, json.dumps({"model": "m", **body}).encode())
    return forwarded_generations(read, validator(), "id", caller, options)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, CHAT),
        (f"/tenant/llama{CHAT}?x=/v1/completions", CHAT),
        ("/v2/rerank", "/v2/rerank"),
        ("/rerank", "/rerank"),
        ("/v1/models", ""),
        ("/v1/chat/completions/x", ""),
        (f"/metrics{CHAT}", ""),
        (f"/metricsx{CHAT}", ""),
        (f"/sleep/..{CHAT}", ""),
        (f"/{CHAT}", ""),
        (f"/sleep#{CHAT}", ""),
        (f"/sleep;{CHAT}", ""),
        (f"/sleep%3f{CHAT}", ""),
        ("", ""),
    ],
)
def test_paths_may_have_a_beginning_of_the_gateways(path: str, expected: str) -> None:
    assert api_path(path) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/responses", {"input": MESSAGES}),
    ],
)
def test_a_conversation_has_the_tokens_of_the_models_template(path: str, body: dict[str, Any]) -> None:
    found = forwarded(path, body)
    assert found.first.prompt_token_ids == array("i", TOKENIZER.encode_chat(MESSAGES, 512))
    assert found.prompt_tokens == len(found.first.prompt_token_ids)


def test_each_prompt_counts() -> None:
    found = forwarded(COMPLETIONS, {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 8})
    assert [list(each.prompt_token_ids) for each in found.generations] == [[5, 6, 7], [8, 9]]
    assert (found.prompt_tokens, found.num_sequences) == (5, 4)
    assert found.max_cost == found.prompt_tokens + 4 * 8


def test_blocks_are_as_the_server_has_them_and_not_as_the_routers_tenants() -> None:
    caller = Identity("ada", b"salt of ada")
    assert forwarded(CHAT, {"messages": MESSAGES}, caller).first.cache_salt == b""
    found = forwarded(CHAT, {"messages": MESSAGES, "cache_salt": "mine"}, caller)
    assert (found.first.tenant, found.first.cache_salt) == ("ada", b"mine")


def test_a_session_is_the_tenants_own() -> None:
    options = RequestOptions(session="s")
    sessions = {
        forwarded(CHAT, {"messages": MESSAGES}, Identity(name), options).first.session for name in ("ada", "bob")
    }
    assert len(sessions) == 2
    assert "" not in sessions
    unknown = forwarded(CHAT, {"x": 1}, Identity("ada"), options).first.session
    assert unknown in sessions
    assert forwarded(CHAT, {"messages": MESSAGES}).first.session == ""


def test_a_priority_is_the_servers_to_follow() -> None:
    found = forwarded(CHAT, {"messages": MESSAGES, "priority": -100})
    assert found.first.priority == 0
    assert found.prompt_tokens > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (CHAT, {"messages": MESSAGES, "temperature": -1}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 10_000}),
        (CHAT, {"messages": "no list"}),
        ("/v1/audio/speech", {"input": TEXT}),
        ("", {}),
    ],
)
def test_what_is_not_understood_has_a_size_alone(path: str, body: dict[str, Any]) -> None:
    body = {**body, "padding": "x" * 4000}
    found = forwarded(path, body)
    assert len(found.first.prompt_token_ids) == 1, "less than a block"
    assert 1000 <= found.prompt_tokens < 1100
    output = body.get("max_tokens", ASSUMED_OUTPUT_TOKENS)
    assert found.max_cost == found.prompt_tokens + output


@pytest.mark.parametrize("limit", [0, -1, "9", True, 2**40, None, 1.5])
def test_a_limit_that_is_none_is_not_taken_for_one(limit: Any) -> None:
    found = forwarded(CHAT, {"max_tokens": limit})
    assert found.first.params.max_tokens == ASSUMED_OUTPUT_TOKENS


def test_the_latest_word_for_the_limit_comes_first() -> None:
    assert forwarded(CHAT, {"max_tokens": 5, "max_completion_tokens": 7}).first.params.max_tokens == 7


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"", ErrorCode.INVALID, "not valid JSON"),
        (b"[1]", ErrorCode.INVALID, "must be a JSON object"),
        (b'{"messages": []}', ErrorCode.NOT_FOUND, "no model named"),
        (b'{"model": 5}', ErrorCode.INVALID, "model"),
        (b'{"model": "other"}', ErrorCode.NOT_FOUND, "other"),
        (b"[" * 100_000, ErrorCode.INVALID, "more than"),
        (b'{"model":"m","a":' + b"[" * 5000 + b"]" * 5000 + b"}", ErrorCode.INVALID, "recursion limit"),
    ],
)
def test_only_a_body_without_a_known_model_is_refused(body: bytes, code: ErrorCode, words: str) -> None:
    with pytest.raises(QuireError, match=words) as refused:
        forwarded_generations(read_forwarded(CHAT, body), validator(), "id", ANONYMOUS, NO_OPTIONS)
    assert refused.value.code is code
