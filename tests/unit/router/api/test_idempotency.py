"""Requests with a key run once, background requests need no listener; and what else comes beside a body."""

import asyncio
import re
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from threading import current_thread, main_thread

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.errors import ErrorCode, QuireError
from quire_router.api import prepared_request
from quire_router.api.auth import Identity
from quire_router.api.prepared_request import RequestOptions
from quire_router.core.generation import Delta, GenerationRequest, PromptGroup
from quire_router.journal.fleet_secret import FleetSecret
from quire_router.journal.objects import MemoryObjectStore

from tests.support.both_apis import as_proto
from tests.support.scripted_api import ANSWER, MODEL, Limits, ScriptedRunner, ask, chat, completion, open_stage

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = [(CHAT, chat), (COMPLETIONS, completion)]
KEY = {"idempotency-key": "order 66"}
METADATA = tuple(KEY.items())
REPLAY = "x-quire-idempotent-replay"
NO_KEYS = ["", "x" * 256, "a\tb", "é"]


def over_grpc(stage_channel, fields, metadata=METADATA):
    message = as_proto(fields)
    stub = InferenceStub(stage_channel)
    return (stub.Chat if isinstance(message, pb.ChatRequest) else stub.Generate)(message, metadata=metadata)


# Keys


@asynccontextmanager
async def open_router(store, **settings):
    secret = FleetSecret(store)
    await secret.agree()
    async with open_stage(fleet_secret=secret, **settings) as stage:
        yield stage


async def test_without_api_keys_an_id_follows_from_the_key_at_each_router_and_nowhere_else():
    store, ids = MemoryObjectStore(), []
    for each in (store, store, MemoryObjectStore()):
        async with open_router(each) as stage:
            ids.append((await ask(stage.port, "POST", CHAT, chat(), KEY)).headers["x-request-id"])
    assert ids[0] == ids[1] != ids[2]
    assert RequestOptions(key=KEY["idempotency-key"]).request_id(Identity()) not in ids


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chat(temperature=0.5), {}),
        (chat(temperature=-5), {}),
        (chat(model="other"), {}),
        (chat(), {"last-event-id": "1.2"}),
    ],
    ids=["another", "invalid", "unknown", "resume"],
)
async def test_without_api_keys_who_guesses_a_key_does_not_learn_the_id(body, headers):
    async with open_router(MemoryObjectStore()) as stage, stage.channel() as channel:
        first = await ask(stage.port, "POST", CHAT, chat(), KEY)
        again = await ask(stage.port, "POST", CHAT, body, KEY | headers)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await over_grpc(channel, chat(temperature=0.5)).read()
        error = refused.value
        said = (error.initial_metadata(), error.trailing_metadata(), error.details())
    request_id = first.headers["x-request-id"]
    assert (first.status, again.status >= 400) == (200, True)
    assert request_id not in f"{again.headers} {again.body} {said}"


async def test_a_key_that_came_before_ids_had_16_bytes_is_found():
    tenant = "0123456789ab" + "c" * 20

    class Former(ScriptedRunner):
        async def statuses(self, request_ids, *, confirm_missing=True):
            return [object() for _ in request_ids]

    options = RequestOptions(key="k")
    async with open_stage(runner=Former(ANSWER)) as stage:
        found = await stage.service.keyed_id(options, Identity(tenant))
        named = await stage.service.keyed_id(options, Identity("acme"))
    assert found == options.request_id(Identity("0123456789ab"))
    assert named == options.request_id(Identity("acme"))


@pytest.mark.parametrize(("path", "build"), BOTH)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}])
async def test_a_repeated_request_gets_the_first_ones_response(path, build, fields):
    async with open_stage() as stage:
        first, second = [await ask(stage.port, "POST", path, build(**fields), KEY) for _ in range(2)]

    assert len(stage.runner.generations) == 1
    # When a client comes back after a break is drawn for each stream.
    first_body, second_body = (re.sub(rb"^retry: \d+\n", b"", each.body) for each in (first, second))
    assert first_body == second_body
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert (REPLAY in first.headers, second.headers[REPLAY]) == (False, "true")


async def test_a_repeated_request_may_be_streamed_where_the_first_was_not():
    async with open_stage() as stage, stage.channel() as channel:
        whole = await ask(stage.port, "POST", CHAT, chat(), KEY)
        stream = await ask(stage.port, "POST", CHAT, chat(stream=True), KEY)
        call = over_grpc(channel, chat())
        messages = [message async for message in call]
        trailing = dict(await call.trailing_metadata())

    text = whole.json["choices"][0]["message"]["content"]
    said = [event["choices"][0]["delta"].get("content", "") for event in stream.events[:-1]]
    assert ("".join(said), "".join(message.text for message in messages)) == (text, text)
    assert stream.events[0]["id"] == whole.json["id"] == f"chatcmpl-{messages[0].request_id}"
    assert trailing["quire-idempotent-replay"] == "true"
    assert len(stage.runner.generations) == 1


