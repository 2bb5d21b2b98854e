"""What a worker keeps of running sequences between steps: tokens, block tables and sampling parameters.

It caches the scheduler's state. Each sequence has a row; a step carries the changes, and the scheduler can send a row
again at any time. One gather reads the rows of a whole step, so preparing a decode step needs no loop over sequences.
"""

from array import array
from math import inf, log

import numpy as np
import numpy.typing as npt
from quire_proto.pooling import PoolingParams

from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import NewRequest, SampleRequest, SchedulerOutput
from quire_engine.sampling.logits_processors import SamplingState, is_plain
from quire_engine.sampling.metadata import SamplingMetadata, row_keys

Indices = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]
_FIRST_ROWS = 64
_FIRST_NUMBERS = 4096
_MIN_ROOM = 16


class RaggedRows:
    """Growing rows of int32, packed in one array ``data``. Number i of a row is at ``starts[row] + i``.

    A row that outgrows its room moves to the end. When the array is full, the rows are packed into a new array of twice
    the size that they need. So the array is at most about four times as large as the rows at their longest.
    """

    def __init__(self) -> None:
        self.data: Numbers = np.zeros(_FIRST_NUMBERS, np.int32)
        self.starts: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self._rooms: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self._end = 0

    def put(self, row: int, numbers: Numbers) -> None:
        """Sets a row to ``numbers``, with room to grow."""
        if row >= len(self.starts):
            self._add_rows(row + 1)
        if self._rooms[row] < len(numbers) + 1:
            self._rooms[row] = 0  # its old numbers need not move
            self._move(row, len(numbers) + 1)
        start = self.starts[row]
        self.data[start : start + len(numbers)] = numbers

    def write(self, rows: Indices, indices: Indices, numbers: Numbers | Indices) -> None:
        """Writes ``numbers[i]`` at index ``indices[i]`` of row ``rows[i]``. The last write to a place counts."""
        missing = indices >= self._rooms[rows]
        if missing.any():
            for row, index in zip(rows[missing].tolist(), indices[missing].tolist(), strict=True):
                if index >= self._rooms[row]:
                    self._move(row, index + 1)
        self.data[self.starts[rows] + indices] = numbers

    def row(self, row: int) -> Numbers:
        """Returns a view of one row: its numbers, then its unused room."""
        return self.data[self.starts[row] : self.starts[row] + self._rooms[row]]

    def gather(self, rows: Indices, firsts: Indices, counts: Indices, indptr: Indices) -> Numbers:
        """Returns ``counts[i]`` numbers of each row ``rows[i]``, from index ``firsts[i]``, packed. ``indptr`` bounds
        them.
        """
        places = np.repeat(self.starts[rows] + firsts - indptr[:-1], counts)
        places += np.arange(len(places))
        return self.data[places]

    def _add_rows(self, count: int) -> None:
        more = max(count, 2 * len(self.starts)) - len(self.starts)
        self.starts, self._rooms = np.pad(self.starts, (0, more)), np.pad(self._rooms, (0, more))

    def _move(self, row: int, size: int) -> None:
        """Moves a row to a place with room for at least ``size`` numbers."""
        room = max(_MIN_ROOM, size + size // 4)
        if self._end + room > len(self.data):
            self._pack(room)
        start, old = self.starts[row], self._rooms[row]
        self.data[self._end : self._end + old] = self.data[start : start + old]
        self.starts[row], self._rooms[row] = self._end, room
        self._end += room

    def _pack(self, room: int) -> None:
        """Moves all rows to the start of a new array that has at least ``room`` free after them."""
        total = int(self._rooms.sum())
        data = np.zeros(max(_FIRST_NUMBERS, 2 * (total + room)), np.int32)
        ends = np.cumsum(self._rooms)
        data[:total] = self.gather(np.arange(len(self.starts)), np.zeros_like(ends), self._rooms, np.append(0, ends))
        self.data, self.starts, self._end = data, ends - self._rooms, total


class SamplingColumns:
    """The sampling parameters and the seed of each row, and whether its draws are plain: ``is_plain`` (see
    ``logits_processors.is_plain``).
    """

    def __init__(self) -> None:
        self._temperature = np.zeros(_FIRST_ROWS, np.float32)
        self._top_k = np.zeros(_FIRST_ROWS, np.int64)
        self._top_p = np.ones(_FIRST_ROWS, np.float64)
        self._log_min_p = np.zeros(_FIRST_ROWS, np.float32)
        self._seeds = np.zeros(_FIRST_ROWS, np.uint64)
        self.is_plain = np.zeros(_FIRST_ROWS, np.bool_)

    def put(self, row: int, request: SampleRequest | None, *, is_plain: bool) -> None:
        """Sets the parameters of a row, and whether its draws are plain. ``request`` is None for a row that samples
        nothing.
        """
        if row >= len(self.is_plain):
            self._add_rows(row + 1)
        self.is_plain[row] = is_plain
        if request is not None:
            params = request.params
            self._temperature[row], self._top_k[row], self._top_p[row] = params.temperature, params.top_k, params.top_p
            self._log_min_p[row] = log(params.min_p) if params.min_p else -inf
            self._seeds[row] = request.seed

    def metadata(self, rows: Indices, positions: Indices) -> SamplingMetadata | None:
        """Returns the metadata for sampling the tokens at ``positions`` of ``rows``, or None if all are greedy."""
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        keys = row_keys(self._seeds[rows], positions)
        return SamplingMetadata(temperature, self._top_k[rows], self._top_p[rows], self._log_min_p[rows], keys)

    def _add_rows(self, count: int) -> None:
        more = max(count, 2 * len(self.is_plain)) - len(self.is_plain)
        for name, column in vars(self).items():
            setattr(self, name, np.pad(column, (0, more)))


class StateRows(RaggedRows):
    """Rows of blocks of states, each for ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size


class RequestStates:
    """What the worker knows of each row: tokens, a block table per KV cache group, the adapter, and how to sample or
    pool. If blocks of states have ``state_block_size`` tokens, not 0, also the table of ``states``.

    ``lora_ids`` int64 are the adapter ids of the rows, 0 for none, and ``loras`` the adapters of the rows that have
    one. ``prompt_logprobs`` maps rows that want prompt log-probabilities to the number of top tokens to return.
    ``pooling`` holds the rows whose prompt is pooled.
    """

    def __init__(self, num_groups: int, vocab_size: int, state_block_size: int = 0) -> None:
        self.tokens = RaggedRows()
        self.block_tables = tuple(RaggedRows() for _ in range(num_groups))
        self.states = StateRows(state_block_size) if state_block_size else None
        self._tables = self.block_tables if self.states is None else (*self.block_tables, self.states)
        self.sampling = SamplingColumns()
        self.lora_ids: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self.loras: dict[int, LoRARequest] = {}
        self.prompt_logprobs: dict[int, int] = {}
        self.pooling: dict[int, PoolingParams] = {}
        self._sample_requests: dict[int, tuple[SampleRequest, ...]] = {}
        self._sampling_states: dict[tuple[int, int], SamplingState] = {}
        self.vocab_size = vocab_size

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the changes of a step to the rows."""
        for row in scheduler_output.freed_rows:
            self._remove(row)
        for new in scheduler_output.new:
            self._add(new)
        if scheduler_output.new_tokens:
            self.write_tokens(scheduler_output.new_tokens)
        for blocks, changes in zip(self._tables, scheduler_output.new_blocks, strict=False):
            if changes:
                _write(blocks, changes)

    def write_tokens(self, changes: "array[int]") -> None:
        """Writes tokens of rows, given as int32 triples of row, position and token."""
        if changes:
            _write(self.tokens, changes)

    def num_prompt_tokens(self, row: int) -> int:
        """Returns the number of prompt tokens of a row that samples."""
        return self._sample_requests[row][0].num_prompt_tokens

    def sampling_state(self, row: int, choice: int) -> SamplingState:
        """Returns the sampling state of output ``choice`` of a row."""
        state = self._sampling_states.get((row, choice))
        if state is None:
            request = self._sample_requests[row][choice]
            state = self._sampling_states[row, choice] = SamplingState(request, self.vocab_size)
        return state

    def _add(self, new: NewRequest) -> None:
        row, requests = new.row, new.sample_requests
        self._remove(row)
        self.tokens.put(row, np.frombuffer(new.token_ids, np.int32))
        for blocks, block_ids in zip(self._tables, new.block_ids, strict=True):
            blocks.put(row, np.frombuffer(block_ids, np.int32))
        self.sampling.put(row, requests[0] if requests else None, is_plain=bool(requests) and is_plain(requests[0]))
        self._sample_requests[row] = requests
        if row >= len(self.lora_ids):
            self.lora_ids = np.pad(self.lora_ids, (0, max(row + 1, 2 * len(self.lora_ids)) - len(self.lora_ids)))
        if new.lora is not None:
            self.lora_ids[row], self.loras[row] = new.lora.lora_int_id, new.lora
        if new.num_prompt_logprobs is not None:
            self.prompt_logprobs[row] = new.num_prompt_logprobs
        if new.pooling is not None:
            self.pooling[row] = new.pooling

    def _remove(self, row: int) -> None:
        """Forgets everything about a row except its numbers."""
        for choice in range(len(self._sample_requests.pop(row, ()))):
            self._sampling_states.pop((row, choice), None)
        if self.loras.pop(row, None) is not None:
            self.lora_ids[row] = 0
        self.prompt_logprobs.pop(row, None)
        self.pooling.pop(row, None)


def _write(rows: RaggedRows, triples: "array[int]") -> None:
    """Applies changes to ``rows``, given as int32 triples of row, index and number."""
    changes = np.frombuffer(triples, np.int32).reshape(-1, 3).astype(np.int64)
    rows.write(changes[:, 0], changes[:, 1], changes[:, 2])
