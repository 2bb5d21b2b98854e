"""What Redis holds of a request after it was served."""

import json

import redis

from tests.service.conftest import MODEL, Stack
from tests.support.processes import eventually


def test_a_request_is_in_redis_with_all_that_resuming_it_needs(stack: Stack) -> None:
    answer = stack.openai.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0.7, seed=3, stop=["zzz"]
    )
    request_id = answer.id.removeprefix("cmpl-")
    database = redis.Redis.from_url(stack.redis.url)

    def keys() -> list[bytes]:
        return list(database.scan_iter(match=f"*{{{request_id}}}*"))

    eventually(lambda: len(keys()) >= 1, message="nothing was written")

    def finished() -> bool:
        return b'"reason": "length"' in b"".join(_dump(database, key) for key in keys())

    eventually(finished, message="the end was not written")
    everything = b"".join(_dump(database, key) for key in keys())
    assert b"zzz" in everything
    assert b"0.7" in everything
    assert all(database.ttl(key) > 0 for key in keys()), "a record is kept for ever"


def _dump(database: "redis.Redis[bytes]", key: bytes) -> bytes:
    if database.type(key) == b"hash":
        return json.dumps({k.decode(): v.decode("latin1") for k, v in database.hgetall(key).items()}).encode()
    return bytes(database.get(key) or b"")
