"""``/v1/conversations`` over HTTP: conversations, their items, and the responses that are turns of them."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.admission.limits import RateLimiter
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.api.conversations import Conversations, Turn, encode_items
from quire_router.api.rest import response_history
from quire_router.api.stored_quota import RECORD_BYTES, ResponseQuota
from quire_router.journal.objects import MemoryObjectStore, Quota

from tests.support.response_streams import response_events, response_of
from tests.support.scripted_api import MODEL, TOKENIZER, Limits, ask, open_stage, script_of
from tests.support.tool_models import THINKING_TEMPLATE
from tests.support.waiting import until

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
USER = {"role": "user", "content": "hello"}
KEYS = ["k" * 16, "l" * 16]


@asynccontextmanager
async def stage_with(
    script: Any = "yes", store: MemoryObjectStore | None = None, most: Quota | None = None, **more: Any
):
    store = store or MemoryObjectStore()
    conversations = Conversations(store, 60.0, most or Quota())
    played = script_of(script) if isinstance(script, str) else script
    async with open_stage(played, template=THINKING_TEMPLATE, conversations=conversations, **more) as stage:
        stage.fleet.model_limits = Limits(4096)
        yield stage


async def make(stage, **fields: Any) -> str:
    answer = await ask(stage.port, "POST", CONVERSATIONS, fields)
    assert answer.status == 200, answer.body
    return answer.json["id"]


async def respond(stage, conversation: Any, text: str, headers: Any = None, **fields: Any):
    body = {"model": MODEL, "input": text, "conversation": conversation, **fields}
    return await ask(stage.port, "POST", RESPONSES, body, headers or {})


async def texts(stage, conversation: str) -> list[str]:
    items = (await ask(stage.port, "GET", f"{CONVERSATIONS}/{conversation}/items?order=asc&limit=100")).json["data"]
    return [item["content"][0]["text"] for item in items]


def prompt_of(stage) -> str:
    return TOKENIZER.decode(stage.runner.generations[-1].prompt_token_ids)


async def test_openais_client_makes_changes_lists_and_deletes_conversations():
    async with stage_with() as stage, stage.openai() as api:
        made = await api.conversations.create(metadata={"a": "b"}, items=[USER])
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert await api.conversations.retrieve(made.id) == made
        changed = await api.conversations.update(made.id, metadata={"a": "c"})
        assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"a": "c"})
        added = await api.conversations.items.create(
            made.id, items=[{"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
        )
        assert [item.content[0].text for item in added.data] == ["hi", "more"]
        listed = [item async for item in api.conversations.items.list(made.id, order="asc", limit=2)]
        assert [item.content[0].text for item in listed] == ["hello", "hi", "more"]
        assert len({item.id for item in listed}) == 3
        one = await api.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
        assert one == listed[1]
        assert (await api.conversations.items.delete(one.id, conversation_id=made.id)).id == made.id
        assert await texts(stage, made.id) == ["hello", "more"]
        with pytest.raises(openai.NotFoundError):
            await api.conversations.items.retrieve(one.id, conversation_id=made.id)
        assert (await api.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.conversations.retrieve(made.id)


async def test_responses_are_turns_of_their_conversation():
    async with stage_with() as stage:
        conversation = await make(stage, items=[{"role": "developer", "content": "Be brief."}])
        first = await respond(stage, conversation, "one")
        assert first.json["conversation"] == {"id": conversation}
        assert await texts(stage, conversation) == ["Be brief.", "one", "yes"]
        streamed = await respond(stage, {"id": conversation}, "two", stream=True)
        assert response_of(response_events(streamed.body))["output"][0]["content"][0]["text"] == "yes"
        before, last = stage.runner.generations
        assert [*last.prompt_token_ids][: len(before.prompt_token_ids)] == [*before.prompt_token_ids]
        assert await texts(stage, conversation) == ["Be brief.", "one", "yes", "two", "yes"]
        ids = first.json["output"][0]["id"]
        await ask(stage.port, "DELETE", f"{CONVERSATIONS}/{conversation}/items/{ids}")
        asked = {"model": MODEL, "input": "three", "conversation": conversation}
        counted = await ask(stage.port, "POST", f"{RESPONSES}/input_tokens", asked)
        await respond(stage, conversation, "three")
        assert prompt_of(stage).count("yes") == 1
        assert counted.json["input_tokens"] == len(stage.runner.generations[-1].prompt_token_ids)


async def test_a_turn_outlives_the_record_of_its_response():
    async with stage_with() as stage:
        conversation = await make(stage)
        for text in ("one", "two"):
            response = (await respond(stage, conversation, text)).json
        await texts(stage, conversation)
        await ask(stage.port, "DELETE", f"{RESPONSES}/{response['id']}")
        stage.runner.runs.clear()
        assert await texts(stage, conversation) == ["one", "yes", "two", "yes"]
        assert (await respond(stage, conversation, "three")).status == 200
    assert "two" in prompt_of(stage)


async def test_a_repeated_key_has_the_first_response_and_is_one_turn():
    once = {"idempotency-key": "once"}
    async with stage_with() as stage:
        conversation = await make(stage, items=[USER])
        first = await respond(stage, conversation, "one", once)
        await respond(stage, conversation, "two")
        again = await respond(stage, conversation, "one", once)
        assert await texts(stage, conversation) == ["hello", "one", "yes", "two", "yes"]
    assert again.body == first.body
    assert again.headers["x-quire-idempotent-replay"] == "true"


async def test_what_failed_adds_nothing():
    async with stage_with(["no", QuireError(ErrorCode.INTERNAL, "It broke.")]) as stage:
        conversation = await make(stage, items=[USER])
        failed = await respond(stage, conversation, "one")
        assert failed.status == 500
        assert await texts(stage, conversation) == ["hello"]
        stage.runner.script = script_of("yes")
        assert (await respond(stage, conversation, "two")).status == 200
        assert await texts(stage, conversation) == ["hello", "two", "yes"]


async def turns_of(store: MemoryObjectStore, conversation: str) -> list[Turn]:
    return [*(await Conversations(store, 60.0).get(conversation, "")).turns]


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "once"}], ids=["without key", "with key"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_a_response_that_is_refused_is_no_turn(fields, headers, monkeypatch):
    """Once with a full queue, before there is a record of it."""
    store = MemoryObjectStore()

    async def refuse(*_: Any) -> None:
        raise QuireError(ErrorCode.OVERLOADED, "Too many requests wait.")

    async def refuse_run(*_: Any):
        await refuse()
        yield

    async with stage_with(store=store) as stage:
        conversation = await make(stage, items=[USER])
        for name, refused in (("run", refuse_run), ("run_once", refuse), ("start", refuse)):
            monkeypatch.setattr(stage.runner, name, refused)
        assert (await respond(stage, conversation, "one", headers, **fields)).status == 429
        assert len(await turns_of(store, conversation)) == 1
        monkeypatch.undo()
        assert (await respond(stage, conversation, "two")).status == 200
        assert (await respond(stage, conversation, "one", headers, **fields)).status == 200
        await until(lambda: not stage.runner.background)
        assert await texts(stage, conversation) == ["hello", "two", "yes", "one", "yes"]
        assert len(await turns_of(store, conversation)) == 3


async def test_a_response_that_cannot_be_prepared_is_no_turn():
    store = MemoryObjectStore()
    async with stage_with(store=store) as stage:
        conversation = await make(stage, items=[USER])
        assert (await respond(stage, conversation, "one", temperature=-1)).status == 400
        assert len(await turns_of(store, conversation)) == 1


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}], ids=str)
async def test_a_response_that_failed_is_no_turn_once_the_next_begins(fields):
    store = MemoryObjectStore()
    async with stage_with(["no", QuireError(ErrorCode.INTERNAL, "It broke.")], store=store) as stage:
        conversation = await make(stage, items=[USER])
        await respond(stage, conversation, "one", **fields)
        await until(lambda: not stage.runner.background)
        assert await texts(stage, conversation) == ["hello"]
        stage.runner.script = script_of("yes")
        await respond(stage, conversation, "two")
        turns = await turns_of(store, conversation)
        assert [bool(turn.response) for turn in turns] == [False, True]
        assert await texts(stage, conversation) == ["hello", "two", "yes"]


async def test_a_key_that_is_refused_while_its_response_runs_leaves_that_in_the_conversation(monkeypatch):
    store, release, once = MemoryObjectStore(), asyncio.Event(), {"idempotency-key": "once"}
    async with stage_with(["so", release, FinishReason.STOP], store=store) as stage:
        conversation = await make(stage)
        running = asyncio.create_task(respond(stage, conversation, "one", once))
        await stage.runner.started.wait()

        async def refuse(*_: Any) -> None:
            raise QuireError(ErrorCode.OVERLOADED, "Too many requests a minute.")

        monkeypatch.setattr(stage.runner, "run_once", refuse)
        assert (await respond(stage, conversation, "one", once)).status == 429
        release.set()
        assert (await running).status == 200
        assert await texts(stage, conversation) == ["one", "so"]


async def test_a_number_of_a_turn_is_never_used_again():
    """What was written of a turn that is gone would be the items of the next one."""
    conversations = Conversations(MemoryObjectStore(), 60.0)
    made = await conversations.create("", {}, encode_items([{"id": "msg_1"}]))
    for name in "ab":
        await conversations.add_response(made.id, "", name, 0)
    before = await conversations.get(made.id, "")
    await conversations.write_response(before, before.turns[1], encode_items([{"id": "msg_2"}]))
    for name in "ab":
        await conversations.remove_response(made.id, "", name)
    await conversations.add_response(made.id, "", "c", 0)
    found = await conversations.get(made.id, "")
    assert [turn.response for turn in found.turns] == ["", "c"]
    assert [json.loads(part) async for part in conversations.read_turns(found, found.turns)] == [[{"id": "msg_1"}]]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_of_any_size_are_the_whole_list(order: str):
    async with stage_with() as stage:
        conversation = await make(stage, items=[USER] * 3)
        await respond(stage, conversation, "one")
        await ask(stage.port, "POST", f"{CONVERSATIONS}/{conversation}/items", {"items": [USER] * 2})
        path = f"{CONVERSATIONS}/{conversation}/items?order={order}"
        listed = (await ask(stage.port, "GET", f"{path}&limit=100")).json["data"]
        gone = listed.pop(3)["id"]
        await ask(stage.port, "DELETE", f"{CONVERSATIONS}/{conversation}/items/{gone}")
        assert (await ask(stage.port, "GET", f"{path}&after={gone}")).status == 404
        for limit in range(1, 8):
            pages, after, has_more = [], "", True
            while has_more:
                page = (await ask(stage.port, "GET", f"{path}&limit={limit}{after}")).json
                pages += page["data"]
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                after, has_more = f"&after={page['last_id']}", page["has_more"]
            assert pages == listed


async def test_a_page_parses_the_turns_that_it_is_of_alone_and_off_the_loop(monkeypatch: pytest.MonkeyPatch):
    parsed: list[tuple[int, bool]] = []

    class Parser:
        def loads(self, data: bytes) -> Any:
            parsed.append((len(data), threading.current_thread() is threading.main_thread()))
            return json.loads(data)

        dumps = staticmethod(json.dumps)

    limits = RateLimiter(Tenants([Tenant("", requests_per_minute=4)]), clock=lambda: 0)
    async with stage_with(tenant_limits=limits) as stage:
        conversation = await make(stage)
        for text in "abc":
            items = {"items": [{"role": "user", "content": text * 30_000}] * 3}
            assert (await ask(stage.port, "POST", f"{CONVERSATIONS}/{conversation}/items", items)).status == 200
        monkeypatch.setattr(response_history, "json", Parser())
        path = f"{CONVERSATIONS}/{conversation}/items"
        page = (await ask(stage.port, "GET", f"{path}?limit=1")).json
        assert [item["content"][0]["text"][0] for item in page["data"]] == ["c"]
        assert [(size > 90_000, on_loop) for size, on_loop in parsed] == [(True, False)]
        parsed.clear()
        assert (await ask(stage.port, "GET", f"{path}/{page['last_id']}")).json == page["data"][0]
        assert len(parsed) == 1
        statuses = [(await ask(stage.port, "GET", f"{path}?order=asc")).status for _ in range(20)]
        assert statuses.count(200) < 10, "each reads 270 kB, which count as five reads"
        assert statuses[-1] == 429


async def test_a_response_that_runs_is_waited_for():
    release = asyncio.Event()
    async with stage_with(["so", release, FinishReason.STOP]) as stage:
        conversation = await make(stage)
        running = asyncio.create_task(respond(stage, conversation, "one"))
        await stage.runner.started.wait()
        assert await texts(stage, conversation) == []
        waiting = asyncio.create_task(respond(stage, conversation, "two"))
        release.set()
        assert (await running).status == (await waiting).status == 200
        assert await texts(stage, conversation) == ["one", "so", "two", "so"]


async def test_a_conversation_is_locked_while_a_response_does_not_end(monkeypatch):
    async with stage_with() as stage:
        conversation = await make(stage)
        await respond(stage, conversation, "one")

        async def never(*_: Any, **__: Any) -> None:
            raise QuireError(ErrorCode.DEADLINE, "It takes too long.")

        monkeypatch.setattr("quire_router.api.rest.response_history.HistoryReader._whole", never)
        refused = await respond(stage, conversation, "two")
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        400,
        "conversation_locked",
        "conversation",
    )


async def test_conversations_of_other_tenants_are_not_there():
    async with stage_with(keys=KEYS) as stage:
        headers = [{"authorization": f"Bearer {key}"} for key in KEYS]
        made = (await ask(stage.port, "POST", CONVERSATIONS, {}, headers[0])).json["id"]
        path = f"{CONVERSATIONS}/{made}"
        for method, where, body in (
            ("GET", path, None),
            ("POST", path, {"metadata": {}}),
            ("DELETE", path, None),
            ("GET", f"{path}/items", None),
            ("POST", f"{path}/items", {"items": [USER]}),
            ("GET", f"{path}/items/msg_1", None),
        ):
            answer = await ask(stage.port, method, where, body, headers[1])
            assert (answer.status, answer.error["param"]) == (404, "conversation_id"), (method, where)
        assert (await respond(stage, made, "one", headers[1])).status == 404
        assert (await ask(stage.port, "GET", path, None, headers[0])).status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}, "conversation"),
        (RESPONSES, {"model": MODEL, "input": "x", "store": False}, "store"),
        (RESPONSES, {"model": MODEL, "input": "x", "conversation": 5}, "conversation"),
        (f"{CONVERSATIONS}/ID/items", {"items": []}, "items"),
        (f"{CONVERSATIONS}/ID/items", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        (f"{CONVERSATIONS}/ID/items", {"items": [{"type": "mesage", "role": "user"}]}, "items[0]"),
        (f"{CONVERSATIONS}/ID", {}, "metadata"),
        (CONVERSATIONS, {"metadata": {"a": 1}}, "metadata"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(path, body, param):
    async with stage_with() as stage:
        conversation = await make(stage)
        fields = {"conversation": conversation, **body} if path == RESPONSES else body
        answer = await ask(stage.port, "POST", path.replace("ID", conversation), fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_changes_at_once_are_all_kept():
    async with stage_with() as stage:
        conversation = await make(stage)
        path = f"{CONVERSATIONS}/{conversation}/items"
        bodies = [{"items": [{"role": "user", "content": str(number)}]} for number in range(6)]
        answers = await asyncio.gather(*(ask(stage.port, "POST", path, body) for body in bodies))
        assert [answer.status for answer in answers] == [200] * 6
        assert sorted(await texts(stage, conversation)) == [str(number) for number in range(6)]


async def test_responses_that_run_at_once_are_in_the_conversation_when_they_have_ended(monkeypatch):
    release, begun, add = asyncio.Event(), asyncio.Barrier(2), Conversations.add_response

    async def add_together(*given: Any) -> None:
        await begun.wait()  # both have read what they go on from
        await add(*given)

    monkeypatch.setattr(Conversations, "add_response", add_together)
    async with stage_with(["so", release, FinishReason.STOP]) as stage:
        conversation = await make(stage)
        running = [asyncio.create_task(respond(stage, conversation, text)) for text in ("one", "two")]
        await until(lambda: len(stage.runner.generations) == 2)
        assert await texts(stage, conversation) == []
        release.set()
        assert [(await each).status for each in running] == [200, 200]
        assert sorted(await texts(stage, conversation)) == ["one", "so", "so", "two"]


async def items_of(stage, conversation: str) -> list[dict[str, Any]]:
    path = f"{CONVERSATIONS}/{conversation}/items?order=asc&limit=100"
    return (await ask(stage.port, "GET", path)).json["data"]


async def test_ids_are_unique_in_a_conversation_whatever_clients_send(monkeypatch):
    """Also where two responses begin at once, neither of which knows the other's input."""
    named = {"type": "message", "role": "user", "id": "msg_1", "content": "hello"}
    begun, add = asyncio.Barrier(2), Conversations.add_response

    async def add_together(*given: Any) -> None:
        await begun.wait()
        await add(*given)

    async with stage_with() as stage:
        conversation = await make(stage, items=[named, named])
        path = f"{CONVERSATIONS}/{conversation}/items"
        added = (await ask(stage.port, "POST", path, {"items": [named]})).json["data"]
        monkeypatch.setattr(Conversations, "add_response", add_together)
        body = {"model": MODEL, "input": [named], "conversation": conversation}
        responses = await asyncio.gather(*(ask(stage.port, "POST", RESPONSES, body) for _ in range(2)))
        monkeypatch.setattr(Conversations, "add_response", add)
        listed = await items_of(stage, conversation)
        ids = [item["id"] for item in listed]
        assert len(set(ids)) == len(ids) == 3 + 2 * 2
        assert added[0]["id"] == ids[2]
        for response in responses:
            inputs = (await ask(stage.port, "GET", f"{RESPONSES}/{response.json['id']}/input_items")).json["data"]
            assert {item["id"] for item in inputs} <= {*ids}
            assert {item["id"] for item in response.json["output"]} <= {*ids}
        await respond(stage, conversation, "more")
        assert (await items_of(stage, conversation))[: len(ids)] == listed
        await ask(stage.port, "DELETE", f"{path}/{ids[0]}")
        assert [item["id"] for item in await items_of(stage, conversation)][: len(ids) - 1] == ids[1:]


