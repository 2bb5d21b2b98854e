"""What was told, put together again where it was cut. Knows neither rows nor databases."""

from quire_router.journal.base import Told


class Pieces:
    """A list of pieces, in which plain ones of one choice are one until something else of that choice comes: choices
    that run side by side are cut at every token.
    """

    __slots__ = ("_open", "pieces")

    def __init__(self) -> None:
        self.pieces: list[Told] = []
        self._open: dict[int, list[int]] = {}

    def add(self, piece: Told) -> None:
        """The next piece, whose tokens become the list's own."""
        plain = not piece.logprobs and not piece.prompt_logprobs and piece.score is None
        if not plain or piece.finish_reason is not None:
            self._open.pop(piece.index, None)
            self.pieces.append(piece)
        elif (tokens := self._open.get(piece.index)) is not None:
            tokens += piece.token_ids
        else:
            self._open[piece.index] = piece.token_ids
            self.pieces.append(piece)
