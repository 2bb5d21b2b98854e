"""``RequestResumer``: how the answer to an earlier request is continued. It is replayed from its record, followed while
another router writes that, and claimed when no router holds its lease. And ``BackgroundRequests``, which run without a
client, orphans that were claimed among them.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core import metrics
from quire_router.core.errors import background_full, consumer_deadline_exceeded, record_lost, shutting_down
from quire_router.core.generation import (
    NO_USAGE,
    Delta,
    GenerationRequest,
    OwnedDeltaStream,
    ResponseConsumer,
    StreamCursor,
    Usage,
)
from quire_router.engines.attempt import Output
from quire_router.journal.base import Journal, Lease, RecordedDelta, RequestRecord, decode_error
from quire_router.requests.choice import create_choices
from quire_router.requests.deltas import chunked, mark_replayed, split_at_cursor, with_usage, yielding_to_loop

if TYPE_CHECKING:
    from quire_router.requests.runner import RequestRegistry

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.05  # seconds between two polls of a record that another router writes
MAX_POLLS_PER_SECOND = 400  # of all that follow records here
MAX_ORPHANS = 256  # background requests beyond which no orphans are claimed
MAX_ORPHAN_TOKENS = 16_777_216  # of all that were claimed and run, prompts and answers so far: 64 MiB


class RequestResumer:
    """Resumes requests of the models that have ``tokenizers``: for clients that return, and orphans in the
    ``background``. ``resume_claimed`` runs the rest of a request whose record was claimed; one in the ``registry``
    needs no claim.
    """

    def __init__(
        self,
        journal: Journal,
        tokenizers: Mapping[str, ModelTokenizer],
        registry: "RequestRegistry",
        background: "BackgroundRequests",
        resume_claimed: Callable[[RequestRecord, Lease, ResponseConsumer], OwnedDeltaStream],
    ) -> None:
        self._journal = journal
        self._tokenizers = tokenizers
        self._registry = registry
        self._background = background
        self._resume_claimed = resume_claimed
        self._pausing = 0

    async def resume(
        self, request: GenerationRequest, consumer: ResponseConsumer, cursor: StreamCursor
    ) -> AsyncGenerator[Delta]:
        """Replays the record and follows it while another router writes it; then claims the request and continues it.
        Raises ``QuireError``.
        """
        follower = self._journal.follow(request.request_id)
        replayer = Replayer(request, self._tokenizers[request.model], cursor)
        while (tail := await follower.poll()) is not None:
            ended = tail.finish_reason is not None
            async for delta in yielding_to_loop(replayer.replay(tail.deltas, ended=ended)):
                yield delta
            if tail.finish_reason is FinishReason.ERROR:
                raise decode_error(tail.error)
            if tail.finish_reason is not None:
                for delta in replayer.finish(tail.finish_reason, tail.usage):
                    yield replace(delta, pending=tail.pending and delta.usage is not None)
                return
            self._check_consumer(consumer)
            claimed = None if tail.leased else await self._claim(request.request_id)
            if claimed is not None:
                async with aclosing(self._continue(*claimed, replayer, consumer)) as answer:
                    async for delta in answer:
                        yield delta
                return
            await (asyncio.sleep(0) if tail.more else self._pause())
        raise record_lost()

    def _check_consumer(self, consumer: ResponseConsumer) -> None:
        if self._registry.drained:
            raise shutting_down()
        if consumer.seconds_left == 0:
            raise consumer_deadline_exceeded()

    async def _pause(self) -> None:
        """Waits between two polls of a record: all that follow records here make ``MAX_POLLS_PER_SECOND`` together."""
        self._pausing += 1
        try:
            await asyncio.sleep(max(POLL_INTERVAL, self._pausing / MAX_POLLS_PER_SECOND))
        finally:
            self._pausing -= 1

    async def _continue(
        self, record: RequestRecord, lease: Lease, replayer: "Replayer", consumer: ResponseConsumer
    ) -> AsyncGenerator[Delta]:
        async with aclosing(self._resume_claimed(record, lease, consumer)) as answer:
            async for delta in yielding_to_loop(replayer.replay_to_end(record.deltas)):
                yield delta
            async for delta in answer:
                yield delta

    async def claim_orphans(self) -> int:
        """Claims background requests whose routers released them or died, some at a time, unless there are many here
        already; returns how many. Raises ``QuireError``.
        """
        adopted = 0
        for request_id in await self._journal.orphans() if self._has_capacity() else ():
            if not self._has_capacity():
                break  # those that are left over come again
            try:
                adopted += await self.claim_orphan(request_id)
            except QuireError as error:
                if error.code is not ErrorCode.INTERNAL:
                    raise
                log.error("cannot resume background request %s", request_id)  # the others can
        return adopted

    async def claim_orphan(self, request_id: str) -> bool:
        """Claims a background request if no router holds its lease; returns whether it did. Raises ``QuireError``."""
        claimed = await self._claim(request_id) if await self._is_claimable(request_id) else None
        if claimed is not None:
            record, lease = claimed
            tokens = record.generation.stored_size + sum(len(delta.token_ids) for delta in record.deltas)
            self._background.run(self._resume_claimed(record, lease, ResponseConsumer()), tokens)
        return claimed is not None

    async def claim_if_orphaned(self, record: RequestRecord) -> None:
        """Takes over the background request of a ``record`` that was just read, if no router holds its lease and it has
        not ended: it may be missing in the index of orphans. Does not raise ``QuireError``, which would fail the read.
        """
        left = not record.leased and record.finish_reason is None
        if left and self._has_capacity():
            with suppress(QuireError):
                await self.claim_orphan(record.generation.request_id)

    def _has_capacity(self) -> bool:
        return self._background.has_orphan_capacity and not self._registry.draining

    async def _is_claimable(self, request_id: str) -> bool:
        """Whether a record's request is an orphan and can run here; routers of other models may share the journal. One
        that is damaged may be claimed by any router, which ends it.
        """
        try:
            record = await self._journal.read(request_id, tokens_only=True)
        except QuireError as error:
            if error.code is ErrorCode.INTERNAL:
                return True
            raise
        if record is None or record.leased or record.finish_reason is not None:
            return False
        return record.generation.background and record.generation.model in self._tokenizers

    async def _claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """Claims the record; returns None if another router holds its lease or the request is in flight here."""
        self._registry.check_accepting()
        if request_id in self._registry:
            return None  # it is ending here, and about to be released
        return await self._journal.claim(request_id)


class Replayer:
    """Makes the deltas of a record into those of an answer: with their text, and what is before ``cursor`` as replayed.

    Candidates, of which the best are delivered together, are replayed once all of them are there: a request whose
    record has only some of them is run again.
    """

    def __init__(self, request: GenerationRequest, tokenizer: ModelTokenizer, cursor: StreamCursor) -> None:
        self._cursor = cursor
        self._prompt_tokens = len(request.prompt_token_ids)
        self._deferred: list[RecordedDelta] | None = [] if request.selects_choices else None
        self._choices = create_choices(request, tokenizer, request.params.n)

    def replay(self, recorded: Iterable[RecordedDelta], *, ended: bool) -> Iterator[Delta]:
        """Yields the answer's deltas for the next ``recorded`` ones; with ``ended`` they are the last."""
        if self._deferred is not None:
            self._deferred += recorded
            recorded = self._deferred if ended else ()
        for delta in chunked(recorded):
            yield from self._replay_delta(delta, 0)

    def replay_to_end(self, recorded: Iterable[RecordedDelta]) -> Iterator[Delta]:
        """Yields the answer's deltas for all ``recorded`` ones of a record, without what was replayed before."""
        behind = [len(choice.token_ids) for choice in self._choices]
        for delta in chunked(recorded if self._deferred is None else ()):
            known = min(behind[delta.index], len(delta.token_ids))
            behind[delta.index] -= known
            yield from self._replay_delta(delta, known)

    def finish(self, reason: FinishReason, usage: Usage) -> list[Delta]:
        """Returns the last deltas: the ends of choices that were cut short, and the usage; if the record has none, that
        of what the consumer was sent.
        """
        if usage == NO_USAGE:
            usage = Usage(self._prompt_tokens, sum(len(choice.token_ids) for choice in self._choices))
        ends = []
        for choice in self._choices:
            if choice.finish_reason is None:
                ends.append(mark_replayed(choice.finish(reason), len(choice.token_ids), self._cursor))
        return with_usage(ends, usage, self._cursor)

    def _replay_delta(self, recorded: RecordedDelta, known: int) -> Iterator[Delta]:
        """``known`` of the delta's tokens were replayed before."""
        choice = self._choices[recorded.index]
        if choice.finish_reason is not None or (known == len(recorded.token_ids) and recorded.finish_reason is None):
            return
        output = Output(
            recorded.token_ids[known:],
            len(choice.token_ids),
            recorded.finish_reason,
            index=recorded.index,
            logprobs=recorded.logprobs[known:],
            score=recorded.score,
            stop_token=recorded.stop_token,
        )
        prompt = recorded.prompt_logprobs
        for part in split_at_cursor(output, self._cursor):
            delta = mark_replayed(choice.process(part), len(choice.token_ids), self._cursor)
            yield replace(delta, prompt_logprobs=prompt) if prompt else delta
            prompt = []


