"""What Redis holds of a request after it was served."""

import json
import re
from pathlib import Path
from time import time

import httpx
import redis

from tests.service.conftest import DEMO, MODEL, Stack
from tests.support.forked_engines import ForkedRouter
from tests.support.processes import at_rest, eventually


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


def test_a_request_whose_router_was_killed_is_counted_once_by_the_one_that_goes_on(
    stack: Stack, tmp_path: Path
) -> None:
    before = at_rest(lambda: usage_of(stack))
    killed = ForkedRouter(DEMO, [engine.address for engine in stack.engines], tmp_path, "--redis-url", stack.redis.url)
    killed.wait_ready()
    lines: list[str] = []
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_event_ids": True, "include_usage": True}
    with httpx.stream("POST", f"{killed.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 60:
                break
    killed.kill()
    request_id = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))["id"]
    last = [line for line in lines if line.startswith("id: ")][-1].removeprefix("id: ")
    url = f"{stack.router.url}/v1/requests/{request_id}/events"
    rest = httpx.get(url, headers={"last-event-id": last}, timeout=60).raise_for_status().text
    [text] = re.findall(r'"usage":({"prompt_tokens".*?})', rest)
    usage = json.loads(text.partition(',"prompt_tokens_details"')[0].rstrip("}") + "}")
    assert usage["completion_tokens"] == 60
    expected = (before[0] + 1, before[1] + usage["prompt_tokens"], before[2] + 60)
    eventually(lambda: usage_of(stack) == expected)


def usage_of(stack: Stack) -> tuple[int, int, int]:
    """Requests, prompt tokens and output tokens of all, as the router says."""
    start = int(time()) - 2 * 86_400
    page = httpx.get(f"{stack.router.url}/v1/usage", params={"start_time": start}, timeout=60).raise_for_status().json()
    results = [result for bucket in page["data"] for result in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "output_tokens")
    requests, prompt, output = (sum(result[name] for result in results) for name in names)
    return requests, prompt, output


def _dump(database: "redis.Redis[bytes]", key: bytes) -> bytes:
    if database.type(key) == b"hash":
        return json.dumps({k.decode(): v.decode("latin1") for k, v in database.hgetall(key).items()}).encode()
    return bytes(database.get(key) or b"")
