"""Requests for a name with several targets, over each API: they get one of them, and hear of the name alone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.pooling import Task
from quire_proto.telemetry import Metric
from quire_router.admission.model_targets import ModelTarget, ModelTargets, TargetGroup
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import ApiKey, TenantsFile

from tests.support.scripted_api import Stage, ask, open_stage

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}
KEY = "a-long-enough-key"


def of_weights(v1: int, v2: int) -> TargetGroup:
    return TargetGroup((ModelTarget("v1", v1), ModelTarget("v2", v2)))


@asynccontextmanager
async def targets_stage(v1: int = 1, v2: int = 1, **settings) -> AsyncIterator[tuple[Stage, ModelTargets]]:
    targets = ModelTargets({"chat": of_weights(v1, v2)})
    async with open_stage(models=("v1", "v2"), targets=targets, **settings) as stage:
        yield stage, targets


async def post(stage: Stage, path: str, headers: dict[str, str] | None = None, **body):
    return await ask(stage.port, "POST", path, {"model": "chat", **BODIES.get(path, {}), **body}, headers)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_says_the_name_and_a_header_the_target(path: str, stream: bool) -> None:
    async with targets_stage(0, 1) as (stage, _):
        answer = await post(stage, path, stream=stream)
        (generation,) = stage.runner.generations

    assert answer.status == 200, answer.body
    assert (generation.model, generation.served_name) == ("v2", "chat")
    assert answer.headers["x-quire-model-target"] == "v2"
    assert b'"model":"chat"' in answer.body.replace(b" ", b"")
    assert b"v2" not in answer.body


async def test_each_request_gets_its_target_and_all_of_its_prompts_the_same() -> None:
    async with targets_stage() as (stage, _):
        for _ in range(24):
            await post(stage, "/v1/completions", prompt=["a", "b", "c"], n=2)
        generations = stage.runner.generations

    of_request: dict[str, set[str]] = {}
    for generation in generations:
        of_request.setdefault(generation.request_id.partition("_")[0], set()).add(generation.model)
    assert all(len(models) == 1 for models in of_request.values())
    assert set.union(*of_request.values()) == {"v1", "v2"}


async def test_grpc_and_embeddings_choose_in_the_same_place() -> None:
    async with targets_stage(0, 1) as (stage, _), stage.channel() as channel:
        call = InferenceStub(channel).Generate(pb.GenerateRequest(model="chat", text="Hi"))
        replies = [reply async for reply in call]
        metadata = dict(await call.initial_metadata())
        limits = replace(stage.fleet.model_limits, supported_tasks=(Task.EMBED,), pooled_size=2)
        stage.fleet.model_limits = limits
        stage.runner.script = []
        await post(stage, "/v1/embeddings", input="Hi")
        models = [generation.model for generation in stage.runner.generations]

    assert replies
    assert metadata["quire-model-target"] == "v2"
    assert models == ["v2", "v2"]


async def test_errors_name_what_the_client_asked_for() -> None:
    async with targets_stage() as (stage, _):
        stage.fleet.model_limits = None
        unknown = await post(stage, "/v1/completions")
    assert unknown.status == 503
    assert "'chat'" in unknown.error["message"]


@pytest.mark.parametrize("label", ["header", "prompt_cache_key"])
async def test_a_session_stays_with_its_target_when_weights_change(label: str) -> None:
    async with targets_stage(1, 0) as (stage, targets):

        async def turns() -> list[str]:
            before = len(stage.runner.generations)
            for number in range(8):
                name = f"session-{number}"
                headers = {"x-session-id": name} if label == "header" else {}
                body = {} if label == "header" else {"prompt_cache_key": name}
                await post(stage, "/v1/completions", headers, **body)
            return [generation.model for generation in stage.runner.generations[before:]]

        first = await turns()
        targets.replace_all({"chat": of_weights(0, 1)})
        later = await turns()
        stage.fleet.without_engine.add("v1")
        lost = await turns()
        stage.fleet.without_engine.clear()
        after = await turns()

    assert first == later == ["v1"] * 8
    assert lost == after == ["v2"] * 8


async def test_a_fallback_is_counted_and_does_not_keep_its_sessions() -> None:
    async with targets_stage(1, 1) as (stage, _):

        async def models() -> list[str]:
            before = len(stage.runner.generations)
            for number in range(12):
                await post(stage, "/v1/completions", {"x-session-id": f"s{number}"})
            return [generation.model for generation in stage.runner.generations[before:]]

        stage.fleet.without_engine.add("v1")
        counted = count("v2", "fallback")
        without = await models()
        counted = count("v2", "fallback") - counted
        stage.fleet.without_engine.clear()
        back = await models()

    assert set(without) == {"v2"}
    assert 0 < counted < 12
    assert back.count("v1") == counted


def count(target: str, reason: str) -> float:
    labels = {"model": "chat", "target": target, "reason": reason}
    return REGISTRY.get_sample_value(f"{Metric.TARGET_CHOICES}_total", labels) or 0.0


async def test_a_key_that_comes_again_finds_its_first_answer_whatever_the_weights_are() -> None:
    async with targets_stage(1, 0) as (stage, targets):
        first = await post(stage, "/v1/completions", {"idempotency-key": "k"})
        targets.replace_all({"chat": of_weights(0, 1)})
        again = await post(stage, "/v1/completions", {"idempotency-key": "k"})
        (generation,) = stage.runner.generations

    assert generation.model == "v1"
    assert again.headers["x-quire-idempotent-replay"] == "true"
    assert again.headers["x-quire-model-target"] == "v1"
    assert again.json["id"] == first.json["id"]


async def test_a_response_goes_on_where_the_one_before_was() -> None:
    async with targets_stage(1, 0) as (stage, targets):
        first = await post(stage, "/v1/responses")
        targets.replace_all({"chat": of_weights(0, 1)})
        second = await post(stage, "/v1/responses", previous_response_id=first.json["id"])
        third = await post(stage, "/v1/responses")

    assert second.status == 200, second.body
    assert [each.headers["x-quire-model-target"] for each in (first, second, third)] == ["v1", "v1", "v2"]


async def test_models_are_listed_with_the_names_that_a_caller_may_use() -> None:
    async with targets_stage() as (stage, _):
        stage.fleet.without_engine.add("v2")
        listed = (await ask(stage.port, "GET", "/v1/models")).json["data"]
        one = (await ask(stage.port, "GET", "/v1/models/chat")).json
        engines = (await ask(stage.port, "GET", "/health")).json["ready_engines"]

    assert [card["id"] for card in listed] == ["v1", "v2", "chat"]
    assert listed[2] == one
    assert engines == {"v1": 1, "v2": 0, "chat": 1}


async def test_a_tenant_that_may_use_the_name_may_not_name_a_target() -> None:
    tenant = Tenant("a", models=frozenset({"chat"}))
    file = TenantsFile(Tenants([tenant]), {"a": (ApiKey.of(KEY),)}, policies=(tenant,))
    headers = {"authorization": f"Bearer {KEY}"}
    async with targets_stage(0, 1, file=file) as (stage, _):
        name = await post(stage, "/v1/completions", headers)
        target = await post(stage, "/v1/completions", headers, model="v2")
        listed = (await ask(stage.port, "GET", "/v1/models", headers=headers)).json["data"]

    assert (name.status, target.status) == (200, 403)
    assert [card["id"] for card in listed] == ["chat"]


async def test_a_target_that_is_named_itself_is_no_target_of_the_request() -> None:
    async with targets_stage(0, 1) as (stage, _):
        answer = await post(stage, "/v1/completions", model="v1")
        (generation,) = stage.runner.generations
    assert (generation.model, generation.served_name, answer.json["model"]) == ("v1", "", "v1")
    assert "x-quire-model-target" not in answer.headers
