"""One choice of an answer between its first and its last piece: its tokens and its text."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs, best_of, mean_logprob

from quire_router.core.generation import Delta, StreamCursor, Usage
from quire_router.engines.output_stream import Output
from quire_router.journal.base import AnyDelta, RecordedDelta

# The choices of a request that is told only when all of them have ended: which ones, and in which order.


@dataclass(slots=True)
class _Candidate:
    """All pieces of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None


class BestOfSelection:
    """Holds back the candidates of ``best_of`` and of a beam search.

    Candidates are ranked by the mean log-probability of their tokens, equal ones by index; a search has ranked its
    beams already. When the client cancels, it gets the best of what there is.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._candidates: dict[int, _Candidate] = {}

    def add(self, piece: Delta) -> None:
        """Keeps a piece of a candidate."""
        whole = self._candidates.setdefault(piece.index, _Candidate())
        whole.texts.append(piece.text)
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.finish_reason, whole.score = piece.finish_reason, piece.score

    def best(self) -> list[Delta]:
        """One piece for each of the ``n`` best, best first. All have ended; if any did by being cancelled, nobody can
        say which ones would have been best, so all of them are given that reason.
        """
        wholes = [self._candidates[index] for index in sorted(self._candidates)]
        aborted = any(whole.finish_reason is FinishReason.ABORT for whole in wholes)
        if not self._params.beam_width:
            means = [mean_logprob(whole.logprobs) for whole in wholes]
            wholes = [wholes[index] for index in best_of(means, self._params.n)]
        return [self._to_delta(index, whole, aborted) for index, whole in enumerate(wholes)]

    def _to_delta(self, index: int, whole: _Candidate, aborted: bool) -> Delta:
        return Delta(
            "".join(whole.texts),
            whole.token_ids,
            FinishReason.ABORT if aborted else whole.finish_reason,
            index=index,
            logprobs=whole.logprobs if self._params.logprobs is not None else [],
            score=whole.score,
        )


# An answer told again from its record, up to where its reader stands and beyond. Does no I/O.


CHUNK_TOKENS = 256
"""Tokens of a part: a millisecond or so."""
P = TypeVar("P", bound=AnyDelta)


async def yielding_to_loop(pieces: Iterable[P]) -> AsyncGenerator[P]:
    """The pieces, between which others get their turn: there may be many, and each takes a while to make."""
    tokens = 0
    for piece in pieces:
        yield piece
        tokens += len(piece.token_ids) + sum(len(each.top) for each in piece.logprobs)
        if tokens >= CHUNK_TOKENS:
            tokens = 0
            await asyncio.sleep(0)


def chunked(pieces: Iterable[RecordedDelta]) -> Iterator[RecordedDelta]:
    """The same pieces, none of which has so many tokens that making their text would hold up others."""
    for piece in pieces:
        for start in range(0, len(piece.token_ids) - CHUNK_TOKENS, CHUNK_TOKENS):
            yield _chunk(piece, start, start + CHUNK_TOKENS)
        rest = (max(1, len(piece.token_ids)) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        yield piece if rest == 0 else _chunk(piece, rest, None)


def _chunk(piece: RecordedDelta, start: int, end: int | None) -> RecordedDelta:
    return RecordedDelta(
        piece.index,
        piece.token_ids[start:end],
        piece.finish_reason if end is None else None,
        piece.logprobs[start:end],
        [] if start else piece.prompt_logprobs,
        piece.score if end is None else None,
    )


def split_at_cursor(output: Output, mark: StreamCursor) -> list[Output]:
    """The output, in two where its reader stands within it: what it has, and what follows."""
    count = mark.position(output.index) - output.position
    inside = 0 < count < len(output.token_ids)
    at_its_end = count == len(output.token_ids) > 0 and output.finish_reason is not None
    if not inside and not (at_its_end and not mark.ended(output.index)):
        return [output]
    had = replace(output, token_ids=output.token_ids[:count], logprobs=output.logprobs[:count], finish_reason=None)
    output.drop(count)
    return [had, output]


def mark_replayed(piece: Delta, position: int, mark: StreamCursor) -> Delta:
    """The piece, as told if its reader had it: it ends at ``position`` of its choice."""
    begun, ended = mark.begun(piece.index), mark.ended(piece.index)
    had = begun and position <= mark.position(piece.index) and (piece.finish_reason is None or ended)
    return replace(piece, replayed=True) if had else piece


def with_usage(pieces: list[Delta], usage: Usage, mark: StreamCursor | None) -> list[Delta]:
    """The last pieces of an answer, with its usage in the very last one; by itself where the reader had the others."""
    if pieces and not pieces[-1].replayed:
        return [*pieces[:-1], replace(pieces[-1], usage=usage)]
    return [*pieces, Delta("", [], usage=usage, replayed=mark is not None and mark.usage)]
