"""The engines as columns of numbers, a row each, so that a choice among a thousand is a few sums over arrays.

Rows are written as things happen (a dispatch, an engine's report, a peer's share) and read when a request is placed.
Does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_FIRST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an engine's steps take, in seconds: each step, each prompt token in it, each sequence that it draws a
    token for; and copying a block back from the host pool. As ``quire.v1.Pace``.
    """

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    host_block_seconds: float


UNKNOWN_PACE = Pace(step_seconds=0.01, token_seconds=1e-4, sequence_seconds=2e-4, host_block_seconds=1e-4)
"""What is assumed of an engine that has not told, when none like it has: a small GPU. Equal guesses cancel out in a
comparison."""


@dataclass(eq=False)
class Columns:
    """What is known of some engines, each a float64 array over rows: ``requests`` in flight from all routers;
    ``pending_tokens``, those of their prompts that are not computed yet, as far as they are not cached there;
    ``decoding`` sequences past their first token; ``waiting`` and ``swapped`` sequences as the engine last said;
    ``blocks_free`` (or evictable) and ``blocks_total``; ``max_sequences``; ``step_tokens``, the most that one step
    computes; ``block_size`` in tokens; the four of its ``Pace``, and ``paced``, 1 where they are its own word and 0
    where they are a guess; ``stepped``, when its last step began as far as is known, in seconds of the routers' clock,
    and ``computing``, how many of the pending tokens are in that step.
    """

    requests: Column
    pending_tokens: Column
    decoding: Column
    waiting: Column
    swapped: Column
    blocks_free: Column
    blocks_total: Column
    max_sequences: Column
    step_tokens: Column
    block_size: Column
    step_seconds: Column
    token_seconds: Column
    sequence_seconds: Column
    host_block_seconds: Column
    paced: Column
    computing: Column
    stepped: Column

    def queued(self) -> Column:
        """Requests that have no token yet."""
        return np.maximum(self.requests - self.decoding, 0)


class EngineTable(Columns):
    """One row an engine. A row keeps its number while the engine is known, and is used again afterwards.

    The columns are over all rows, and may be written to. ``unseen_tokens`` are those of prompts that other routers have
    sent to some of the engines and that are in no column yet, on average.
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self.ids: list[str | None] = []
        self.unseen_tokens = 0.0
        self._hold(np.zeros((len(fields(Columns)), 0)))

    def __len__(self) -> int:
        """How many rows there are, with those that are free."""
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Engines and their rows."""
        return iter(self._rows.items())

    def add(self, engine_id: str) -> int:
        """The row of a new engine, all zero but for guesses of its pace, its block size and its step's tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[engine_id], self.ids[row] = row, engine_id
        self._cells[:, row] = 0.0
        self.set_pace(row, UNKNOWN_PACE)
        self.paced[row] = 0
        self.block_size[row], self.step_tokens[row] = 16, 2048
        return row

    def remove(self, engine_id: str) -> None:
        """The engine has left; its row is free."""
        row = self._rows.pop(engine_id)
        self.ids[row] = None
        self._free.append(row)

    def row(self, engine_id: str) -> int:
        """Raises ``KeyError`` for an engine that is not known."""
        return self._rows[engine_id]

    def find(self, engine_id: str) -> int:
        """The engine's row, -1 when it is not known."""
        return self._rows.get(engine_id, -1)

    def at(self, rows: Rows) -> Columns:
        """A copy of these rows, in this order."""
        return Columns(*self._cells.take(rows, axis=1))

    def set_pace(self, row: int, pace: Pace) -> None:
        """How fast the engine is, from now on."""
        self.step_seconds[row] = pace.step_seconds
        self.token_seconds[row] = pace.token_seconds
        self.sequence_seconds[row] = pace.sequence_seconds
        self.host_block_seconds[row] = pace.host_block_seconds
        self.paced[row] = 1

    def _grow(self) -> None:
        old, new = len(self.ids), max(_FIRST_ROWS, 2 * len(self.ids))
        self._hold(np.concatenate([self._cells, np.zeros((len(self._cells), new - old))], axis=1))
        self.ids += [None] * (new - old)
        self._free += range(new - 1, old - 1, -1)

    def _hold(self, cells: npt.NDArray[np.float64]) -> None:
        """All columns lie in one array, so that reading some rows of all of them is one step."""
        self._cells = cells
        super().__init__(*cells)
