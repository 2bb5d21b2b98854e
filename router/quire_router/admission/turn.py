"""What the lifecycle needs of admission: a request waits for its turn, and the turn comes when an engine has room."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that wants to run.

    ``tokens`` is what it may cost an engine: prompt and most output of all choices. ``bytes`` is what holding it takes
    here. Smaller ``priority`` first, within one tenant. ``deadline`` is in seconds of the monotonic clock.
    """

    request_id: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    priority: int = 0
    deadline: float | None = None


class Turns(Protocol):
    """The queue before all engines, fair between tenants."""

    async def turn(self, waiting: Waiting) -> None:
        """Returns when the request may be placed: at once when nobody waits and an engine has room. Whoever it returns
        to must dispatch before it waits for anything else, because the room is not kept. Raises ``QuireError``:
        OVERLOADED when the queue is full, UNAVAILABLE when no engine came to be ready in time, DEADLINE. May be
        cancelled.
        """
        ...

    def leave(self, request_id: str) -> bool:
        """Lets go of a request that waits: its ``turn`` returns at once, though there may be no room. For requests that
        are interrupted. False when it does not wait.
        """
        ...

    def stir(self) -> None:
        """There may be room now: a stream has ended, an engine is ready. Never waits."""
        ...
