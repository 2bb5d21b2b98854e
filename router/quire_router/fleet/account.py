"""One engine's account: what all routers have in flight there and what it says itself, as its row of the table.

Does no I/O. The engine's reports and the routers' counts know different things about the prompt tokens that are still
to be computed. A report knows how far long prompts have come, what was preempted, and the requests of routers that
died, but nothing of what was dispatched while it was made or on its way. The counts know every dispatch at once, but a
prompt counts whole until its first output is heard. What is true lies between what was reported and that together with
what was dispatched too recently to be in it; the counts tell where between.
"""

from collections.abc import Callable
from math import inf
from time import monotonic

from quire.v1 import engine_pb2

from quire_router.fleet.recent import UnreportedTokens
from quire_router.fleet.share import Counts
from quire_router.placement.table import EngineTable, StepTimes

ZERO_COUNTS: Counts = (0, 0, 0)
_ASSUMED_STEP_TOKENS = 2048
ASSUMED_BLOCK_SIZE = 16
_SLOWEST = 3600.0  # seconds; a pace beyond is no pace
_CLEAR_PART = 0.05  # of the seconds with which an engine still has room


class EngineLoad:
    """Of the engine in ``row`` of ``table``. ``on_own`` is called when what this router has there has changed,
    ``on_room`` when the engine came to have room: fewer requests than it runs at once, and less than ``room_seconds``
    of prompts to compute; and when it came to be clear: with next to none. Once ``closed``, it hears no report.
    """

    def __init__(
        self,
        table: EngineTable,
        row: int,
        *,
        room_seconds: float,
        on_own: Callable[[], None] = lambda: None,
        on_room: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.row = row
        self.local = ZERO_COUNTS
        self.remote = ZERO_COUNTS
        self.has_capacity = False
        self.is_mostly_idle = False
        self.closed = False
        self._table = table
        self._room_seconds = room_seconds
        self._on_own = on_own
        self._on_room = on_room
        self._clock = clock
        self._unreported = UnreportedTokens()
        self._reported = 0
        self._max_sequences = inf
        self._token_seconds = 0.0
        self.describe(engine_pb2.DescribeResponse())

    def describe(self, description: engine_pb2.DescribeResponse) -> None:
        """Takes how large the engine is."""
        self._max_sequences = description.max_num_seqs or inf
        self._table.max_sequences[self.row] = description.max_num_seqs
        self._table.set_sizes(
            self.row,
            block_size=description.block_size or ASSUMED_BLOCK_SIZE,
            step_tokens=description.max_num_batched_tokens or _ASSUMED_STEP_TOKENS,
        )
        self._update_token_seconds()
        self._write_row()

    def report(self, load: engine_pb2.Load) -> None:
        """Takes what the engine said after a step; comes for every step of every engine. An empty one forgets."""
        if self.closed:  # a link that is being closed may have a last word, and the row may be another engine's
            return
        table, row = self._table, self.row
        table.waiting[row] = load.waiting
        table.swapped[row] = load.swapped
        table.blocks_free[row] = load.blocks_free
        table.blocks_total[row] = load.blocks_total
        if load.HasField("pace"):
            self._set_pace(load.pace)
        # Of each running sequence the last token is not computed yet, and is none of a prompt.
        self._reported = max(0, load.uncomputed_tokens - load.running)
        self._unreported.on_report(self._clock())
        self._write_row()
        self._begin_step()

    def change_local(self, before: Counts, after: Counts) -> None:
        """What this router has there changed by as much as ``after`` is more than ``before``."""
        was_idle = self._is_idle
        self.local = self._apply(self.local, before, after)
        self._update(was_idle, before, after)
        self._on_own()

    def change_remote(self, before: Counts, after: Counts) -> None:
        """As ``change_own``, of what the other routers have there together."""
        was_idle = self._is_idle
        self.remote = self._apply(self.remote, before, after)
        self._update(was_idle, before, after)

    @property
    def _is_idle(self) -> bool:
        return not self.local[0] + self.remote[0]

    def _update(self, was_idle: bool, before: Counts, after: Counts) -> None:
        self._write_row()
        if was_idle or after[1] < before[1]:
            self._begin_step()

    def _begin_step(self) -> None:
        """Where nothing ran, what comes is computed at once; and a report, or a first output, is of a step that ended,
        so that the next one begins.
        """
        table, row = self._table, self.row
        table.computing[row] = min(table.pending_tokens[row], table.step_tokens[row])
        table.stepped[row] = self._clock()

    def _apply(self, total: Counts, before: Counts, after: Counts) -> Counts:
        dispatched = after[1] - before[1]
        if dispatched > 0:
            self._unreported.add(dispatched)
        return total[0] + after[0] - before[0], total[1] + dispatched, total[2] + after[2] - before[2]

    def _pending(self) -> int:
        counted = self.local[1] + self.remote[1]
        return min(max(counted, self._reported), self._reported + self._unreported.tokens)

    def _write_row(self) -> None:
        table, row = self._table, self.row
        requests, decoding, pending = self.local[0] + self.remote[0], self.local[2] + self.remote[2], self._pending()
        table.requests[row] = requests
        table.decoding[row] = decoding
        table.pending_tokens[row] = pending
        had_room, was_clear = self.has_capacity, self.is_mostly_idle
        # A request whose prompt is computed takes the place of a sequence too, soon.
        busy = max(requests, decoding) >= self._max_sequences
        seconds = pending * self._token_seconds
        self.has_capacity = not busy and seconds < self._room_seconds
        self.is_mostly_idle = not busy and seconds < _CLEAR_PART * self._room_seconds
        if (self.has_capacity and not had_room) or (self.is_mostly_idle and not was_clear):
            self._on_room()

    def _set_pace(self, told: engine_pb2.Pace) -> None:
        pace = StepTimes(told.step_seconds, told.token_seconds, told.sequence_seconds, told.host_block_seconds)
        for seconds in (pace.step_seconds, pace.token_seconds, pace.sequence_seconds, pace.host_block_seconds):
            if not 0.0 <= seconds <= _SLOWEST:  # not a number, too
                return
        self._table.set_step_times(self.row, pace)
        self._update_token_seconds()

    def _update_token_seconds(self) -> None:
        """What a prompt's token takes where steps are full of them, its part of each step's own time included."""
        table, row = self._table, self.row
        self._token_seconds = float(table.token_seconds[row] + table.step_seconds[row] / table.step_tokens[row])
