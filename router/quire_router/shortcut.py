"""The direct path of plain deltas to the response's sink: one call each, past every generator and task."""

from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol

from quire_router.generation import Delta


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