async def test_an_item_that_is_named_again_has_an_id_of_its_own():
    async with stage_with() as stage:
        conversation = await make(stage)
        first = (await respond(stage, conversation, "one")).json["output"][0]["id"]
        again = {"type": "item_reference", "id": first}
        repeated = {"model": MODEL, "input": [again, USER], "conversation": conversation}
        assert (await ask(stage.port, "POST", RESPONSES, repeated)).status == 200
        assert await texts(stage, conversation) == ["one", "yes", "yes", "hello", "yes"]
        ids = [item["id"] for item in await items_of(stage, conversation)]
        assert len(set(ids)) == len(ids)


async def test_what_clients_add_to_a_conversation_is_bounded(monkeypatch):
    monkeypatch.setattr("quire_router.api.conversations.MAX_CONVERSATION_BYTES", 1000)
    long = {"role": "user", "content": "x" * 400}
    async with stage_with() as stage:
        conversation = await make(stage, items=[long])
        path = f"{CONVERSATIONS}/{conversation}/items"
        refused = await ask(stage.port, "POST", path, {"items": [long, long]})
        assert (refused.status, refused.error["param"]) == (400, "items")
        assert (await ask(stage.port, "POST", path, {"items": [USER]})).status == 200
        assert await texts(stage, conversation) == ["x" * 400, "hello"]
        assert (await ask(stage.port, "POST", CONVERSATIONS, {"items": [long] * 3})).status == 400


