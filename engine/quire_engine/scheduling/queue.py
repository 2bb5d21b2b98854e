"""Queues of sequences in arrival order, with O(1) removal from anywhere."""

from collections import OrderedDict
from collections.abc import Iterator

from quire_engine.request import Sequence


class SequenceQueue:
    """First come, first served. The order is that of ``push``, never that of a set or of addresses."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        """Adds at the end."""
        self._sequences[sequence.id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """Adds at the front, for one that had already been admitted."""
        self.push(sequence)
        self._sequences.move_to_end(sequence.id, last=False)

    def first(self) -> Sequence:
        """The one that has waited longest."""
        return next(iter(self._sequences.values()))

    def last(self) -> Sequence:
        """The newest."""
        return next(reversed(self._sequences.values()))

    def remove(self, sequence: Sequence) -> None:
        """Takes one out, wherever it stands."""
        del self._sequences[sequence.id]


class WaitingQueue(SequenceQueue):
    """Sequences for which nothing is computed, and the tokens that this work amounts to."""

    def __init__(self) -> None:
        super().__init__()
        self.uncomputed_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Adds at the end."""
        super().push(sequence)
        self.uncomputed_tokens += sequence.num_uncomputed

    def remove(self, sequence: Sequence) -> None:
        """Takes one out, wherever it stands; call it before anything of the sequence changes."""
        super().remove(sequence)
        self.uncomputed_tokens -= sequence.num_uncomputed