async def test_two_at_once_run_once_and_the_second_may_disconnect():
    release = asyncio.Event()
    async with open_stage(["one", release, *ANSWER]) as stage:
        first = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(), KEY))
        await stage.runner.started.wait()
        second = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(stream=True), KEY))
        third = asyncio.create_task(ask(stage.port, "POST", CHAT, chat(), KEY))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0.05)
        assert not stage.runner.abandoned.is_set()
        release.set()
        answers = [await first, await third]
        async with asyncio.timeout(10):
            while len(stage.service.concurrency):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)

    assert answers[0].body == answers[1].body
    assert len(stage.runner.generations) == 1


async def test_several_prompts_of_one_key_run_once():
    async with open_stage() as stage:
        bodies = {(await ask(stage.port, "POST", COMPLETIONS, completion(["a", "b"]), KEY)).body for _ in range(2)}

    assert len(bodies) == 1
    assert len(stage.runner.generations) == 2


class RefusesSecondPrompts(ScriptedRunner):
    """Has no room for a request's second prompt when it first comes."""

    refused = False

    async def run_once(
        self, generation: GenerationRequest, siblings: PromptGroup | None = None
    ) -> AsyncGenerator[Delta] | None:
        if generation.request_id.endswith("_1") and not self.refused:
            self.refused = True
            raise QuireError(ErrorCode.OVERLOADED, "There is no room.")
        return await super().run_once(generation, siblings)


async def test_prompts_that_were_refused_are_run_when_their_key_comes_again():
    runner = RefusesSecondPrompts()
    async with open_stage(runner=runner) as stage:
        answers = [await ask(stage.port, "POST", COMPLETIONS, completion(["a", "b"]), KEY) for _ in range(3)]
    async with open_stage() as stage:
        undisturbed = await ask(stage.port, "POST", COMPLETIONS, completion(["a", "b"]), KEY)

    assert [answer.status for answer in answers] == [429, 200, 200]
    assert answers[1].json["choices"] == answers[2].json["choices"] == undisturbed.json["choices"]
    assert answers[1].json["usage"] == undisturbed.json["usage"]
    (ran,) = runner.generations
    assert ran.request_id.endswith("_1"), "the first one was written down, so it goes on"


async def test_a_request_is_the_same_when_the_engines_take_more_or_less_than_before():
    async with open_stage() as stage:
        answers = []
        for length in (64, 60):
            stage.fleet.model_limits = Limits(length)
            answers.append(await ask(stage.port, "POST", CHAT, chat(), KEY))

    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].body == answers[1].body


async def test_the_same_key_gives_the_same_seed_at_every_router_unless_the_request_has_one():
    seeds = []
    for headers in (KEY, KEY, {"idempotency-key": "another"}):
        async with open_stage() as stage:
            await ask(stage.port, "POST", COMPLETIONS, completion(["a", "b"]), headers)
            seeds.append({generation.params.seed for generation in stage.runner.generations})
    async with open_stage() as stage:
        await ask(stage.port, "POST", COMPLETIONS, completion(seed=7), KEY)
        (generation,) = stage.runner.generations
        assert generation.params.seed == 7

    assert seeds[0] == seeds[1]
    assert len(seeds[0] | seeds[2]) == 4


@pytest.mark.parametrize(
    "other",
    [
        chat("another"),
        chat(temperature=0.5),
        chat(seed=1),
        chat(n=2),
        chat(stop="x"),
        chat(logprobs=True),
        chat(skip_special_tokens=False),
        chat(background=True),
        completion(),
    ],
    ids=repr,
)
async def test_another_request_with_the_same_key_is_a_conflict(other):
    async with open_stage() as stage, stage.channel() as channel:
        await ask(stage.port, "POST", CHAT, chat(), KEY)
        refused = await ask(stage.port, "POST", COMPLETIONS if "prompt" in other else CHAT, other, KEY)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await over_grpc(channel, other).read()

    assert (refused.status, refused.error["param"]) == (409, "idempotency-key")
    assert refused.headers["x-should-retry"] == "false"
    assert refusal.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert refusal.value.details() == refused.error["message"]


