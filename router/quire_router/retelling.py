"""An answer told again from its record, up to where its reader stands and beyond. Does no I/O and knows no engine."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from quire_proto.text.model_text import ModelText

from quire_router.choice import open_choices
from quire_router.fleet.output import Output
from quire_router.generation import Delta, Generation, Usage
from quire_router.journal.base import Told
from quire_router.mark import Mark


class Retelling:
    """Makes the pieces of a record into those of an answer: their text again, and what is before ``mark`` as told."""

    def __init__(self, generation: Generation, text: ModelText, mark: Mark) -> None:
        self._mark = mark
        self._choices = open_choices(generation, text, generation.params.n)

    def follow(self, pieces: Iterable[Told]) -> Iterator[Delta]:
        """The answer's pieces for ``pieces`` that go on from those that were given before."""
        for piece in pieces:
            yield from self._retell(piece, 0)

    def catch_up(self, pieces: Iterable[Told]) -> Iterator[Delta]:
        """The answer's pieces for all ``pieces`` of a record, without what was retold before."""
        behind = [len(choice.token_ids) for choice in self._choices]
        for piece in pieces:
            known = min(behind[piece.index], len(piece.token_ids))
            behind[piece.index] -= known
            yield from self._retell(piece, known)

    def end(self, usage: Usage) -> Delta:
        """The last piece, once every choice has ended: the usage alone."""
        return Delta("", [], usage=usage, told=self._mark.usage)

    def _retell(self, piece: Told, known: int) -> Iterator[Delta]:
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
        for part in parted(output, self._mark):
            delta = as_told(choice.take(part), len(choice.token_ids), self._mark)
            yield replace(delta, prompt_logprobs=prompt) if prompt else delta
            prompt = []


def parted(output: Output, mark: Mark) -> list[Output]:
    """The output, in two where its reader stands within it: what it has, and what follows."""
    count = mark.position(output.index) - output.position
    inside = 0 < count < len(output.token_ids)
    at_its_end = count == len(output.token_ids) > 0 and output.finish_reason is not None
    if not inside and not (at_its_end and not mark.ended(output.index)):
        return [output]
    had = replace(output, token_ids=output.token_ids[:count], logprobs=output.logprobs[:count], finish_reason=None)
    output.drop(count)
    return [had, output]


def as_told(piece: Delta, position: int, mark: Mark) -> Delta:
    """The piece, as told if its reader had it: it ends at ``position`` of its choice."""
    begun, ended = mark.begun(piece.index), mark.ended(piece.index)
    had = begun and position <= mark.position(piece.index) and (piece.finish_reason is None or ended)
    return replace(piece, told=True) if had else piece


def with_usage(pieces: list[Delta], usage: Usage, mark: Mark | None) -> list[Delta]:
    """The last pieces of an answer, with its usage in the very last one; by itself where the reader had the others."""
    if pieces and not pieces[-1].told:
        return [*pieces[:-1], replace(pieces[-1], usage=usage)]
    return [*pieces, Delta("", [], usage=usage, told=mark is not None and mark.usage)]
