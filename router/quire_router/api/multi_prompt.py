"""A list of prompts run as one request: each is a generation of its own, and their deltas are merged."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import replace

from quire_proto.errors import internal

from quire_router.api.prepared_request import Runner
from quire_router.api.request_limits import ConcurrencyLimit
from quire_router.core.errors import prompt_forgotten
from quire_router.core.generation import Delta, GenerationRequest, OwnedDeltaStream, PromptGroup, StreamCursor, Usage
from quire_router.journal.base import RequestRecord

_QueueItem = tuple[int, Delta | Exception | None]


class MultiPromptRunner:
    """Runs all prompts of a request. Each prompt takes a slot of ``concurrency``. The first error is the response's,
    and whatever ends the response ends every prompt. Choices are numbered through: those of the first prompt, then
    those of the second.
    """

    def __init__(self, runner: Runner, concurrency: ConcurrencyLimit) -> None:
        self._runner = runner
        self._concurrency = concurrency

    async def run(self, generations: Sequence[GenerationRequest]) -> AsyncGenerator[Delta]:
        """As ``Runner.run``. Raises ``QuireError`` when there is no capacity for all prompts."""
        answer = await self.run_once(generations)
        if answer is None:
            raise internal()  # a random id that is taken
        return answer

    async def run_once(self, generations: Sequence[GenerationRequest]) -> AsyncGenerator[Delta] | None:
        """As ``Runner.run_once``; of several prompts the first one's id counts. The records of all prompts are written
        before the first delta is yielded, so that the response can be resumed from then on. When one prompt is refused,
        the others are ended and leave nothing, except for a request with an idempotency key, whose retry finds them.
        """
        first, *others = generations
        prompt_group = PromptGroup()
        with self._acquire_slots(len(generations)) as slots:
            async with AsyncExitStack() as cleanup:
                run = await self._runner.run_once(first, prompt_group)
                if run is None:
                    return None
                cleanup.push_async_callback(run.aclose)
                runs = [run, *await self._open_all(others, {}, prompt_group, first.ends_by, cleanup)]
                cleanup.pop_all()
            return _combined(runs, prompt_group, first.params.n, slots)

    def resume(
        self, records: Sequence[RequestRecord], cursor: StreamCursor, deadline: float | None = None
    ) -> AsyncGenerator[Delta]:
        """As ``Runner.resume``, of the records of all prompts. Raises as ``run``."""
        n, prompt_group = records[0].generation.params.n, PromptGroup()
        with self._acquire_slots(len(records)) as slots:
            runs = [
                self._runner.resume(record, cursor.slice(number * n, n), deadline)
                for number, record in enumerate(records)
            ]
            return _combined(runs, prompt_group, n, slots)

    async def replay(
        self, generations: Sequence[GenerationRequest], records: Sequence[RequestRecord], deadline: float | None
    ) -> AsyncGenerator[Delta]:
        """Yields the response to an earlier request until ``deadline``: prompts with a record are resumed, the others,
        which were refused or lost before their record was written, are run. Raises as ``run_once``.
        """
        known, prompt_group = {record.generation.request_id: record for record in records}, PromptGroup()
        with self._acquire_slots(len(generations)) as slots:
            async with AsyncExitStack() as cleanup:
                runs = await self._open_all(generations, known, prompt_group, deadline, cleanup)
                cleanup.pop_all()
            return _combined(runs, prompt_group, generations[0].params.n, slots)

    async def _open_all(
        self,
        generations: Sequence[GenerationRequest],
        known: Mapping[str, RequestRecord],
        prompt_group: PromptGroup,
        deadline: float | None,
        cleanup: AsyncExitStack,
    ) -> list[AsyncGenerator[Delta]]:
        """Opens the deltas of each generation; ``cleanup`` closes them."""
        runs = []
        for generation in generations:
            record = known.get(generation.request_id)
            runs.append(await self._resume_or_run(generation, record, prompt_group, deadline))
            cleanup.push_async_callback(runs[-1].aclose)
        return runs

    async def _resume_or_run(
        self,
        generation: GenerationRequest,
        record: RequestRecord | None,
        prompt_group: PromptGroup,
        deadline: float | None,
    ) -> AsyncGenerator[Delta]:
        run = await self._runner.run_once(generation, prompt_group) if record is None else None
        if run is not None:
            return run
        record = record or await self._runner.record(generation.request_id)
        if record is None:
            raise prompt_forgotten()
        return self._runner.resume(record, StreamCursor(generation.params.n), deadline)

    async def cancel(self, request_ids: Sequence[str]) -> bool:
        """As ``Runner.cancel``, for all of these; returns False when none runs."""
        return any([await self._runner.cancel(request_id) for request_id in request_ids])

    async def delete(self, request_ids: Sequence[str]) -> None:
        """As ``Runner.delete``, for all of these."""
        for request_id in request_ids:
            await self._runner.delete(request_id)

    @contextmanager
    def _acquire_slots(self, prompts: int) -> Iterator[ExitStack]:
        """Acquires a slot for each prompt but the first, which has one already."""
        with ExitStack() as slots:
            for own in range(1, prompts):
                slots.enter_context(self._concurrency.acquire(own=own))
            yield slots


def _combined(
    runs: Sequence[AsyncGenerator[Delta]], prompt_group: PromptGroup, n: int, slots: ExitStack
) -> AsyncGenerator[Delta]:
    """Merges streams with ``n`` choices each; the result owns ``slots``."""
    if len(runs) == 1:
        return runs[0]
    cleanup = AsyncExitStack()
    cleanup.enter_context(slots.pop_all())
    for run in runs:
        cleanup.push_async_callback(run.aclose)
    return OwnedDeltaStream(_renumbered(runs, prompt_group, n, cleanup), cleanup.aclose)


async def _renumbered(
    runs: Sequence[AsyncGenerator[Delta]], prompt_group: PromptGroup, n: int, cleanup: AsyncExitStack
) -> AsyncGenerator[Delta]:
    """Yields the deltas with their choices numbered through. The usage is the sum over all prompts, and comes with the
    last delta of the last one.
    """
    usages, pending = list[Usage](), False
    async with cleanup, aclosing(_merged(runs)) as deltas:
        async for number, delta in deltas:
            if delta.usage is not None:
                usages.append(delta.usage)
                pending = pending or delta.pending
            usage = total_usage(usages) if len(usages) == len(runs) else None
            if usage is not None or _has_output(delta):
                prompt_group.started = True
                yield replace(delta, index=number * n + delta.index, usage=usage, pending=pending and usage is not None)


def _has_output(delta: Delta) -> bool:
    """Whether a delta has anything but the usage of its prompt."""
    return delta.usage is None or bool(delta.token_ids or delta.text) or delta.finish_reason is not None


async def _merged(runs: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[tuple[int, Delta]]:
    """Yields the deltas of several streams as they come, each with the number of its stream. Raises the first error,
    and closes every stream on every way out.
    """
    queue: asyncio.Queue[_QueueItem] = asyncio.Queue(1)  # a consumer that does not read holds up all of them
    tasks = [asyncio.create_task(_forward(number, run, queue)) for number, run in enumerate(runs)]
    try:
        open_runs = len(tasks)
        while open_runs:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_runs -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(number: int, run: AsyncGenerator[Delta], queue: asyncio.Queue[_QueueItem]) -> None:
    try:
        async with aclosing(run) as deltas:
            async for delta in deltas:
                await queue.put((number, delta))
    except Exception as error:  # noqa: BLE001 - raised where the deltas are read
        await queue.put((number, error))
    else:
        await queue.put((number, None))


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Returns the sum of several requests' usage."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
