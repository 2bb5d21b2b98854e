"""Which row of the worker's state each running sequence has, and which data of it the worker lacks.

The worker's state is a cache of the scheduler's. A sequence gets a row with its first chunk on the device and loses it
when it is preempted or ends. Any row can be sent again as a ``NewRequest`` at any time.
"""

from array import array
from collections.abc import Sequence as Tokens
from heapq import heappop, heappush

from quire_engine.core.request import Sequence
from quire_engine.core.step import NewRequest, SchedulerOutput


class WorkerRows:
    """Assigns rows to sequences, lowest first, so that there are no more rows than sequences ran at once.

    A row that a step in flight computes is not reused before that step is done, because the sampled token is written
    into the row. Until then it is in ``released``.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._free: list[int] = []
        # Rows, each with the last step that computed it.
        self.released: list[tuple[int, int]] = []

    def free_released(self, oldest_in_flight: int) -> "array[int]":
        """Frees the released rows that no step from ``oldest_in_flight`` on computes. Returns them."""
        freed = array("i", [row for row, last_step in self.released if last_step < oldest_in_flight])
        self.released = [each for each in self.released if each[1] >= oldest_in_flight]
        for row in freed:
            heappush(self._free, row)
        return freed

    def release(self, sequence: Sequence) -> None:
        """Releases the row, if any, of a sequence that leaves the device."""
        sequence.plain_until = 0
        if sequence.row is not None:
            self.released.append((sequence.row, sequence.last_step))
            sequence.row = None

    def send_changes(self, sequence: Sequence, scheduler_output: SchedulerOutput, drafts: Tokens[int]) -> int:
        """Adds to the step the data that the worker lacks of a sequence with a chunk in it, and the ``drafts`` after
        its known tokens. Returns its row.
        """
        row = sequence.row
        if row is None:
            sequence.row = row = self._take()
            scheduler_output.new.append(new_request(sequence, row))
        else:
            if sequence.num_unsent_tokens:
                num_sent = len(sequence.token_ids) - sequence.num_unsent_tokens
                _add(scheduler_output.new_tokens, row, num_sent, sequence.token_ids[num_sent:])
                sequence.num_unsent_tokens = 0
            for number, index, block_id in sequence.block_table.take_changes():
                scheduler_output.new_blocks[number].extend((row, index, block_id))
        if drafts:
            _add(scheduler_output.new_tokens, row, len(sequence.token_ids), drafts)
        return row

    def _take(self) -> int:
        if self._free:
            return heappop(self._free)
        self._num_rows += 1
        return self._num_rows - 1


def new_request(sequence: Sequence, row: int) -> NewRequest:
    """Returns the complete state of a sequence for its ``row`` in a worker."""
    sequence.num_unsent_tokens = 0
    group = sequence.group
    return NewRequest(
        row,
        array("i", sequence.token_ids),
        sequence.block_table.take_all(),
        sequence.sample_requests,
        num_prompt_logprobs=group.request.sampling.prompt_logprobs if group.needs_prompt_logprobs else None,
        lora=group.request.lora,
        pooling=group.request.pooling,
    )


def _add(changes: "array[int]", row: int, first: int, values: Tokens[int]) -> None:
    """Adds ``values`` at the indexes of the row from ``first`` on."""
    for index, value in enumerate(values, first):
        changes.extend((row, index, value))