async def test_a_tenant_has_so_many_conversations_and_others_have_their_own():
    async with stage_with(most=Quota(max_names=2), keys=KEYS) as stage:
        first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
        made = [(await ask(stage.port, "POST", CONVERSATIONS, {}, first)).json["id"] for _ in range(2)]
        refused = await ask(stage.port, "POST", CONVERSATIONS, {}, first)
        assert (refused.status, refused.error["code"]) == (429, "max_conversations")
        assert "2 conversations (--max-tenant-conversations)" in str(refused.error["message"])
        assert (await ask(stage.port, "POST", CONVERSATIONS, {}, second)).status == 200
        path = f"{CONVERSATIONS}/{made[0]}"
        assert (await ask(stage.port, "POST", path, {"metadata": {"a": "b"}}, first)).status == 200
        assert (await ask(stage.port, "DELETE", path, None, first)).status == 200
        assert (await ask(stage.port, "POST", CONVERSATIONS, {}, first)).status == 200


async def test_all_conversations_of_a_tenant_have_so_many_bytes():
    long, store = {"role": "user", "content": "x" * 2000}, MemoryObjectStore()
    async with stage_with(most=Quota(max_bytes=5000), store=store) as stage:
        made = [await make(stage, items=[long]) for _ in range(2)]
        for path, body in (
            (CONVERSATIONS, {"items": [long]}),
            (f"{CONVERSATIONS}/{made[0]}/items", {"items": [long]}),
            (f"{CONVERSATIONS}/{made[0]}", {"metadata": {str(number): "x" * 500 for number in range(4)}}),
        ):
            refused = await ask(stage.port, "POST", path, body)
            assert (refused.status, refused.error["code"]) == (429, "max_conversations"), path
            assert "5000 bytes of conversations (--max-tenant-conversation-bytes)" in str(refused.error["message"])
        assert await texts(stage, made[0]) == ["x" * 2000]
        await ask(stage.port, "DELETE", f"{CONVERSATIONS}/{made[1]}")
        assert (await ask(stage.port, "POST", f"{CONVERSATIONS}/{made[0]}/items", {"items": [long]})).status == 200


