"""Pages of items, as OpenAI's APIs list them, and the query of the address that asks for one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl

from quire_proto.errors import invalid

from quire_router.api.rest.http import HttpExchange
from quire_router.core.errors import item_not_found

MAX_LISTED, DEFAULT_LISTED = 100, 20  # items
_MAX_QUERY_FIELDS = 16
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page of a list that a request asks for: at most ``limit`` items behind the one with the id ``after``."""

    newest_first: bool = True
    limit: int = DEFAULT_LISTED
    after: str | None = None

    @classmethod
    def read(cls, exchange: HttpExchange) -> Self:
        """Returns that of a request's address. Raises ``QuireError`` INVALID."""
        query = read_query(exchange)
        return cls(_order(query) == "desc", _limit(query), query.get("after"))

    def of(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the page of all ``items``, the oldest of which is first. Raises ``QuireError`` NOT_FOUND."""
        if self.newest_first:
            items = items[::-1]
        begin = _position_behind([str(item.get("id")) for item in items], self.after)
        return item_page(items[begin : begin + self.limit], has_more=begin + self.limit < len(items))


def item_page(page: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """Returns a page as OpenAI's APIs write it."""
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": has_more,
    }


def read_query(exchange: HttpExchange) -> dict[str, str]:
    """Returns the fields of the address, the last of each name. Raises ``QuireError`` INVALID for too many."""
    try:
        fields = parse_qsl(exchange.scope["query_string"].decode("latin-1"), max_num_fields=_MAX_QUERY_FIELDS)
    except ValueError:
        raise invalid("query", f"The address has more than {_MAX_QUERY_FIELDS} fields.") from None
    return dict(fields)


def _order(query: Mapping[str, str]) -> str:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    return order


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_LISTED))
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= MAX_LISTED:
        raise invalid("limit", f"limit must be a number from 1 to {MAX_LISTED}.")
    return int(given)


def _position_behind(ids: Sequence[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise item_not_found("after", after)
    return ids.index(after) + 1
