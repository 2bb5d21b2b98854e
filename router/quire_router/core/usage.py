"""What tenants used, hour by hour: the rows of the ledger that journals keep, and how a request's usage is added to it.

A request's usage is counted when its record ends, and when its router gives it up before: then with what it had so far.
Whoever counts it again adds only what is more than was counted before, so that counting twice changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import time

from quire_router.core.generation import NO_USAGE, GenerationRequest, Usage
from quire_router.core.tenant_ids import owns

HOUR = 3600  # seconds
MAX_ROWS = 100_000  # that a ledger in memory keeps
MAX_COUNTED_AGE = 3 * 3600.0
"""Seconds after which it may be forgotten that a request's usage was counted, so that it is not counted any more."""
REMEMBERED = 4 * 3600.0
"""Seconds for which it is remembered: an hour longer, as nobody counts at the moment at which it is forgotten."""


@dataclass(frozen=True, slots=True)
class Account:
    """Who pays for what: a tenant's id, empty without keys, and a model, or an adapter of one."""

    tenant: str
    model: str

    @classmethod
    def of(cls, generation: GenerationRequest) -> "Account":
        """The account of a request."""
        return cls(generation.tenant, generation.model_name)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What was counted of an account within the ``hour`` (UTC) that began so many seconds after 1970."""

    hour: int
    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Requests, and tokens: of prompts, those of them that were cached, and of outputs."""
        return self.requests, self.prompt_tokens, self.cached_tokens, self.completion_tokens


def hour_of(seconds: float) -> int:
    """When the hour (UTC) began, in seconds after 1970."""
    return int(seconds // HOUR) * HOUR


def used(usage: Usage, prompt_tokens: int, output_tokens: int) -> Usage:
    """What is counted of a request whose record has this ``usage``, or none: then its prompt and the tokens that were
    delivered, if there are any. ``NO_USAGE`` if no engine had it, as far as is known.
    """
    if usage != NO_USAGE or not output_tokens:
        return usage
    return Usage(prompt_tokens, output_tokens)


def difference(total: Usage, counted: Usage) -> tuple[int, int, int, int]:
    """What is to be added to the ledger: requests, prompt tokens, cached tokens, output tokens."""
    return (
        int(counted == NO_USAGE and total != NO_USAGE),
        max(0, total.prompt_tokens - counted.prompt_tokens),
        max(0, total.cached_tokens - counted.cached_tokens),
        max(0, total.completion_tokens - counted.completion_tokens),
    )


def largest(total: Usage, counted: Usage) -> Usage:
    """What has been counted of a request once ``difference`` was added."""
    return Usage(
        max(total.prompt_tokens, counted.prompt_tokens),
        max(total.completion_tokens, counted.completion_tokens),
        max(total.cached_tokens, counted.cached_tokens),
    )


class MemoryLedger:
    """A ledger of this process, which goes with it: ``MAX_ROWS`` rows at most, the oldest of which go first."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, Account], list[int]] = {}

    def add(self, account: Account, counts: Iterable[int]) -> None:
        """Adds requests and tokens to the account, in the hour that it is now."""
        row = self._counts.setdefault((hour_of(time()), account), [0, 0, 0, 0])
        for place, count in enumerate(counts):
            row[place] += count
        if len(self._counts) > MAX_ROWS:
            del self._counts[next(iter(self._counts))]

    def rows(self, since: float, until: float, tenant: str | None) -> list[UsageRow]:
        """Rows of the hours that begin from ``since`` until before ``until``, of one tenant or of all, in order."""
        found = [
            UsageRow(hour, account.tenant, account.model, *counts)
            for (hour, account), counts in self._counts.items()
            if since <= hour < until and (tenant is None or owns(tenant, account.tenant))
        ]
        return in_order(found)


def in_order(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Rows by hour, tenant and model."""
    return sorted(rows, key=lambda row: (row.hour, row.tenant, row.model))
