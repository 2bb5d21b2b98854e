"""Where engines are found. Implementations: ``static``, ``dns``, ``kubernetes``, and ``combined`` of several."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from quire_router.fleet.endpoint import Endpoint


class Discovery(Protocol):
    """A source of engines."""

    def watch(self) -> AsyncGenerator[Sequence[Endpoint]]:
        """Yields all engines that are known, as soon as that can be said, and again whenever it changes. Never ends
        because the source cannot be asked: what was said last stands until it can. May be called again after what it
        returned was closed, and then yields all engines anew.
        """
        ...
