"""The number that models are scaled by, as its readers see it, and the load of a router that is alone."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

METRIC = "quire_load"
"""The metric's name in every API."""


class Load(Protocol):
    """The load of all routers."""

    async def read(self) -> Mapping[str, int]:
        """Requests of each configured model, 0 if it is idle, at most a second old. Raises ``QuireError`` UNAVAILABLE
        if it is not known: an unknown load is never reported as 0.
        """
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


class LocalLoad:
    """Implements ``Load`` for a single router: ``count`` returns its requests of a model."""

    def __init__(self, models: Iterable[str], count: Callable[[str], int]) -> None:
        self._models = tuple(models)
        self._count = count

    async def read(self) -> Mapping[str, int]:
        """See ``Load``."""
        return self.now()

    async def close(self) -> None:
        """See ``Load``."""

    def now(self) -> dict[str, int]:
        """This router's requests of each model at this moment."""
        return {model: self._count(model) for model in self._models}