async def test_what_responses_add_counts_and_an_answer_is_kept_all_the_same():
    async with stage_with("y" * 3000, most=Quota(max_bytes=3500)) as stage:
        conversation = await make(stage, items=[USER])
        assert (await respond(stage, conversation, "one", max_output_tokens=3000)).status == 200
        assert [len(text) for text in await texts(stage, conversation)] == [5, 3, 3000]
        ran = len(stage.runner.generations)
        refused = await respond(stage, conversation, "z" * 500)
        assert (refused.status, refused.error["code"]) == (429, "max_conversations")
        assert len(stage.runner.generations) == ran
        assert len(await texts(stage, conversation)) == 3
        item = (await items_of(stage, conversation))[0]["id"]
        path = f"{CONVERSATIONS}/{conversation}"
        assert (await ask(stage.port, "DELETE", f"{path}/items/{item}")).status == 200
        assert (await ask(stage.port, "DELETE", path)).status == 200
        assert (await ask(stage.port, "POST", CONVERSATIONS, {"items": [USER]})).status == 200


async def test_all_stored_responses_of_a_tenant_have_so_many_bytes():
    quota = ResponseQuota(MemoryObjectStore(), 2 * RECORD_BYTES + 6000)
    async with stage_with(quota=quota, keys=KEYS) as stage:
        first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
        body = {"model": MODEL, "input": "x" * 400}
        stored = [await ask(stage.port, "POST", RESPONSES, body, first) for _ in range(2)]
        assert [answer.status for answer in stored] == [200, 200]
        refused = await ask(stage.port, "POST", RESPONSES, body, first)
        assert (refused.status, refused.error["code"]) == (429, "max_responses")
        assert f"{2 * RECORD_BYTES + 6000} bytes (--max-tenant-response-bytes)" in str(refused.error["message"])
        assert (await ask(stage.port, "POST", RESPONSES, body | {"store": False}, first)).status == 200
        assert (await ask(stage.port, "POST", RESPONSES, body, second)).status == 200
        await ask(stage.port, "DELETE", f"{RESPONSES}/{stored[0].json['id']}", None, first)
        assert (await ask(stage.port, "POST", RESPONSES, body, first)).status == 200


