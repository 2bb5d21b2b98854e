"""The states of recurrent layers in memory: which row a step reads and writes for each part of a chunk.

A row [bytes] is the state of one sequence in all layers that keep one. The scheduler's blocks of states
(``core.state_pool``) are numbers; this module maps each to a row. A step never overwrites the state that a chunk begins
with, because a step that failed is run again. If a chunk begins within a block, the step writes another row, and the
block has that row from then on. The row before is kept until the sequence continues. So there is one spare row for each
sequence of a step.

All of this is arithmetic on the host: the rows of a step are uploaded once, and nothing waits for the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.device.accelerator import upload_arrays

Indices = npt.NDArray[np.int64]
_UNKNOWN = -1  # the position of a state that is being written, or of none


StateViews = Mapping[int, Sequence[torch.Tensor]]
"""The parts [rows, ...] of each layer's state, by the index of the layer."""


class StateChunks(NamedTuple):
    """The chunks of a step. Chunk i has the tokens ``[query_indptr[i], query_indptr[i + 1])`` of the step, after
    ``starts[i]`` tokens of its sequence. ``blocks[indptr[i] : indptr[i + 1]]`` are its blocks of states: from the block
    of the last token before the chunk (of the first token if there is none) to the block of the chunk's last token.
    """

    starts: Indices
    query_indptr: Indices
    blocks: Indices
    indptr: Indices


class StateRun(NamedTuple):
    """Parts of ``length`` tokens of several chunks, which a layer computes together: ``tokens`` are the indices
    [parts * length] int64 of their tokens in the step, or a slice. They begin with the states in the rows ``read``
    [parts] int64, or with the first token of a sequence if that is None. The states after them go to the rows ``write``
    [parts] int64. Parts of the same chunk are in different runs, in order.
    """

    length: int
    tokens: torch.Tensor | slice
    read: torch.Tensor | None
    write: torch.Tensor


@dataclass(slots=True)
class _Pieces:
    """Parts of chunks that belong to one block each: the tokens ``[starts, ends)`` of their sequences, which are in the
    step from ``firsts`` on. They begin with the states in the rows ``read``, if ``starts`` is not 0.
    """

    starts: Indices
    ends: Indices
    firsts: Indices
    blocks: Indices
    read: Indices
    write: Indices


