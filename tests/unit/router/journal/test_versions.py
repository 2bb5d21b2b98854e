"""Routers of two versions read what the other writes (the rule is in ``journal.records``): every kind of record, with
fields of a newer version, and as an older version wrote it.
"""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import quire_router
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_router.api.conversations import Conversation, Turn
from quire_router.api.schemas.response_state import ResponseState
from quire_router.batches.batch import Batch
from quire_router.batches.files import FileInfo
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.core.response_options import ResponseOptions
from quire_router.core.usage import UsageRow
from quire_router.journal import codec, records
from quire_router.journal.base import decode_error, encode_error
from quire_router.journal.codec import (
    NewerRecordError,
    decode_record,
    decode_request,
    decode_usage,
    encode_request,
    request_checksum,
)
from quire_router.journal.redis.ledger import rows_of
from quire_router.journal.redis.redis_connection import keys

from tests.support.record_strategies import generations, stored
from tests.support.redis_journals import flushed, journal_at, redis_at, small_request
from tests.support.redis_server import RedisServer, redis_server

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
newer = st.dictionaries(st.from_regex(r"x_[a-z]{1,8}", fullmatch=True), values, min_size=1, max_size=3)
"""Fields that no version has."""
RECORDS: dict[type[Any], st.SearchStrategy[Any]] = {kind: st.builds(kind) for kind in (Batch, FileInfo, Conversation)}
FIRST: dict[type[Any], tuple[str, Any]] = {
    Batch: (
        '{"id":"batch_1","tenant":"t","cache_salt":"00","endpoint":"/v1/responses","input_file_id":"file-1",'
        '"created_at":1,"expires_at":2,"metadata":{"a":"b"},"output_ttl":null,"status":"in_progress","model":"m",'
        '"errors":[],"total":3,"completed":1,"failed":0,"result_bytes":9,"output_file_id":null,"error_file_id":null,'
        '"in_progress_at":1,"finalizing_at":null,"completed_at":null,"failed_at":null,"expired_at":null,'
        '"cancelling_at":null,"cancelled_at":null,"owner":"o","lease_until":1.5}',
        Batch(
            "batch_1", "t", "00", "/v1/responses", "file-1", 1, 2, {"a": "b"}, status="in_progress", model="m",
            total=3, completed=1, result_bytes=9, in_progress_at=1, owner="o", lease_until=1.5,
        ),
    ),
    FileInfo: (
        '{"id":"file-1","tenant":"t","filename":"a.jsonl","purpose":"batch","bytes":5,"created_at":1,"expires_at":2}',
        FileInfo("file-1", "t", "a.jsonl", "batch", 5, 1, 2),
    ),
    Conversation: (
        '{"id":"conv_1","tenant":"t","created_at":1,"metadata":{},"deleted":["msg_1"],'
        '"turns":[{"number":0,"response":"","known":0},{"number":1,"response":"r","known":2}]}',
        Conversation("conv_1", "t", 1, {}, (Turn(0), Turn(1, "r", 2)), ("msg_1",)),
    ),
}  # fmt: skip
"""What the first version with each kind wrote, and what that is."""


def test_every_kind_of_record_is_tested_here() -> None:
    sources = "".join(path.read_text() for path in Path(quire_router.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"records\.(?:read|decode)\((\w+),", sources)) == {kind.__name__ for kind in RECORDS}
    assert RECORDS.keys() == FIRST.keys()


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_fields_of_newer_versions_are_ignored_and_absent_ones_have_their_defaults(
    kind: type[Any], data: st.DataObject
) -> None:
    record, more = data.draw(RECORDS[kind]), data.draw(newer)
    written = json.loads(records.encode(record))
    for turn in written.get("turns", ()):
        turn.update(more)
    assert records.decode(kind, json.dumps(written | more).encode()) == record
    optional = {each.name: each for each in fields(kind) if not is_required(each)}
    absent = data.draw(st.sets(st.sampled_from(sorted(optional)))) if optional else set()
    changes = {
        name: optional[name].default if optional[name].default_factory is MISSING else optional[name].default_factory()
        for name in absent
    }
    kept = {name: value for name, value in written.items() if name not in absent}
    assert records.decode(kind, json.dumps(kept).encode()) == replace(record, **changes)


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_records_of_the_first_version_are_read_and_it_finds_what_it_needs(kind: type[Any]) -> None:
    text, record = FIRST[kind]
    assert records.decode(kind, text.encode()) == record
    assert json.loads(text).items() <= json.loads(records.encode(record)).items()
    assert {each.name for each in fields(kind) if is_required(each)} <= json.loads(text).keys(), "new fields: a default"


def is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("damaged", ["", "{}", "[]", "7", '"x"', "[" * 100_000, "{", "null", "wrong type"])
def test_what_is_no_record_is_refused(kind: type[Any], damaged: str) -> None:
    if damaged == "wrong type":
        damaged = json.dumps(json.loads(FIRST[kind][0]) | {"created_at": "soon"})
    with pytest.raises(records.UnreadableRecordError):
        records.decode(kind, damaged.encode())


