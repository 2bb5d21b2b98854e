"""Records that are kept as JSON (``encode``, ``read``), and the rule of all that routers keep in a database.

**The rule.** While an update rolls, routers of two versions read what the other writes. So a field keeps its name and
its meaning, a new one has a default, and a router ignores fields that it does not know. What a request's answer depends
on cannot be ignored: a record says in ``needs`` which of its newer fields that is, and a router that does not know one
of them leaves the request to those that do (``codec``). ``tests/unit/router/journal/test_versions.py`` holds every kind
of record to this.
"""

import json
import logging
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from quire_router.core import metrics

log = logging.getLogger(__name__)
MAX_LOGGED = 128  # characters of a name
RecordT = TypeVar("RecordT")


class UnreadableRecordError(ValueError):
    """What is stored is damaged: it is no record of this kind in any version."""


def encode(record: Any) -> bytes:
    """Returns a record, a dataclass, as JSON."""
    try:
        return _adapter(type(record)).dump_json(record)
    except ValueError:  # half of a surrogate pair, which a line of a batch may hold
        return json.dumps(asdict(record), separators=(",", ":")).encode()


def decode(kind: type[RecordT], data: bytes) -> RecordT:
    """Returns the record, a dataclass, that a router of this version or another one wrote. Raises
    ``UnreadableRecordError``.
    """
    adapter = _adapter(kind)
    try:
        return adapter.validate_json(data)
    except ValidationError:
        pass
    try:
        return adapter.validate_python(json.loads(data))
    except (ValidationError, ValueError, RecursionError) as error:
        raise UnreadableRecordError(f"this is not a {kind.__name__} ({type(error).__name__})") from error


def read(kind: type[RecordT], name: str, data: bytes) -> RecordT | None:
    """As ``decode``, but returns None for what is damaged, which is logged and counted: that costs only itself."""
    try:
        return decode(kind, data)
    except UnreadableRecordError as error:
        log.error("the record of %s is damaged: %s", name[:MAX_LOGGED], error)
        metrics.RECORDS_UNREADABLE.labels(kind.__name__.removesuffix("Info").lower()).inc()
        return None


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type[RecordT]) -> TypeAdapter[RecordT]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]
