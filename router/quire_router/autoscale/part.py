"""What one router has, as it stands in Redis. Does no I/O."""

import json
from collections.abc import Mapping

MAX_PART_BYTES = 256 * 1024
_LARGEST = 2**32


class DamagedPartError(ValueError):
    """What was read is no router's part."""


def encode(part: Mapping[str, int]) -> bytes:
    """A router's part: how many requests it has of each model that it has any of."""
    return json.dumps({model: count for model, count in part.items() if count}, separators=(",", ":")).encode("ascii")


def decode(payload: bytes | None) -> dict[str, int]:
    """Raises ``DamagedPartError``, whatever the bytes are."""
    if payload is None:
        raise DamagedPartError("it is not there")
    if len(payload) > MAX_PART_BYTES:
        raise DamagedPartError("it is too long")
    try:
        part = json.loads(payload)
    except (ValueError, RecursionError):
        raise DamagedPartError("it is not JSON") from None
    if not isinstance(part, dict) or not all(map(_is_count, part.values())):
        raise DamagedPartError("it holds something else than counts")
    return part


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST
