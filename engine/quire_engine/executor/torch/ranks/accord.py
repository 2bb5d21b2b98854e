"""Whether all ranks come to the same end of a call. Knows neither what a call is nor how it is made.

All ranks make the same calls, each of which fails on all of them in the same place or on none: a batch that is wrong is
refused by every rank before anything is exchanged, and the next call finds all of them ready. Whatever else happens,
one rank waits for what another will never send, and the engine has to end.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank's failure in the call ``number``, after it had begun so many ``collectives``; ``text`` says why. It is
    ``user_error`` where the text is a whole sentence for whoever chose the settings.
    """

    call_number: int
    collectives: int
    reason: str
    user_error: bool = False


class RankFailureTracker:
    """Rank 0's latest call, and what the ``others`` (their number) reported. Not thread-safe."""

    def __init__(self, others: int) -> None:
        self._num_other_ranks = others
        self._call_number = 0
        self._own_failure: RankFailure | None = None
        self._succeeded = True
        self._reported_failures: dict[int, RankFailure] = {}

    def begin_call(self) -> int:
        """Begins the next call; its number."""
        self._call_number += 1
        self._own_failure, self._succeeded = None, False
        self._reported_failures.clear()
        return self._call_number

    def record_success(self) -> None:
        """The call has succeeded on rank 0."""
        self._succeeded = True

    def record_failure(self, collectives: int, text: str) -> None:
        """The call has failed on rank 0."""
        self._own_failure = RankFailure(self._call_number, collectives, text)

    def record_remote_failure(self, rank: int, failure: RankFailure) -> None:
        """The call has failed on another rank."""
        self._reported_failures[rank] = failure

    @property
    def all_failed_alike(self) -> bool:
        """Whether all ranks have failed in the same place."""
        return (
            self._own_failure is not None
            and len(self._reported_failures) == self._num_other_ranks
            and self.divergence is None
        )

    @property
    def divergence(self) -> str | None:
        """What is certain to leave the ranks in different places, as a sentence."""
        for rank, failure in sorted(self._reported_failures.items()):
            if failure.user_error and self._own_failure is None:
                return failure.reason
            if self._succeeded or failure.call_number < self._call_number:
                return f"Rank {rank} failed in a step that rank 0 computed: {failure.reason}."
            if self._own_failure is not None and failure.collectives != self._own_failure.collectives:
                return f"Rank {rank} failed in another place than rank 0: {failure.reason}."
        return None

    @property
    def suspected_failure(self) -> str | None:
        """What is wrong, as a sentence, unless the ranks that have not failed yet are about to."""
        if self.all_failed_alike:
            return None
        failed = {rank: each.reason for rank, each in self._reported_failures.items()}
        if self._own_failure is not None:
            failed[0] = self._own_failure.reason
        if not failed:
            return None
        rank = min(failed)
        return f"Rank {rank} failed in a step in which other ranks did not: {failed[rank]}."
