"""How a request goes on that was begun before: whoever wants its answer follows its record while somebody writes it,
and takes it up when nobody does. Makes no tokens itself.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace

from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason
from quire_proto.text.tokenizer import ModelTokenizer

from quire_router.core.errors import shutting_down_error
from quire_router.core.generation import (
    NO_USAGE,
    Delta,
    GenerationRequest,
    OwnedDeltaStream,
    ResponseConsumer,
    StreamCursor,
    Usage,
    deadline_exceeded,
)
from quire_router.engines.output_stream import Output
from quire_router.journal.base import Journal, Lease, RecordedDelta, RequestRecord, decode_error
from quire_router.requests.choices import chunked, mark_replayed, split_at_cursor, with_usage, yielding_to_loop
from quire_router.requests.registry import BackgroundRequests, RequestRegistry
from quire_router.requests.state import create_choices

log = logging.getLogger(__name__)

POLL_INTERVAL = 0.05  # seconds between two looks at a record that another writes
MAX_POLLS_PER_SECOND = 400  # in a second, of all that follow records here


class RequestResumer:
    """Resumes requests of the models that have ``texts``: for readers that come back, and those that nobody waits for
    in the ``background``. ``go_on`` makes the rest of an answer whose record was claimed; what is in flight ``here``
    needs no claim.
    """

    def __init__(
        self,
        journal: Journal,
        texts: Mapping[str, ModelTokenizer],
        here: RequestRegistry,
        background: BackgroundRequests,
        go_on: Callable[[RequestRecord, Lease, ResponseConsumer], OwnedDeltaStream],
    ) -> None:
        self._journal = journal
        self._texts = texts
        self._registry = here
        self._background = background
        self._resume_claimed = go_on
        self._pausing = 0

    async def resume(
        self, generation: GenerationRequest, reader: ResponseConsumer, mark: StreamCursor
    ) -> AsyncGenerator[Delta]:
        """Tells what is written, for as long as another writes it; then goes on with it."""
        follower = self._journal.follow(generation.request_id)
        retelling = Replayer(generation, self._texts[generation.model], mark)
        while (tail := await follower.poll()) is not None:
            ended = tail.finish_reason is not None
            async for delta in yielding_to_loop(retelling.replay(tail.deltas, ended=ended)):
                yield delta
            if tail.finish_reason is FinishReason.ERROR:
                raise decode_error(tail.error)
            if tail.finish_reason is not None:
                for delta in retelling.finish(tail.finish_reason, tail.usage):
                    yield delta
                return
            self._check_consumer(reader)
            claimed = None if tail.leased else await self._claim(generation.request_id)
            if claimed is not None:
                async with aclosing(self._continue(*claimed, retelling, reader)) as answer:
                    async for delta in answer:
                        yield delta
                return
            await (asyncio.sleep(0) if tail.more else self._pause())
        raise QuireError(ErrorCode.NOT_FOUND, "What was known of this request was lost.", param="request_id")

    def _check_consumer(self, reader: ResponseConsumer) -> None:
        if self._registry.drained:
            raise shutting_down_error()
        if reader.seconds_left == 0:
            raise deadline_exceeded()

    async def _pause(self) -> None:
        """Between two looks at a record: however many follow records here, they look only so often together."""
        self._pausing += 1
        try:
            await asyncio.sleep(max(POLL_INTERVAL, self._pausing / MAX_POLLS_PER_SECOND))
        finally:
            self._pausing -= 1

    async def _continue(
        self, record: RequestRecord, lease: Lease, retelling: "Replayer", reader: ResponseConsumer
    ) -> AsyncGenerator[Delta]:
        async with aclosing(self._resume_claimed(record, lease, reader)) as answer:
            async for delta in yielding_to_loop(retelling.replay_to_end(record.deltas)):
                yield delta
            async for delta in answer:
                yield delta

    async def claim_orphans(self) -> int:
        """Takes up background requests that their routers left, some at a time, unless there are many here already;
        returns how many. Raises ``QuireError``.
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
                log.error("background request %s cannot be taken up", request_id)  # the others can
        return adopted

    async def claim_orphan(self, request_id: str) -> bool:
        """Takes up a background request if its router left it. Raises ``QuireError``."""
        claimed = await self._claim(request_id) if await self._is_claimable(request_id) else None
        if claimed is not None:
            record, lease = claimed
            tokens = record.generation.stored_size + sum(len(piece.token_ids) for piece in record.deltas)
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
        """Whether a record's request is left, and can run here; routers of other models may share the journal. One that
        is damaged is everybody's: whoever claims it ends it.
        """
        try:
            record = await self._journal.read(request_id, tokens_only=True)
        except QuireError as error:
            if error.code is ErrorCode.INTERNAL:
                return True
            raise
        if record is None or record.leased or record.finish_reason is not None:
            return False
        return record.generation.background and record.generation.model in self._texts

    async def _claim(self, request_id: str) -> tuple[RequestRecord, Lease] | None:
        """The record, if nobody holds it and this router may take it up."""
        self._registry.check_accepting()
        if request_id in self._registry:
            return None  # it is ending here, and about to be let go of
        return await self._journal.claim(request_id)


