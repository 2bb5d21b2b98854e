"""``/v1/usage``: what the caller's own tenant used, in the shape of OpenAI's usage of an organization's completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from time import time
from typing import Any
from urllib.parse import parse_qsl

from quire_proto.errors import invalid

from quire_router.api.rest.http import HttpExchange, to_json
from quire_router.api.service import ApiService, counting_rejections
from quire_router.core.usage import HOUR, UsageRow

_DAY = 24 * HOUR
_WIDTHS = {"1h": (HOUR, 24, 168), "1d": (_DAY, 7, 31)}  # seconds, buckets by default and at most, as OpenAI's
_PARAMETERS = ("start_time", "end_time", "bucket_width", "limit", "page")
_MAX_TIME = 10**11


@dataclass(frozen=True, slots=True)
class UsagePage:
    """Which buckets are asked for: from ``start`` until before ``stop``, each ``width`` seconds long. ``more`` is
    whether there are others after them.
    """

    start: int
    stop: int
    width: int
    more: bool

    @classmethod
    def parse(cls, query: str, now: float) -> "UsagePage":
        """Reads the query of an address. Raises ``QuireError`` INVALID."""
        fields = _fields(query)
        name = fields.get("bucket_width", "1d")
        if name not in _WIDTHS:
            raise invalid("bucket_width", "bucket_width must be 1h or 1d.")
        width, usual, most = _WIDTHS[name]
        if "start_time" not in fields:
            raise invalid("start_time", "start_time is needed: seconds since 1970.")
        start = _number(fields, "start_time") // width * width
        end = _number(fields, "end_time") if "end_time" in fields else int(now) + 1
        limit = _number(fields, "limit") if "limit" in fields else usual
        if not 1 <= limit <= most:
            raise invalid("limit", f"limit must be from 1 to {most} where bucket_width is {name}.")
        first = max(start, _number(fields, "page") // width * width) if "page" in fields else start
        stop = min(first + limit * width, -(-max(first, end) // width) * width)
        return cls(first, stop, width, stop < end)

    def to_dict(self, rows: Sequence[UsageRow]) -> dict[str, Any]:
        """The answer, with what was used in each bucket by model; a bucket without any has no results."""
        by_bucket = {
            start: list(group) for start, group in groupby(rows, key=lambda row: row.hour // self.width * self.width)
        }
        data = [
            {
                "object": "bucket",
                "start_time": start,
                "end_time": start + self.width,
                "results": _results(by_bucket.get(start, ())),
            }
            for start in range(self.start, self.stop, self.width)
        ]
        next_page = str(self.stop) if self.more else None
        return {"object": "page", "data": data, "has_more": self.more, "next_page": next_page}


def _fields(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=len(_PARAMETERS))
    except ValueError:
        raise invalid("start_time", "The address has too many parameters.") from None
    fields = dict(pairs)
    unknown = next((name for name in fields if name not in _PARAMETERS), None)
    if unknown is not None:
        raise invalid(unknown[:64], f"The address takes {', '.join(_PARAMETERS)}.")
    return fields


def _number(fields: dict[str, str], name: str) -> int:
    text = fields[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 11):
        raise invalid(name, f"{name} must be a whole number.")
    return min(int(text), _MAX_TIME)


def _results(rows: Sequence[UsageRow]) -> list[dict[str, Any]]:
    totals: dict[str, list[int]] = {}
    for row in rows:
        total = totals.setdefault(row.model, [0, 0, 0, 0])
        for place, count in enumerate(row.counts):
            total[place] += count
    return [
        {
            "object": "organization.usage.completions.result",
            "input_tokens": prompt,
            "output_tokens": completion,
            "input_cached_tokens": cached,
            "num_model_requests": requests,
            "model": model,
        }
        for model, (requests, prompt, cached, completion) in sorted(totals.items())
    ]


class UsageEndpoint:
    """Handler of ``/v1/usage``."""

    def __init__(self, service: ApiService) -> None:
        self._service = service

    async def usage(self, exchange: HttpExchange) -> None:
        """Sends what the caller's tenant used. Raises ``QuireError``."""
        with self._service.request_scope("GET /v1/usage", exchange.request_id, exchange.headers):
            with counting_rejections():
                page = UsagePage.parse(exchange.scope["query_string"].decode("latin-1"), time())
            rows = await self._service.usage(page.start, page.stop, exchange.caller)
            await exchange.response.send(200, to_json(page.to_dict(rows)))
