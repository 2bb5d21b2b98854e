"""The engines as columns of numbers, a row each, so that a choice among a thousand is a few sums over arrays; and how
fast they are, whatever their load: the step times that placement assumes for each (``EngineSpeeds``).

Rows are written as things happen (a dispatch, an engine's report, a peer's load) and read when a request is placed.
Engines of one kind are taken to be equally fast, although what each has measured of itself differs a little. All times
are in seconds. Does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

MAX_CACHED_ARRAYS = 16

_FIRST_ROWS = 16
_READ_ONLY = (
    "step_tokens", "block_size", "step_seconds", "token_seconds", "sequence_seconds", "host_block_seconds", "measured",
)  # fmt: skip

Value = TypeVar("Value")


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
"""Assumed of an engine that has reported none, when none like it has: a small GPU. Equal guesses cancel out in a
comparison."""


@dataclass(eq=False)
class EngineColumns:
    """What is known of some engines, each a float64 array over rows: ``requests`` in flight from all routers;
    ``pending_tokens``, those of their prompts that are not computed yet, as far as they are not cached there;
    ``decoding`` sequences past their first token; ``waiting`` and ``swapped`` sequences as the engine last reported;
    ``blocks_free`` (or evictable) and ``blocks_total``; ``max_sequences``; ``step_tokens``, the most that one step
    computes; ``block_size``, the tokens that take a block; the four of its ``StepTimes``, and ``measured``, 1 where the
    engine reported them and 0 where they are a guess; ``prompt_tokens_per_step``, the most of prompts in a step beside
    what decodes there now, ``step_tokens`` unless the engine bounds its steps in time; ``stepped``, when its last step
    began as far as is known, in seconds of the routers' clock, and ``computing``, how many of the pending tokens are in
    that step.
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
    measured: Column
    prompt_tokens_per_step: Column
    computing: Column
    stepped: Column

    def queued(self) -> Column:
        """Returns how many requests have no token yet."""
        return np.maximum(self.requests - self.decoding, 0)


_COLUMN_INDEXES = {column.name: index for index, column in enumerate(fields(EngineColumns))}


class EngineTable(EngineColumns):
    """One row an engine. A row keeps its number while the engine is known, and is reused afterwards.

    The columns are over all rows, and those of load may be written to. What an engine is, rather than what it has in
    hand, changes by ``set_step_times`` and ``set_sizes``, and ``version`` counts these changes: what is computed from
    it alone stays valid until then. ``unseen_tokens`` is how many prompt tokens, on average, other routers have sent to
    some of the engines that are in no column yet.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._step_times: list[StepTimes | None] = []
        self.ids: list[str | None] = []
        self.unseen_tokens = 0.0
        self._set_cells(np.zeros((len(fields(EngineColumns)), 0)))

    def __len__(self) -> int:
        """Returns the number of rows, free ones included."""
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yields each engine's id with its row."""
        return iter(self._rows.items())

    def add(self, engine_id: str) -> int:
        """Returns the row of a new engine, all zero but for guesses of its step times, block size and step's tokens."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[engine_id], self.ids[row] = row, engine_id
        self._cells[:, row] = 0.0
        self._step_times[row] = None
        self._write_step_times(row, DEFAULT_STEP_TIMES, measured=False)
        self.set_sizes(row, block_size=16, step_tokens=2048)
        return row

    def remove(self, engine_id: str) -> None:
        """Frees the row of an engine that left."""
        row = self._rows.pop(engine_id)
        self.ids[row] = None
        self._free.append(row)

    def row_of(self, engine_id: str) -> int:
        """Returns the engine's row, -1 if it is not known."""
        return self._rows.get(engine_id, -1)

    def columns_of(self, rows: Rows) -> EngineColumns:
        """Returns these rows (at least one), in this order, as they are now. They must be neither written to nor kept:
        of contiguous rows, as a pool's are until an engine leaves, they are views of the table, as a copy takes longer
        than a few sums.
        """
        cached = self._contiguous.get(rows)
        if cached is not None:
            return cached
        run = slice(int(rows[0]), int(rows[0]) + len(rows))
        if np.array_equal(rows, np.arange(run.start, run.stop)):
            return self._contiguous.put(rows, EngineColumns(*self._cells[:, run]))
        return EngineColumns(*self._cells.take(rows, axis=1))

    def set_step_times(self, row: int, step_times: StepTimes) -> None:
        """Sets the step times that the engine reported. Most steps report the same ones, which changes nothing."""
        if step_times != self._step_times[row]:
            self._step_times[row] = step_times
            self._write_step_times(row, step_times, measured=True)

    def set_sizes(self, row: int, *, block_size: int, step_tokens: int) -> None:
        """Sets how many tokens the engine's blocks have, and the most that one step computes, of prompts too until the
        engine reports fewer.
        """
        self._write(row, block_size=block_size, step_tokens=step_tokens)
        self.prompt_tokens_per_step[row] = step_tokens

    def _write_step_times(self, row: int, step_times: StepTimes, *, measured: bool) -> None:
        self._write(
            row,
            step_seconds=step_times.step_seconds,
            token_seconds=step_times.token_seconds,
            sequence_seconds=step_times.sequence_seconds,
            host_block_seconds=step_times.host_block_seconds,
            measured=measured,
        )

    def _write(self, row: int, **values: float) -> None:
        self.version += 1
        for name, value in values.items():
            self._cells[_COLUMN_INDEXES[name], row] = value

    def _grow(self) -> None:
        old, new = len(self.ids), max(_FIRST_ROWS, 2 * len(self.ids))
        self._set_cells(np.concatenate([self._cells, np.zeros((len(self._cells), new - old))], axis=1))
        self.ids += [None] * (new - old)
        self._step_times += [None] * (new - old)
        self._free += range(new - 1, old - 1, -1)

    def _set_cells(self, cells: npt.NDArray[np.float64]) -> None:
        """All columns lie in one array, so that reading some rows of all of them is one step."""
        self._cells = cells
        self._contiguous: ArrayCache[EngineColumns] = ArrayCache()
        super().__init__(*cells)
        for name in _READ_ONLY:
            getattr(self, name).flags.writeable = False