@given(generations, newer)
@settings(max_examples=30, deadline=None)
def test_a_request_is_read_whatever_a_newer_version_has_added(
    generation: GenerationRequest, more: dict[str, Any]
) -> None:
    written = json.loads(encode_request(generation))
    changed = json.dumps(written | more | {"params": written["params"] | more}).encode()
    row = stored(generation, b"") | {b"request": changed} | {name.encode(): b"x" for name in more}
    row[b"seal"] = b"%d" % request_checksum(changed, row[b"prompt"], row.get(b"conversation", b""))
    assert decode_record(generation.request_id, row, 0, 0).generation == generation


OF_FIRST_REQUEST = {
    "request_id", "model", "params", "stop", "include_stop", "skip_special_tokens", "echo", "priority", "operation",
    "tenant", "cache_salt", "stream", "created", "shape", "parts", "digest", "background", "session", "deadline",
}  # fmt: skip
"""What routers read that refuse fields which they do not know."""


@given(generations)
@settings(max_examples=20, deadline=None)
def test_older_versions_find_all_that_they_need_in_a_request_and_no_more(generation: GenerationRequest) -> None:
    assert json.loads(encode_request(generation)).keys() - {"lora", "served_name"} == OF_FIRST_REQUEST


def with_unknown_parameter(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A request with ``min_p``, as if that were new, which from now on is not known here."""
    request = replace(small_request(), params=SamplingParams(seed=3, min_p=0.5))
    monkeypatch.setattr(codec, "_KNOWN_TO_ALL", codec._KNOWN_TO_ALL - {"min_p"})
    written = encode_request(request)
    monkeypatch.setattr(codec, "_KNOWN", codec._KNOWN - {"params.min_p"})
    monkeypatch.setattr(codec, "_PARAM_DEFAULTS", {k: v for k, v in codec._PARAM_DEFAULTS.items() if k != "min_p"})
    return written


def test_a_parameter_that_only_newer_versions_know_is_ignored_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    unset = encode_request(small_request())
    written = with_unknown_parameter(monkeypatch)
    with pytest.raises(NewerRecordError, match=r"params\.min_p"):
        decode_request(json.loads(written), array("i"))
    assert json.loads(unset)["params"]["min_p"] == 0
    assert decode_request(json.loads(unset), array("i", [1])).params.seed == small_request().params.seed


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


async def test_a_request_of_a_newer_version_is_left_to_routers_of_that(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with journal_at(server) as journal, redis_at(server) as redis:
        lease = journal.open(small_request())
        await flushed(journal)
        journal.release(lease)
        await flushed(journal)
        row, written = await redis.hgetall(keys("r")[0]), with_unknown_parameter(monkeypatch)
        seal = request_checksum(written, row[b"prompt"], row.get(b"conversation", b""))
        await redis.hset(keys("r")[0], mapping={"request": written, "seal": str(seal)})
        async with journal_at(server, "other") as older:
            for call in (older.read("r"), older.claim("r"), older.statuses(["r"])):
                with pytest.raises(QuireError) as caught:
                    await call
                assert caught.value.code is ErrorCode.UNAVAILABLE
        assert await redis.hget(keys("r")[0], "reason") is None, "it has not been ended"


def test_counts_of_newer_versions_are_not_taken_for_others() -> None:
    assert decode_usage(b"1 2 3 4 5") == decode_usage(b"1 2 3") == Usage(1, 2, 3)
    assert decode_usage(b"1 2") == Usage(1, 2)
    counts = {b"requests t m": b"1", b"prompt_tokens t m": b"2", b"x_tokens t m": b"9", b"x": b"1", b"y 1": b"2"}
    assert rows_of(0, counts) == [UsageRow(0, "t", "m", 1, 2, 0, 0)]


def test_errors_options_and_states_of_newer_versions_are_read() -> None:
    error = QuireError(ErrorCode.OVERLOADED, "Full.", param="p", retry_after=2.0, reason="queue_full")
    newer_error = decode_error(encode_error(error)[:-1] + ', "x_new": [1]}')
    assert (newer_error.code, newer_error.message, newer_error.reason) == (error.code, "Full.", "queue_full")
    options = ResponseOptions(tools=("get",))
    told = json.loads(options.to_json()) | {"x_new": {"a": 1}}
    assert ResponseOptions.from_record(replace(small_request(), response_options=json.dumps(told))) == options
    state = ResponseState({"store": True}, [{"id": "msg_1"}])
    repeated, items = state.to_text().split("\n")
    more = json.dumps(json.loads(repeated) | {"x_new": 1})
    assert ResponseState.read(f"{more}\n{items}").items == state.items
