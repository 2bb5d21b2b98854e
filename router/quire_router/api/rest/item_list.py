"""Pages of items, as OpenAI's APIs list them, and the query of the address that asks for one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from quire_proto.errors import invalid

from quire_router.api.rest.http import HttpExchange
from quire_router.core.errors import item_not_found

MAX_LISTED, DEFAULT_LISTED = 100, 20  # items
_MAX_QUERY_FIELDS = 16
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


def item_page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str], most: int = MAX_LISTED) -> dict[str, Any]:
    """Returns the page of items that a query asks for, ``most`` at most. Raises ``QuireError``."""
    if _order(query) == "desc":
        items = items[::-1]
    begin = _position_behind([str(item.get("id")) for item in items], query.get("after"))
    page = items[begin : begin + _limit(query, most)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": begin + len(page) < len(items),
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


def _limit(query: Mapping[str, str], most: int) -> int:
    given = query.get("limit", str(DEFAULT_LISTED))
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= most:
        raise invalid("limit", f"limit must be a number from 1 to {most}.")
    return int(given)


def _position_behind(ids: Sequence[str], after: str | None) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise item_not_found("after", after)
    return ids.index(after) + 1
