"""``BatchWorker``: continues batches. Each has a lease in its record, so any router takes up those of one that died.

A batch is worked through line by line, a window of them at a time. What each line gave is written once, as a part of
the batch's object with the line's number: a router that works on a batch reads which numbers are there, and goes on
with the others. A line that was begun and has no result yet is begun again under the same id, and so only followed
(``LineRunner``). At the end the results are copied in order into files whose ids follow from the batch's, and a file
that is written twice is the same.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import uniform
from time import monotonic, time
from typing import Any, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.telemetry import Attribute, Span
from quire_proto.tracing import is_recording

from quire_router.batches.batch import (
    FAILED,
    MAX_ERRORS,
    OK,
    Batch,
    Line,
    LineError,
    LineReader,
    LineRunner,
    encode_result,
)
from quire_router.batches.batch_store import ACTIVE, Batches
from quire_router.batches.files import FileInfo
from quire_router.core import metrics
from quire_router.core.retry import wait_at_most
from quire_router.journal import records
from quire_router.journal.objects import read_objects

log = logging.getLogger(__name__)

LEASE, RENEWAL = 10.0, 2.0  # seconds that a lease lasts, and between two times that it is renewed
LOOK_PERIOD = 1.0  # seconds between two looks for batches without a router, give or take a quarter
LINE_WINDOW = 32  # lines of a batch that are under way
MAX_RUNNING = 8  # batches that one router works on
TURN = 60.0  # seconds for which it works on a batch before one of a tenant that has none takes its place
PAUSE, MAX_PAUSE = 1.0, 10.0  # seconds before a line is tried again that could not begin
RESULT_BYTES = 1024  # of a result that is not there yet, as it is counted
_COPIED = 64  # results that are read at once
T = TypeVar("T")
_TRACER = trace.get_tracer("quire.router")


class LeaseLostError(Exception):
    """Another router works on the batch now, or it is gone, or what this one knows of it does not hold any more."""


class BatchWorker:
    """Works on the batches that no other router works on, from ``run`` on. ``max_line_bytes`` bounds one line."""

    def __init__(
        self,
        batches: Batches,
        lines: LineRunner,
        *,
        owner: str,
        max_line_bytes: int = 4 * 2**20,
        clock: Callable[[], float] = time,
    ) -> None:
        self.batches = batches
        self.lines = lines
        self.owner = owner
        self.max_line_bytes = max_line_bytes
        self.clock = clock
        self._running: dict[str, _RunningBatch] = {}
        self._leases: dict[str, tuple[float, float]] = {}  # of others' batches, and since when (monotonic) each is seen
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """There is a new batch, or one to cancel."""
        self._wake.set()

    async def run(self) -> None:
        """Looks for batches, and works on them, until it is cancelled."""
        try:
            while True:
                await wait_at_most(self._wake, uniform(0.75, 1.25) * LOOK_PERIOD)  # noqa: S311 - so that routers look apart
                self._wake.clear()
                with suppress(QuireError):  # the journal cannot be read now, which is logged
                    await self.look()
        finally:
            tasks = [running.task for running in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def look(self) -> None:
        """Takes up batches that no router works on: next one of the tenant with the fewest here, and of these the
        oldest. Raises ``QuireError``.
        """
        waiting = {batch.id: (batch, version) async for batch, version in self._waiting()}
        while waiting:
            turns = Counter(running.tenant for running in self._running.values())
            batch, version = waiting.pop(min(waiting, key=lambda name: turns[waiting[name][0].tenant]))
            if len(self._running) >= MAX_RUNNING and not self._make_room(turns, batch.tenant):
                return
            if (run := await self._claim(batch, version)) is not None:
                task = asyncio.create_task(self._work(run), name=f"batch {batch.id}")
                self._running[batch.id] = _RunningBatch(batch.tenant, monotonic(), task)

    async def _waiting(self) -> AsyncGenerator[tuple[Batch, int]]:
        """Yields the batches that no router works on, the oldest first, with their records' versions. Forgets those
        that have ended, and those that cannot be read: they are shown as failed.
        """
        store = self.batches.store
        names = [name for name in await store.names(ACTIVE) if name not in self._running]
        self._leases = {name: seen for name, seen in self._leases.items() if name in names}
        async with aclosing(read_objects(store, ACTIVE, names)) as objects:
            async for name, found in objects:
                batch = records.read(Batch, name, found.data)
                if batch is None:
                    await store.leave(ACTIVE, name)
                elif batch.ended:
                    await self.batches.forget(batch)
                # One of this router's own is not running any more: it failed, or was put back.
                elif batch.owner in ("", self.owner) or self._is_over(batch):
                    yield batch, found.version

    def _is_over(self, batch: Batch) -> bool:
        """Whether another router's lease has ended, by this one's clock; or was not renewed for as long as one lasts,
        as its router had a clock that was ahead.
        """
        until, since = self._leases.setdefault(batch.id, (batch.lease_until, monotonic()))
        if until != batch.lease_until:
            self._leases[batch.id] = batch.lease_until, monotonic()
            return batch.lease_until <= self.clock()
        return until <= self.clock() or monotonic() - since > LEASE

    def _make_room(self, turns: Counter[str], tenant: str) -> bool:
        """Puts a batch back whose tenant has more here than this one would, or that had its turn where this tenant has
        none. Returns whether there is one. What it has begun goes on, and is found when it is taken up again.
        """
        most = max(turns.values())
        of_most = [name for name, running in self._running.items() if turns[running.tenant] == most]
        first = self._running[of_most[0]]
        if most >= turns[tenant] + 2:
            name = of_most[-1]
        elif not turns[tenant] and monotonic() - first.since > TURN:
            name = of_most[0]
        else:
            return False
        self._running.pop(name).task.cancel()
        return True

    async def _claim(self, batch: Batch, version: int) -> "BatchRun | None":
        run = BatchRun(batch, version, self)
        try:
            await run.save()
        except LeaseLostError:
            return None
        return run

    async def _work(self, run: "BatchRun") -> None:
        batch_id = run.batch.id
        try:
            with _batch_span(run.batch):
                await run.work()
            self.wake()  # it is forgotten, and there is room for another
        except LeaseLostError:
            log.info("leaving batch %s to the next router that looks for it", batch_id)
        except QuireError as error:
            log.warning("pausing batch %s: %s", batch_id, error.message)
        except Exception:
            log.exception("batch %s failed; trying again", batch_id)
            await asyncio.sleep(LEASE)
        finally:
            run.show("")
            if (running := self._running.get(batch_id)) is not None and running.task is asyncio.current_task():
                del self._running[batch_id]


@dataclass(frozen=True, slots=True)
class _RunningBatch:
    """A batch that is worked on, since when, in seconds of the monotonic clock."""

    tenant: str
    since: float
    task: asyncio.Task[None]


class BatchRun:
    """One router's work on one batch, of whose record it has read ``version``."""

    def __init__(self, batch: Batch, version: int, worker: BatchWorker) -> None:
        self.batch = batch
        self._version = version
        self._batches = worker.batches
        self._store = worker.batches.store
        self._files = worker.batches.files
        self._lines = worker.lines
        self._owner = worker.owner
        self._max_line_bytes = worker.max_line_bytes
        self._clock = worker.clock
        self._shown = ""

    def show(self, status: str) -> None:
        """Counts the batch among those that this router works on, under its status; under none if that is empty."""
        if self._shown:
            metrics.BATCHES.labels(self._shown).dec()
        if status:
            metrics.BATCHES.labels(status).inc()
        self._shown = status

    async def work(self) -> None:
        """Brings the batch to its end. Raises ``LeaseLostError``, and ``QuireError`` for what passes."""
        batch = self.batch
        if batch.status == "validating":
            await self._begin()
        if batch.status == "finalizing" and await self._lacks_results():
            batch.status, batch.finalizing_at, batch.expired_at = "in_progress", None, None
        if batch.status == "in_progress":
            await self._run()
        if batch.status == "cancelling":
            await self._while_leased(self._cancel_lines())
            await self._finish("cancelled")
        elif batch.status == "finalizing":
            await self._finish("failed" if batch.errors else "expired" if batch.expired_at else "completed")

    async def save(self) -> None:
        """Writes the record and renews the lease. Raises ``LeaseLostError`` when somebody else has the batch. A client
        may have cancelled it meanwhile, which is adopted.
        """
        batch = self.batch
        batch.owner, batch.lease_until = self._owner, self._clock() + LEASE
        ttl = self._batches.ttl(batch)
        while not await self._store.put(batch.id, batch.to_json(), self._version, ttl, drop_parts=batch.ended):
            found = await self._store.get(batch.id)
            stored = None if found is None else records.read(Batch, batch.id, found.data)
            if found is None or stored is None or stored.status != "cancelling":
                raise LeaseLostError
            if stored.owner not in ("", self._owner):
                raise LeaseLostError
            self._version = found.version
            if batch.status in ("validating", "in_progress"):
                batch.status, batch.cancelling_at = "cancelling", stored.cancelling_at
        self._version += 1
        self.show("" if batch.ended else batch.status)

    async def _lacks_results(self) -> bool:
        """Whether there are lines without a result, though all had one: a Redis that died may have lost the last ones.
        A batch that failed needs none.
        """
        return not self.batch.errors and len(await self._store.part_numbers(self.batch.id)) < self.batch.total

    async def _while_leased(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of ``work``, while which the lease is renewed; None when the batch is cancelled first."""
        before, task = self.batch.status, asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=RENEWAL)
                if not task.done():
                    await self.save()
                    if self.batch.status != before:
                        return None
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _finish(self, status: str) -> None:
        """Writes the files and ends the batch. A Redis that dies may lose what it was told last: what it lost before
        the record was written again is missed here, and if it loses more from then on, that record is among it.
        """
        await self._while_leased(self._write_files())
        await self.save()
        files = [each for each in (self.batch.output_file_id, self.batch.error_file_id) if each is not None]
        if not all([await self._files.is_whole(each) for each in files]):
            raise LeaseLostError
        await self._end(status)

    async def _end(self, status: str) -> None:
        """Ends the batch; the results are in its files. The next look forgets it, if it is still stored then."""
        self.batch.status = status
        setattr(self.batch, f"{status}_at", int(self._clock()))
        await self.save()
        metrics.BATCHES_ENDED.labels(status).inc()

    # Validating

    async def _begin(self) -> None:
        outcome = await self._while_leased(self._validate())
        if outcome is None:
            return  # it was cancelled
        batch = self.batch
        batch.total, batch.model, batch.errors = outcome
        if batch.errors:
            batch.total = 0
            await self._end("failed")
            return
        batch.status, batch.in_progress_at = "in_progress", int(self._clock())
        await self.save()

    async def _validate(self) -> tuple[int, str | None, list[dict[str, Any]]]:
        """Returns how many lines there are, the model of the first, and what is wrong with them."""
        seen, models, errors = set[str](), list[str | None](), list[dict[str, Any]]()
        try:
            async with aclosing(self._read_lines()) as lines:
                async for line in lines:
                    if isinstance(line, LineError):
                        errors.append(line.error)
                    elif line.custom_id in seen:
                        message = f"The custom_id {line.custom_id[:64]!r} was used before."
                        errors.append(LineError("duplicate_custom_id", message, line.number + 1, "custom_id").error)
                    else:
                        seen.add(line.custom_id)
                        models = models or [line.model]
                    if len(errors) == MAX_ERRORS:
                        break
        except LineError as error:
            errors.append(error.error)
        except QuireError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            errors.append(LineError("invalid_file", error.message, param="input_file_id").error)
        if not seen and not errors:
            errors.append(LineError("empty_file", "The file has no lines.").error)
        return len(seen), models[0] if models else None, errors

    async def _read_lines(self) -> AsyncGenerator[Line | LineError]:
        """Yields the requests in the file, and errors where a line is none. Raises ``LineError`` where no more can be
        read.
        """
        info = await self._files.get(self.batch.input_file_id, self.batch.tenant)
        reader = LineReader(self.batch.endpoint, self._max_line_bytes)
        async with aclosing(self._files.read(info)) as chunks:
            async for chunk in chunks:
                for line in await self._offload(reader.size_with(chunk), partial(reader.feed, chunk)):
                    yield line
                if reader.error is not None:
                    raise reader.error
                await asyncio.sleep(0)  # chunks in memory come without waiting
        for line in await self._offload(reader.size_with(b""), reader.end):
            yield line
        if reader.error is not None:
            raise reader.error

    async def _offload(self, size: int, work: Callable[[], T]) -> T:
        return await _persistently(lambda: self._lines.offload(self.batch, size, work))

    # Lines

    async def _run(self) -> None:
        batch = self.batch
        try:
            expired = await self._while_leased(self._run_lines())
        except QuireError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            batch.errors = [LineError("invalid_file", error.message, param="input_file_id").error]
            expired = False
        if expired is None:
            return  # it was cancelled
        now = int(self._clock())
        batch.expired_at = now if expired else None
        batch.status, batch.finalizing_at = "finalizing", now
        await self.save()

    async def _run_lines(self) -> bool:
        """Runs what has no result yet. Returns whether the window ended before all had one."""
        try:
            async with asyncio.timeout(max(0.0, self.batch.expires_at - self._clock())):
                while await self._run_missing_lines():
                    pass  # what was written may be lost while others run, with a Redis that dies
            return False
        except TimeoutError:
            await self._expire_lines()
            return True

    async def _run_missing_lines(self) -> bool:
        """Runs each line that has no result now. Returns whether there was one."""
        done = set(await self._store.part_numbers(self.batch.id))
        if len(done) >= self.batch.total:
            return False
        self.batch.completed = len(done) - min(self.batch.failed, len(done))
        tasks, begun = set[asyncio.Task[None]](), False
        try:
            async with aclosing(self._read_lines()) as lines:
                async for line in lines:
                    if isinstance(line, LineError) or line.number in done:
                        continue
                    begun = True
                    tasks.add(asyncio.create_task(self._run_line(line)))
                    if len(tasks) >= LINE_WINDOW:
                        await _reap(tasks)
            while tasks:
                await _reap(tasks)
            if not begun:  # a router of another version counted lines that are none to this one
                self.batch.total = len(done)
            return begun
        finally:
            await _cancel_all(tasks)

    async def _run_line(self, line: Line) -> None:
        """Runs a line, and writes its result. Raises ``TimeoutError`` if the window has ended: also by a clock that was
        set, or by a former router's, so that the timer of this one knows nothing of it.
        """
        batch = self.batch
        if self._clock() >= batch.expires_at:
            raise TimeoutError
        with metrics.BATCH_LINES_IN_FLIGHT.track_inprogress():
            result = await _persistently(lambda: self._result(line))
        ttl = self._batches.ttl(batch)
        if await _persistently(lambda: self._store.add_part(batch.id, line.number, result, ttl)):
            batch.result_bytes += len(result)
            if result.startswith(OK):
                batch.completed += 1
            else:
                batch.failed += 1
            metrics.BATCH_LINES.labels("completed" if result.startswith(OK) else "failed").inc()

    async def _result(self, line: Line) -> bytes:
        batch, most = self.batch, self._files.settings.max_tenant_bytes
        size = batch.result_bytes + RESULT_BYTES
        if not await self._files.charge_results(batch.tenant, batch.id, size, self._batches.ttl(batch)):
            message = (
                f"All files of this key and twice the answers of its batches would have more than {most} bytes, so "
                "this request was not run. Delete files, and send it again."
            )
            return encode_result(line, None, {"code": "batch_output_too_large", "message": message})
        return encode_result(line, await self._lines.run(batch, line), None)

    async def _expire_lines(self) -> None:
        """Ends what has no result, and gives it an error."""
        message = "This request could not be executed before the completion window expired."
        error = {"code": "batch_expired", "message": message}
        done, ttl = set(await self._store.part_numbers(self.batch.id)), self._batches.ttl(self.batch)
        async with aclosing(self._read_lines()) as lines:
            async for line in lines:
                if isinstance(line, Line) and line.number not in done:
                    await self._lines.cancel(self.batch, line.number)
                    if await self._store.add_part(self.batch.id, line.number, encode_result(line, None, error), ttl):
                        metrics.BATCH_LINES.labels("expired").inc()

    async def _cancel_lines(self) -> None:
        """Ends what has no result and may run: what lies in the window behind the first line without one."""
        done = set(await self._store.part_numbers(self.batch.id))
        missing = [number for number in range(self.batch.total) if number not in done]
        last = max(done, default=-1) + LINE_WINDOW
        for number in missing:
            if number > last:
                break
            await self._lines.cancel(self.batch, number)

    # The files

    async def _write_files(self) -> None:
        """Copies the results into the files, and counts them."""
        batch, now = self.batch, int(self._clock())
        if batch.status == "finalizing" and await self._lacks_results():
            raise LeaseLostError  # they were lost just now; whoever takes the batch up runs these lines again
        numbers = await self._store.part_numbers(batch.id)
        kept = self._files.settings.retention if batch.output_ttl is None else batch.output_ttl
        expires = int(now + min(kept, self._files.settings.retention))
        batch.completed = batch.failed = 0
        for kind, mark in (("output", OK), ("error", FAILED)):
            name = f"{batch.id}_{kind}.jsonl"
            info = FileInfo(batch.file_id(kind), batch.tenant, name, "batch_output", 0, now, expires)
            count = await self._copy(info, numbers, mark)
            if mark == OK:
                batch.completed, batch.output_file_id = count, info.id if count else None
            else:
                batch.failed, batch.error_file_id = count, info.id if count else None

    async def _copy(self, info: FileInfo, numbers: list[int], mark: bytes) -> int:
        count = 0

        async def lines() -> AsyncGenerator[bytes]:
            nonlocal count
            for start in range(0, len(numbers), _COPIED):
                for result in await self._store.parts(self.batch.id, numbers[start : start + _COPIED]):
                    if result is None:
                        raise LeaseLostError  # somebody else has ended the batch
                    if result.startswith(mark):
                        count += 1
                        yield result[1:] + b"\n"

        async with aclosing(lines()) as results:
            first = await anext(results, None)
            if first is not None:
                await self._files.write(info, _chain(first, results))
        return count


@contextmanager
def _batch_span(batch: Batch) -> Iterator[None]:
    """The span of one router's work on a batch, with how far it came. Its lines have traces of their own."""
    if not is_recording(_TRACER):
        yield
        return
    attributes = {Attribute.BATCH_ID: batch.id}
    with _TRACER.start_as_current_span(Span.BATCH, Context(), attributes=attributes) as span:
        try:
            yield
        finally:
            span.set_attribute(Attribute.BATCH_STATUS, batch.status)
            span.set_attribute(Attribute.BATCH_COMPLETED, batch.completed)
            span.set_attribute(Attribute.BATCH_FAILED, batch.failed)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for each in rest:
        yield each


async def _persistently(call: Callable[[], Awaitable[T]]) -> T:
    """Returns what ``call`` returns, which is called again while it raises ``QuireError``: that passes. Raises
    ``TimeoutError`` if that is DEADLINE, which does not.
    """
    while True:
        try:
            return await call()
        except QuireError as error:
            if error.code is ErrorCode.DEADLINE:
                raise TimeoutError from None
            log.debug("a line waits: %s", error.message)
            await asyncio.sleep(min(MAX_PAUSE, error.retry_after or PAUSE))


async def _reap(tasks: set[asyncio.Task[None]]) -> None:
    """Waits until one of the tasks has ended, and removes those that have. Raises what one of them raised."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks -= ended
    errors = [error for task in ended if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


async def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
