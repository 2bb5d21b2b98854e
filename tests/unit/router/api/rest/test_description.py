"""What the API says of itself, and to browsers: ``/version``, ``/openapi.json``, ``/ping``, pages of other sites."""

import json
import re

import jsonschema
import pytest
from quire_router.api.rest.openapi import OPERATIONS

from tests.support.scripted_api import ask, chat, completion, open_stage

KEY = "k" * 16
CHAT = "/v1/chat/completions"
PAGE = "https://chat.example"


async def described() -> dict:
    async with open_stage() as stage:
        return (await ask(stage.port, "GET", "/openapi.json")).json


async def test_every_route_is_described_and_every_described_route_is_there():
    async with open_stage() as stage:
        paths = (await ask(stage.port, "GET", "/openapi.json")).json["paths"]
        assert set(paths) == set(OPERATIONS)
        for path, methods in paths.items():
            allowed = (await ask(stage.port, "PUT", path.replace("{id}", "x").replace("{model}", "m"))).headers["allow"]
            assert {method.strip().lower() for method in allowed.split(",")} - {"head"} == set(methods), path
        unknown = await ask(stage.port, "PUT", "/v1/nothing")
        assert unknown.status == 404


async def test_the_document_follows_its_own_references():
    document = await described()
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert {"ChatRequest", "CompletionRequest", "ChatMessage", "Error"} <= names
    assert names <= set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "body", "fits"),
    [
        (CHAT, chat(temperature=0.5, tools=[]), True),
        (CHAT, {"model": "m"}, False),
        (CHAT, chat(n="three"), False),
        ("/v1/completions", completion([1, 2]), True),
        ("/v1/completions", completion({"a": 1}), False),
    ],
)
async def test_the_schemas_take_and_refuse_what_the_router_does(path, body, fits):
    document = await described()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    async with open_stage() as stage:
        assert ((await ask(stage.port, "POST", path, body)).status == 200) is fits


async def test_the_version_and_the_description_need_a_key_and_the_ping_none():
    async with open_stage(keys=[KEY]) as stage:
        for path in ("/version", "/openapi.json"):
            assert (await ask(stage.port, "GET", path)).status == 401
            with_key = await ask(stage.port, "GET", path, headers={"x-api-key": KEY})
            assert with_key.status == 200
        assert re.fullmatch(
            r"\d+\.\d+\.\d+", (await ask(stage.port, "GET", "/version", headers={"api-key": KEY})).json["version"]
        )
        for method in ("GET", "POST"):
            ping = await ask(stage.port, method, "/ping")
            assert (ping.status, ping.json) == (200, {"status": "ok"})


async def test_a_page_of_an_allowed_site_may_ask_before_it_has_a_key_and_then_read_everything():
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,idempotency-key,last-event-id",
    }
    async with open_stage(keys=[KEY], origins=[PAGE]) as stage:
        before = await ask(stage.port, "OPTIONS", CHAT, headers=asked)
        assert before.status == 200
        assert before.headers["access-control-allow-origin"] == PAGE
        assert "POST" in before.headers["access-control-allow-methods"]
        assert "idempotency-key" in before.headers["access-control-allow-headers"]
        sent = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        for body in (chat(), chat(stream=True)):
            answer = await ask(stage.port, "POST", CHAT, body, headers=sent)
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert answer.headers["access-control-expose-headers"] == "*"
        refused = await ask(stage.port, "POST", CHAT, chat(), headers={"origin": PAGE})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)  # the page can read why


@pytest.mark.parametrize("origins", [(), (PAGE,)])
async def test_a_page_of_another_site_is_told_nothing(origins):
    other = {"origin": "https://evil.example"}
    async with open_stage(origins=origins) as stage:
        before = await ask(stage.port, "OPTIONS", CHAT, headers={**other, "access-control-request-method": "POST"})
        assert before.status >= 400
        answer = await ask(stage.port, "GET", "/v1/models", headers=other)
    assert not [name for reply in (before, answer) for name in reply.headers if name == "access-control-allow-origin"]


async def test_every_site_is_allowed_by_a_star():
    async with open_stage(origins=["*"]) as stage:
        answer = await ask(stage.port, "GET", "/v1/models", headers={"origin": "https://any.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers
