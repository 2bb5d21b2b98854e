"""Anthropic's clients list models in the form of their API; other clients in OpenAI's."""

import anthropic
import pytest

from tests.support.scripted_api import MODEL, Stage, ask, open_stage

NAMES = ("a", "b", "c", "d", "e")
VERSION = {"anthropic-version": "2023-06-01"}


def client_of(stage: Stage) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=stage.url, api_key="none", max_retries=0)


async def test_the_anthropic_package_reads_every_page() -> None:
    async with open_stage(models=NAMES) as stage, client_of(stage) as client:
        listed = [model async for model in client.models.list(limit=2)]
        before = await client.models.list(limit=2, before_id="d")
        one = await client.models.retrieve("c")
    assert [model.id for model in listed] == list(NAMES)
    assert ([model.id for model in before.data], before.has_more) == (["b", "c"], True)
    assert (one.id, one.display_name, one.type, one.lifecycle) == ("c", "c", "model", "active")
    assert one.max_input_tokens == 64


async def test_models_are_as_the_document_says() -> None:
    async with open_stage() as stage:
        for path in ("/v1/models", f"/v1/models/{MODEL}"):  # ask() compares them
            assert "object" not in (await ask(stage.port, "GET", path, headers=VERSION)).json
            assert "object" in (await ask(stage.port, "GET", path)).json


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/other", 404),
        ("/v1/models?limit=0", 400),
        ("/v1/models?limit=1001", 400),
        ("/v1/models?limit=x", 400),
        ("/v1/models?after_id=other", 404),
    ],
)
async def test_their_errors_are_anthropics(path: str, status: int) -> None:
    async with open_stage() as stage:
        answer = await ask(stage.port, "GET", path, headers=VERSION)
    assert (answer.status, answer.json["type"]) == (status, "error")


async def test_a_path_of_the_document_that_is_not_here_is_taken_for_no_id() -> None:
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/responses/compact", {"model": MODEL, "input": "hello"})
        other = await ask(stage.port, "POST", "/v1/responses/resp_1")
    assert answer.status == 404
    assert "truncation" in str(answer.error["message"])
    assert other.status == 405