async def test_a_response_that_its_conversation_has_no_room_for_counts_no_more():
    stored = MemoryObjectStore()
    async with stage_with(most=Quota(max_bytes=320), quota=ResponseQuota(stored)) as stage:
        conversation = await make(stage)
        statuses = [(await respond(stage, conversation, "x", {"idempotency-key": str(each)})).status for each in "ab"]
        assert statuses == [200, 429]
        assert (await respond(stage, conversation, "x", {"idempotency-key": "a"})).status in (200, 429)
    assert [len(account.sizes) for account in stored._accounts.values()] == [1]


@pytest.mark.parametrize("path", [RESPONSES, "/v1/requests"])
async def test_a_response_that_is_deleted_at_any_route_counts_no_more(path):
    async with stage_with(quota=ResponseQuota(MemoryObjectStore(), RECORD_BYTES + 3000)) as stage:
        body = {"model": MODEL, "input": "x" * 400}
        for _ in range(3):
            stored = await ask(stage.port, "POST", RESPONSES, body)
            assert stored.status == 200, stored.body
            assert (await ask(stage.port, "DELETE", f"{path}/{stored.json['id']}")).status == 200


async def test_a_response_counts_once_and_not_if_nothing_is_stored_of_it(monkeypatch):
    quota = ResponseQuota(MemoryObjectStore(), RECORD_BYTES + 3000)
    body, once = {"model": MODEL, "input": "x" * 400}, {"idempotency-key": "once"}
    async with stage_with(quota=quota) as stage:

        async def refuse(*_: Any) -> None:
            raise QuireError(ErrorCode.OVERLOADED, "Too many requests a minute.")

        monkeypatch.setattr(stage.runner, "run_once", refuse)
        assert (await ask(stage.port, "POST", RESPONSES, body, once)).status == 429
        monkeypatch.undo()
        for _ in range(3):
            assert (await ask(stage.port, "POST", RESPONSES, body, {"idempotency-key": "another"})).status == 200
        assert (await ask(stage.port, "POST", RESPONSES, body, once)).error["code"] == "max_responses"
