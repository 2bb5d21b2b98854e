"""Whether all ranks come to the same end of a call. Knows neither what a call is nor how it is made.

All ranks make the same calls, each of which fails on all of them in the same place or on none: a batch that is wrong is
refused by every rank before anything is exchanged, and the next call finds all of them ready. Whatever else happens,
one rank waits for what another will never send, and the engine has to end.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's failure in the call ``number``, after it had begun so many ``collectives``; ``text`` says why. It is
    ``user_error`` where the text is a whole sentence for whoever chose the settings.
    """

    number: int
    collectives: int
    text: str
    user_error: bool = False


class Accord:
    """Rank 0's latest call, and what the ``others`` (their number) reported. Not thread-safe."""

    def __init__(self, others: int) -> None:
        self._others = others
        self._number = 0
        self._own: Failure | None = None
        self._succeeded = True
        self._reported: dict[int, Failure] = {}

    def begin(self) -> int:
        """Begins the next call; its number."""
        self._number += 1
        self._own, self._succeeded = None, False
        self._reported.clear()
        return self._number

    def succeed(self) -> None:
        """The call has succeeded on rank 0."""
        self._succeeded = True

    def fail(self, collectives: int, text: str) -> None:
        """The call has failed on rank 0."""
        self._own = Failure(self._number, collectives, text)

    def report(self, rank: int, failure: Failure) -> None:
        """The call has failed on another rank."""
        self._reported[rank] = failure

    @property
    def is_settled(self) -> bool:
        """Whether all ranks have failed in the same place."""
        return self._own is not None and len(self._reported) == self._others and self.disagreement is None

    @property
    def disagreement(self) -> str | None:
        """What is certain to leave the ranks in different places, as a sentence."""
        for rank, failure in sorted(self._reported.items()):
            if failure.user_error and self._own is None:
                return failure.text
            if self._succeeded or failure.number < self._number:
                return f"Rank {rank} failed in a step that rank 0 computed: {failure.text}."
            if self._own is not None and failure.collectives != self._own.collectives:
                return f"Rank {rank} failed in another place than rank 0: {failure.text}."
        return None

    @property
    def doubt(self) -> str | None:
        """What is wrong, as a sentence, unless the ranks that have not failed yet are about to."""
        if self.is_settled:
            return None
        failed = {rank: each.text for rank, each in self._reported.items()}
        if self._own is not None:
            failed[0] = self._own.text
        if not failed:
            return None
        rank = min(failed)
        return f"Rank {rank} failed in a step in which other ranks did not: {failed[rank]}."