class ArrayCache(Generic[Value]):
    """Values computed from arrays of rows, keyed by the identity of the array: a pool hands out the same array until
    its engines change, and a look-up takes no longer for a thousand rows than for one. Writeable arrays are not cached.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Rows, Value]] = {}

    def get(self, rows: Rows) -> Value | None:
        """Returns the cached value, None if there is none."""
        entry = self._entries.get(id(rows))
        return None if entry is None else entry[1]

    def put(self, rows: Rows, value: Value) -> Value:
        """Caches ``value`` and returns it."""
        if not rows.flags.writeable:
            if len(self._entries) == MAX_CACHED_ARRAYS:
                self._entries.clear()
            self._entries[id(rows)] = rows, value  # references the array, so that its id cannot become another's
        return value


def column_min(column: Column) -> float:
    """Returns the smallest number. Numpy finds where it is in a fifth of the time in which it finds which it is."""
    return float(column[column.argmin()])


def column_max(column: Column) -> float:
    """Returns the largest number, as ``column_min``."""
    return float(column[column.argmax()])


Flags = npt.NDArray[np.bool_]

OUTLIER_THRESHOLD = 0.25
"""Relative difference from the median step time below which an engine counts as one of the usual kind."""

SHORT_PROMPT = 256
"""Tokens of the short prompt whose step time distinguishes kinds of engines."""

STEP_TIMES_TTL = 60.0
"""Seconds after its last step for which an engine's own step times are used."""

SPEED_TTL = 0.05
"""Seconds for which speeds are reused after an engine reported new step times. In a large fleet some engine has new
ones at every choice, and none moves far within so few."""


@dataclass(frozen=True, slots=True)
class StepTimeColumns:
    """``StepTimes`` of several engines: each a column, or an array of no axes if one number holds for all."""

    step_seconds: Column
    token_seconds: Column
    sequence_seconds: Column
    host_block_seconds: Column


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """What follows from an engine's description and step times, whatever its load. ``step_times`` are those of
    ``cluster_step_times``. ``block_size`` is in tokens, at least one.
    """

    step_times: StepTimeColumns
    block_size: Column


@dataclass(frozen=True, slots=True)
class _CachedSpeeds:
    computed_at: float
    version: int
    stepped: Flags
    speeds: EngineSpeeds


