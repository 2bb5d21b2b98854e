"""The consumer of a response: its trace context, where it stands and until when it waits."""

from dataclasses import dataclass, field
from time import time

from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError

from quire_router.mark import StreamCursor
from quire_router.shortcut import DirectPath
from quire_router.siblings import PromptGroup


@dataclass(frozen=True, slots=True)
class ResponseConsumer:
    """``caller`` is the trace context that the request came with, ``shortcut`` the short way of its pieces, and
    ``siblings`` the other prompts of the same answer. Who comes back for an earlier answer stands at ``mark``, and
    waits until ``deadline``, in seconds since 1970.
    """

    trace_context: Context = field(default_factory=Context)
    direct_path: DirectPath = field(default_factory=DirectPath)
    prompt_group: PromptGroup = field(default_factory=PromptGroup)
    cursor: StreamCursor | None = None
    deadline: float | None = None

    @property
    def seconds_left(self) -> float | None:
        """How long the reader waits from now on; None without end."""
        return None if self.deadline is None else max(0.0, self.deadline - time())


def deadline_exceeded() -> QuireError:
    """Returns the error of a consumer whose deadline has passed, while the request's has not."""
    return QuireError(ErrorCode.DEADLINE, "The time to read this answer was over before it had ended.")
