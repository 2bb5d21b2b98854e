"""Redis' password changes while a router runs: what streams goes on, and what comes later is remembered."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from openai import OpenAI

from tests.service.conftest import DEMO, MODEL, Stack
from tests.support.forked_engines import ForkedRouter
from tests.support.processes import Router, eventually
from tests.support.redis_server import RedisServer, redis_server

OLD, NEW = "correct-horse", 'battery: @/% "staple"'


def test_requests_continue(stack: Stack, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{OLD}\n")
    with redis_server(password=OLD) as server, router_at(server, stack, file) as router:
        client = OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
        ask = {"model": MODEL, "prompt": "Once", "temperature": 0.0, "extra_body": {"ignore_eos": True}}
        stream = iter(client.completions.create(**ask, max_tokens=400, stream=True))
        first = next(stream)
        change(server, file)
        pieces = [first, *stream]
        assert pieces[-1].choices[0].finish_reason == "length"
        later = client.completions.create(**ask, max_tokens=8)
        with redis.Redis(port=server.port, password=NEW) as there:
            for key in (each.id.partition("-")[2] for each in (first, later)):
                eventually(lambda key=key: there.keys(f"*{key}*"))
        eventually(lambda: router.metric("quire_journal_available") == router.metric("quire_load_shared") == 1)


def change(server: RedisServer, file: Path) -> None:
    """First the server, then the file; and nobody stays connected."""
    with redis.Redis(port=server.port, password=OLD, protocol=2) as root:
        root.config_set("requirepass", NEW)
        file.with_suffix(".new").write_text(NEW)
        file.with_suffix(".new").replace(file)
        root.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        root.execute_command("CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes")


@contextmanager
def router_at(server: RedisServer, stack: Stack, file: Path) -> Iterator[Router]:
    """A router of its own, at the stack's engines."""
    flags = ("--redis-url", f"redis://127.0.0.1:{server.port}/0", "--redis-password-file", str(file))
    router = ForkedRouter(DEMO, [engine.address for engine in stack.engines], file.parent, *flags)
    try:
        router.wait_ready()
        yield router
    finally:
        code = router.stop()
    assert code == 0, router.text
    assert "horse" not in router.text
    assert "staple" not in router.text
