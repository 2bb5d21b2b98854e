"""Models as ``/v1/models`` lists them: in the form of OpenAI's API, or in that of Anthropic's for requests with the
header ``anthropic-version``.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from quire_proto.errors import invalid

from quire_router.api.model_cards import ModelCard
from quire_router.core.errors import item_not_found

ANTHROPIC_VERSION: Final = "anthropic-version"
MAX_LISTED, DEFAULT_LISTED = 1000, 20
_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)


def model_object(card: ModelCard) -> dict[str, Any]:
    """Returns one model as OpenAI's API has it."""
    known: dict[str, Any] = {"root": card.parent or card.name, "parent": card.parent or None}
    if card.max_model_len:
        known["max_model_len"] = card.max_model_len
    if card.supported_tasks:
        known["supported_tasks"] = card.supported_tasks
    return {"id": card.name, "object": "model", "created": card.created, "owned_by": "quire", **known}


def model_info(card: ModelCard) -> dict[str, Any]:
    """Returns one model as Anthropic's API has it, with null for what is not known."""
    length = card.max_model_len or None
    unknown = ("capabilities", "deprecated_at", "retires_at", "line")
    return {
        "id": card.name,
        "type": "model",
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
        **dict.fromkeys(unknown),
    }


def model_info_page(cards: Sequence[ModelCard], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page that ``limit`` and ``after_id`` or ``before_id`` ask for. Raises ``QuireError``."""
    given = query.get("limit", str(DEFAULT_LISTED))
    if not _NUMBER.fullmatch(given) or not 1 <= int(given) <= MAX_LISTED:
        raise invalid("limit", f"limit must be a number from 1 to {MAX_LISTED}.")
    limit, names = int(given), [card.name for card in cards]
    begin, end = _bound(names, query, "after_id", -1) + 1, _bound(names, query, "before_id", len(names))
    if "before_id" in query:
        begin = max(begin, end - limit)
    shown = cards[begin : min(end, begin + limit)]
    return {
        "data": [model_info(card) for card in shown],
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
        "has_more": begin > 0 if "before_id" in query else begin + len(shown) < end,
    }


def _bound(names: Sequence[str], query: Mapping[str, str], field: str, absent: int) -> int:
    if field not in query:
        return absent
    if query[field] not in names:
        raise item_not_found(field, query[field])
    return names.index(query[field])
