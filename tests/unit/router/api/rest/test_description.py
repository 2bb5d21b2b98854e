"""What the API says of itself, and to browsers: ``/version``, ``/openapi.json``, ``/ping``, pages of other sites."""

import json
import re
from typing import cast

import jsonschema
import pytest
from quire_router.api.auth import Authenticator
from quire_router.api.fleet_feed import FleetFeed
from quire_router.api.rest.endpoints import FleetEndpoint
from quire_router.api.rest.openapi import BATCH_PATHS, FLEET, LORA_UPDATES, openapi
from quire_router.api.rest.page import DOCS, HOME, Page
from quire_router.api.rest.rest_app import PUBLIC_PATHS
from quire_router.api.rest.sse import KEEPALIVE
from quire_router.engines.loaded_loras import LoadedLoRAs
from quire_router.engines.lora_updates import LoRAUpdater
from quire_router.engines.pool import EnginePool
from quire_router.journal.objects import MemoryObjectStore

from tests.support.scripted_api import ask, chat, completion, open_stage

KEY = "k" * 16
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PAGE = "https://chat.example"
NOT_DESCRIBED = {*PUBLIC_PATHS, HOME, DOCS, "/page/{name}", "/openapi.json"}
NO_UPDATER = LoRAUpdater(cast(EnginePool, None), (), LoadedLoRAs(MemoryObjectStore()))  # as are routes that update
NO_FEED = cast(FleetFeed, None)  # the stream is described, not read


async def described() -> dict:
    async with open_stage() as stage:
        return (await ask(stage.port, "GET", "/openapi.json")).json


@pytest.mark.parametrize("page", [None, Page()], ids=["without the page", "with the page"])
async def test_the_described_routes_are_those_that_the_application_has(page):
    fleet = None if page is None else FleetEndpoint(NO_FEED, Authenticator(()), KEEPALIVE)
    updater = None if page is None else NO_UPDATER
    async with open_stage(page=page, fleet_endpoint=fleet, lora_updater=updater) as stage:
        paths = (await ask(stage.port, "GET", "/openapi.json")).json["paths"]
        routes = {route.path_format: {method.lower() for method in route.methods} for route in stage.app.routes}
        optional = {HOME, DOCS, "/page/{name}", FLEET, *LORA_UPDATES}
        assert optional & set(routes) == (set() if page is None else optional)
        assert {path: set(methods) for path, methods in paths.items()} == {
            path: methods - {"head"} for path, methods in routes.items() if path not in NOT_DESCRIBED
        }
        for path in paths:
            refused = await ask(stage.port, "PUT", path.replace("{id}", "x").replace("{model}", "m"))
            assert refused.status == 405, path


def test_what_answers_with_events_alone_is_described_so():
    answers = {
        path: set(methods["get"]["responses"]["200"]["content"])
        for path, methods in openapi("1")["paths"].items()
        if "get" in methods
    }
    assert {path for path, types in answers.items() if types == {"text/event-stream"}} == {
        "/v1/requests/{id}/events",
        FLEET,
    }


def test_every_route_is_in_one_section_and_the_sections_begin_with_what_generates():
    document = openapi("1")
    listed = [tag["name"] for tag in document["tags"]]
    used = [each["tags"] for methods in document["paths"].values() for each in methods.values()]
    assert all(len(tags) == 1 for tags in used)
    assert list(dict.fromkeys(tags[0] for tags in used)) == listed
    assert listed[:5] == ["Chat", "Completions", "Responses", "Conversations", "Messages"]
    assert document["paths"]["/v1/batches/{id}/cancel"]["post"]["tags"] == ["Files and batches"]
    for tag in document["tags"]:
        assert re.fullmatch(r"[A-Z][^.]+\.", tag["description"]), tag


def test_a_section_is_absent_when_the_router_has_none_of_its_routes():
    names = {tag["name"] for tag in openapi("1", BATCH_PATHS | LORA_UPDATES)["tags"]}
    assert "Files and batches" not in names
    assert {"Chat", "Models"} <= names


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
        (MESSAGES, chat(max_tokens=1), True),
        (MESSAGES, chat([{"type": "text", "text": "hello"}], max_tokens=1, system="Be brief."), True),
        (MESSAGES, chat(max_tokens=1, system=[{"type": "text", "text": "Be brief."}]), True),
        (MESSAGES, chat(), False),
        (MESSAGES, chat(max_tokens=1, tools=[{"name": "get"}]), False),
        (f"{MESSAGES}/count_tokens", chat(), True),
    ],
)
async def test_the_schemas_take_and_refuse_what_the_router_does(path, body, fits):
    document = await described()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits
    async with open_stage() as stage:
        assert ((await ask(stage.port, "POST", path, body)).status == 200) is fits


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_errors_look_as_they_are_described(path):
    document = await described()
    content = document["paths"][path]["post"]["responses"]["default"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    async with open_stage() as stage:
        for body in (b"{", {"model": "other"}, chat("x", model="other", max_tokens=1)):
            answer = await ask(stage.port, "POST", path, body)
            assert answer.status in (400, 404)
            jsonschema.Draft202012Validator(schema).validate(answer.json)


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
