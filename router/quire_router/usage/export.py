"""What ``quire-router usage`` does: prints what tenants used, by hour, tenant and model, while routers run or not."""

import asyncio
import csv
import json
import re
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import time
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict
from quire_proto.cli import CliSettings, read_settings
from quire_proto.terminal import fail
from redis.exceptions import RedisError

from quire_router.clients.redis_client import RedisAccess, redis_client
from quire_router.clients.redis_failure import describe_failure
from quire_router.config import PasswordFile, Period
from quire_router.core.usage import HOUR, UsageRow
from quire_router.journal.redis.ledger import read_usage
from quire_router.journal.sqlite.usage_table import read_usage_file

_AGO = re.compile(r"(\d{1,6})([hd])")
_TIMEOUT = 10.0  # seconds for each exchange with Redis
_COLUMNS = tuple(field.name for field in fields(UsageRow))


def _moment(text: object) -> object:
    """The seconds from 1970 to a date or time (UTC if it does not say), or to one so many hours or days ago."""
    if not isinstance(text, str):
        return text
    if ago := _AGO.fullmatch(text):
        unit = timedelta(hours=1) if ago[2] == "h" else timedelta(days=1)
        return time() - int(ago[1]) * unit.total_seconds()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time, such as 2027-01-31, 2027-01-31T08:00Z, 36h or 7d") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


Moment = Annotated[float, BeforeValidator(_moment)]


class UsageSettings(CliSettings):
    """Prints what tenants used: requests and tokens by hour (UTC), tenant and model, or adapter.

    Where routers keep it, is said as it is to them, by flags or by their environment variables.
    """

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_ROUTER_", cli_prog_name="quire-router usage", extra="ignore", populate_by_name=True
    )

    redis_url: SecretStr | None = Field(default=None, description="The routers' Redis.")
    redis_username: str | None = Field(default=None, description="User of Redis; none: the one in the URL.")
    redis_password_file: PasswordFile | None = Field(default=None, description="File with the password of Redis.")
    journal_file: Path | None = Field(default=None, description="The router's SQLite file, instead of Redis.")
    usage_retention: Period = Field(default=400 * 86_400, description="Seconds that hours are stored.")
    since: Moment | None = Field(
        default=None, description="First hour: a date or time, or a number of hours (36h) or days (7d) ago; none: all."
    )
    until: Moment | None = Field(default=None, description="Where the hours end, which is not printed; none: now.")
    tenant: str | None = Field(default=None, description="Of this tenant alone; none: of all.")
    format: Literal["csv", "jsonl"] = Field(default="csv", description="A table with a heading, or JSON in lines.")

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        if (self.redis_url is None) == (self.journal_file is None):
            raise ValueError("Give --redis-url or --journal-file: what routers keep in memory is gone with them.")
        return self


def run(arguments: Sequence[str]) -> None:
    """Runs the command. Exits with 2 for wrong settings, and with 1 and one sentence if the store cannot be read."""
    settings = read_settings(UsageSettings, arguments)
    since = 0.0 if settings.since is None else settings.since
    until = time() + HOUR if settings.until is None else settings.until
    try:
        if settings.journal_file is not None:
            rows = _read_file(settings.journal_file, since, until, settings.tenant)
        else:
            rows = asyncio.run(_read_redis(settings, since, until))
    except (RedisError, OSError, TimeoutError) as error:
        fail(f"what tenants used cannot be read from Redis ({describe_failure(error)})")
    except ValueError as error:
        fail(str(error))
    _write(rows, settings.format)


def _read_file(path: Path, since: float, until: float, tenant: str | None) -> list[UsageRow]:
    """Raises ``ValueError`` if it cannot be read."""
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    try:
        return read_usage_file(path, since, until, tenant)
    except sqlite3.Error as error:
        raise ValueError(f"{path} cannot be read as a router's journal: {error}") from error


async def _read_redis(settings: UsageSettings, since: float, until: float) -> list[UsageRow]:
    url = "" if settings.redis_url is None else settings.redis_url.get_secret_value()
    access = RedisAccess(url, settings.redis_username, settings.redis_password_file)
    client = redis_client(access, timeout=_TIMEOUT)
    try:
        return await read_usage(client, since, until, settings.tenant, settings.usage_retention)
    finally:
        await client.aclose()


def _write(rows: Iterable[UsageRow], form: str) -> None:
    dicts = [asdict(row) | {"hour": datetime.fromtimestamp(row.hour, UTC).strftime("%Y-%m-%dT%H:%MZ")} for row in rows]
    if form == "jsonl":
        sys.stdout.writelines(f"{json.dumps(each)}\n" for each in dicts)
        return
    table = csv.DictWriter(sys.stdout, _COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(dicts)