@pytest.mark.parametrize("other", [chat(store=False), chat(metadata={"a": "b"})], ids=repr)
async def test_what_is_kept_of_a_request_is_a_part_of_it(other):
    async with open_stage() as stage:
        await ask(stage.port, "POST", CHAT, chat(), KEY)
        refused = await ask(stage.port, "POST", CHAT, other, KEY)
        again = await ask(stage.port, "POST", CHAT, chat(store=True, metadata={}), KEY)

    assert (refused.status, refused.error["param"]) == (409, "idempotency-key")
    assert again.headers[REPLAY] == "true"


async def test_every_tenant_has_keys_of_its_own():
    keys = ("key-of-one", "key-of-two")
    async with open_stage(keys=keys) as stage:
        answers = [
            await ask(stage.port, "POST", CHAT, chat(content), {**KEY, "authorization": f"Bearer {key}"})
            for key, content in zip(keys, ("one", "two"), strict=True)
        ]

    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].headers["x-request-id"] != answers[1].headers["x-request-id"]


@pytest.mark.parametrize("key", NO_KEYS)
async def test_what_is_no_key_is_refused(key):
    async with open_stage() as stage, stage.channel() as channel:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"idempotency-key": key})
        if key.isascii() and key.isprintable():
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await over_grpc(channel, chat(), (("idempotency-key", key),)).read()
            assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    assert (answer.status, answer.error["param"]) == (400, "idempotency-key")
    assert not stage.runner.generations


async def test_two_keys_are_refused():
    async with open_stage() as stage, stage.channel() as channel:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"idempotency-key": "a", "Idempotency-Key": "b"})
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await over_grpc(channel, chat(), (*METADATA, *METADATA)).read()

    assert answer.status == 400
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_error_of_the_first_request_is_returned_again():
    error = QuireError(ErrorCode.DEADLINE, "Too long.")
    async with open_stage([error]) as stage:
        answers = [await ask(stage.port, "POST", CHAT, chat(), KEY) for _ in range(2)]

    assert [answer.status for answer in answers] == [504, 504]
    assert len(stage.runner.generations) == 1


class Forgetful(ScriptedRunner):
    """Says that there is a request, and then that there is none."""

    async def run_once(self, generation, siblings=None):
        return None

    async def start(self, generation):
        return False

    async def record(self, request_id):
        return None


@pytest.mark.parametrize("fields", [{}, {"background": True}])
async def test_a_request_lost_between_two_reads_is_503(fields):
    async with open_stage(runner=Forgetful()) as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(**fields), KEY)

    assert (answer.status, "retry-after" in answer.headers) == (503, True)


@settings(deadline=None)
@given(st.text("ab\0 ", max_size=4), st.text("ab\0 ", max_size=4), st.text("ab", max_size=3), st.text("ab", max_size=3))
def test_ids_of_keys_are_the_same_everywhere_and_differ_between_tenants_and_keys(one, other, tenant, another):
    ids = [
        RequestOptions(key=f"k{key}").request_id(Identity(owner)) for key, owner in ((one, tenant), (other, another))
    ]
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    assert (ids[0] == ids[1]) == ((one, tenant) == (other, another))


# Background


@pytest.mark.parametrize(("path", "build"), BOTH)
async def test_a_background_request_is_started_polled_and_read(path, build):
    release = asyncio.Event()
    async with open_stage(["one", release, *ANSWER]) as stage:
        begun = await ask(stage.port, "POST", path, build(background=True))
        location = begun.headers["location"]
        polled = await ask(stage.port, "GET", location)
        release.set()
        stream = await ask(stage.port, "GET", f"{location}/events")
        completed = await ask(stage.port, "GET", location)

    assert (begun.status, begun.json["status"], begun.json["background"]) == (202, "running", True)
    assert location == f"/v1/requests/{begun.json['id']}"
    assert polled.json["status"] == "running"
    assert stream.events[-1] == "[DONE]"
    assert completed.json["response"]["usage"]["completion_tokens"] == 5
    assert stage.runner.generations[0].background


async def test_a_background_request_over_grpc_names_itself_and_ends():
    async with open_stage() as stage, stage.channel() as channel:
        request = pb.GenerateRequest(model=MODEL, text="x", background=True)
        (begun,) = [message async for message in InferenceStub(channel).Generate(request, timeout=20)]
        resumed = InferenceStub(channel).Resume(pb.ResumeRequest(request_id=begun.request_id))
        text = "".join([message.generate.text async for message in resumed])

    assert (begun.event_id, text) == ("", "Hello wörld")
    assert stage.runner.generations[0].deadline is None, "the call's deadline is not the answer's"


