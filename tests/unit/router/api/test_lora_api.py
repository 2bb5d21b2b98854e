"""Adapters as clients see them: a name beside those of models, and two routes that load and unload them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.tenants_file import read_tenants
from quire_router.core.generation import LoRA
from quire_router.engines.settings import ServedLoRA

from tests.support.scripted_api import MODEL, Stage, ask, chat, completion, open_stage

POLITE = ServedLoRA(MODEL, LoRA("polite", b"digest"))
USER, OPERATOR, BOUNDED = "the-key-of-a-tenant-that-asks", "the-key-of-an-operator", "the-key-of-one-for-few-models"
TENANTS = f"""
[[tenants]]
name = "user"
keys = ["{USER}"]
models = ["{MODEL}"]
[[tenants]]
name = "operator"
keys = ["{OPERATOR}"]
allow_lora_updates = true
[[tenants]]
name = "bounded"
keys = ["{BOUNDED}"]
models = ["{MODEL}", "mine"]
allow_lora_updates = true
"""
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "polite", "lora_path": "/adapters/polite"}


class Updater:
    """Notes what it is asked to do."""

    def __init__(self, error: QuireError | None = None) -> None:
        self.asked: list[tuple[str | None, ...]] = []
        self.error = error

    async def load(self, *arguments: str | None) -> None:
        self.asked.append(arguments)
        if self.error is not None:
            raise self.error

    async def unload(self, name: str) -> None:
        await self.load(name)


@asynccontextmanager
async def stage_with_adapter(**more: object) -> AsyncIterator[Stage]:
    async with open_stage(**more) as stage:  # type: ignore[arg-type]
        stage.fleet.served_loras["polite"] = POLITE
        yield stage


async def test_an_adapter_is_asked_for_by_its_name_and_answers_under_it() -> None:
    async with stage_with_adapter() as stage:
        client = stage.openai()
        answer = await client.chat.completions.create(model="polite", messages=[{"role": "user", "content": "Hi"}])
        stream = await client.completions.create(model="polite", prompt="Hi", stream=True)
        names = {chunk.model async for chunk in stream}
        assert {answer.model, *names} == {"polite"}
        assert answer.choices[0].message.content == "Hello wörld"
        runs = [run.generation for run in stage.runner.runs.values()]
        assert [(each.model, each.lora) for each in runs] == [(MODEL, POLITE.lora)] * 2
        plain = await client.completions.create(model=MODEL, prompt="Hi")
        assert plain.model == MODEL
        assert list(stage.runner.runs.values())[-1].generation.lora is None
        tokens = await ask(stage.port, "POST", "/tokenize", {"model": "polite", "prompt": "Hi"})
        assert tokens.json["count"] == 3  # with the one that begins a text


async def test_models_list_adapters_behind_their_models() -> None:
    async with stage_with_adapter() as stage, stage.channel() as channel:
        listed = (await ask(stage.port, "GET", "/v1/models")).json["data"]
        lineage = [(each["id"], each["root"], each["parent"]) for each in listed]
        assert lineage == [(MODEL, MODEL, None), ("polite", MODEL, MODEL)]
        assert (await stage.openai().models.retrieve("polite")).id == "polite"
        over_grpc = (await InferenceStub(channel).ListModels(pb.ListModelsRequest())).models
        assert [(each.name, each.parent) for each in over_grpc] == [(MODEL, ""), ("polite", MODEL)]
        stage.fleet.served_loras.clear()
        assert (await ask(stage.port, "GET", "/v1/models/polite")).status == 404
        assert (await ask(stage.port, "POST", "/v1/completions", completion(model="polite"))).status == 404


ASKING = [
    ("POST", "/v1/chat/completions", chat(model="polite")),
    ("POST", "/v1/chat/completions", chat(model="polite", stream=True)),
    ("POST", "/v1/completions", completion(model="polite")),
    ("POST", "/v1/completions", completion(model="polite", prompt="word " * 5_000)),
    ("POST", "/v1/messages", chat(model="polite", max_tokens=8)),
    ("POST", "/v1/responses", {"model": "polite", "input": "Hi"}),
    ("POST", "/v1/responses", {"model": "polite", "input": "Hi", "background": True}),
    ("POST", "/tokenize", {"model": "polite", "prompt": "Hi"}),
    ("POST", "/detokenize", {"model": "polite", "tokens": [1]}),
    ("GET", "/v1/models/polite", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ASKING)
async def test_an_adapter_that_no_engine_has_named_yet_is_waited_for(
    method: str, path: str, body: dict[str, object] | None
) -> None:
    async with open_stage(hold_timeout=0.05) as stage:
        stage.fleet.all_heard.clear()
        early = await ask(stage.port, method, path, body)
        assert early.status == 503
        assert early.headers["retry-after"] in ("2", "3")
        assert "not every engine has said" in early.body.decode()
    async with open_stage(hold_timeout=20) as stage:
        stage.fleet.all_heard.clear()
        asking = asyncio.create_task(ask(stage.port, method, path, body))
        await asyncio.sleep(0.05)
        assert not asking.done()
        stage.fleet.served_loras["polite"] = POLITE
        stage.fleet.all_heard.set()
        assert (await asking).status in (200, 400)  # as the prompt is that is too long
        stage.fleet.served_loras.clear()
        assert (await ask(stage.port, method, path, body)).status == 404


async def test_an_adapter_is_waited_for_over_grpc_too() -> None:
    async with open_stage(hold_timeout=0.05) as stage, stage.channel() as channel:
        stage.fleet.all_heard.clear()
        asked = pb.ChatRequest(model="polite", messages=[pb.ChatMessage(role="user", content="Hi")])
        with pytest.raises(grpc.aio.AioRpcError) as early:
            await InferenceStub(channel).Chat(asked).read()
        assert early.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_one_idempotency_key_is_not_for_two_adapters() -> None:
    async with stage_with_adapter() as stage:
        headers = {"idempotency-key": "once"}
        first = await ask(stage.port, "POST", "/v1/chat/completions", chat(model="polite"), headers)
        other = await ask(stage.port, "POST", "/v1/chat/completions", chat(), headers)
        assert (first.status, other.status) == (200, 409)


async def test_a_key_opens_the_adapters_that_its_tenant_may_use(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    async with stage_with_adapter(file=read_tenants(tmp_path / "tenants.toml")) as stage:
        for key, status in ((USER, 403), (OPERATOR, 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await ask(stage.port, "POST", "/v1/chat/completions", chat(model="polite"), headers)
            assert answer.status == status
            listed = (await ask(stage.port, "GET", "/v1/models", headers=headers)).json["data"]
            assert ("polite" in {each["id"] for each in listed}) is (status == 200)


async def test_adapters_are_loaded_and_unloaded_only_where_that_is_turned_on() -> None:
    updater = Updater()
    async with open_stage(lora_updater=updater) as stage, open_stage() as without:  # type: ignore[arg-type]
        loaded = await ask(stage.port, "POST", LOAD, {**BODY, "base_model_name": MODEL})
        assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'polite' added successfully.")
        unloaded = await ask(stage.port, "POST", UNLOAD, {"lora_name": "polite", "lora_int_id": 3})
        assert (unloaded.status, unloaded.body) == (200, b"Success: LoRA adapter 'polite' removed successfully.")
        assert updater.asked == [("polite", "/adapters/polite", MODEL), ("polite",)]
        assert {(await ask(without.port, "POST", path, BODY)).status for path in (LOAD, UNLOAD)} == {404}


async def test_a_key_has_to_allow_it(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    updater = Updater()
    file = read_tenants(tmp_path / "tenants.toml")
    async with open_stage(lora_updater=updater, file=file) as stage:  # type: ignore[arg-type]
        refused = await ask(stage.port, "POST", LOAD, BODY, {"authorization": f"Bearer {USER}"})
        assert (refused.status, updater.asked) == (403, [])
        assert "allow_lora_updates" in refused.json["error"]["message"]
        allowed = await ask(stage.port, "POST", LOAD, BODY, {"authorization": f"Bearer {OPERATOR}"})
        assert allowed.status == 200


async def test_an_adapter_is_loaded_and_unloaded_only_under_a_name_that_the_tenant_may_use(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    updater = Updater()
    file = read_tenants(tmp_path / "tenants.toml")
    headers = {"authorization": f"Bearer {BOUNDED}"}
    async with open_stage(lora_updater=updater, file=file) as stage:  # type: ignore[arg-type]
        for path in (LOAD, UNLOAD):
            refused = await ask(stage.port, "POST", path, BODY, headers)
            assert (refused.status, updater.asked) == (403, [])
        other_model = {**BODY, "lora_name": "mine", "base_model_name": "another"}
        assert (await ask(stage.port, "POST", LOAD, other_model, headers)).status == 403
        allowed = await ask(stage.port, "POST", LOAD, {**BODY, "lora_name": "mine"}, headers)
        assert (allowed.status, updater.asked) == (200, [("mine", "/adapters/polite", None)])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({**BODY, "lora_name": ""}, "lora_name"),
        ({**BODY, "load_inplace": True}, "load_inplace"),
    ],
)
async def test_a_body_that_says_something_else_is_refused(body: dict[str, object], param: str) -> None:
    updater = Updater()
    async with open_stage(lora_updater=updater) as stage:  # type: ignore[arg-type]
        answer = await ask(stage.port, "POST", LOAD, body)
        assert (answer.status, answer.json["error"]["param"], updater.asked) == (400, param, [])


@pytest.mark.parametrize("name", ["a\nERROR forged", "a\x85b", "../a", "a\u2028b"], ids=range(4))
async def test_a_name_that_could_lead_elsewhere_or_write_a_line_of_a_log_is_refused(name: str) -> None:
    updater = Updater()
    async with open_stage(lora_updater=updater) as stage:  # type: ignore[arg-type]
        answer = await ask(stage.port, "POST", LOAD, {"lora_name": name, "lora_path": "/a"})
        assert (answer.status, answer.error["param"], updater.asked) == (400, "lora_name", [])
        assert "letters, digits, dots, dashes and underscores" in str(answer.error["message"])


async def test_an_engines_refusal_reaches_the_client() -> None:
    updater = Updater(QuireError(ErrorCode.CONFLICT, "Another adapter is loaded as polite: unload it first."))
    async with open_stage(lora_updater=updater) as stage:  # type: ignore[arg-type]
        answer = await ask(stage.port, "POST", LOAD, BODY)
        assert (answer.status, answer.json["error"]["message"]) == (409, updater.error.message)  # type: ignore[union-attr]
