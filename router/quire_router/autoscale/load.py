"""The one number that models are scaled by: requests that were admitted and have not ended, of all routers together.
Does no I/O.

It counts what waits in the queue, what waits for an engine after it lost one, and what engines run. What waits alone
would be nothing while every engine is just busy, and they would be taken away for it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from quire_proto.errors import ErrorCode, QuireError

METRIC = "quire_load"
"""What the metric is called, wherever it is asked for."""


class Load(Protocol):
    """The load of all routers."""

    async def read(self) -> Mapping[str, int]:
        """Each configured model's, 0 where it is idle, at most a second old. Raises ``QuireError`` UNAVAILABLE where
        it is not known: nothing that is not known is ever 0.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections."""
        ...


class OwnLoad:
    """Implements ``Load`` for a router that is the only one: ``count`` tells what it has of a model."""

    def __init__(self, models: Iterable[str], count: Callable[[str], int]) -> None:
        self._models = tuple(models)
        self._count = count

    async def read(self) -> Mapping[str, int]:
        """See ``Load``."""
        return self.now()

    async def close(self) -> None:
        """See ``Load``."""

    def now(self) -> dict[str, int]:
        """What this router has at this moment."""
        return {model: self._count(model) for model in self._models}


def unknown_load(message: str) -> QuireError:
    """The load cannot be told now. Nobody is asked to wait: autoscalers come again by themselves."""
    return QuireError(ErrorCode.UNAVAILABLE, message)


def no_such_model(model: str) -> QuireError:
    """A model that is not configured, whatever engines there are."""
    return QuireError(ErrorCode.NOT_FOUND, f"There is no model {model!r}.")
