"""``/openapi.json`` by schemathesis: every answer is one that it describes, whatever is sent, and no schema of a field
is looser than what reads the field.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from jsonschema import Draft202012Validator
from quire_router.api.conversations import Conversations
from quire_router.api.rest.openapi import openapi
from quire_router.journal.objects import MemoryObjectStore
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.scripted_api import MODEL, Stage
from tests.support.served_stage import served_stage

MESSAGES = [{"role": "user", "content": "hello"}]
REQUIRED: Mapping[str, dict[str, Any]] = {
    "ChatRequest": {"model": MODEL, "messages": MESSAGES},
    "CompletionRequest": {"model": MODEL, "prompt": "hello"},
    "MessagesRequest": {"model": MODEL, "max_tokens": 9, "messages": MESSAGES},
    "CountTokensRequest": {"model": MODEL, "messages": MESSAGES},
    "ResponsesRequest": {"model": MODEL, "input": "hello"},
    "InputTokensRequest": {"model": MODEL, "input": "hello"},
    "TokenizeRequest": {"model": MODEL, "prompt": "hello"},
    "DetokenizeRequest": {"model": MODEL, "tokens": [1]},
    "EmbeddingRequest": {"model": MODEL, "input": "hello"},
    "ScoreRequest": {"model": MODEL, "text_1": "a", "text_2": "b"},
    "RerankRequest": {"model": MODEL, "query": "a", "documents": ["b"]},
    "ConversationBody": {},
    "ConversationUpdate": {"metadata": {}},
    "NewItems": {"items": [{"role": "user", "content": "hello"}]},
}
# Why a value that a field's schema allows may be refused all the same: rules across fields, and what only this model,
# this caller or this moment knows. Each is a pattern of the sentence.
ACROSS_FIELDS: Mapping[str, str] = {
    r"exclude each other|go together|together\.$": "two fields",
    r" needs |which is not among|belongs to|is missing|are missing|both given|has the field": "one that goes with it",
    r"between 0 and max_|most tokens of the output|between n and|at most as many": "the other field's value",
    r"this model's limit|maximum context length|prompt is too long": "the model's size",
    r"Each of bad_words must have 1 to \d+ tokens": "the model's tokenizer",
    r"model's vocabulary|must be -1, or between 1 and": "the model's size",
    r"bad_words holds \d+ texts": "its texts, which have two forms each",
    r"have no role|nothing that a model is shown": "the type of the item",
    r"no prompt named|makes no embeddings": "what the model's folder has",
    r"is not taken|only 0 is|cannot be stored|not kept": "the router's settings",
    r"not found|is not there|expired": "what is stored",
    r"is not a JSON Schema|is not valid JSON|must be a JSON Schema|does not compile": "JSON in a text",
    r"are not supported|not supported here|is not supported": "a type that the field's text names",
    r"two tools named|come twice|same call|answers no call|no call|last message|first message": "its neighbours",
    r"has \d+ texts and": "two lists",
    r"prompt is empty": "the template",
}
FAST = 2
LONG = 200


def served(**settings: Any) -> Iterator[Stage]:
    with served_stage(conversations=Conversations(MemoryObjectStore(), 60.0), **settings) as stage:
        yield stage


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    yield from served()


@pytest.fixture(scope="module")
def document(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{stage.url}/openapi.json", timeout=20).json()
    return found


def examples(count: int) -> Any:
    checks = list(HealthCheck)
    return settings(
        max_examples=count, deadline=None, suppress_health_check=checks, phases=[Phase.generate], database=None
    )


def operations(found: dict[str, Any]) -> Iterator[Any]:
    for result in schemathesis.openapi.from_dict(found).get_all_operations():
        yield result.ok()


def answer_of(case: Case, stage: Stage) -> Any:
    return case.call(base_url=stage.url, timeout=20)


def check_operations(stage: Stage, found: dict[str, Any], count: int) -> None:
    """Every answer to what is allowed, and to what is not, is one that the document has."""
    problems: list[str] = []
    for operation in operations(found):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue  # a path has nothing that could be wrong: schemathesis would try for a second

            @seed(0)
            @examples(count)
            @given(case=operation.as_strategy(generation_mode=mode))
            def run(case: Case) -> None:
                response = answer_of(case, stage)
                assert response.status_code < 500 or response.status_code in (501, 503), response.text
                checks = [status_code_conformance, content_type_conformance, response_schema_conformance]
                case.validate_response(response, checks=checks)

            try:
                run()
            except BaseException as error:  # noqa: BLE001 - schemathesis' failures are groups
                problems.append(f"{operation.method} {operation.path}: {described(error)}")
    assert not problems, "\n".join(problems)


def described(error: BaseException) -> str:
    """An error and those that it is a group of, in one line each."""
    inner = [described(each) for each in getattr(error, "exceptions", ())]
    return " | ".join(inner or [f"{type(error).__name__}: {error}"])[:1000]


def alone(found: dict[str, Any], path: str, method: str, field: str) -> dict[str, Any]:
    """The document with one operation, which takes a field and what must come with it as constants."""
    operation = found["paths"][path][method]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fixed = {key: value for key, value in REQUIRED[name].items() if key != field}
    schema = {
        "type": "object",
        "properties": {**{key: {"const": value} for key, value in fixed.items()}},
        "required": [*fixed, field],
        "additionalProperties": False,
    }
    schema["properties"][field] = found["components"]["schemas"][name]["properties"][field]
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    only = {**operation, "parameters": operation.get("parameters", [])[: path.count("{")], "requestBody": body}
    return {**found, "paths": {path: {method: only}}}


def looser(stage: Stage, found: dict[str, Any], path: str, method: str, field: str, count: int) -> list[str]:
    """What a field's schema allows, and the router refuses for that field alone."""
    refused: list[str] = []
    (operation,) = operations(alone(found, path, method, field))

    @seed(0)
    @examples(count)
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def run(case: Case) -> None:
        response = answer_of(case, stage)
        if 400 <= response.status_code < 500:
            sentence = response.json()["error"]["message"]
            if not any(re.search(pattern, sentence) for pattern in ACROSS_FIELDS):
                refused.append(f"{path} {field}={json.dumps(case.body.get(field))[:80]}: {sentence}")

    run()
    return refused