class StateCache:
    """The rows of ``num_blocks`` blocks of ``block_size`` tokens, and spare rows: ``rows`` [rows, bytes] uint8 on the
    device. ``host_rows`` are the blocks on the host. Block 0 is the null block.
    """

    def __init__(self, rows: torch.Tensor, host_rows: torch.Tensor, num_blocks: int, block_size: int) -> None:
        self.rows, self.host_rows = rows, host_rows
        self.block_size = block_size
        self._row = np.arange(num_blocks)
        self._position = np.full(num_blocks, _UNKNOWN)
        self._host_position = np.full(len(host_rows), _UNKNOWN)
        # The row that a block had before, 0 for none, what it has, and the number of the step that wrote the next one.
        self._old_row = np.zeros(num_blocks, np.int64)
        self._old_position = np.full(num_blocks, _UNKNOWN)
        self._last_step = np.zeros(num_blocks, np.int64)
        self._spare = [*range(num_blocks, len(rows))]
        self._step = 0

    def begin_step(self, chunks: StateChunks) -> tuple[list[StateRun], "StatesWritten"]:
        """Plans a step. Returns its runs, and what to pass to ``end_step`` when all layers have computed. Raises
        ``RuntimeError`` if the state before a chunk is lost.
        """
        self._step += 1
        pieces = self._pieces(chunks)
        written = StatesWritten(
            np.concatenate([each.blocks for each in pieces]), np.concatenate([each.ends for each in pieces])
        )
        self._position[written.blocks] = _UNKNOWN
        return self._upload([run for each in pieces for run in _runs(each)]), written

    def end_step(self, written: "StatesWritten") -> None:
        """Notes that the states of a step are complete."""
        self._position[written.blocks] = written.positions

    def forget(self) -> None:
        """Notes that the rows have lost their contents."""
        self._position[:] = self._old_position[:] = _UNKNOWN

    # Copies

    def copy_to_host(self, source: int, target: int) -> tuple[int, int]:
        """Notes that block ``source`` is copied to ``target`` on the host. Returns both rows. Raises ``IndexError``."""
        self._host_position[target] = self._position[source]
        return int(self._row[source]), target

    def copy_within(self, source: int, target: int) -> tuple[int, int]:
        """Notes that block ``source`` is copied to ``target``. Returns both rows. Raises ``IndexError``."""
        return int(self._row[source]), self._overwrite(target, self._position[source])

    def copy_from_host(self, source: int, target: int) -> tuple[int, int]:
        """Notes that ``source`` on the host is copied to block ``target``. Returns both rows. Raises ``IndexError``."""
        return source, self._overwrite(target, self._host_position[source])

    def _overwrite(self, block: int, position: int) -> int:
        self._position[block], self._old_position[block] = position, _UNKNOWN
        return int(self._row[block])

    # A step

    def _pieces(self, chunks: StateChunks) -> "list[_Pieces]":
        """Returns the first pieces of all chunks, then the second ones, and so on."""
        size, made = self.block_size, list[_Pieces]()
        starts, firsts, last_tokens = (
            chunks.starts,
            chunks.query_indptr[:-1],
            chunks.starts + np.diff(chunks.query_indptr),
        )
        places = chunks.indptr[:-1] + starts // size - np.maximum(starts - 1, 0) // size
        read, write = self._first_rows(starts, chunks.blocks[chunks.indptr[:-1]], chunks.blocks[places])
        while len(starts):
            ends, blocks = np.minimum(last_tokens, (starts // size + 1) * size), chunks.blocks[places]
            if made:
                write = self._row[blocks]
                self._old_position[blocks] = _UNKNOWN
            made.append(_Pieces(starts, ends, firsts, blocks, read, write))
            left = ends < last_tokens
            starts, firsts, read = ends[left], (firsts + ends - starts)[left], write[left]
            places, last_tokens = places[left] + 1, last_tokens[left]
        return made

    def _first_rows(self, starts: Indices, sources: Indices, blocks: Indices) -> tuple[Indices, Indices]:
        """Returns the rows with the states after ``starts`` tokens, which are in the blocks ``sources``, and rows to
        write for ``blocks``.
        """
        within = starts % self.block_size > 0
        is_again = (self._position[sources] != starts) & (starts > 0)
        lost = is_again & (self._old_position[sources] != starts)
        if lost.any():
            number = int(np.flatnonzero(lost)[0])
            block = int(sources[number])
            raise RuntimeError(
                f"block {block} has the state after {self._position[block]} tokens, and not after {starts[number]}"
            )
        read = np.where(is_again, self._old_row[sources], self._row[sources])
        self._old_position[blocks[~within]] = _UNKNOWN
        goes_on = blocks[within & ~is_again]
        self._last_step[blocks[within]] = self._step
        for block in goes_on[self._old_row[goes_on] == 0].tolist():
            self._old_row[block] = self._take_spare()
        self._row[goes_on], self._old_row[goes_on] = self._old_row[goes_on], self._row[goes_on]
        self._old_position[goes_on] = starts[within & ~is_again]
        return read, self._row[blocks]

    def _take_spare(self) -> int:
        """Returns a spare row, or the row before of the block that was written the longest ago."""
        if self._spare:
            return int(self._spare.pop())
        oldest = int(np.where(self._old_row > 0, self._last_step, self._step + 1).argmin())
        row = int(self._old_row[oldest])
        self._old_row[oldest], self._old_position[oldest] = 0, _UNKNOWN
        return row

    def _upload(self, runs: "Sequence[_HostRun]") -> list[StateRun]:
        """Returns the runs with their indices on the device, in one copy."""
        arrays = [array for run in runs for array in (run.tokens, run.read, run.write) if isinstance(array, np.ndarray)]
        uploaded = iter(upload_arrays(arrays, self.rows.device))
        made = []
        for run in runs:
            tokens = run.tokens if isinstance(run.tokens, slice) else next(uploaded)
            read = None if run.read is None else next(uploaded)
            made.append(StateRun(run.length, tokens, read, next(uploaded)))
        return made


class StatesWritten(NamedTuple):
    """The ``blocks`` that a step writes, and the number of tokens after which each state is."""

    blocks: Indices
    positions: Indices


class _HostRun(NamedTuple):
    length: int
    tokens: Indices | slice
    read: Indices | None
    write: Indices


def _runs(pieces: _Pieces) -> list[_HostRun]:
    """Returns pieces grouped by their length, and by whether a state comes before."""
    lengths, has_past = pieces.ends - pieces.starts, pieces.starts > 0
    runs = []
    for kind in np.unique(2 * lengths + has_past).tolist():
        chosen = np.flatnonzero(2 * lengths + has_past == kind)
        length, firsts = kind // 2, pieces.firsts[chosen]
        tokens: Indices | slice = (firsts[:, None] + np.arange(length)).ravel()
        if np.array_equal(firsts, firsts[0] + length * np.arange(len(firsts))):
            tokens = slice(int(firsts[0]), int(firsts[0]) + length * len(firsts))
        runs.append(_HostRun(length, tokens, pieces.read[chosen] if kind % 2 else None, pieces.write[chosen]))
    return runs


class RecurrentLayers(Protocol):
    """The layers of a model that keep a state instead of keys and values. ``num_bytes`` is the size of one sequence's
    state in all of them.
    """

    num_bytes: int

    def views(self, rows: torch.Tensor) -> StateViews:
        """Returns the parts of ``rows`` [rows, num_bytes] uint8 that belong to each layer."""
        ...

    def step(self, runs: Sequence[StateRun], views: StateViews) -> AbstractContextManager[None]:
        """Within the context, the model computes the step that ``runs`` describe, on the states ``views``."""
        ...


class RecurrentRunner:
    """Runs recurrent ``layers`` on the rows of ``states``."""

    def __init__(self, layers: RecurrentLayers, states: StateCache) -> None:
        self._layers, self._states = layers, states
        self._views = layers.views(states.rows)

    @contextmanager
    def step(self, chunks: StateChunks) -> Iterator[None]:
        """Within this context, the model computes the step of these chunks. Raises ``RuntimeError`` if the state before
        a chunk is lost.
        """
        runs, written = self._states.begin_step(chunks)
        with self._layers.step(runs, self._views):
            yield
        self._states.end_step(written)
