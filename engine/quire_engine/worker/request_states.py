"""What a worker keeps between steps of the sequences that run: their tokens, block tables and sampling parameters.

A cache of the scheduler's: each sequence has a row, steps say what is new in it, and a row can be sent again at any
time. The rows of a step are read with one gather for all of them, so preparing a decode step has no loop over
sequences.
"""

from array import array

import numpy as np
import numpy.typing as npt

from quire_engine.core.step import NewRequest, SchedulerOutput
from quire_engine.sampling.logits_processors import is_plain
from quire_engine.sampling.metadata import SamplingColumns

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
_FIRST_ROWS = 64
_FIRST_NUMBERS = 4096
_MIN_ROOM = 16


class RaggedRows:
    """Rows of int32 that grow, one behind the other in one array ``data``: number i of a row is at ``starts[row] + i``.

    A row that outgrows its place moves to the end; when that is reached, the rows are packed into another array, of
    twice what they need. So it takes at most some four times the numbers that the rows had at their longest.
    """

    def __init__(self) -> None:
        self.data: Numbers = np.zeros(_FIRST_NUMBERS, np.int32)
        self.starts: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self._rooms: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self._end = 0

    def put(self, row: int, numbers: Numbers) -> None:
        """Makes a row of these numbers, with room for more."""
        if row >= len(self.starts):
            self._add_rows(row + 1)
        if self._rooms[row] < len(numbers) + 1:
            self._rooms[row] = 0  # nothing of it needs to move
            self._move(row, len(numbers) + 1)
        start = self.starts[row]
        self.data[start : start + len(numbers)] = numbers

    def write(self, rows: Indices, indices: Indices, numbers: Numbers | Indices) -> None:
        """Writes ``numbers[i]`` at ``indices[i]`` of ``rows[i]``; of equal places the last one counts."""
        missing = indices >= self._rooms[rows]
        if missing.any():
            for row, index in zip(rows[missing].tolist(), indices[missing].tolist(), strict=True):
                if index >= self._rooms[row]:
                    self._move(row, index + 1)
        self.data[self.starts[rows] + indices] = numbers

    def row(self, row: int) -> Numbers:
        """The numbers of one row, and what lies in its room behind them."""
        return self.data[self.starts[row] : self.starts[row] + self._rooms[row]]

    def gather(self, rows: Indices, firsts: Indices, counts: Indices, indptr: Indices) -> Numbers:
        """``counts[i]`` numbers of each of ``rows`` from ``firsts[i]`` on, packed; ``indptr`` bounds them."""
        places = np.repeat(self.starts[rows] + firsts - indptr[:-1], counts)
        places += np.arange(len(places))
        return self.data[places]

    def _add_rows(self, count: int) -> None:
        more = max(count, 2 * len(self.starts)) - len(self.starts)
        self.starts, self._rooms = np.pad(self.starts, (0, more)), np.pad(self._rooms, (0, more))

    def _move(self, row: int, size: int) -> None:
        """Gives a row a place for at least ``size`` numbers, and takes its numbers along."""
        room = max(_MIN_ROOM, size + size // 4)
        if self._end + room > len(self.data):
            self._pack(room)
        start, old = self.starts[row], self._rooms[row]
        self.data[self._end : self._end + old] = self.data[start : start + old]
        self.starts[row], self._rooms[row] = self._end, room
        self._end += room

    def _pack(self, room: int) -> None:
        """Moves all rows to the beginning of an array that has ``room`` behind them."""
        total = int(self._rooms.sum())
        data = np.zeros(max(_FIRST_NUMBERS, 2 * (total + room)), np.int32)
        ends = np.cumsum(self._rooms)
        data[:total] = self.gather(np.arange(len(self.starts)), np.zeros_like(ends), self._rooms, np.append(0, ends))
        self.data, self.starts, self._end = data, ends - self._rooms, total


class RequestStates:
    """The tokens of each row, its block table for each group of layers, and how its tokens are drawn."""

    def __init__(self, num_groups: int) -> None:
        self.tokens = RaggedRows()
        self.blocks = tuple(RaggedRows() for _ in range(num_groups))
        self.sampling = SamplingColumns()

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the rows up to date with a step."""
        for new in scheduler_output.new:
            self._add(new)
        if scheduler_output.new_tokens:
            _write(self.tokens, scheduler_output.new_tokens)
        for blocks, changes in zip(self.blocks, scheduler_output.new_blocks, strict=False):
            if changes:
                _write(blocks, changes)

    def _add(self, new: NewRequest) -> None:
        self.tokens.put(new.row, np.frombuffer(new.token_ids, np.int32))
        for blocks, block_ids in zip(self.blocks, new.block_ids, strict=True):
            blocks.put(new.row, np.frombuffer(block_ids, np.int32))
        request = new.sample_request
        self.sampling.put(new.row, request, is_plain=request is not None and is_plain(request))


def _write(rows: RaggedRows, triples: "array[int]") -> None:
    """Writes the changes of rows: int32 triples of a row, an index in it and a number."""
    changes = np.frombuffer(triples, np.int32).reshape(-1, 3).astype(np.int64)
    rows.write(changes[:, 0], changes[:, 1], changes[:, 2])