def check_fields(stage: Stage, found: dict[str, Any], count: int) -> None:
    problems: list[str] = []
    for path, methods in found["paths"].items():
        if path in ("/v1/score", "/v1/rerank", "/v2/rerank"):
            continue  # by other names above
        for method, operation in methods.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = schema.get("$ref", "").rpartition("/")[2]
            for field in found["components"]["schemas"].get(name, {}).get("properties", {}) if name in REQUIRED else ():
                if field != "model":
                    problems += looser(stage, found, path, method, field, count)
    assert not problems, "\n".join(problems)


def test_every_answer_is_one_that_the_document_has(stage: Stage, document: dict[str, Any]) -> None:
    check_operations(stage, document, FAST)


def test_no_field_has_a_schema_looser_than_its_validator(stage: Stage, document: dict[str, Any]) -> None:
    check_fields(stage, document, FAST)


def test_limits_of_the_output_have_the_bounds_that_they_are_held_to(document: dict[str, Any]) -> None:
    limits = {"ChatRequest": "max_tokens", "MessagesRequest": "max_tokens", "ResponsesRequest": "max_output_tokens"}
    for name, field in limits.items():
        schema = document["components"]["schemas"][name]["properties"][field]
        (bounded,) = [form for form in (schema, *schema.get("anyOf", ())) if form.get("type") == "integer"]
        assert bounded["exclusiveMaximum"] == 2**64, name


@pytest.mark.soak
def test_every_answer_is_one_that_the_document_has_at_length(stage: Stage, document: dict[str, Any]) -> None:
    check_operations(stage, document, LONG)


@pytest.mark.soak
def test_no_field_has_a_looser_schema_at_length(stage: Stage, document: dict[str, Any]) -> None:
    check_fields(stage, document, LONG)


@pytest.mark.parametrize(
    ("word", "allowed"),
    [("x", True), (" x", True), ("", False), ("  ", False), ("x" * 257, False), ([1], True), ([], False)],
)
def test_the_schema_of_bad_words_allows_what_is_taken(
    stage: Stage, document: dict[str, Any], word: str | list[int], allowed: bool
) -> None:
    body = {**REQUIRED["CompletionRequest"], "bad_words": [word]}
    assert requests.post(f"{stage.url}/v1/completions", json=body, timeout=20).ok == allowed
    schema = document["components"]["schemas"]["CompletionRequest"]["properties"]["bad_words"]
    assert Draft202012Validator(schema).is_valid([word]) == allowed


def test_a_looser_schema_would_be_found(stage: Stage, document: dict[str, Any]) -> None:
    found = copy.deepcopy(document)
    found["components"]["schemas"]["ChatRequest"]["properties"]["temperature"] = {"type": "number", "minimum": 3}
    assert looser(stage, found, "/v1/chat/completions", "post", "temperature", FAST)


def test_everything_is_described() -> None:
    for path, methods in openapi("1")["paths"].items():
        for method, operation in methods.items():
            named = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            responses = operation["responses"]
            for response in responses.values():
                assert all("schema" in each for each in response["content"].values()), path
            assert set(responses) <= {"200", "202", "default"}
            if method == "post" and not path.endswith("/cancel"):
                assert operation["requestBody"]["content"], path