class BackgroundRequests:
    """Runs requests without a client, at most ``limit`` at a time: reads their answers to the end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    @property
    def has_orphan_capacity(self) -> bool:
        """Whether orphans are to be claimed: when a router dies, all of its background requests come at once, so their
        number and their tokens are bounded.
        """
        return len(self._tasks) < min(MAX_ORPHANS, self._limit) and self._tokens < MAX_ORPHAN_TOKENS

    def check_capacity(self) -> None:
        """Raises ``QuireError`` OVERLOADED when there are as many as there may be."""
        if len(self._tasks) >= self._limit:
            metrics.REJECTIONS.labels(ErrorCode.OVERLOADED.name.lower()).inc()
            raise background_full(self._limit)

    def run(self, answer: AsyncGenerator[Delta], tokens: int = 0) -> None:
        """Starts to read an answer; ``tokens`` are those of an orphan when it was claimed."""
        task = asyncio.create_task(_read_to_end(answer), name="background request")
        self._tasks.add(task)
        self._tokens += tokens

        def ended(_: object) -> None:
            self._tasks.discard(task)
            self._tokens -= tokens

        task.add_done_callback(ended)

    async def wait(self) -> None:
        """Waits until all of them have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _read_to_end(answer: AsyncGenerator[Delta]) -> None:
    try:
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                pass
    except QuireError as error:
        log.info("a background request ended: %s", error.code.name)
