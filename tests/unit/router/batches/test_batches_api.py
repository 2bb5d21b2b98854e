"""``/v1/files`` and ``/v1/batches`` over HTTP, as the client of OpenAI uses them."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import time
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_router.admission.tenants import Tenant, Tenants
from quire_router.admission.tenants_file import ApiKey, TenantsFile
from quire_router.api.auth import Authenticator
from quire_router.api.request_limits import BodyBudget, ConcurrencyLimit
from quire_router.api.rest.batch_lines import MAX_RUNS, BatchLines
from quire_router.api.service import ApiService
from quire_router.api.stored_quota import ResponseQuota
from quire_router.batches.batch import Batch, Line
from quire_router.batches.batch_store import Batches
from quire_router.batches.files import CHUNK_BYTES, FileInfo, Files, FileSettings
from quire_router.core.errors import engines_lost, journal_unavailable
from quire_router.core.generation import Delta, GenerationRequest
from quire_router.journal.objects import Excess, MemoryObjectStore, ObjectStore, Quota
from quire_router.journal.redis.redis_objects import RedisObjectStore
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal

from tests.support.batch_stage import batch_stage, jsonl, line
from tests.support.journal_kinds import KINDS, Databases, databases
from tests.support.scripted_api import (
    CHAT_TEMPLATE,
    MODEL,
    Limits,
    ScriptedPool,
    ScriptedRunner,
    ask,
    script_of,
    tokenizer_with,
)
from tests.support.waiting import until

KEYS = ["k" * 16, "l" * 16]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
VOLATILE = {"id", "created", "created_at", "completed_at", "system_fingerprint"}


@pytest.fixture(scope="module")
def databases_of_kinds() -> Iterator[Databases]:
    with databases() as running:
        yield running


@asynccontextmanager
async def objects_of(kind: str, stores: Databases) -> AsyncIterator[ObjectStore]:
    if kind == "memory":
        yield MemoryObjectStore()
    elif kind == "redis":
        store = RedisObjectStore(stores.redis.url)
        yield store
        await store.close()
    else:
        journal = SqliteJournal(stores.file)
        yield journal.objects
        await journal.close()


async def upload(api: openai.AsyncOpenAI, content: bytes, **more: Any) -> Any:
    return await api.files.create(file=("in.jsonl", content), purpose="batch", **more)


async def run(api: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file = await upload(api, content)
    batch = await api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    return await ended(api, batch.id)


async def ended(api: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await api.batches.retrieve(batch_id)).status in (  # noqa: ASYNC110
            "validating",
            "in_progress",
            "finalizing",
            "cancelling",
        ):
            await asyncio.sleep(0.01)
    return batch


async def lines_of(api: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await api.files.content(file_id)).text.splitlines()]


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name not in VOLATILE}
    return [timeless(each) for each in value] if isinstance(value, list) else value


# Files


async def test_a_file_is_stored_listed_read_and_deleted():
    async with batch_stage() as stage:
        api = stage.openai()
        content = bytes(range(256)) * 3000  # three chunks
        first = await upload(api, content)
        second = await upload(api, b"x", expires_after={"anchor": "created_at", "seconds": 3600})
        assert (first.bytes, first.filename, first.purpose, first.object) == (768_000, "in.jsonl", "batch", "file")
        assert second.expires_at == second.created_at + 3600
        assert await api.files.retrieve(first.id) == first
        assert (await api.files.content(first.id)).content == content
        assert [file.id async for file in api.files.list()] == [second.id, first.id]
        assert [file.id async for file in api.files.list(order="asc", limit=1)] == [first.id, second.id]
        assert [file async for file in api.files.list(purpose="batch_output")] == []
        assert (await api.files.delete(first.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await api.files.content(first.id)
        assert [file.id async for file in api.files.list()] == [second.id]


@pytest.mark.parametrize("error", [None, journal_unavailable()])
async def test_a_file_that_cannot_be_sent_whole_breaks_the_connection_and_holds_nothing_else(error, caplog):
    """It is deleted in the middle, or the journal goes away."""

    class Failing(MemoryObjectStore):
        async def parts(self, name, numbers):
            if numbers == [2] and error is not None:
                raise error
            return [None] if numbers == [2] else await super().parts(name, numbers)

    got = bytearray()

    async def read(client, path):
        async with client.stream("GET", path) as response:
            async for data in response.aiter_bytes():
                got.extend(data)

    async with batch_stage(store=Failing()) as stage, httpx.AsyncClient(base_url=stage.url, timeout=60) as client:
        content = b"x" * 600_000
        file = await upload(stage.openai(), content)
        with pytest.raises(httpx.TransportError):
            await read(client, f"/v1/files/{file.id}/content")
        assert content.startswith(got)
    assert not any(each.levelno >= logging.ERROR for each in caplog.records)


async def test_an_empty_file_can_be_read():
    async with batch_stage() as stage:
        api = stage.openai()
        file = await upload(api, b"")
        assert (file.bytes, (await api.files.content(file.id)).content) == (0, b"")


async def test_files_and_batches_of_others_are_not_found():
    async with batch_stage(keys=KEYS) as stage:
        own, other = stage.openai(KEYS[0]), stage.openai(KEYS[1])
        batch = await run(own, jsonl([line("a")]))
        for call in (
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.output_file_id),
            other.files.delete(batch.output_file_id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        for file_id in (batch.input_file_id, "no file's id"):
            with pytest.raises(openai.NotFoundError) as refused:
                await other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
            assert refused.value.param == "input_file_id"
        assert [each async for each in other.files.list()] == [each async for each in other.batches.list()] == []
        assert len(await lines_of(own, batch.output_file_id)) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "assistants"}, "purpose"),
        ({"purpose": "user_data"}, "purpose"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
    ],
)
async def test_files_for_what_there_is_not_are_refused_and_leave_nothing(fields, param):
    async with batch_stage() as stage:
        api = stage.openai()
        with pytest.raises(openai.BadRequestError) as refused:
            await api.files.create(file=("a", b"x"), **fields)
        assert refused.value.param == param
        assert [file async for file in api.files.list()] == []


async def test_files_are_bounded():
    async with batch_stage(settings=FileSettings(max_bytes=1000, max_tenant_bytes=1500)) as stage:
        api = stage.openai()
        with pytest.raises(openai.BadRequestError, match="larger than the limit of 1000 bytes"):
            await upload(api, b"x" * 1001)
        kept = await upload(api, b"x" * 1000)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            await upload(api, b"x" * 501)
        await api.files.delete(kept.id)
        await upload(api, b"x" * 501)
        with pytest.raises(openai.APIStatusError) as refused:
            await upload(api, b"x" * 100_000)
        assert refused.value.status_code == 413


async def test_files_that_arrive_at_once_are_bounded_together():
    files = Files(MemoryObjectStore(), FileSettings(max_tenant_bytes=1500))
    first, second = [await files.new_upload("tenant") for _ in range(2)]
    for each in (first, second):
        await each.write(b"x" * 1000)
    await first.end("one", "batch", None)
    with pytest.raises(QuireError, match="delete some"):
        await second.end("two", "batch", None)
    assert [each.filename async for each in files.list("tenant")] == ["one"]


@pytest.mark.parametrize("kind", KINDS)
async def test_uploads_that_have_not_ended_count(kind, databases_of_kinds, monkeypatch):
    monkeypatch.setattr("quire_router.batches.files.CHUNK_BYTES", 100)
    async with objects_of(kind, databases_of_kinds) as store:
        files = Files(store, FileSettings(max_tenant_bytes=1000))
        uploads = [await files.new_upload(f"of {kind}") for _ in range(8)]
        refused = list[QuireError]()
        for number in range(3):
            for each in uploads:
                try:
                    await each.write(bytes(100))
                except QuireError as error:
                    refused.append(error)
            written = [len(await store.part_numbers(each.id)) for each in uploads]
            assert sum(written) == min(10, 8 * (number + 1))
        assert len(refused) == 14
        assert {each.code for each in refused} == {ErrorCode.OVERLOADED}
        assert await files.new_upload("another tenant")
        await uploads[0].abandon()
        await (await files.new_upload(f"of {kind}")).write(bytes(100))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["open", "write", "write", "end", "abandon", "delete"]), st.integers(0, 99))),
)
def test_what_a_tenant_has_stored_is_what_is_counted_and_never_above_its_limit(steps):
    async def run() -> None:
        store = MemoryObjectStore()
        files = Files(store, FileSettings(max_bytes=400, max_tenant_bytes=1000))
        uploads, ended = [], []
        for step, number in steps:
            with suppress(QuireError):
                if step == "open":
                    uploads.append(await files.new_upload("a"))
                elif step == "write" and uploads:
                    await uploads[number % len(uploads)].write(bytes(37 * (number % 7)))
                elif step == "abandon" and uploads:
                    await uploads.pop(number % len(uploads)).abandon()
                elif step == "end" and uploads:
                    upload = uploads.pop(number % len(uploads))
                    try:
                        ended.append(await upload.end("in", "batch", None))
                    except QuireError:
                        await upload.abandon()
                        raise
                elif step == "delete" and ended:
                    await files.delete(ended.pop(number % len(ended)))
            stored = sum(len(part) for each in store._objects.values() for part in each.parts.values())
            assert stored <= 1000
        for each in uploads:
            await each.abandon()
        assert (
            await store.charge("files:a", "the rest", 1000 - sum(each.bytes for each in ended), 60, Quota(None, 1000))
            is None
        )
        assert await store.charge("files:a", "more", 1, 60, Quota(None, 1000)) is Excess.BYTES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire_router.batches.files.CHUNK_BYTES", 50)
        asyncio.run(run())


async def test_an_upload_that_breaks_off_counts_no_more():
    async with batch_stage(settings=FileSettings(max_tenant_bytes=1500)) as stage:
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        head += b"content-length: 60000\r\n\r\n--b\r\ncontent-disposition: form-data; name=file; filename=f\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(head + b"x" * 1400)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        async with asyncio.timeout(10):
            while True:
                with suppress(openai.RateLimitError):
                    await upload(stage.openai(), b"x" * 1500)
                    break


async def test_an_upload_that_drips_is_refused_and_one_that_is_slow_is_not(monkeypatch):
    """Each byte in time is not enough: the whole has a deadline by what has arrived."""
    monkeypatch.setattr("quire_router.api.rest.batch_endpoints.UPLOAD_RATE", 1000)
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    field = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    field += b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def send(port: int, piece: int, size: int, pause: float) -> bytes:
        body = field + b"x" * size + b"\r\n--b--\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body))

        async def drip() -> None:
            for start in range(0, len(body), piece):
                writer.write(body[start : start + piece])
                await asyncio.sleep(pause)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(60):
            line = await reader.readline()
        dripping.cancel()
        writer.close()
        return line

    async with batch_stage(patience=1.0) as stage:
        dripped, slow = await asyncio.gather(send(stage.port, 2, 4000, 0.05), send(stage.port, 800, 8000, 0.2))
    assert b" 408 " in dripped
    assert b" 200 " in slow, "it took longer than the patience, and came fast enough"


async def test_uploads_hold_memory_as_bodies_do():
    async with batch_stage(
        bodies=BodyBudget(CHUNK_BYTES * 2), keys=KEYS, settings=FileSettings(max_bytes=10**6)
    ) as stage:
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n" % KEYS[0].encode()
        head += b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 60000\r\n\r\n--b\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
        writer.write(head)
        await writer.drain()
        await asyncio.sleep(0.1)
        with pytest.raises(openai.RateLimitError) as refused:
            await upload(stage.openai(KEYS[0]), b"x")
        assert refused.value.code == "body_bytes"
        assert (await upload(stage.openai(KEYS[1]), b"x")).bytes == 1
        writer.close()


async def test_what_is_no_form_is_refused():
    async with batch_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/files", {"a": 1})
        assert (answer.status, answer.error["param"]) == (400, "body")


async def test_a_tenant_of_whom_nothing_is_stored_has_no_files():
    tenant = Tenant("private", retention=0)
    file = TenantsFile(Tenants([tenant]), {"private": (ApiKey.of(KEYS[0]),)})
    async with batch_stage(file=file) as stage:
        with pytest.raises(openai.PermissionDeniedError, match="no files"):
            await upload(stage.openai(KEYS[0]), b"x")


# Batches


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
async def test_a_batch_answers_as_its_route_does(endpoint):
    async with batch_stage() as stage:
        api = stage.openai()
        body = (
            {"model": MODEL, **BODIES[endpoint], "seed": 3}
            if endpoint != RESPONSES
            else {"model": MODEL, "input": "hi"}
        )
        lines = [{"custom_id": f"c{number}", "method": "POST", "url": endpoint, "body": body} for number in range(3)]
        batch = await run(api, jsonl(lines), endpoint)
        assert batch.status == "completed"
        assert batch.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
        assert (batch.endpoint, batch.completion_window, batch.error_file_id) == (endpoint, "24h", None)
        assert batch.model == MODEL
        direct = (await ask(stage.port, "POST", endpoint, body)).json
        found = await lines_of(api, batch.output_file_id)
    assert [each["custom_id"] for each in found] == ["c0", "c1", "c2"]
    assert len({each["response"]["request_id"] for each in found}) == 3
    for each in found:
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        assert timeless(each["response"]["body"]) == timeless(direct)
    assert all(generation.priority > 2**30 for generation in stage.runner.generations[:3])


async def test_requests_that_are_refused_are_in_the_error_file():
    async with batch_stage() as stage:
        api = stage.openai()
        lines = [
            line("good"),
            line("unknown model", model="other"),
            line("bad value", temperature=-1),
        ]
        batch = await run(api, jsonl(lines))
        direct = await ask(stage.port, "POST", CHAT, lines[2]["body"])
        (good,) = await lines_of(api, batch.output_file_id)
        unknown, bad = await lines_of(api, batch.error_file_id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert good["custom_id"] == "good"
    assert (unknown["custom_id"], unknown["response"]["status_code"]) == ("unknown model", 404)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad value", 400)
    assert bad["response"]["body"]["error"]["message"] == direct.error["message"]


async def test_a_line_beyond_the_bounds_of_a_body_fails_alone_with_its_own_error():
    last = dict(reversed(line("name at the end", "x" * 100_000).items()))
    async with batch_stage() as stage:
        api = stage.openai()
        batch = await run(api, jsonl([line("long", "x" * 10_000), line("good"), last]))
        (good,) = await lines_of(api, batch.output_file_id)
        refused = await lines_of(api, batch.error_file_id)
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert good["custom_id"] == "good"
    for each, name in zip(refused, ("long", "name at the end"), strict=True):
        assert (each["custom_id"], each["response"]["status_code"]) == (name, 400)
        assert each["response"]["body"]["error"]["message"] == "This line has more than 10000 bytes."


async def test_a_response_that_could_not_begin_counts_no_more(monkeypatch):
    async def refuse(_: Any) -> None:
        raise QuireError(ErrorCode.INVALID, "This key may use 1 token a minute.")

    store = MemoryObjectStore()
    async with batch_stage(quota=ResponseQuota(store)) as stage:
        monkeypatch.setattr(stage.runner, "run_once", refuse)
        asked = {"custom_id": "a", "method": "POST", "url": RESPONSES, "body": {"model": MODEL, "input": "hi"}}
        batch = await run(stage.openai(), jsonl([asked]), RESPONSES)
        (answer,) = await lines_of(stage.openai(), batch.error_file_id)
    assert answer["response"]["status_code"] == 400
    assert not store._accounts


@pytest.mark.parametrize(
    ("content", "code", "number", "param"),
    [
        (b"", "empty_file", None, None),
        (b"\n \n", "empty_file", None, None),
        (jsonl([line("a")]) + b"{", "invalid_json_line", 2, None),
        (b"[]", "invalid_json_line", 1, None),
        (b"[" * 5000, "invalid_json_line", 1, None),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3, "custom_id"),
        (jsonl([line("")]), "missing_required_parameter", 1, "custom_id"),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1, "method"),
        (jsonl([{**line("a"), "body": 1}]), "missing_required_parameter", 1, "body"),
        (jsonl([line("a", url=COMPLETIONS)]), "mismatched_url", 1, "url"),
        (jsonl([line("a", stream=True)]), "invalid_request", 1, "body.stream"),
        (b'["' + b"x" * 10_000 + b'"]', "line_too_long", 1, None),
    ],
)
async def test_a_file_that_holds_no_batch_fails_it_before_anything_runs(content, code, number, param):
    async with batch_stage() as stage:
        batch = await run(stage.openai(), content)
        assert stage.runner.generations == []
    assert (batch.status, batch.output_file_id) == ("failed", None)
    (error,) = batch.errors.data
    assert (error.code, error.line, error.param) == (code, number, param)
    assert batch.failed_at >= batch.created_at


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ],
)
async def test_a_batch_of_what_there_is_not_is_refused(fields, param):
    async with batch_stage() as stage:
        api = stage.openai()
        file = await upload(api, jsonl([line("a")]))
        with pytest.raises(openai.BadRequestError) as refused:
            await api.batches.create(
                **{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
            )
    assert refused.value.param == param


async def test_batches_are_listed_with_their_metadata():
    async with batch_stage() as stage:
        api = stage.openai()
        file = await upload(api, jsonl([line("a")]))
        made = [
            await api.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"n": str(number)}
            )
            for number in range(3)
        ]
        assert [each.id async for each in api.batches.list(limit=2)] == [each.id for each in reversed(made)]
        assert [each.metadata async for each in api.batches.list()] == [{"n": "2"}, {"n": "1"}, {"n": "0"}]


def service_of(runner: ScriptedRunner) -> ApiService:
    tokenizers = dict.fromkeys([MODEL], tokenizer_with(CHAT_TEMPLATE))
    return ApiService(tokenizers, ScriptedPool(), runner, Authenticator(()), ConcurrencyLimit(8))


async def test_lines_of_a_tenant_that_was_removed_wait_until_it_is_there_again():
    runner, tenants, now = ScriptedRunner(), Tenants([Tenant("a", listed=True)]), int(time())
    service = service_of(runner)
    lines, batch = BatchLines(service, tenants), Batch("batch_1", "a", "", CHAT, "file-1", now, now + 1000, listed=True)
    body = json.dumps(line("x")).encode()
    assert (await lines.run(batch, Line(0, "x", body))).status == 200
    tenants.replace_all(Tenants([Tenant("b", listed=True)]))
    with pytest.raises(QuireError, match="waits"):
        await lines.run(batch, Line(1, "x", body))
    assert len(runner.generations) == 1
    tenants.replace_all(Tenants([Tenant("a", listed=True)]))
    assert (await lines.run(batch, Line(1, "x", body))).status == 200
    assert not lines._under_way
    service.close()


@dataclass
class LosingRunner(ScriptedRunner):
    """Loses the engines of the first requests."""

    losses: int = 0

    async def _play(self, generation: GenerationRequest) -> AsyncGenerator[Delta]:
        if len(self.generations) <= self.losses:
            raise engines_lost()
        async for delta in super()._play(generation):
            yield delta


@pytest.mark.parametrize(("losses", "status"), [(1, 200), (MAX_RUNS - 1, 200), (MAX_RUNS, 503), (1000, 503)])
async def test_a_line_whose_engines_were_lost_is_run_again_and_fails_when_it_brings_all_of_them_down(losses, status):
    runner, now = LosingRunner(losses=losses), int(time())
    service = service_of(runner)
    lines, batch = BatchLines(service, Tenants()), Batch("batch_1", "", "", CHAT, "file-1", now, now + 1000)
    answer, tries = None, 0
    while answer is None:
        tries += 1
        assert tries < 20
        with suppress(QuireError):
            answer = await lines.run(batch, Line(0, "x", json.dumps(line("x")).encode()))
    assert answer.status == status
    assert len(runner.generations) == len(runner.runs) == min(losses + 1, MAX_RUNS)
    service.close()


async def test_batches_that_are_made_at_once_are_bounded_together(monkeypatch):
    monkeypatch.setattr("quire_router.batches.batch_store.MAX_ACTIVE", 3)
    store, now = MemoryObjectStore(), int(time())
    batches = Batches(store, Files(store, FileSettings()))
    made = [Batch(f"batch_{number}", "a", "", CHAT, "file-1", now, now + 1000) for number in range(9)]
    done = await asyncio.gather(*map(batches.create, made), return_exceptions=True)
    assert [each for each in done if each is not None and not isinstance(each, QuireError)] == []
    assert done.count(None) == 3
    assert len([each async for each in batches.list("a")]) == 3
    await batches.forget(made[done.index(None)])
    await batches.create(Batch("batch_x", "a", "", CHAT, "file-1", now, now + 1000))


async def test_answers_of_batches_count_among_the_files_of_their_tenant():
    async with batch_stage(settings=FileSettings(max_tenant_bytes=30_000), script=script_of("y" * 500)) as stage:
        api, stage.fleet.model_limits = stage.openai(), Limits(4096)
        batch = await run(api, jsonl([line(f"{number}", "hi", max_tokens=600) for number in range(60)]))
        errors = await lines_of(api, batch.error_file_id)
        assert 1 <= batch.request_counts.completed < 60
        assert {each["error"]["code"] for each in errors} == {"batch_output_too_large"}
        with pytest.raises(openai.RateLimitError):
            await upload(api, b"x" * 25_000)
        for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
            await api.files.delete(file)
        async with asyncio.timeout(20):
            while True:
                with suppress(openai.RateLimitError):
                    await upload(api, b"x" * 30_000)
                    break
                await asyncio.sleep(0.1)


async def test_deleting_a_file_reads_the_batches_of_this_file_alone(monkeypatch):
    store, now, read = MemoryObjectStore(), int(time()), list[str]()
    files = Files(store, FileSettings())
    batches = Batches(store, files)
    info = FileInfo("file-1", "a", "in", "batch", 0, now, now + 100)
    for number in range(12):
        await batches.create(Batch(f"batch_{number}", "a", "", CHAT, f"file-{number % 6}", now, now + 1000))
    get_many = store.get_many

    async def reading(names):
        read.extend(names)
        return await get_many(names)

    monkeypatch.setattr(store, "get_many", reading)
    assert await batches.reading(info) == "batch_1"
    assert set(read) <= {"batch_1", "batch_7"}


async def test_a_page_reads_no_more_of_a_list_than_it_shows(monkeypatch):
    monkeypatch.setattr("quire_router.journal.objects.OBJECTS_AT_ONCE", 2)
    store, read = MemoryObjectStore(), list[int]()
    get_many = store.get_many

    async def counted(names):
        read.append(len(names))
        return await get_many(names)

    async with batch_stage(store=store) as stage:
        api = stage.openai()
        files = [(await upload(api, b"x")).id for _ in range(7)][::-1]
        monkeypatch.setattr(store, "get_many", counted)
        page = await api.files.list(limit=3, after=files[1])
        assert ([each.id for each in page.data], page.has_more) == (files[2:5], True)
        assert read == [2, 2]
        page = await api.files.list(limit=3, after=files[3])
        assert ([each.id for each in page.data], page.has_more) == (files[4:], False)
        with pytest.raises(openai.BadRequestError, match="This list has no"):
            await api.files.list(after="file-none")
        with pytest.raises(openai.BadRequestError, match="limit"):
            await api.files.list(limit=0)


# While it runs


async def test_a_file_that_a_batch_reads_is_kept_until_its_end():
    gate = asyncio.Event()
    async with batch_stage([gate, "Hi", FinishReason.STOP]) as stage:
        api = stage.openai()
        file = await upload(api, jsonl([line("a")]))
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        await until_status(api, batch.id, "in_progress")
        with pytest.raises(openai.ConflictError, match="reads this file"):
            await api.files.delete(file.id)
        gate.set()
        assert (await ended(api, batch.id)).status == "completed"
        await api.files.delete(file.id)


async def test_a_line_that_cannot_begin_is_tried_again():
    async with batch_stage() as stage:
        refused, start = list[GenerationRequest](), stage.runner.start

        async def refuse_once(generation: GenerationRequest) -> bool:
            if not refused:
                refused.append(generation)
                raise QuireError(ErrorCode.OVERLOADED, "No room.", retry_after=0.01)
            return await start(generation)

        stage.runner.start = refuse_once
        api = stage.openai()
        file = await upload(api, jsonl([line("a")]))
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert (await ended(api, batch.id)).request_counts.completed == 1
        assert [each.request_id for each in stage.runner.generations] == [each.request_id for each in refused]


async def test_a_batch_that_is_cancelled_ends_what_runs_and_keeps_what_is_done():
    gate = asyncio.Event()
    async with batch_stage() as stage:
        api = stage.openai()
        done = await run(api, jsonl([line("a")]))
        with pytest.raises(openai.ConflictError, match="completed"):
            await api.batches.cancel(done.id)
        stage.runner.script = (gate, "late", FinishReason.STOP)
        file = await upload(api, jsonl([line(str(number)) for number in range(3)]))
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        await until(lambda: len(stage.runner.aborts) == 3)
        cancelling = await api.batches.cancel(batch.id)
        assert cancelling.status == "cancelling"
        batch = await ended(api, batch.id)
        await until(lambda: not stage.runner.aborts)
    assert batch.status == "cancelled"
    assert (batch.output_file_id, batch.request_counts.completed) == (None, 0)
    assert batch.cancelled_at >= batch.cancelling_at


async def test_what_is_not_done_when_the_window_ends_has_expired(monkeypatch):
    gate = asyncio.Event()
    async with batch_stage() as stage:
        api = stage.openai()
        monkeypatch.setattr("quire_router.api.rest.batch_endpoints.WINDOW", 1)
        stage.runner.script = (gate, "late", FinishReason.STOP)
        batch = await run(api, jsonl([line("a"), line("b")]))
        await until(lambda: not stage.runner.aborts)
        errors = await lines_of(api, batch.error_file_id)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        ("a", "batch_expired"),
        ("b", "batch_expired"),
    ]


async def until_status(api: openai.AsyncOpenAI, batch_id: str, status: str) -> None:
    async with asyncio.timeout(20):
        while (await api.batches.retrieve(batch_id)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
