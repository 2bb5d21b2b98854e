"""The direct path of plain deltas to the response's sink: one call each, past every generator and task."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError

from quire_router.core.cursor import StreamCursor
from quire_router.core.generation import Delta, PromptGroup


class DeltaSink(Protocol):
    """Writes a response delta by delta."""

    @property
    def is_open(self) -> bool:
        """Whether a delta can be written now, without waiting for anything."""
        ...

    def write(self, delta: Delta) -> None:
        """Writes a delta. May be called only while ``is_open``."""
        ...


class DirectPath:
    """Between one answer's maker and its ``writer``, who may take part once it has written something.

    A task switch and a chain of generators cost more than all that is done with a token. So a piece that comes while
    the reader waits for it, and that ends nothing, is given to the writer where it comes up. Every other piece, every
    end and every error goes the long way, through the generator, and so does everything while the writer is not open.
    """

    __slots__ = ("sink",)

    def __init__(self) -> None:
        self.sink: DeltaSink | None = None


class DeltaStream(AsyncGenerator[Delta, None]):
    """``answer`` as it is, and the ``shortcut`` that its reader may use."""

    def __init__(self, answer: AsyncGenerator[Delta, None], shortcut: DirectPath) -> None:
        self.direct_path = shortcut
        self._answer = answer

    def __anext__(self) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self.asend(None)

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self._answer.asend(value)

    def athrow(self, error: Any, *older: Any) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        return self._answer.athrow(error, *older)

    def aclose(self) -> Coroutine[Any, Any, None]:
        """See ``AsyncGenerator``."""
        return self._answer.aclose()


# A delta stream that owns resources before it is first read, and releases them even if it never is.


class OwnedDeltaStream(DeltaStream):
    """``answer``, which lets go of what it holds on every way out. Closing it before its first piece was asked for
    calls ``let_go`` instead, because a generator that was never started runs none of its ends.
    """

    def __init__(
        self,
        answer: AsyncGenerator[Delta, None],
        let_go: Callable[[], Awaitable[None]],
        shortcut: DirectPath | None = None,
    ) -> None:
        super().__init__(answer, shortcut or DirectPath())
        self._release: Callable[[], Awaitable[None]] | None = let_go

    def asend(self, value: None) -> Coroutine[Any, Any, Delta]:
        """See ``AsyncGenerator``."""
        self._release = None
        return super().asend(value)

    async def athrow(self, error: Any, *older: Any) -> Delta:
        """See ``AsyncGenerator``."""
        await self._release_once()
        return await super().athrow(error, *older)

    async def aclose(self) -> None:
        """See ``AsyncGenerator``."""
        await self._release_once()
        await super().aclose()

    async def _release_once(self) -> None:
        let_go, self._release = self._release, None
        if let_go is not None:
            await let_go()


# The consumer of a response: its trace context, where it stands and until when it waits.


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