async def test_a_background_request_with_a_key_is_started_once():
    async with open_stage() as stage:
        answers = [await ask(stage.port, "POST", CHAT, chat(background=True), KEY) for _ in range(2)]

    assert [answer.status for answer in answers] == [202, 202]
    assert answers[0].json["id"] == answers[1].json["id"]
    assert answers[1].headers[REPLAY] == "true"
    assert len(stage.runner.generations) == 1


async def test_a_background_request_has_one_prompt():
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", COMPLETIONS, completion(["a", "b"], background=True))

    assert (answer.status, answer.error["param"]) == (400, "background")


async def test_the_openai_client_sends_all_of_it():
    async with open_stage() as stage:
        api = stage.openai()
        async with api:
            answers = [
                await api.completions.create(model=MODEL, prompt="hi", extra_headers={"Idempotency-Key": "one"})
                for _ in range(2)
            ]

    assert answers[0] == answers[1]


# Sessions, deadlines, and what a router says of itself


async def test_a_session_is_opaque_and_the_same_over_both_apis():
    async with open_stage() as stage, stage.channel() as channel:
        await ask(stage.port, "POST", CHAT, chat(), {"x-session-id": "talk"})
        await ask(stage.port, "POST", CHAT, chat(prompt_cache_key="talk"))
        await ask(stage.port, "POST", CHAT, chat(prompt_cache_key="talk"), {"x-session-id": "walk"})
        await over_grpc(channel, chat(), (("session-id", "talk"),)).read()
        await ask(stage.port, "POST", CHAT, chat())
        talk, as_field, walk, as_metadata, none = [each.session for each in stage.runner.generations]

    assert talk == as_field == as_metadata != walk
    assert (none, "talk" in talk) == ("", False)


async def test_the_deadline_is_the_clients_within_the_routers_limit():
    async with open_stage(request_timeout=100.0) as stage, stage.channel() as channel:
        for headers in ({"x-request-timeout": "2.5"}, {"x-request-timeout": "2h"}, {}):
            await ask(stage.port, "POST", CHAT, chat(), headers)
        await InferenceStub(channel).Chat(as_proto(chat()), timeout=50).read()
        await InferenceStub(channel).Chat(as_proto(chat())).read()
        seconds = [each.deadline - each.created for each in stage.runner.generations]

    assert seconds[:3] + seconds[4:] == pytest.approx([2.5, 100, 100, 100])
    assert 0 < seconds[3] <= 50.1  # gRPC tells a timeout in three digits, rounded up: 50.0001 s are 50.1


async def test_without_any_limit_there_is_no_deadline():
    async with open_stage() as stage, stage.channel() as channel:
        await ask(stage.port, "POST", CHAT, chat())
        await InferenceStub(channel).Chat(as_proto(chat())).read()

    assert [each.deadline for each in stage.runner.generations] == [None, None]


@pytest.mark.parametrize("seconds", ["", "0", "-1", "x", "1e3", "inf", "nan", "0.0", "1" * 7, "1.", "²", "0s", "5y"])
async def test_what_is_no_time_is_refused(seconds):
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", CHAT, chat(), {"x-request-timeout": seconds})

    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
async def test_an_unavailable_journal_is_reported_in_a_header(fields):
    durable = [True, False]
    async with open_stage(durable=lambda _request_ids: durable[0]) as stage, stage.channel() as channel:
        before = await ask(stage.port, "POST", CHAT, chat(**fields))
        durable.reverse()
        after = await ask(stage.port, "POST", CHAT, chat(**fields))
        call = InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, text="x"))
        metadata = dict(await call.initial_metadata())

    assert ("x-quire-journal" in before.headers, after.headers["x-quire-journal"]) == (False, "unavailable")
    assert metadata["quire-journal"] == "unavailable"


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3) | st.just(list(range(10_000))), min_size=1, max_size=3))
def test_prompts_are_fingerprinted_as_the_repr_of_their_lists(prompts):
    written = [prepared_request._list_repr(array("i", prompt)) for prompt in prompts]
    assert f"[{', '.join(written)}]" == repr(prompts)


async def test_a_long_prompt_with_a_key_is_hashed_on_a_thread(monkeypatch):
    threads, digest = [], prepared_request._digest
    monkeypatch.setattr(prepared_request, "_digest", lambda *given: threads.append(current_thread()) or digest(*given))
    async with open_stage(max_body_bytes=2**20) as stage:
        stage.fleet.model_limits = Limits(2**20)
        answers = [await ask(stage.port, "POST", COMPLETIONS, completion([300] * 10_000), KEY) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert len(threads) == 2
    assert main_thread() not in threads
