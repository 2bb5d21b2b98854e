"""A record comes back from how it is stored exactly, or is refused."""

import asyncio
import json
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.journal.base import RecordedDelta, RequestRecord
from quire_router.journal.codec import (
    MAX_LEASE,
    CorruptRecordError,
    encode_request,
    encode_usage,
    pack_tokens,
    request_checksum,
)
from quire_router.journal.token_log import FRAME_MARKER, read_record

from tests.support.journals import by_choice
from tests.support.record_strategies import deliver, deltas, generations, possible, stored, usages


def decode_record(
    request_id: str, fields: dict[bytes, bytes], log: bytes, now: int = 0, *, brief: bool = False
) -> RequestRecord:
    return asyncio.run(read_record(request_id, fields, log, now, tokens_only=brief))[0]


def request(request_id: str = "r", prompt: list[int] | None = None, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3, n=n)
    )


@given(generations, deltas, st.none() | st.sampled_from(FinishReason), st.text(st.characters()), usages)
@settings(max_examples=30, deadline=None)
def test_a_record_comes_back_exactly(
    generation: GenerationRequest, deltas: list[RecordedDelta], reason: FinishReason | None, error: str, usage: Usage
) -> None:
    sent = possible(deltas, generation.params.n)
    log = pack_tokens(deliver(sent, generation.params.n).values)
    fields = stored(generation, log, epoch=b"4", lease_expires=b"1000", usage=encode_usage(usage).encode())
    fields[b"error"] = error.encode("utf-8", "surrogatepass")
    if reason is not None:
        fields[b"reason"] = reason.value.encode()
    for now, held in (999, reason is None), (1000, False), (-MAX_LEASE, False):
        record = decode_record(generation.request_id, fields, log, now)
        assert by_choice(record.deltas) == by_choice(sent)
        assert replace(record, deltas=[]) == RequestRecord(generation, "me", 4, [], reason, error, usage, held)
        brief = decode_record(generation.request_id, fields, log, now, brief=True)
        assert brief.choices == record.choices


def test_a_record_of_a_former_version_can_be_read() -> None:
    former = json.loads(encode_request(request()))
    for name in ("include_stop", "skip_special_tokens", "echo", "priority", "shape", "parts", "digest", "background"):
        del former[name]
    for name in ("n", "best_of", "logprobs", "structured", "min_p"):
        del former["params"][name]
    log, former_request = pack_tokens([5, 6, -2]), json.dumps(former).encode()
    fields = stored(request(), log) | {b"request": former_request}
    fields[b"seal"] = b"%d" % request_checksum(former_request, fields[b"prompt"])
    expected = RequestRecord(
        replace(request(), created=former["created"]),
        "me",
        1,
        [RecordedDelta(0, [5, 6]), RecordedDelta(0, [], FinishReason.STOP)],
    )
    assert decode_record("r", fields, log) == expected


@pytest.mark.parametrize(
    "broken",
    [
        {},
        *({b"epoch": epoch} for epoch in (b"x", b"inf", b"1e308", b"0x10", b" 1 ", b"-1", b"9" * 16, b"")),
        {b"request": b"[]"},
        {b"prompt": b"123"},
        {b"reason": b"bored"},
        {b"usage": b"x 1 2"},
        {b"usage": b"-1 2 3"},
        {b"usage": b"1 2 99999999999"},
        {b"usage": b"1"},
        {b"lease_expires": b"soon"},
        {b"sum": b"4"},
        {b"seal": b"4"},
    ],
)
def test_a_damaged_record_is_recognised(broken: dict[bytes, bytes]) -> None:
    with pytest.raises(CorruptRecordError):
        decode_record("r", stored(request()) | broken if broken else {}, b"")


@pytest.mark.parametrize("unknown", [b"[]", b"{}", b"x", b'"x"', b"[" * 100_000])
def test_a_sealed_value_that_is_no_request_is_recognised(unknown: bytes) -> None:
    fields = stored(request()) | {b"request": unknown}
    fields[b"seal"] = b"%d" % request_checksum(unknown, fields[b"prompt"])
    with pytest.raises(CorruptRecordError):
        decode_record("r", fields, b"")


WRONG_TYPES = {
    "deadline": "x",
    "created": None,
    "priority": 1.5,
    "background": 1,
    "stream": "yes",
    "model": 3,
    "tenant": None,
    "shape": {},
    "digest": 5,
    "session": [],
    "stop": [1],
    "parts": [None],
    "params": {"temperature": "x"},
    "operation": 1,
    "echo": 0,
    "needs": 1,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_field_of_another_type_is_recognised(name: str) -> None:
    broken = json.dumps(json.loads(encode_request(request())) | {name: WRONG_TYPES[name]}).encode()
    fields = stored(request()) | {b"request": broken}
    fields[b"seal"] = b"%d" % request_checksum(broken, fields[b"prompt"])
    with pytest.raises(CorruptRecordError):
        decode_record("r", fields, b"")


def test_a_record_under_another_name_is_recognised() -> None:
    decode_record("r", stored(request()), b"")
    with pytest.raises(CorruptRecordError):
        decode_record("q", stored(request()), b"")


DAMAGED_LOGS = {
    "half a token": b"123",
    "a choice that is not there": pack_tokens([-100]),
    "a token after the end": pack_tokens([1, -2, 3]),
    "a frame of another choice": pack_tokens([FRAME_MARKER, 6, 1, 0, 0, 0, 0, 0]),
    "a frame that ends for no reason": pack_tokens([FRAME_MARKER, 6, 0, 9, 0, 0, 0, 0]),
    "a frame with more in it": pack_tokens([FRAME_MARKER, 7, 0, 0, 0, 0, 0, 0, 0]),
    "a frame with less in it": pack_tokens([FRAME_MARKER, 5, 0, 0, 0, 0, 0]),
    "a frame with an unknown part": pack_tokens([FRAME_MARKER, 6, 0, 0, 4, 0, 0, 0]),
    "a frame with two stop tokens": pack_tokens([FRAME_MARKER, 12, 0, 1, 2, 0, 7, 2, 0, 0, 0, 0, 0, 0]),
    "a frame with a stop token that is none": pack_tokens([FRAME_MARKER, 10, 0, 1, 2, 0, -7, 1, 0, 0, 0, 0]),
    "a frame of a negative length": pack_tokens([FRAME_MARKER, -1]),
}


@pytest.mark.parametrize("log", DAMAGED_LOGS.values(), ids=DAMAGED_LOGS)
def test_damaged_deliveries_are_recognised(log: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        decode_record("r", stored(request(), log), log)
