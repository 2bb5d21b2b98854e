"""Bodies may come in gzip or deflate, within the limits that they have when they are decoded."""

import asyncio
import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.api.rest.content_coding import decoding
from quire_router.api.rest.http import HttpError
from starlette.types import Message

from tests.support.scripted_api import ask, completion, open_stage


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


CODERS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "DEFLATE": raw_deflate}


async def read(sent: list[bytes], *codings: str) -> list[bytes]:
    """The pieces of a body that arrives in parts."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in sent]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    left = iter([*messages, {"type": "http.disconnect"}])

    async def receive() -> Message:
        await asyncio.sleep(0)
        return next(left)

    decoded, pieces = decoding(receive, codings), []
    while True:
        message = await decoded()
        pieces.append(message["body"])
        if not message["more_body"]:
            assert (await decoded())["type"] == "http.disconnect"
            return pieces


@given(st.binary(max_size=200), st.integers(1, 400), st.sampled_from(sorted(CODERS)), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_a_body_is_decoded_however_it_is_cut(data: bytes, times: int, coding: str, parts: int) -> None:
    encoded = CODERS[coding](data * times)
    size = max(1, len(encoded) // parts)
    sent = [encoded[start : start + size] for start in range(0, len(encoded), size)]

    assert b"".join(asyncio.run(read(sent, coding))) == data * times


async def test_codings_are_undone_in_the_reverse_of_their_order() -> None:
    twice = gzip.compress(zlib.compress(b"body"))

    assert b"".join(await read([twice], "deflate, identity", "gzip")) == b"body"
    assert b"".join(await read([gzip.compress(b"a") + gzip.compress(b"b")], "gzip")) == b"ab"
    assert b"".join(await read([b"plain"], "identity")) == b"plain"
    assert b"".join(await read([], "gzip")) == b""


async def test_what_comes_out_of_a_bomb_is_never_held_as_a_whole() -> None:
    assert max(map(len, await read([gzip.compress(bytes(5_000_000))], "gzip"))) <= 64 * 1024


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br", "compress", "gzip, gzip, gzip", "\xff"])
async def test_other_codings_are_a_415_that_names_those_there_are(coding: str) -> None:
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/completions", completion(), {"content-encoding": coding})

    assert (answer.status, answer.error["code"]) == (415, "unsupported_content_encoding")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("coding", sorted(CODERS))
async def test_a_request_in_a_coding_is_answered(coding: str) -> None:
    body = CODERS[coding](json.dumps(completion("hi " * 10)).encode())
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/completions", body, {"content-encoding": coding})

    assert (answer.status, answer.json["object"]) == (200, "text_completion")


@pytest.mark.parametrize(
    "body", [b"not gzip", gzip.compress(b"{}" * 99)[:-5], zlib.compress(b"{}")], ids=["text", "cut", "zlib"]
)
async def test_a_body_that_is_not_in_its_coding_is_a_400(body: bytes) -> None:
    async with open_stage() as stage:
        answer = await ask(stage.port, "POST", "/v1/completions", body, {"content-encoding": "gzip"})

    assert (answer.status, answer.error["code"]) == (400, "malformed_body")


async def test_the_limit_of_a_body_holds_for_what_comes_out_of_it() -> None:
    bomb = gzip.compress(b" " * 5_000_000)
    async with open_stage(max_body_bytes=100_000) as stage:
        answer = await ask(stage.port, "POST", "/v1/completions", bomb, {"content-encoding": "gzip"})

    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert stage.service.bodies.used == 0


async def test_what_follows_the_end_of_deflate_is_an_error() -> None:
    with pytest.raises(HttpError, match="follows its end"):
        await read([zlib.compress(b"a") + b"b"], "deflate")
