"""``check_complexity``: a bound on what JSON costs to parse, before it is parsed."""

from quire_router.core.errors import invalid_body

MAX_VALUES = 300_000
MAX_PARTS = 16_384  # a conversation as long as is allowed, each message with one part
_LIMITS = {
    b",": (MAX_VALUES, "values"),
    b'"': (4 * MAX_PARTS, "quotation marks"),  # those of a name and of a value for each field
    b":": (MAX_PARTS, "fields"),
    b"[": (MAX_PARTS, "lists"),
    b"{": (MAX_PARTS, "objects"),
}


def check_complexity(body: bytes | bytearray) -> None:
    """Raises ``QuireError`` INVALID for JSON with more values or parts than any request needs, before it is parsed.

    Parsing and validating hold the interpreter, so they stall every stream of this process, in whatever thread they
    run. The bytes of a text cost next to nothing, but each field, list and object costs up to microseconds: four
    megabytes of them would take a second.
    """
    if _excess(body) is None:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    excess = _excess(unescaped, b'"') or _excess(b"".join(unescaped.split(b'"')[::2]))
    if excess is not None:
        raise invalid_body(f"The body holds more than {excess}.")


def _excess(text: bytes | bytearray, marks: bytes = b'",:[{') -> str | None:
    """Returns what ``text`` has too much of, judged by its ``marks``, as words; None for nothing."""
    for mark, (most, name) in _LIMITS.items():
        if mark in marks and text.count(mark) > most:
            return f"{most} {name}"
    return None
