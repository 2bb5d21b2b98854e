"""``quire-router usage``: the ledger of a journal's file, or of Redis, as a table or as JSON in lines."""

import asyncio
import json
from array import array
from datetime import UTC, datetime
from pathlib import Path
from time import time

import pytest
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.core.usage import hour_of
from quire_router.journal.buffered_journal import BufferedJournal
from quire_router.journal.redis.redis_journal import RedisJournal
from quire_router.journal.sqlite.sqlite_journal import SqliteJournal
from quire_router.usage.export import run

from tests.support.redis_server import redis_server

HEADING = "hour,tenant,model,requests,prompt_tokens,cached_tokens,completion_tokens"


async def use(journal: BufferedJournal, *tenants: str) -> None:
    for number, tenant in enumerate(tenants):
        request = GenerationRequest(f"r{number}", "a/model", array("i", [1, 2, 3]), SamplingParams(), tenant=tenant)
        journal.finish(journal.open(request), FinishReason.STOP, "", Usage(3, 2, 1))
    await journal.flush()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    run(arguments)
    return capsys.readouterr().out


def this_hour() -> str:
    return datetime.fromtimestamp(hour_of(time()), UTC).strftime("%Y-%m-%dT%H:%MZ")


def test_the_file_of_a_router_that_runs_is_printed_as_a_table_or_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    with asyncio.Runner() as runner:
        journal = runner.run(opened(path))
        runner.run(use(journal, "shop", "lab", "shop"))
        hour = this_hour()
        table = printed(capsys, "--journal-file", str(path))
        assert table.splitlines() == [HEADING, f"{hour},lab,a/model,1,3,1,2", f"{hour},shop,a/model,2,6,2,4"]
        lines = printed(capsys, "--journal-file", str(path), "--format", "jsonl", "--tenant", "lab", "--since", "2h")
        assert [json.loads(line) for line in lines.splitlines()] == [
            {
                "hour": hour,
                "tenant": "lab",
                "model": "a/model",
                "requests": 1,
                "prompt_tokens": 3,
                "cached_tokens": 1,
                "completion_tokens": 2,
            }
        ]
        assert printed(capsys, "--journal-file", str(path), "--until", "2020-01-01") == f"{HEADING}\n"
        assert printed(capsys, "--journal-file", str(path), "--since", "2999-01-01T00:00Z") == f"{HEADING}\n"
        runner.run(journal.close())


async def opened(path: Path) -> SqliteJournal:
    return SqliteJournal(path)


def test_that_of_redis_is_printed_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server() as server:

        async def run_router() -> None:
            journal = RedisJournal(server.url)
            await use(journal, "shop", "", "shop")
            await journal.close()

        asyncio.run(run_router())
        expected = [HEADING, f"{this_hour()},,a/model,1,3,1,2", f"{this_hour()},shop,a/model,2,6,2,4"]
        assert printed(capsys, "--redis-url", server.url, "--since", "1d").splitlines() == expected
        monkeypatch.setenv("QUIRE_ROUTER_REDIS_URL", server.url)
        monkeypatch.setenv("QUIRE_ROUTER_MODEL", "m=/models/m")  # routers' other settings are no mistakes
        assert printed(capsys, "--since", "1d", "--tenant", "shop").splitlines() == [HEADING, expected[2]]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "Give --redis-url or --journal-file"),
        (("--redis-url", "redis://127.0.0.1:1", "--journal-file", "x"), 2, "Give --redis-url or --journal-file"),
        (("--journal-file", "x", "--since", "yesterday"), 2, "'yesterday' is not a time"),
        (("--redis-url", "redis://:secret@127.0.0.1:1"), 1, "cannot be read from Redis (Connection refused)"),
        (("--redis-url", "nonsense"), 1, "the Redis URL is not of the form"),
        (("--journal-file", "/nowhere/journal"), 1, "/nowhere/journal is not there"),
        (("--journal-file", __file__), 1, "cannot be read as a router's journal"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == status
    assert message in error
    assert error.count("\n") == 1
    assert "secret" not in error
