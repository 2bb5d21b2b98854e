"""``Answer``: an answer that is about to be written, and the three ways to come by one: a request is run, is run only
if it did not come before, or is resumed.
"""

import asyncio
from collections.abc import AsyncGenerator, Container
from dataclasses import dataclass, replace

from quire_proto.errors import ErrorCode, QuireError, internal

from quire_router.api.admitted import Admitted
from quire_router.api.calling import naming_tools
from quire_router.api.earlier import Archive, Earlier, read_mark
from quire_router.api.echo import echoed
from quire_router.api.identity import Caller
from quire_router.api.together import Together
from quire_router.generation import Delta
from quire_router.held import OwnedDeltaStream
from quire_router.journal.base import RequestRecord
from quire_router.mark import StreamCursor

_ATTEMPTS, _PAUSE = 5, 0.05  # seconds between attempts
_RETRY = 1.0  # seconds


@dataclass(slots=True)
class Answer:
    """``deltas`` are the answer's pieces, which begin to be made when the first is asked for; whoever is given them
    closes them. ``mark`` is where its reader stands before the first that is not told. It is
    ``replayed`` where the request had come before under the same key.
    """

    admitted: Admitted
    deltas: AsyncGenerator[Delta]
    mark: StreamCursor
    replayed: bool = False


class Answers:
    """Makes answers. Raises ``QuireError`` as ``Runner`` does."""

    def __init__(self, runner: Together, archive: Archive) -> None:
        self._runner = runner
        self._archive = archive

    async def open(self, admitted: Admitted, caller: Caller) -> Answer:
        """The answer to a new request, or, if it has a key and came before, the first one's. Raises ``QuireError``
        CONFLICT when another request had the key.
        """
        if not admitted.first.digest:
            return _answer(admitted, await self._runner.run(admitted.generations), StreamCursor(admitted.choices))
        for _ in range(_ATTEMPTS):
            deltas = await self._runner.run_once(admitted.generations)
            if deltas is not None:
                return _answer(admitted, deltas, StreamCursor(admitted.choices))
            earlier = await self._same(admitted)
            if earlier is not None:
                return await self._replay(admitted, earlier, caller)
            await asyncio.sleep(_PAUSE)  # it is forgotten just now
        raise _lost_between()

    async def start(self, admitted: Admitted) -> tuple[Earlier, bool]:
        """Begins a background request, unless it came before under its key; how it is with it, and whether it came
        before. Raises as ``open``.
        """
        for _ in range(_ATTEMPTS):
            if await self._runner.start(admitted.first):
                return Earlier((RequestRecord(admitted.first, "", 0, []),)), False
            earlier = await self._same(admitted)
            if earlier is not None:
                return earlier, True
            await asyncio.sleep(_PAUSE)
        raise _lost_between()

    async def resume(self, earlier: Earlier, after: str, caller: Caller, deadline: float | None = None) -> Answer:
        """The answer to an earlier request from where the mark ``after`` says, empty for the beginning, until
        ``deadline``. Raises ``QuireError`` INVALID for what is no such mark.
        """
        earlier = await self._archive.whole(earlier, caller)
        admitted = self._archive.admitted(earlier)
        mark = read_mark(after, earlier, admitted.choices)
        return _answer(admitted, self._runner.resume(earlier.records, mark, deadline), mark)

    async def _same(self, admitted: Admitted) -> Earlier | None:
        """The request that came first under the key of this one; None when it cannot be found (any more)."""
        if not admitted.first.digest:
            raise internal()  # an id of chance that is taken
        earlier = await self._archive.look(admitted.first.request_id)
        if earlier is None:
            return None
        first, second = earlier.first, admitted.first
        if (first.tenant, first.digest) != (second.tenant, second.digest):
            message = "This idempotency key came with another request before."
            raise QuireError(ErrorCode.CONFLICT, message, param="idempotency-key")
        return earlier

    async def _replay(self, admitted: Admitted, earlier: Earlier, caller: Caller) -> Answer:
        """The first one's answer, in the form and within the time that the second asks for."""
        earlier = await self._archive.settled(earlier, caller)
        first = {record.generation.request_id: record.generation for record in earlier.records}
        generations = tuple(first.get(each.request_id, each) for each in admitted.generations)
        again = replace(admitted, generations=generations)
        deltas = await self._runner.replay(generations, earlier.records, admitted.first.deadline)
        answer = _answer(again, deltas, StreamCursor(again.choices))
        answer.replayed = True
        return answer


def begun(mark: StreamCursor, choices: int) -> Container[int]:
    """The choices of which something was told before ``mark``."""
    return frozenset(index for index in range(choices) if mark.begun(index))


def _answer(admitted: Admitted, deltas: AsyncGenerator[Delta], mark: StreamCursor) -> Answer:
    """Choices begin with their prompt where it is echoed."""
    if admitted.first.echo:
        known = begun(mark, admitted.choices)
        deltas = OwnedDeltaStream(echoed(deltas, admitted.generations, admitted.text, known), deltas.aclose)
    structured = admitted.first.params.structured
    if admitted.shape.tools and structured is not None:
        deltas = OwnedDeltaStream(naming_tools(deltas, structured.text), deltas.aclose)
    return Answer(admitted, deltas, mark)


def _lost_between() -> QuireError:
    message = "The request of this idempotency key is neither to be begun nor to be found now."
    return QuireError(ErrorCode.UNAVAILABLE, message, retry_after=_RETRY)
