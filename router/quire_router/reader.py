"""``Reader``: who an answer is for, as those see it who make the answer."""

from dataclasses import dataclass, field

from opentelemetry.context import Context

from quire_router.mark import Mark
from quire_router.shortcut import Shortcut


@dataclass(frozen=True, slots=True)
class Reader:
    """``caller`` is the trace context that the request came with, ``shortcut`` the short way of its pieces. Who comes
    back for an earlier answer stands at ``mark``, and waits until ``deadline``, in seconds since 1970.
    """

    caller: Context = field(default_factory=Context)
    shortcut: Shortcut = field(default_factory=Shortcut)
    mark: Mark | None = None
    deadline: float | None = None