class Replayer:
    """Makes the pieces of a record into those of an answer: their text again, and what is before ``mark`` as told.

    Choices that are told together are told once all of them are there: whoever goes on with a record that has only some
    of them runs the request again.
    """

    def __init__(self, generation: GenerationRequest, text: ModelTokenizer, mark: StreamCursor) -> None:
        self._cursor = mark
        self._prompt_tokens = len(generation.prompt_token_ids)
        self._deferred: list[RecordedDelta] | None = [] if generation.selects_choices else None
        self._choices = create_choices(generation, text, generation.params.n)

    def replay(self, pieces: Iterable[RecordedDelta], *, ended: bool) -> Iterator[Delta]:
        """The answer's pieces for ``pieces`` that go on from those that were given before, ``ended`` with the last."""
        if self._deferred is not None:
            self._deferred += pieces
            pieces = self._deferred if ended else ()
        for piece in chunked(pieces):
            yield from self._replay_piece(piece, 0)

    def replay_to_end(self, pieces: Iterable[RecordedDelta]) -> Iterator[Delta]:
        """The answer's pieces for all ``pieces`` of a record, without what was retold before."""
        behind = [len(choice.token_ids) for choice in self._choices]
        for piece in chunked(pieces if self._deferred is None else ()):
            known = min(behind[piece.index], len(piece.token_ids))
            behind[piece.index] -= known
            yield from self._replay_piece(piece, known)

    def finish(self, reason: FinishReason, usage: Usage) -> list[Delta]:
        """The last pieces: the ends of choices that have none of their own, as they were cut short, and the usage;
        where nobody who ran the request told it, that of what the reader was told.
        """
        if usage == NO_USAGE:
            usage = Usage(self._prompt_tokens, sum(len(choice.token_ids) for choice in self._choices))
        ends = []
        for choice in self._choices:
            if choice.finish_reason is None:
                ends.append(mark_replayed(choice.finish(reason), len(choice.token_ids), self._cursor))
        return with_usage(ends, usage, self._cursor)

    def _replay_piece(self, piece: RecordedDelta, known: int) -> Iterator[Delta]:
        """``known`` of the piece's tokens were retold."""
        choice = self._choices[piece.index]
        if choice.finish_reason is not None or (known == len(piece.token_ids) and piece.finish_reason is None):
            return
        output = Output(
            piece.token_ids[known:],
            len(choice.token_ids),
            piece.finish_reason,
            index=piece.index,
            logprobs=piece.logprobs[known:],
            score=piece.score,
        )
        prompt = piece.prompt_logprobs
        for part in split_at_cursor(output, self._cursor):
            delta = mark_replayed(choice.process(part), len(choice.token_ids), self._cursor)
            yield replace(delta, prompt_logprobs=prompt) if prompt else delta
            prompt = []
