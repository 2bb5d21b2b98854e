"""``Reader``: who an answer is for, as those see it who make the answer."""

from dataclasses import dataclass, field
from time import time

from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError

from quire_router.mark import Mark
from quire_router.shortcut import Shortcut
from quire_router.siblings import Siblings


@dataclass(frozen=True, slots=True)
class Reader:
    """``caller`` is the trace context that the request came with, ``shortcut`` the short way of its pieces, and
    ``siblings`` the other prompts of the same answer. Who comes back for an earlier answer stands at ``mark``, and
    waits until ``deadline``, in seconds since 1970.
    """

    caller: Context = field(default_factory=Context)
    shortcut: Shortcut = field(default_factory=Shortcut)
    siblings: Siblings = field(default_factory=Siblings)
    mark: Mark | None = None
    deadline: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """How long the reader waits from now on; None without end."""
        return None if self.deadline is None else max(0.0, self.deadline - time())


def reader_is_late() -> QuireError:
    """The reader's time is over, and not the request's."""
    return QuireError(ErrorCode.DEADLINE, "The time to read this answer was over before it had ended.")
