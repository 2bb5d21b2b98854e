"""The sessions of an engine by their ids (``SessionTable``), and the requests that they submitted (``LiveRequests``).
Everything here runs on the event loop.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from quire.v1 import engine_pb2 as pb

from quire_engine.core.lora import LoRARequest
from quire_engine.core.request import Request
from quire_engine.server.loras import LoRARegistry
from quire_engine.server.session import Session


class SessionTable:
    """The open sessions of an engine's ``generation``. One without a stream is closed after ``grace`` seconds.

    An iteration sees the sessions that were open at its beginning.
    """

    def __init__(self, generation: int, grace: float) -> None:
        self._generation = generation
        self._grace = grace
        self._by_id: dict[str, Session] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._last_sequences: dict[str, int] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: str) -> Session | None:
        """Returns the open session of this id; None if there is none."""
        return self._by_id.get(session_id)

    def is_open(self, session: Session) -> bool:
        """Whether a session was neither closed nor replaced."""
        return self._by_id.get(session.session_id) is session

    def add(self, message: pb.Open, *, draining: bool) -> Session:
        """Opens a session that is not there yet."""
        session = Session(message.session_id, self._generation, message.updates, draining=draining)
        self._by_id[message.session_id] = session
        return session

    def remove(self, session: Session) -> None:
        """Removes an open session."""
        del self._by_id[session.session_id]
        self.keep(session)

    def expire(self, session: Session, close: Callable[[Session], None]) -> None:
        """Calls ``close`` after the grace period, unless ``keep`` is called before."""
        self.keep(session)
        self._expiries[session.session_id] = asyncio.get_running_loop().call_later(self._grace, close, session)

    def keep(self, session: Session) -> None:
        """Undoes ``expire``."""
        if (handle := self._expiries.pop(session.session_id, None)) is not None:
            handle.cancel()

    def take_silent(self) -> list[Session]:
        """Returns the sessions with requests that got no batch since the last call."""
        silent = [each for each in self if each.requests and each.sequence == self._last_sequences.get(each.session_id)]
        self._last_sequences = {name: session.sequence for name, session in self._by_id.items()}
        return silent


@dataclass(slots=True)
class LiveRequest:
    """A request as its router knows it. ``handle`` names its choices in ``TokenColumns``; 0 if the router does not read
    them. ``lora`` is its adapter. ``started`` is set with its first output, which is sent as a message because it has
    more than tokens.
    """

    session: Session
    request_id: str
    handle: int
    lora: LoRARequest | None = None
    started: bool = False


class LiveRequests:
    """The requests that have not ended, ``by_key``: under the keys by which the core knows them. Keeps their adapters.

    Two routers may choose the same id, and an id may be submitted again while the core is still ending its last use.
    """

    def __init__(self, loras: LoRARegistry) -> None:
        self.by_key: dict[str, LiveRequest] = {}
        self._loras = loras
        self._keys = count(1)
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self.by_key)

    def next_key(self) -> str:
        """Returns a key that no request has had."""
        return str(next(self._keys))

    def add(self, session: Session, message: pb.Submit, request: Request) -> None:
        """Adds the request of a message."""
        if request.lora is not None:
            self._loras.acquire(request.lora)
        self.by_key[request.request_id] = LiveRequest(session, message.request_id, message.handle, request.lora)
        session.requests[message.request_id] = request.request_id

    def remove(self, key: str) -> LiveRequest:
        """Removes a request, after the core has ended it or was told to: the core may then free its adapter."""
        live = self.by_key.pop(key)
        del live.session.requests[live.request_id]
        if live.lora is not None:
            self._loras.release(live.lora)
        self._ended.set()
        return live

    async def wait_idle(self) -> None:
        """Waits until all have ended."""
        while self.by_key:
            self._ended.clear()
            await self._ended.wait()
