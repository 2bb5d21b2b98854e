"""Keys: every route but health and metrics needs one, whatever else a client sends."""

import asyncio
import hashlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import ApiKey, TenantsFile, read_tenants
from quire_router.api import auth as identity
from quire_router.api.auth import ANONYMOUS, Authenticator
from quire_router.core.tenant_ids import former_id

from tests.support.scripted_api import ask, chat, open_stage, read_answer

KEY, OTHER = "the-right-long-key", "another-right-key"
RIGHT = {"authorization": f"Bearer {KEY}"}
REFLECTION_V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
OPEN = {"/started", "/ready", "/health", "/live", "/ping"}
WRONG = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer wrong"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {KEY},{OTHER}"},
    {"authorization": "Bearer \xff\xfe"},
    {"x-api-key": f"{KEY}x"},
    {"x-api-key": KEY, "api-key": KEY},
    {"x-api-key": KEY, "authorization": "Bearer wrong"},
    {"api-key": f"Bearer {KEY}"},
]


async def test_every_route_needs_a_key_unless_it_is_on_the_short_list():
    async with open_stage(keys=[KEY]) as stage:
        routes = [(method, route.path) for route in stage.app.routes for method in sorted(route.methods)]
        for method, path in routes:
            answer = await ask(stage.port, method, path.replace("{model:path}", "tiny"))
            if path in OPEN:
                assert answer.status == 200, path
            else:
                assert answer.status == 401, path

    assert {path for _, path in routes} > OPEN
    assert len(routes) >= 10


@pytest.mark.parametrize("headers", WRONG, ids=str)
async def test_a_wrong_key_is_no_key(headers):
    async with open_stage(keys=[KEY, OTHER]) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", chat(), headers)

    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["type"] == "authentication_error"
    assert stage.runner.generations == []


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} ", f"Bearer {OTHER}"])
async def test_each_right_key_opens(authorization):
    async with open_stage(keys=[KEY, OTHER]) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", chat(), {"authorization": authorization})

    assert answer.status == 200


@pytest.mark.parametrize("header", ["api-key", "x-api-key", "X-Api-Key"])
async def test_the_headers_of_clients_that_send_their_key_bare_open_too(header):
    async with open_stage(keys=[KEY, OTHER]) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", chat(), {header: OTHER})
        health = await ask(stage.port, "GET", "/health", None, {header: OTHER})

    assert answer.status == 200
    assert "ready_engines" in health.json


@pytest.mark.parametrize("host", ["x/?", "x/#", "x/health?", "x/metrics#", "/health", "a@b/live", "", "\xff"])
@pytest.mark.parametrize("path", ["/v1/models", "/health/../v1/models", "//health/v1/models", "/v1/models?/health"])
async def test_no_host_or_path_bypasses_the_key(host, path):
    async with open_stage(keys=[KEY]) as stage:
        answer = await ask(stage.port, "GET", path, None, {"host": host})

    assert answer.status == (400 if host else 401)


async def test_without_a_key_health_on_the_public_port_is_the_status_alone():
    async with open_stage(keys=[KEY]) as stage:
        brief = await ask(stage.port, "GET", "/health")
        wrong = await ask(stage.port, "GET", "/health", None, {"authorization": "Bearer wrong"})
        detailed = await ask(stage.port, "GET", "/health", None, RIGHT)
        of_metrics = await ask(stage.admin_port, "GET", "/health")
        stage.fleet.engines = 0
        unready = await ask(stage.port, "GET", "/health")

    assert (brief.status, brief.json) == (200, {"status": "ok"})
    assert (unready.status, unready.json) == (503, {"status": "unavailable"})
    assert wrong.status == 401
    assert detailed.json == of_metrics.json == {"status": "ok", "ready_engines": {"tiny": 1}}


async def test_health_names_only_the_models_that_the_caller_may_use(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "acme"\nkeys = ["{KEY}"]\nmodels = ["another"]\n')
    async with open_stage(file=read_tenants(path)) as stage:
        answer = await ask(stage.port, "GET", "/health", None, RIGHT)

    assert answer.json == {"status": "ok", "ready_engines": {}}


async def test_a_model_that_is_not_there_does_not_show_a_caller_those_of_others(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f'[[tenants]]\nname = "acme"\nkeys = ["{KEY}"]\nmodels = ["another"]\n')
    async with open_stage(file=read_tenants(path)) as stage:
        answers = [
            await ask(stage.port, "POST", "/v1/chat/completions", chat() | {"model": "another"}, RIGHT),
            await ask(stage.port, "GET", "/v1/models/another", None, RIGHT),
        ]

    assert [answer.error["message"] for answer in answers] == ["There is no model named 'another' here."] * 2


@pytest.mark.parametrize(
    "path", ["/metrics", "/nothing", "/docs", "/openapi.json", "/health/", "/HEALTH", "/%68ealth/x"]
)
async def test_without_a_key_not_even_what_exists_can_be_learned(path):
    async with open_stage(keys=[KEY]) as stage:
        assert (await ask(stage.port, "GET", path)).status == 401


@pytest.mark.parametrize("other", [KEY, "wrong"])
async def test_two_keys_are_no_key(other):
    lines = f"authorization: Bearer {other}\r\nauthorization: Bearer {KEY}\r\n"
    async with open_stage(keys=[KEY]) as stage:
        reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{lines}\r\n".encode())
        over_rest = await read_answer(reader)
        writer.close()
        async with stage.channel() as channel:
            metadata = (("authorization", f"Bearer {other}"), ("authorization", f"Bearer {KEY}"))
            over_grpc = await InferenceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata).code()

    assert over_rest.status == 401
    assert over_grpc == grpc.StatusCode.UNAUTHENTICATED


