"""Deltas of an answer that are not passed on one by one as they come: those of candidates, of which ``BestOfSelection``
delivers the best together, and those of a record, which are cut and marked by what their consumer has received. Does no
I/O.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs, best_of, mean_logprob
from quire_proto.text.stream_scanner import OutputPart

from quire_router.core.generation import Delta, StreamCursor, Usage
from quire_router.engines.attempt import Output
from quire_router.journal.base import AnyDelta, RecordedDelta


@dataclass(slots=True)
class _Candidate:
    """All deltas of one choice."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    score: float | None = None
    stop_token: StopToken | None = None
    stop_string: str | None = None
    parts: list[OutputPart] | None = None


class BestOfSelection:
    """Holds back the candidates of ``best_of`` and of a beam search.

    Candidates are ranked by the mean log-probability of their tokens, equal ones by index; a search has ranked its
    beams already. A client that cancels gets the best of what there is.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._candidates: dict[int, _Candidate] = {}

    def add(self, delta: Delta) -> None:
        """Keeps a delta of a candidate."""
        whole = self._candidates.setdefault(delta.index, _Candidate())
        whole.texts.append(delta.text)
        whole.token_ids += delta.token_ids
        whole.logprobs += delta.logprobs
        whole.finish_reason, whole.score = delta.finish_reason, delta.score
        whole.stop_token, whole.stop_string = delta.stop_token, delta.stop_string
        if delta.parts is not None:
            whole.parts = [*(whole.parts or ()), *delta.parts]

    def best(self) -> list[Delta]:
        """Returns one delta for each of the ``n`` best, best first. All have ended; if one of them was cancelled, it is
        not known which would have been best, so all of them get ABORT as their reason.
        """
        wholes = [self._candidates[index] for index in sorted(self._candidates)]
        aborted = any(whole.finish_reason is FinishReason.ABORT for whole in wholes)
        if not self._params.beam_width:
            means = [mean_logprob(whole.logprobs) for whole in wholes]
            wholes = [wholes[index] for index in best_of(means, self._params.n)]
        return [self._to_delta(index, whole, aborted) for index, whole in enumerate(wholes)]

    def _to_delta(self, index: int, whole: _Candidate, aborted: bool) -> Delta:
        shows_logprobs = self._params.logprobs is not None
        return Delta(
            "".join(whole.texts),
            whole.token_ids,
            FinishReason.ABORT if aborted else whole.finish_reason,
            index=index,
            logprobs=whole.logprobs if shows_logprobs else [],
            score=whole.score,
            stop_token=None if aborted else self._shown(whole.stop_token),
            stop_string=None if aborted else whole.stop_string,
            parts=whole.parts,
        )

    def _shown(self, stop_token: StopToken | None) -> StopToken | None:
        """Returns the token that ended a candidate as a request shows it that may need log-probabilities itself."""
        if stop_token is None or self._params.logprobs is not None:
            return stop_token
        return StopToken(stop_token.token_id) if stop_token.token_id in self._params.stop_token_ids else None


CHUNK_TOKENS = 256
"""Tokens that are processed before the event loop gets a turn: a millisecond or so."""
P = TypeVar("P", bound=AnyDelta)


async def yielding_to_loop(deltas: Iterable[P]) -> AsyncGenerator[P]:
    """Yields the deltas, and lets the event loop run after every ``CHUNK_TOKENS`` tokens and log-probabilities."""
    tokens = 0
    for delta in deltas:
        yield delta
        tokens += len(delta.token_ids) + sum(len(each.top) for each in delta.logprobs)
        if tokens >= CHUNK_TOKENS:
            tokens = 0
            await asyncio.sleep(0)


def chunked(deltas: Iterable[RecordedDelta]) -> Iterator[RecordedDelta]:
    """Yields the same deltas, cut to at most ``CHUNK_TOKENS`` tokens, so that detokenising one holds up no stream."""
    for delta in deltas:
        for start in range(0, len(delta.token_ids) - CHUNK_TOKENS, CHUNK_TOKENS):
            yield _chunk(delta, start, start + CHUNK_TOKENS)
        rest = (max(1, len(delta.token_ids)) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        yield delta if rest == 0 else _chunk(delta, rest, None)


def _chunk(delta: RecordedDelta, start: int, end: int | None) -> RecordedDelta:
    return RecordedDelta(
        delta.index,
        delta.token_ids[start:end],
        delta.finish_reason if end is None else None,
        delta.logprobs[start:end],
        [] if start else delta.prompt_logprobs,
        delta.score if end is None else None,
        delta.stop_token if end is None else None,
    )


def split_at_cursor(output: Output, cursor: StreamCursor) -> list[Output]:
    """Returns the output, cut in two if the cursor is within it: what the consumer has, and what follows."""
    count = cursor.position(output.index) - output.position
    inside = 0 < count < len(output.token_ids)
    at_its_end = count == len(output.token_ids) > 0 and output.finish_reason is not None
    if not inside and not (at_its_end and not cursor.ended(output.index)):
        return [output]
    token_ids, logprobs = output.token_ids[:count], output.logprobs[:count]
    had = replace(output, token_ids=token_ids, logprobs=logprobs, finish_reason=None, stop_token=None)
    output.drop(count)
    return [had, output]


def mark_replayed(delta: Delta, position: int, cursor: StreamCursor) -> Delta:
    """Returns the delta, marked as replayed if its consumer has it; ``position`` is its end in its choice's tokens."""
    started, ended = cursor.started(delta.index), cursor.ended(delta.index)
    had = started and position <= cursor.position(delta.index) and (delta.finish_reason is None or ended)
    return replace(delta, replayed=True) if had else delta


def with_usage(deltas: list[Delta], usage: Usage, cursor: StreamCursor | None) -> list[Delta]:
    """Returns the last deltas of an answer with its usage: in the last one, or in one of its own if the consumer has
    that.
    """
    if deltas and not deltas[-1].replayed:
        return [*deltas[:-1], replace(deltas[-1], usage=usage)]
    return [*deltas, Delta("", [], usage=usage, replayed=cursor is not None and cursor.usage)]
