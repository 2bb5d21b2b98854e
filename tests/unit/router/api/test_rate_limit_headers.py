"""What clients of both APIs see of tenants and their limits: the same, in each one's words."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress

import grpc
import openai
import pytest
from prometheus_client import REGISTRY
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_proto.telemetry import Metric
from quire_router.admission.limits import RateLimiter
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import ApiKey, TenantsFile
from quire_router.core.errors import RefusalReason
from quire_router.core.generation import Delta, GenerationRequest

from tests.support.scripted_api import ANSWER, MODEL, ScriptedRunner, ask, chat, completion, open_stage

KEY, OTHER = "a-long-enough-key", "another-long-key"


class LimitedRunner(ScriptedRunner):
    """Takes requests in as the lifecycle does."""

    limits: RateLimiter

    async def run(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        with await self.limits.reserve(generation.tenant, generation.request_id, generation.max_cost) as bill:
            async with aclosing(super().run(generation)) as deltas:
                async for delta in deltas:
                    if delta.usage is not None:
                        bill.used = generation.cost(delta.usage.prompt_tokens, delta.usage.completion_tokens)
                    yield delta


@asynccontextmanager
async def tenant_stage(script=ANSWER, responses_retention=None, **policy):
    tenant = Tenant("a", **policy)
    tenants = Tenants([tenant, Tenant("b")])
    runner = LimitedRunner(script)
    runner.limits = RateLimiter(tenants)
    file = TenantsFile(tenants, {"a": (ApiKey.of(KEY),), "b": (ApiKey.of(OTHER),)}, (tenant,))
    async with open_stage(
        runner=runner, file=file, tenant_limits=runner.limits, responses_retention=responses_retention
    ) as stage:
        stage.runner = runner
        yield stage


def post(stage, key=KEY, body=None):
    return ask(
        stage.port, "POST", "/v1/chat/completions", body or chat(max_tokens=5), {"authorization": f"Bearer {key}"}
    )


async def call(stage, key=KEY, **fields):
    """The status and the metadata that come last."""
    metadata = (("authorization", f"Bearer {key}"),)
    async with stage.channel() as channel:
        messages = [pb.ChatMessage(role="user", content="hello")]
        request = pb.ChatRequest(model=MODEL, messages=messages, **fields)
        request.sampling.max_tokens = 5
        answer = InferenceStub(channel).Chat(request, metadata=metadata)
        with suppress(grpc.aio.AioRpcError):
            async for _ in answer:
                pass
        return await answer.code(), dict(await answer.trailing_metadata())


async def test_log_probabilities_count_towards_the_tokens_of_a_minute():
    async with tenant_stage(tokens_per_minute=120) as stage:
        plain = await post(stage, body=chat(max_tokens=40))
        assert plain.status == 200, plain.body
        refused = await post(stage, body=chat(max_tokens=40, logprobs=True, top_logprobs=20))
    assert refused.status == 400, "40 tokens with 21 log-probabilities each are never admitted under 120 a minute"
    assert refused.json["error"]["param"] == "max_tokens"


async def test_a_tenants_retention_comes_before_that_of_responses():
    async with tenant_stage(retention=30.0, responses_retention=99) as stage:
        asked = {"model": MODEL, "input": "hello"}
        await ask(stage.port, "POST", "/v1/responses", asked, {"authorization": f"Bearer {KEY}"})
        (generation,) = stage.runner.generations
    assert generation.retention == 30.0


@pytest.mark.parametrize(("store", "retention"), [(None, 30.0), (True, 30.0), (False, 0)])
async def test_a_tenants_requests_have_its_own_retention(store, retention):
    async with tenant_stage(retention=30.0) as stage:
        await post(stage, body=chat(store=store))
        await call(stage)
        rest, over_grpc = stage.runner.generations
    assert (rest.retention, over_grpc.retention) == (retention, 30.0)


async def test_a_model_that_a_key_does_not_open_is_forbidden_in_both_apis_and_not_listed():
    async with tenant_stage(models=frozenset({"big"})) as stage:
        rest, (code, metadata) = await post(stage), await call(stage)
        headers = {"authorization": f"Bearer {KEY}"}
        bodies = {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [300]}}
        texts = [await ask(stage.port, "POST", path, {"model": MODEL, **bodies[path]}, headers) for path in bodies]
        models = await ask(stage.port, "GET", "/v1/models", None, headers)
        model = await ask(stage.port, "GET", f"/v1/models/{MODEL}", None, headers)
        async with stage.channel() as channel:
            listed = await InferenceStub(channel).ListModels(
                pb.ListModelsRequest(), metadata=(("authorization", f"Bearer {KEY}"),)
            )
        others = await post(stage, OTHER)

    assert (rest.status, rest.error["code"], rest.error["param"]) == (403, "model", "model")
    assert rest.error["type"] == "permission_error"
    assert (code, metadata["quire-reason"]) == (grpc.StatusCode.PERMISSION_DENIED, "model")
    assert (models.json["data"], model.status, list(listed.models)) == ([], 403, [])
    assert [text.status for text in texts] == [403, 403]
    assert others.status == 200


async def test_a_limit_that_is_used_up_is_429_and_resource_exhausted_with_the_same_reason_and_wait():
    async with tenant_stage(requests_per_minute=2) as stage:
        first, second = await post(stage), await call(stage)
        rest, (code, metadata) = await post(stage), await call(stage)
        others = await post(stage, OTHER)

    assert (first.status, second[0]) == (200, grpc.StatusCode.OK)
    assert (rest.status, rest.error["code"], rest.error["type"]) == (429, "requests_per_minute", "rate_limit_error")
    assert rest.headers["x-quire-reason"] == metadata["quire-reason"] == "requests_per_minute"
    assert 1 <= int(rest.headers["retry-after"]) <= 45
    assert 1 <= int(metadata["retry-after"]) <= 45
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert others.status == 200


async def test_a_list_of_more_prompts_than_a_tenant_may_ever_ask_for_is_400_and_costs_one_request():
    async with tenant_stage(requests_per_minute=2) as stage:
        headers = {"authorization": f"Bearer {KEY}"}
        listed = await ask(stage.port, "POST", "/v1/completions", completion(["a", "b", "c"]), headers)
        others = [await post(stage) for _ in range(2)]

    assert (listed.status, listed.error["param"]) == (400, "prompt")
    assert [other.status for other in others] == [200, 429]


async def test_invalid_requests_are_charged_in_both_apis_until_they_are_refused_unread():
    async with tenant_stage(requests_per_minute=4) as stage:
        refused = [await post(stage, body=body) for body in (b"{", chat(nonsense=1, n=0), chat(temperature=-1))]
        code, _ = await call(stage, priority=3)
        late = [await post(stage, body=b"{"), await post(stage)]
        late_code, metadata = await call(stage, priority=3)
        others = await post(stage, OTHER)

    assert [answer.status for answer in refused] == [400, 400, 400]
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert [(answer.status, answer.error["code"]) for answer in late] == [(429, "requests_per_minute")] * 2
    assert int(late[0].headers["retry-after"]) >= 1
    assert (late_code, metadata["quire-reason"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "requests_per_minute")
    assert others.status == 200


async def test_requests_that_are_refused_by_their_head_cost_nothing_in_either_api():
    heads = [
        ("text/plain", {}, 415),
        ("application/json", {"last-event-id": "2"}, 400),
        ("application/json", {"idempotency-key": "x" * 1000}, 400),
        ("application/json", {"x-request-timeout": "never"}, 400),
    ]
    async with tenant_stage(requests_per_minute=1) as stage, stage.channel() as channel:
        own = {"authorization": f"Bearer {KEY}"}
        path = "/v1/chat/completions"
        refused = [
            await ask(stage.port, "POST", path, chat(), {**own, "content-type": kind, **fields})
            for kind, fields, _ in heads
        ]
        message = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="hello")])
        metadata = (("authorization", f"Bearer {KEY}"), ("idempotency-key", "x" * 1000))
        with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
            await InferenceStub(channel).Chat(message, metadata=metadata).read()
        answers = [await post(stage) for _ in range(2)]

    assert [answer.status for answer in refused] == [status for *_, status in heads]
    assert over_grpc.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [answer.status for answer in answers] == [200, 429]


async def test_a_refusal_by_a_limit_is_counted_once_by_its_reason():
    def counted():
        names = ((Metric.REJECTIONS, "overloaded"), (Metric.ADMISSION_REFUSALS, "requests_per_minute"))
        return [REGISTRY.get_sample_value(f"{name}_total", {"reason": reason}) or 0 for name, reason in names]

    async with tenant_stage(requests_per_minute=1) as stage:
        await post(stage)
        before = counted()
        await post(stage)
        after = counted()

    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 1]


async def test_tokens_are_counted_for_a_request_each_in_both_apis():
    headers, metadata = {"authorization": f"Bearer {KEY}"}, (("authorization", f"Bearer {KEY}"),)
    bodies = {"/tokenize": {"prompt": "hello"}, "/detokenize": {"tokens": [300]}}

    async def both(stage):
        return [await ask(stage.port, "POST", path, {"model": MODEL, **bodies[path]}, headers) for path in bodies]

    async with tenant_stage(requests_per_minute=5) as stage, stage.channel() as channel:
        rest = await both(stage)
        stub = InferenceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="hello"), metadata=metadata)
        await stub.Detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=[300]), metadata=metadata)
        answer = await post(stage)
        late = await both(stage)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="hello"), metadata=metadata)

    assert [each.status for each in (*rest, answer)] == [200, 200, 200]
    assert [(each.status, each.error["code"]) for each in late] == [(429, "requests_per_minute")] * 2
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_status_reads_have_a_limit_of_their_own_and_cost_no_request():
    async with tenant_stage(requests_per_minute=1) as stage:
        headers = {"authorization": f"Bearer {KEY}"}
        looks = [await ask(stage.port, "GET", "/v1/requests/" + "0" * 32, None, headers) for _ in range(11)]
        answer = await post(stage)

    assert [look.status for look in looks] == [404] * 10 + [429]
    assert looks[-1].error["code"] == "polls_per_minute"
    assert int(looks[-1].headers["retry-after"]) >= 1
    assert answer.status == 200


async def test_rate_limit_headers_show_what_a_tenant_has_left():
    async with tenant_stage(requests_per_minute=10, tokens_per_minute=1000) as stage:
        whole = await post(stage)
        stream = await post(stage, body=chat(max_tokens=5, stream=True))
        _, metadata = await call(stage)
        others = await post(stage, OTHER)
        refusal = await post(stage, body=chat(temperature=-1))

    assert whole.headers["x-ratelimit-limit-requests"] == "10"
    assert whole.headers["x-ratelimit-limit-tokens"] == "1000"
    assert [each.headers["x-ratelimit-remaining-requests"] for each in (whole, stream)] == ["9", "8"]
    assert metadata["ratelimit-remaining-requests"] == "7"
    assert 0 < int(stream.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert float(whole.headers["x-ratelimit-reset-requests"].removesuffix("s")) > 0
    assert refusal.headers["x-ratelimit-remaining-requests"] == "6"
    assert not any("ratelimit" in name for name in others.headers)


async def test_too_many_at_once_are_refused_until_one_has_ended():
    gate = asyncio.Event()
    async with tenant_stage(["x", gate, FinishReason.STOP], max_concurrent=1) as stage:
        first = asyncio.create_task(post(stage))
        await asyncio.wait_for(stage.runner.started.wait(), 20)
        assert (await post(stage)).status == 429
        code, metadata = await call(stage)
        gate.set()
        assert (await first).status == 200
        assert (await post(stage)).status == 200

    assert (code, metadata["quire-reason"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "max_concurrent")


async def test_more_tokens_than_the_limit_per_minute_are_a_bad_request_without_retry_after():
    async with tenant_stage(tokens_per_minute=6) as stage:
        rest, (code, _) = await post(stage), await call(stage)
    assert (rest.status, rest.error["param"]) == (400, "max_tokens")
    assert "retry-after" not in rest.headers
    assert code == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_openai_client_understands():
    async with tenant_stage(requests_per_minute=1) as stage:
        client = stage.openai(KEY)
        ask_it = client.chat.completions.create
        await ask_it(model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5)
        with pytest.raises(openai.RateLimitError) as refusal:
            await ask_it(model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5)
        await client.close()
    assert refusal.value.code == "requests_per_minute"


@pytest.mark.parametrize("reason", [None, *RefusalReason])
async def test_every_reason_looks_the_same_in_both_apis(reason):
    error = QuireError(ErrorCode.OVERLOADED, "Not now.", retry_after=1.2, reason=reason)
    async with open_stage([error]) as stage:
        rest, (code, metadata) = await post(stage), await call(stage)
    assert rest.status == 429
    assert rest.error["code"] == (reason or "overloaded")
    assert rest.headers.get("x-quire-reason") == metadata.get("quire-reason") == reason
    assert {rest.headers["retry-after"], metadata["retry-after"]} <= {"2", "3"}
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("base", "allowed", "own", "priority"),
    [(0, False, 0, 0), (-5, False, 0, -5), (-5, True, 3, -2), (7, False, 3, None)],
)
async def test_a_requests_priority_is_added_to_its_tenants(base, allowed, own, priority):
    async with tenant_stage(priority=base, allow_priority=allowed) as stage:
        rest, (code, _) = await post(stage, body=chat(max_tokens=5, priority=own)), await call(stage, priority=own)

    if priority is None:
        assert (rest.status, rest.error["param"], code) == (400, "priority", grpc.StatusCode.INVALID_ARGUMENT)
    else:
        assert [each.priority for each in stage.runner.generations] == [priority, priority]
