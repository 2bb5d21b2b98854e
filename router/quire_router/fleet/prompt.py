"""The log-probabilities of one prompt's tokens, which an engine tells piece by piece."""

from collections.abc import Sequence

from quire_proto.logprobs import TokenLogprobs


class PromptLogprobsBuffer:
    """Gathers those of ``expected`` tokens, from the prompt's second on: nothing can be said of the first."""

    __slots__ = ("_gathered", "_next", "missing")

    def __init__(self, expected: int) -> None:
        self.missing = expected
        self._next = 1
        self._gathered: list[TokenLogprobs] = []

    def add(self, position: int, logprobs: Sequence[TokenLogprobs]) -> bool:
        """Takes those of the prompt's tokens from ``position`` on, without what came before or was not expected. False
        where some before them have not come.
        """
        if position > self._next:
            return False
        new = logprobs[self._next - position :][: self.missing]
        self._gathered += new
        self._next += len(new)
        self.missing -= len(new)
        return True

    def take(self) -> list[TokenLogprobs]:
        """All of them, once: nothing while some are missing, and nothing afterwards."""
        if self.missing or not self._gathered:
            return []
        taken, self._gathered = self._gathered, []
        return taken