async def test_a_body_is_not_read_before_the_key_was_checked():
    async with open_stage(keys=[KEY]) as stage:
        answer = await ask(stage.port, "POST", "/v1/chat/completions", b"", {"content-length": "1000"})

    assert answer.status == 401


async def test_each_key_has_its_own_tenant_and_cache_salt():
    async with open_stage(keys=[KEY, OTHER]) as stage:
        for key in (KEY, OTHER, KEY):
            await ask(stage.port, "POST", "/v1/chat/completions", chat(), {"authorization": f"Bearer {key}"})
        first, second, again = stage.runner.generations

    assert (first.tenant, first.cache_salt) == (again.tenant, again.cache_salt)
    assert first.tenant != second.tenant
    assert first.cache_salt != second.cache_salt
    assert len(first.cache_salt) == 16
    assert KEY not in first.tenant


def test_the_stored_form_of_a_key_is_slow_to_guess_from_and_the_same_in_every_router():
    derived = hashlib.scrypt(KEY.encode(), salt=b"quire caller", n=2**14, r=8, p=1, dklen=32)

    for _ in range(2):
        caller = Authenticator([KEY]).authenticate(f"Bearer {KEY}")
        assert (caller.tenant, caller.cache_salt) == ((derived[:6] + derived[22:]).hex(), derived[6:22])
        former = hashlib.scrypt(KEY.encode(), salt=b"quire caller", n=2**14, r=8, p=1, dklen=22)
        assert (former_id(caller.tenant), caller.cache_salt) == (former[:6].hex(), former[6:])


async def test_a_thousand_keys_open_at_once_and_each_is_derived_once(monkeypatch):
    derived = []

    def slow(key, **parameters):
        derived.append(key.decode())
        return hashlib.blake2b(key, digest_size=parameters["dklen"]).digest()

    monkeypatch.setattr(identity, "scrypt", slow)
    names = [f"the-right-key-{number}" for number in range(1000)]
    keys = Authenticator(names)
    assert derived == []
    early = keys.authenticate(f"Bearer {names[700]}")
    assert derived == [names[700]]
    with pytest.raises(QuireError):
        keys.authenticate("Bearer the-right-key-1000")
    await keys.prepare()
    assert sorted(derived) == sorted(names)
    callers = [keys.authenticate(f"Bearer {name}") for name in names]
    assert callers[700] == early
    assert len({caller.tenant for caller in callers}) == len(names)
    file = TenantsFile(Tenants([Tenant("named")]), {"named": (ApiKey.of("the-new-key"), ApiKey.of(names[0]))})
    keys.replace(file)
    assert [keys.authenticate(f"Bearer {name}") for name in names[1:]] == callers[1:]
    assert keys.authenticate(f"Bearer {names[0]}").tenant == "named"
    assert derived[len(names) :] == ["the-new-key"], "those of before are known when the file is read again"


async def test_without_configured_keys_everyone_shares():
    async with open_stage() as stage:
        await ask(stage.port, "POST", "/v1/chat/completions", chat(), RIGHT)

    assert (stage.runner.generations[0].tenant, stage.runner.generations[0].cache_salt) == ("", b"")


def test_a_caller_is_known_by_the_key_alone():
    keys = Authenticator([KEY])

    assert keys.authenticate(f"Bearer {KEY}") != ANONYMOUS
    with pytest.raises(QuireError) as refusal:
        keys.authenticate()
    assert refusal.value.code == ErrorCode.UNAUTHENTICATED


# gRPC


async def unary(channel, method, metadata):
    call = channel.unary_unary(method)
    await call(b"", metadata=metadata)


@pytest.mark.parametrize("authorization", ["", KEY, f"Token {KEY}"])
def test_a_key_in_another_form_is_refused_with_the_right_one(authorization):
    with pytest.raises(QuireError, match="Authorization: Bearer KEY"):
        Authenticator([KEY]).authenticate(authorization)


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", KEY),)])
async def test_every_rpc_needs_a_key_also_reflection_and_unknown_ones(metadata):
    codes = []
    async with open_stage(keys=[KEY]) as stage, stage.channel() as channel:
        stub = InferenceStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        calls = [
            stub.Generate(pb.GenerateRequest(), metadata=metadata),
            stub.Chat(pb.ChatRequest(), metadata=metadata),
            stub.Cancel(pb.CancelRequest(), metadata=metadata),
            stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            reflection.ServerReflectionInfo(iter([question]), metadata=metadata),
            channel.stream_stream(REFLECTION_V1)(iter([question.SerializeToString()]), metadata=metadata),
            channel.unary_unary("/quire.v1.Inference/Nothing")(b"", metadata=metadata),
            channel.unary_unary("/grpc.health.v1.Healthy/Check")(b"", metadata=metadata),
        ]
        for call in calls:
            codes.append(await call.code())
            assert "quire-request-id" in dict(await call.trailing_metadata())

    assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 8
    assert stage.runner.generations == []


async def test_health_is_open_to_all():
    async with open_stage(keys=[KEY]) as stage, stage.channel() as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())

    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_right_key_opens_every_rpc():
    metadata = (("authorization", f"Bearer {KEY}"),)
    async with open_stage(keys=[KEY]) as stage, stage.channel() as channel:
        await InferenceStub(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([question]), metadata=metadata)
        assert (await call.read()).list_services_response.service
        call.cancel()
        call = channel.stream_stream(REFLECTION_V1)(iter([question.SerializeToString()]), metadata=metadata)
        answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
        assert answer.list_services_response.service
        call.cancel()
