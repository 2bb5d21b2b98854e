"""The engines as columns of numbers, a row each, so that a choice among a thousand is a few sums over arrays.

Rows are written as things happen (a dispatch, an engine's report, a peer's share) and read when a request is placed.
Does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

# ``ArrayCache``: what was found of arrays of rows. A fleet hands out the same array until its engines change.


MAX_CACHED_ARRAYS = 16

Found = TypeVar("Found")


class ArrayCache(Generic[Found]):
    """By the array itself, so that looking takes no longer for a thousand rows than for one; arrays that can be written
    to are not remembered.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[npt.NDArray[np.intp], Found]] = {}

    def get(self, rows: npt.NDArray[np.intp]) -> Found | None:
        """What was kept last, if anything was."""
        found = self._found.get(id(rows))
        return None if found is None else found[1]

    def put(self, rows: npt.NDArray[np.intp], found: Found) -> Found:
        """The same, which is remembered from now on."""
        if not rows.flags.writeable:
            if len(self._found) == MAX_CACHED_ARRAYS:
                self._found.clear()
            # Holds the array, so that its identity cannot become another's.
            self._found[id(rows)] = rows, found
        return found


Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_FIRST_ROWS = 16
_SETTLED = (
    "step_tokens", "block_size", "step_seconds", "token_seconds", "sequence_seconds", "host_block_seconds", "paced",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long an engine's steps take, in seconds: each step, each prompt token in it, each sequence that it draws a
    token for; and copying a block back from the host pool. As ``quire.v1.Pace``.
    """

    step_seconds: float
    token_seconds: float
    sequence_seconds: float
    host_block_seconds: float


DEFAULT_STEP_TIMES = StepTimes(step_seconds=0.01, token_seconds=1e-4, sequence_seconds=2e-4, host_block_seconds=1e-4)
"""What is assumed of an engine that has not told, when none like it has: a small GPU. Equal guesses cancel out in a
comparison."""


@dataclass(eq=False)
class EngineColumns:
    """What is known of some engines, each a float64 array over rows: ``requests`` in flight from all routers;
    ``pending_tokens``, those of their prompts that are not computed yet, as far as they are not cached there;
    ``decoding`` sequences past their first token; ``waiting`` and ``swapped`` sequences as the engine last said;
    ``blocks_free`` (or evictable) and ``blocks_total``; ``max_sequences``; ``step_tokens``, the most that one step
    computes; ``block_size`` in tokens; the four of its ``StepTimes``, and ``paced``, 1 where they are its own word and
    0 where they are a guess; ``stepped``, when its last step began as far as is known, in seconds of the routers'
    clock, and ``computing``, how many of the pending tokens are in that step.
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


def column_min(column: Column) -> float:
    """The smallest number. Numpy finds where it is in a fifth of the time in which it finds which it is."""
    return float(column[column.argmin()])


def column_max(column: Column) -> float:
    """The largest number, as ``least``."""
    return float(column[column.argmax()])


_PLACES = {column.name: place for place, column in enumerate(fields(EngineColumns))}


class EngineTable(EngineColumns):
    """One row an engine. A row keeps its number while the engine is known, and is used again afterwards.

    The columns are over all rows, and those of load may be written to. What an engine is rather than has in hand
    changes by ``set_step_times`` and ``set_sizes``, and ``version`` counts these changes: what is computed of it alone
    stays true until then. ``unseen_tokens`` are those of prompts that other routers have sent to some of the engines
    and that are in no column yet, on average.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._paces: list[StepTimes | None] = []
        self.ids: list[str | None] = []
        self.unseen_tokens = 0.0
        self._hold(np.zeros((len(fields(EngineColumns)), 0)))

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
        self._paces[row] = None
        self._write_pace(row, DEFAULT_STEP_TIMES, told=False)
        self.set_sizes(row, block_size=16, step_tokens=2048)
        return row

    def remove(self, engine_id: str) -> None:
        """The engine has left; its row is free."""
        row = self._rows.pop(engine_id)
        self.ids[row] = None
        self._free.append(row)

    def row_of(self, engine_id: str) -> int:
        """The engine's row, -1 when it is not known."""
        return self._rows.get(engine_id, -1)

    def columns_of(self, rows: Rows) -> EngineColumns:
        """These rows (at least one), in this order, as they are now. Not to be written to, nor to be kept: of a run of
        rows, as a fleet's are until an engine leaves, it is the table itself, as copying takes longer than a few sums.
        """
        known = self._runs.get(rows)
        if known is not None:
            return known
        run = slice(int(rows[0]), int(rows[0]) + len(rows))
        if np.array_equal(rows, np.arange(run.start, run.stop)):
            return self._runs.put(rows, EngineColumns(*self._cells[:, run]))
        return EngineColumns(*self._cells.take(rows, axis=1))

    def set_step_times(self, row: int, pace: StepTimes) -> None:
        """How fast the engine is, from now on, in its own words. It says the same after most steps."""
        if pace != self._paces[row]:
            self._paces[row] = pace
            self._write_pace(row, pace, told=True)

    def set_sizes(self, row: int, *, block_size: int, step_tokens: int) -> None:
        """How many tokens the engine's blocks have, and the most that one step computes."""
        self._write(row, block_size=block_size, step_tokens=step_tokens)

    def _write_pace(self, row: int, pace: StepTimes, *, told: bool) -> None:
        self._write(
            row,
            step_seconds=pace.step_seconds,
            token_seconds=pace.token_seconds,
            sequence_seconds=pace.sequence_seconds,
            host_block_seconds=pace.host_block_seconds,
            paced=told,
        )

    def _write(self, row: int, **settled: float) -> None:
        self.version += 1
        for name, number in settled.items():
            self._cells[_PLACES[name], row] = number

    def _grow(self) -> None:
        old, new = len(self.ids), max(_FIRST_ROWS, 2 * len(self.ids))
        self._hold(np.concatenate([self._cells, np.zeros((len(self._cells), new - old))], axis=1))
        self.ids += [None] * (new - old)
        self._paces += [None] * (new - old)
        self._free += range(new - 1, old - 1, -1)

    def _hold(self, cells: npt.NDArray[np.float64]) -> None:
        """All columns lie in one array, so that reading some rows of all of them is one step."""
        self._cells = cells
        self._runs: ArrayCache[EngineColumns] = ArrayCache()
        super().__init__(*cells)
        for name in _SETTLED:
            getattr(self, name).flags.writeable = False