class SpeedCache:
    """The speeds of one table's rows. They are computed again ``SPEED_TTL`` seconds after an engine reported new step
    times or sizes, and at once when an engine's ``stepped_recently`` changes.
    """

    def __init__(self) -> None:
        self._cache: ArrayCache[_CachedSpeeds] = ArrayCache()

    def get(self, table: EngineTable, rows: Rows, engines: EngineColumns, now: float) -> EngineSpeeds:
        """Returns the speeds of ``engines``, which are the table's ``rows``."""
        stepped = stepped_recently(engines, now)
        cached = self._cache.get(rows)
        if cached is None or self._is_stale(cached, table, now) or not np.array_equal(stepped, cached.stepped):
            cached = self._cache.put(rows, _CachedSpeeds(now, table.version, stepped, compute_speeds(engines, stepped)))
        return cached.speeds

    def _is_stale(self, cached: _CachedSpeeds, table: EngineTable, now: float) -> bool:
        return cached.version != table.version and not cached.computed_at <= now < cached.computed_at + SPEED_TTL


def compute_speeds(engines: EngineColumns, stepped: Flags) -> EngineSpeeds:
    """Returns the speeds of ``engines``, of which those in ``stepped`` made a step lately."""
    return EngineSpeeds(cluster_step_times(engines, stepped), np.maximum(engines.block_size, 1.0))


def stepped_recently(engines: EngineColumns, now: float) -> Flags:
    """Returns which engines made a step so lately that their step times are believed."""
    return engines.stepped > now - STEP_TIMES_TTL


def cluster_step_times(engines: EngineColumns, stepped: Flags) -> StepTimeColumns:
    """Returns the mean step times of the usual kind of engine; outliers keep their own. ``stepped`` are the engines
    that ``stepped_recently``.

    Step times are fitted to an engine's last steps and move with these. If differences of a percent counted, one engine
    after the other would look like the fastest and draw all requests. The times of a step full of prompts, and of one
    with a short prompt, are known well and decide of which kind an engine is. The fixed part of a step is known less
    well, and what a sequence adds depends on the lengths of the sequences that run.

    An engine that has not reported step times, or has not made a step for long, counts as one of the usual kind: with
    slower times it would get no request, and so never report others. The usual kind is that of the median, which one
    outlier does not move.
    """
    measured = engines.measured > 0
    recent = measured & stepped
    known = recent if np.count_nonzero(recent) else measured
    if not np.count_nonzero(known):
        return _own_step_times(engines)
    outliers = recent & _find_outliers(engines, known)
    if not np.count_nonzero(outliers):
        return _mean_step_times(engines, known)
    usual = known & ~outliers
    mean, own = _mean_step_times(engines, usual if np.count_nonzero(usual) else known), _own_step_times(engines)
    return StepTimeColumns(
        np.where(outliers, own.step_seconds, mean.step_seconds),
        np.where(outliers, own.token_seconds, mean.token_seconds),
        np.where(outliers, own.sequence_seconds, mean.sequence_seconds),
        np.where(outliers, own.host_block_seconds, mean.host_block_seconds),
    )


def _own_step_times(engines: EngineColumns) -> StepTimeColumns:
    return StepTimeColumns(
        engines.step_seconds, engines.token_seconds, engines.sequence_seconds, engines.host_block_seconds
    )


def _mean_step_times(engines: EngineColumns, members: Flags) -> StepTimeColumns:
    """Returns the mean over the ``members``, at least one."""
    weights = members / np.count_nonzero(members)
    return StepTimeColumns(
        np.asarray(engines.step_seconds @ weights),
        np.asarray(engines.token_seconds @ weights),
        np.asarray(engines.sequence_seconds @ weights),
        np.asarray(engines.host_block_seconds @ weights),
    )


def _find_outliers(engines: EngineColumns, known: Flags) -> Flags:
    """Returns the engines whose steps, full or with a short prompt, take another time than the median of ``known``."""
    full = engines.step_seconds + engines.step_tokens * engines.token_seconds
    short = engines.step_seconds + SHORT_PROMPT * engines.token_seconds
    return _far_from_median(full, known) | _far_from_median(short, known)


def _far_from_median(seconds: Column, known: Flags) -> Flags:
    median = _upper_median(seconds if np.count_nonzero(known) == len(known) else seconds[known])
    return np.abs(seconds - median) > OUTLIER_THRESHOLD * median


def _upper_median(numbers: Column) -> float:
    half = len(numbers) // 2
    return float(np.partition(numbers, half)[half])
