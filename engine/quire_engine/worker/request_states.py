"""What a worker keeps between steps of the sequences that run: their tokens, block tables and sampling parameters.

A cache of the scheduler's: each sequence has a row, steps say what is new in it, and a row can be sent again at any
time. The rows of a step are read with one gather for all of them, so preparing a decode step has no loop over
sequences.
"""

from array import array

import numpy as np
import numpy.typing as npt
from quire_proto.pooling import PoolingParams

from quire_engine.core.lora import LoRARequest
from quire_engine.core.step import NewRequest, SampleRequest, SchedulerOutput
from quire_engine.sampling.logits_processors import SamplingState, is_plain
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
    """What the worker knows of each row: its tokens, its block table for each group of layers, its adapter, and how its
    tokens are drawn, or what is pooled of them.

    ``lora_ids`` int64 are the numbers of the rows' adapters, 0 where there is none, and ``loras`` the adapters of those
    that have one. ``prompt_logprobs`` are the rows that log-probabilities of the prompt are asked for: how many most
    probable tokens beside each. ``pooling`` are those whose prompt is pooled.
    """

    def __init__(self, num_groups: int, vocab_size: int) -> None:
        self.tokens = RaggedRows()
        self.blocks = tuple(RaggedRows() for _ in range(num_groups))
        self.sampling = SamplingColumns()
        self.lora_ids: Indices = np.zeros(_FIRST_ROWS, np.int64)
        self.loras: dict[int, LoRARequest] = {}
        self.prompt_logprobs: dict[int, int] = {}
        self.pooling: dict[int, PoolingParams] = {}
        self._sample_requests: dict[int, tuple[SampleRequest, ...]] = {}
        self._sampling_states: dict[tuple[int, int], SamplingState] = {}
        self.vocab_size = vocab_size

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Brings the rows up to date with a step."""
        for row in scheduler_output.freed_rows:
            self._remove(row)
        for new in scheduler_output.new:
            self._add(new)
        self.write_tokens(scheduler_output.new_tokens)
        for blocks, changes in zip(self.blocks, scheduler_output.new_blocks, strict=False):
            if changes:
                _write(blocks, changes)

    def write_tokens(self, changes: "array[int]") -> None:
        """Writes tokens of rows: int32 triples of a row, a position and the token there."""
        if changes:
            _write(self.tokens, changes)

    def num_prompt_tokens(self, row: int) -> int:
        """Tokens of the prompt of a row that draws."""
        return self._sample_requests[row][0].num_prompt_tokens

    def sampling_state(self, row: int, choice: int) -> SamplingState:
        """How one of the row's outputs is drawn."""
        state = self._sampling_states.get((row, choice))
        if state is None:
            request = self._sample_requests[row][choice]
            state = self._sampling_states[row, choice] = SamplingState(request, self.vocab_size)
        return state

    def _add(self, new: NewRequest) -> None:
        row, requests = new.row, new.sample_requests
        self._remove(row)
        self.tokens.put(row, np.frombuffer(new.token_ids, np.int32))
        for blocks, block_ids in zip(self.blocks, new.block_ids, strict=True):
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
        """Forgets what is known of a row but its numbers."""
        for choice in range(len(self._sample_requests.pop(row, ()))):
            self._sampling_states.pop((row, choice), None)
        if self.loras.pop(row, None) is not None:
            self.lora_ids[row] = 0
        self.prompt_logprobs.pop(row, None)
        self.pooling.pop(row, None)


def _write(rows: RaggedRows, triples: "array[int]") -> None:
    """Writes the changes of rows: int32 triples of a row, an index in it and a number."""
    changes = np.frombuffer(triples, np.int32).reshape(-1, 3).astype(np.int64)
    rows.write(changes[:, 0], changes[:, 1], changes[:, 2])
