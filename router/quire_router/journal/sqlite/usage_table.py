"""What tenants used, in a table of the journal's file: added to in the very transaction that ends, releases or deletes
a record, so that it is counted exactly once.
"""

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from quire_router.core import metrics
from quire_router.core.generation import NO_USAGE, Usage
from quire_router.core.tenant_ids import former_id
from quire_router.core.usage import Account, UsageRow, difference, hour_of, largest, used
from quire_router.journal.codec import TOKEN_BYTES, CorruptRecordError, decode_account, decode_usage, encode_usage

log = logging.getLogger(__name__)

_RECORD = """
    SELECT counted, request, length(prompt),
        (SELECT num_tokens FROM logs WHERE record = :record AND num_tokens IS NOT NULL ORDER BY start DESC LIMIT 1)
    FROM records JOIN requests USING (record) WHERE record = :record
"""
_ADD = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
        requests = requests + excluded.requests,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        cached_tokens = cached_tokens + excluded.cached_tokens,
        completion_tokens = completion_tokens + excluded.completion_tokens
"""


def count_usage(connection: sqlite3.Connection, record: int, usage: Usage, now: float) -> None:
    """Counts what a request used: ``usage``, or if that is not known what was delivered. Of one that was counted before
    only what is more than that. To be called within a transaction, at ``now`` (s after 1970).
    """
    row = connection.execute(_RECORD, {"record": record}).fetchone()
    if row is None:
        return
    text, request, prompt_bytes, num_tokens = row
    try:
        counted = decode_usage((text or "").encode())
        total = used(usage, prompt_bytes // TOKEN_BYTES, num_tokens or 0)
        counts = difference(total, counted)
        if not any(counts):
            return
        account = decode_account(request)
    except (CorruptRecordError, TypeError, ValueError):
        log.warning("the usage of a request is not counted, because its record is damaged")
        metrics.USAGE_LOST.inc()
        return
    add_usage(connection, account, counts, now)
    text = encode_usage(largest(total, counted))
    connection.execute("UPDATE records SET counted = ? WHERE record = ?", (text, record))


def add_usage(connection: sqlite3.Connection, account: Account, counts: Iterable[int], now: float) -> None:
    """Adds requests and tokens to the hour that it is at ``now`` (s after 1970)."""
    connection.execute(_ADD, (hour_of(now), account.tenant, account.model, *counts))


def count_left(connection: sqlite3.Connection, now: float) -> None:
    """Counts what was delivered of all records that have not ended: those of a router that died."""
    for (record,) in connection.execute("SELECT record FROM records WHERE reason IS NULL").fetchall():
        count_usage(connection, record, NO_USAGE, now)


def read_usage(connection: sqlite3.Connection, since: float, until: float, tenant: str | None) -> list[UsageRow]:
    """Rows of the hours that begin from ``since`` until before ``until``, of one tenant or of all, in order."""
    rows = connection.execute(
        "SELECT * FROM usage WHERE hour >= ? AND hour < ? AND (?3 IS NULL OR tenant IN (?3, ?4)) "
        "ORDER BY hour, tenant, model",
        (since, until, tenant, former_id(tenant or "") or tenant),
    )
    return [UsageRow(*row) for row in rows]


def read_usage_file(path: Path, since: float, until: float, tenant: str | None) -> list[UsageRow]:
    """As ``read_usage``, from a journal's file that a router may have open. Raises ``sqlite3.Error``."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)
    try:
        return read_usage(connection, since, until, tenant)
    finally:
        connection.close()
