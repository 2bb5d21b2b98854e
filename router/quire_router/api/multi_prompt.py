"""A list of prompts run as one request: each is a generation of its own, and their pieces make one answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import replace

from quire_proto.errors import ErrorCode, QuireError, internal

from quire_router.api.prepared_request import Runner
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream, PromptGroup, StreamCursor, Usage
from quire_router.journal.base import RequestRecord

_QueueItem = tuple[int, Delta | Exception | None]


class MultiPromptRunner:
    """Runs what a client asked for in one request. Each prompt takes a place among ``running``. The first error is the
    answer's, and whatever ends it ends every prompt. Choices are numbered through: those of the first prompt, then
    those of the second.
    """

    def __init__(self, runner: Runner, running: ConcurrencyLimit) -> None:
        self._runner = runner
        self._concurrency = running

    async def run(self, generations: Sequence[GenerationRequest]) -> AsyncGenerator[Delta]:
        """The answer as ``Runner.run`` gives it. Raises ``QuireError`` when there is no room for all prompts."""
        answer = await self.run_once(generations)
        if answer is None:
            raise internal()  # an id of chance that is taken
        return answer

    async def run_once(self, generations: Sequence[GenerationRequest]) -> AsyncGenerator[Delta] | None:
        """The answer as ``Runner.run_once`` gives it. Of several prompts the first one's id counts. All of them are
        written down before anything of their answer is told: who comes back for it can be told the rest. When one of
        them is refused, the others end as if they had never been; but who has a key comes back, and finds them.
        """
        first, *others = generations
        siblings = PromptGroup()
        with self._acquire_slots(len(generations)) as places:
            async with AsyncExitStack() as undo:
                run = await self._runner.run_once(first, siblings)
                if run is None:
                    return None
                undo.push_async_callback(run.aclose)
                runs = [run, *await self._open_all(others, {}, siblings, first.deadline, undo)]
                undo.pop_all()
            return _combined(runs, siblings, first.params.n, places)

    async def start(self, generation: GenerationRequest) -> bool:
        """As ``Runner.start``."""
        return await self._runner.start(generation)

    async def record(self, request_id: str) -> RequestRecord | None:
        """As ``Runner.record``."""
        return await self._runner.record(request_id)

    async def statuses(self, request_ids: Sequence[str], *, surely: bool = True) -> list[RequestRecord | None]:
        """As ``Runner.statuses``."""
        return await self._runner.statuses(request_ids, surely=surely)

    def resume(
        self, records: Sequence[RequestRecord], mark: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        """The answer of all prompts' records as ``Runner.resume`` gives it. Raises as ``run``."""
        n, siblings = records[0].generation.params.n, PromptGroup()
        with self._acquire_slots(len(records)) as places:
            runs = [
                self._runner.resume(record, mark.slice(number * n, n), deadline)
                for number, record in enumerate(records)
            ]
            return _combined(runs, siblings, n, places)

    async def replay(
        self, generations: Sequence[GenerationRequest], records: Sequence[RequestRecord], deadline: float | None
    ) -> AsyncGenerator[Delta]:
        """The answer to a request that came before, until ``deadline``: prompts that have a record are resumed, the
        others, which were refused or lost before they were written down, are run. Raises as ``run_once``.
        """
        known, siblings = {record.generation.request_id: record for record in records}, PromptGroup()
        with self._acquire_slots(len(generations)) as places:
            async with AsyncExitStack() as undo:
                runs = await self._open_all(generations, known, siblings, deadline, undo)
                undo.pop_all()
            return _combined(runs, siblings, generations[0].params.n, places)

    async def _open_all(
        self,
        generations: Sequence[GenerationRequest],
        known: Mapping[str, RequestRecord],
        siblings: PromptGroup,
        deadline: float | None,
        undo: AsyncExitStack,
    ) -> list[AsyncGenerator[Delta]]:
        """Each one's answer, which ``undo`` closes."""
        runs = []
        for generation in generations:
            record = known.get(generation.request_id)
            runs.append(await self._resume_or_run(generation, record, siblings, deadline))
            undo.push_async_callback(runs[-1].aclose)
        return runs

    async def _resume_or_run(
        self, generation: GenerationRequest, record: RequestRecord | None, siblings: PromptGroup, deadline: float | None
    ) -> AsyncGenerator[Delta]:
        run = await self._runner.run_once(generation, siblings) if record is None else None
        if run is not None:
            return run
        record = record or await self._runner.record(generation.request_id)
        if record is None:
            raise QuireError(ErrorCode.UNAVAILABLE, "A prompt of this request was forgotten just now.", retry_after=1)
        return self._runner.resume(record, StreamCursor(generation.params.n), deadline)

    async def cancel(self, request_ids: Sequence[str]) -> bool:
        """Ends what has not ended of these; False when there is nothing."""
        return any([await self._runner.cancel(request_id) for request_id in request_ids])

    async def delete(self, request_ids: Sequence[str]) -> None:
        """As ``Runner.delete``, each of these."""
        for request_id in request_ids:
            await self._runner.delete(request_id)

    @contextmanager
    def _acquire_slots(self, prompts: int) -> Iterator[ExitStack]:
        """Places for all prompts but the first, which has one already."""
        with ExitStack() as places:
            for _ in range(prompts - 1):
                places.enter_context(self._concurrency.acquire())
            yield places


def _combined(
    runs: Sequence[AsyncGenerator[Delta]], siblings: PromptGroup, n: int, places: ExitStack
) -> AsyncGenerator[Delta]:
    """One answer of several with ``n`` choices each, which takes over ``places``."""
    if len(runs) == 1:
        return runs[0]
    ending = AsyncExitStack()
    ending.enter_context(places.pop_all())
    for run in runs:
        ending.push_async_callback(run.aclose)
    return OwnedDeltaStream(_renumbered(runs, siblings, n, ending), ending.aclose)


async def _renumbered(
    runs: Sequence[AsyncGenerator[Delta]], siblings: PromptGroup, n: int, ending: AsyncExitStack
) -> AsyncGenerator[Delta]:
    """The pieces with their choices numbered through: the usage is that of all, and comes with the last piece of the
    last one.
    """
    usages = list[Usage]()
    async with ending, aclosing(_merged(runs)) as pieces:
        async for number, delta in pieces:
            if delta.usage is not None:
                usages.append(delta.usage)
            usage = total_usage(usages) if len(usages) == len(runs) else None
            if usage is not None or _has_output(delta):
                siblings.begun = True
                yield replace(delta, index=number * n + delta.index, usage=usage)


def _has_output(delta: Delta) -> bool:
    """Whether a piece says anything but the usage of its prompt."""
    return delta.usage is None or bool(delta.token_ids or delta.text) or delta.finish_reason is not None


async def _merged(runs: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[tuple[int, Delta]]:
    """The pieces of several answers as they come, each with the number of its answer. The first error is raised, and
    every answer is closed on every way out.
    """
    news: asyncio.Queue[_QueueItem] = asyncio.Queue(1)  # who does not read holds up all of them
    tasks = [asyncio.create_task(_forward(number, run, news)) for number, run in enumerate(runs)]
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


async def _forward(number: int, run: AsyncGenerator[Delta], news: asyncio.Queue[_QueueItem]) -> None:
    try:
        async with aclosing(run) as deltas:
            async for delta in deltas:
                await news.put((number, delta))
    except Exception as error:  # noqa: BLE001 - raised where the answer is read
        await news.put((number, error))
    else:
        await news.put((number, None))


def total_usage(usages: Sequence[Usage]) -> Usage:
    """What several requests consumed together."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
