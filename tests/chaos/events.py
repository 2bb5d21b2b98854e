"""Server-sent events out of lines, as their standard has it: one is complete with the empty line behind it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

DONE = "[DONE]"


@dataclass(frozen=True)
class Event:
    """``id`` is what this event itself says, empty where it says nothing."""

    id: str
    data: str


async def events_of(lines: AsyncIterator[str], hear: Callable[[], None]) -> AsyncIterator[Event]:
    """The complete events; ``hear`` is called for each line, comments included."""
    fields: dict[str, str] = {}
    async for line in lines:
        hear()
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif not line:
            if "data" in fields:
                yield Event(fields.get("id", ""), fields["data"])
            fields = {}
