"""A list of prompts run as one request: each is a generation of its own, and their pieces make one answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace

from quire_router.api.backend import Runner
from quire_router.api.identity import Caller
from quire_router.api.running import Running
from quire_router.generation import Delta, Generation, Usage

_News = tuple[int, Delta | Exception | None]


class Together:
    """Runs what a client asked for in one request. Each prompt takes a place among ``running``."""

    def __init__(self, runner: Runner, running: Running) -> None:
        self._runner = runner
        self._running = running
        self._parts: dict[str, list[str]] = {}

    def run(self, generations: Sequence[Generation]) -> AsyncGenerator[Delta]:
        """The answer as ``Runner.run`` gives it. Choices are numbered through: those of the first prompt, then those of
        the second. The first error is the answer's, and whatever ends it ends every prompt.
        """
        if len(generations) == 1:
            return self._runner.run(generations[0])
        return self._run(generations)

    def cancel(self, request_id: str) -> bool:
        """Ends a running request; False when there is none of that id."""
        ended = [self._runner.cancel(part) for part in self._parts.get(request_id, [request_id])]
        return any(ended)

    async def _run(self, generations: Sequence[Generation]) -> AsyncGenerator[Delta]:
        first = generations[0]
        with ExitStack() as places:
            for generation in generations[1:]:
                caller = Caller(generation.tenant, generation.cache_salt)
                places.enter_context(self._running.enter(generation.request_id, caller))
            self._parts[first.request_id] = [generation.request_id for generation in generations]
            places.callback(self._parts.pop, first.request_id)
            async with aclosing(self._merge(generations)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _merge(self, generations: Sequence[Generation]) -> AsyncGenerator[Delta]:
        """One answer: the usage is all prompts' and comes with the last piece of the last one."""
        n, usages = generations[0].params.n, list[Usage]()
        async with aclosing(_together([self._runner.run(generation) for generation in generations])) as pieces:
            async for number, delta in pieces:
                if delta.usage is not None:
                    usages.append(delta.usage)
                usage = _sum(usages) if len(usages) == len(generations) else None
                yield replace(delta, index=number * n + delta.index, usage=usage)


async def _together(runs: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[tuple[int, Delta]]:
    """The pieces of several answers as they come, each with the number of its answer. The first error is raised, and
    every answer is closed on every way out.
    """
    news: asyncio.Queue[_News] = asyncio.Queue(1)  # who does not read holds up all of them
    tasks = [asyncio.create_task(_tell(number, run, news)) for number, run in enumerate(runs)]
    try:
        open_answers = len(tasks)
        while open_answers:
            number, piece = await news.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                open_answers -= 1
            else:
                yield number, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell(number: int, run: AsyncGenerator[Delta], news: asyncio.Queue[_News]) -> None:
    try:
        async with aclosing(run) as deltas:
            async for delta in deltas:
                await news.put((number, delta))
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        await news.put((number, error))
    else:
        await news.put((number, None))


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
