"""Commands on their way to one engine; one writer empties the queue."""

import asyncio
from collections import OrderedDict

from quire.v1 import engine_pb2

from quire_router.fleet.output import EngineFull


class CommandQueue:
    """A bounded queue. Cancels go first, because they free memory; of acknowledgements only the newest is kept.

    Cancels need no limit of their own: there is at most one for each request that was submitted and has not ended.
    """

    def __init__(self, max_submits: int) -> None:
        self._max_submits = max_submits
        self._submits: OrderedDict[str, engine_pb2.Submit] = OrderedDict()
        self._cancels: OrderedDict[str, dict[int, None]] = OrderedDict()
        self._ack = 0
        self._nonempty = asyncio.Event()

    def submit(self, message: engine_pb2.Submit) -> None:
        """Raises ``EngineFull`` when the engine does not take commands fast enough."""
        if len(self._submits) >= self._max_submits:
            raise EngineFull("too many requests wait to be sent to it")
        self._submits[message.request_id] = message
        self._nonempty.set()

    def repeat(self, message: engine_pb2.Submit) -> None:
        """Puts a Submit that may have been lost before all others; it was within the limit when it came first."""
        self._submits[message.request_id] = message
        self._submits.move_to_end(message.request_id, last=False)
        self._nonempty.set()

    def has_submit(self, request_id: str) -> bool:
        """Whether the request's Submit has not been handed to the writer."""
        return request_id in self._submits

    def withdraw(self, request_id: str) -> bool:
        """Takes a Submit back; False when it is with the writer, or has been sent."""
        return self._submits.pop(request_id, None) is not None

    def cancel(self, request_id: str, *indexes: int) -> None:
        """Asks the engine to end some choices of a request, or all of it without any. Asking twice is asking once."""
        waiting = self._cancels.get(request_id)
        if not indexes or waiting is None:
            self._cancels[request_id] = dict.fromkeys(indexes)
        elif waiting:  # and not the whole request
            waiting.update(dict.fromkeys(indexes))
        self._nonempty.set()

    def has_cancel(self, request_id: str) -> bool:
        """Whether a Cancel of the request waits for the writer."""
        return request_id in self._cancels

    def ack(self, sequence: int) -> None:
        """Every batch up to ``sequence`` was processed."""
        self._ack = sequence
        self._nonempty.set()

    def reset_for_stream(self) -> None:
        """A new stream begins: acknowledgements and Cancels of the old one mean nothing on it."""
        self._cancels.clear()
        self._ack = 0

    async def next(self) -> engine_pb2.SessionRequest:
        """Waits for a command and takes it out."""
        while True:
            command = self._pop()
            if command is not None:
                return command
            self._nonempty.clear()
            await self._nonempty.wait()

    def _pop(self) -> engine_pb2.SessionRequest | None:
        if self._cancels:
            request_id, indexes = self._cancels.popitem(last=False)
            return engine_pb2.SessionRequest(cancel=engine_pb2.Cancel(request_id=request_id, indexes=indexes))
        if self._submits:
            _, message = self._submits.popitem(last=False)
            return engine_pb2.SessionRequest(submit=message)
        if self._ack:
            sequence, self._ack = self._ack, 0
            return engine_pb2.SessionRequest(ack=engine_pb2.Ack(sequence=sequence))
        return None
