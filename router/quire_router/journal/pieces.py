"""What was told, put together again where it was cut. Knows neither rows nor databases."""

from quire_router.journal.base import RecordedDelta


class DeltaMerger:
    """A list of deltas, in which plain ones of one choice are one until something else of that choice comes: choices
    that run side by side are cut at every token.
    """

    __slots__ = ("_open", "deltas")

    def __init__(self) -> None:
        self.deltas: list[RecordedDelta] = []
        self._open: dict[int, list[int]] = {}

    def add(self, delta: RecordedDelta) -> None:
        """The next delta, whose tokens become the list's own."""
        plain = not delta.logprobs and not delta.prompt_logprobs and delta.score is None
        if not plain or delta.finish_reason is not None:
            self._open.pop(delta.index, None)
            self.deltas.append(delta)
        elif (tokens := self._open.get(delta.index)) is not None:
            tokens += delta.token_ids
        else:
            self._open[delta.index] = delta.token_ids
            self.deltas.append(delta)
