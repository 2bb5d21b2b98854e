"""One engine's load in its row of the table: what all routers have in flight there, and what the engine reports.

Does no I/O. The engine's reports and the routers' counts have different parts of the prompt tokens that are still to be
computed. A report includes how far long prompts have come, what was preempted, and the requests of routers that died,
but nothing that was dispatched while it was made or on its way. The counts include every dispatch at once, but a prompt
counts whole until its first output arrives. The true number is at least the reported one, and at most that plus what
was dispatched too recently to be in the report; the counts decide where between the two.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, inf
from time import monotonic

from quire.v1 import engine_pb2

from quire_router.engines.load_messages import Counts, LoadMessage, RouterLoad
from quire_router.placement.engine_table import EngineTable, StepTimes

SETTLE_SECONDS = 0.1
"""More than a Submit takes on its way to an engine, or a share to another router."""


class UnreportedTokens:
    """Tokens that were dispatched to an engine too recently for its reports to contain them: an upper bound, in two
    buckets of which the older one is dropped.

    A report may have been made while a Submit was on its way, or by a step that started before the Submit arrived. So a
    dispatch counts as reported only when, after the first report that followed it, another one came ``SETTLE_SECONDS``
    later: the step of that report had taken up all commands that were sent before.
    """

    __slots__ = ("_new", "_old", "_turned")

    def __init__(self) -> None:
        self._new = 0
        self._old = 0
        self._turned = float("-inf")

    @property
    def tokens(self) -> int:
        """How many may be missing in the last report."""
        return self._new + self._old

    def add(self, tokens: int) -> None:
        """Adds tokens that were dispatched, by this or another router, since the last report."""
        self._new += tokens

    def on_report(self, now: float) -> None:
        """Records a report at ``now``, in seconds of a monotonic clock."""
        if now - self._turned >= SETTLE_SECONDS:
            self._old, self._new, self._turned = self._new, 0, now


ZERO_COUNTS: Counts = (0, 0, 0)
_ASSUMED_STEP_TOKENS = 2048
ASSUMED_BLOCK_SIZE = 16
_SLOWEST = 3600.0  # seconds; step times above are ignored
_MOSTLY_IDLE_PART = 0.05  # of the seconds with which an engine still has capacity


_BEST_EFFORT_PART = 0.75  # of the sequences that an engine runs at once: others find a place, and need preempt none
_MOST_BEST_EFFORT = 1_024  # sequences, where an engine runs more


class EngineLoad:
    """The load of the engine in ``row`` of ``table``. ``on_local_change`` is called when what this router has there has
    changed. ``on_capacity`` is called when the engine got capacity: it has fewer requests than it runs at once, and
    less than ``capacity_seconds`` of prompts to compute, or a step's where steps are not bounded in time; and when it
    became mostly idle, with hardly any; or when it ``has_best_effort_capacity``. Once ``closed``, it ignores reports.
    An engine that is not ``reports_tokens`` does not say what it has to compute: the routers' counts are all that is
    known of it.

    What is best effort delays no other request at an engine that ``schedules_best_effort``, and so is no load of it:
    ``best_effort`` are the sequences of this router there, and the engine reports those of all. It gets no requests
    unless its ``sleep_state`` is awake.
    """

    def __init__(
        self,
        table: EngineTable,
        row: int,
        *,
        capacity_seconds: float,
        reports_tokens: bool = True,
        on_local_change: Callable[[], None] = lambda: None,
        on_capacity: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.row = row
        self.local = ZERO_COUNTS
        self.remote = ZERO_COUNTS
        self.best_effort = 0
        self.has_capacity = False
        self.is_mostly_idle = False
        self.has_best_effort_capacity = False
        self.schedules_best_effort = False
        self.sleep_state = engine_pb2.SLEEP_STATE_AWAKE
        self.closed = False
        self._table = table
        self._capacity_seconds = capacity_seconds
        self._capacity_tokens = 0
        self._reports_tokens = reports_tokens
        self._on_local_change = on_local_change
        self._on_capacity = on_capacity
        self._clock = clock
        self._unreported = UnreportedTokens()
        self._reported = 0
        self._reported_best_effort = 0
        self._reported_sequences = 0
        self._max_sequences = inf
        self._token_seconds = 0.0
        self.describe(engine_pb2.DescribeResponse())

    def describe(self, description: engine_pb2.DescribeResponse) -> None:
        """Sets the engine's sizes from its description."""
        self._max_sequences = description.max_num_seqs or inf
        self.schedules_best_effort = description.best_effort
        self._capacity_tokens = description.max_num_batched_tokens if description.unbounded_steps else 0
        self._table.max_sequences[self.row] = description.max_num_seqs
        # Where layers are in groups, so many tokens take a block in each.
        block_size = (description.block_size or ASSUMED_BLOCK_SIZE) / (description.kv_cache_groups or 1)
        self._table.set_sizes(
            self.row,
            block_size=max(1, round(block_size)),
            step_tokens=description.max_num_batched_tokens or _ASSUMED_STEP_TOKENS,
        )
        self._update_token_seconds()
        self._write_row()

    def report(self, load: engine_pb2.Load) -> None:
        """Applies the engine's report after a step; called for every step. An empty report clears the last one."""
        if self.closed:  # a connection that is being closed may still report, and the row may be another engine's
            return
        table, row = self._table, self.row
        table.waiting[row] = load.waiting
        table.swapped[row] = load.swapped
        table.blocks_free[row] = load.blocks_free
        table.blocks_total[row] = load.blocks_total
        if load.HasField("pace"):
            self._set_pace(load.pace)
        step_tokens = table.step_tokens[row]
        table.prompt_tokens_per_step[row] = min(load.prompt_tokens_per_step or step_tokens, step_tokens)
        # Of each running sequence the last token is not computed yet, and is none of a prompt.
        self._reported = max(0, load.uncomputed_tokens - load.running)
        self._reported_best_effort = load.best_effort
        self._reported_sequences = load.running + load.waiting + load.swapped
        self.sleep_state = load.sleep_state
        self._unreported.on_report(self._clock())
        self._write_row()
        self._begin_step()

    def change_local(self, before: Counts, after: Counts) -> None:
        """What this router has there changed by as much as ``after`` is more than ``before``."""
        was_idle = self._is_idle
        self.local = self._apply(self.local, before, after)
        self._update(was_idle, before, after)
        self._on_local_change()

    def change_remote(self, before: Counts, after: Counts) -> None:
        """As ``change_local``, of what the other routers have there together."""
        was_idle = self._is_idle
        self.remote = self._apply(self.remote, before, after)
        self._update(was_idle, before, after)

    def change_best_effort(self, sequences: int) -> None:
        """This router has so many more sequences there that are best effort, or fewer."""
        self.best_effort += sequences
        self._write_row()

    @property
    def seconds_of_prompts(self) -> float:
        """How long the prompts that wait there take to compute, as placement reckons."""
        return float(self._table.pending_tokens[self.row]) * self._token_seconds

    @property
    def is_awake(self) -> bool:
        """Whether it sleeps neither, nor is about to."""
        return self.sleep_state == engine_pb2.SLEEP_STATE_AWAKE

    @property
    def has_work(self) -> bool:
        """Whether any router has a request there, or the engine says that it has one."""
        return bool(not self._is_idle or self.best_effort or self._reported_sequences)

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
        table.computing[row] = min(table.pending_tokens[row], table.prompt_tokens_per_step[row])
        table.stepped[row] = self._clock()

    def _apply(self, total: Counts, before: Counts, after: Counts) -> Counts:
        dispatched = after[1] - before[1]
        if dispatched > 0:
            self._unreported.add(dispatched)
        return total[0] + after[0] - before[0], total[1] + dispatched, total[2] + after[2] - before[2]

    def _pending(self) -> int:
        counted = self.local[1] + self.remote[1]
        if not self._reports_tokens:
            return counted
        return min(max(counted, self._reported), self._reported + self._unreported.tokens)

    def _write_row(self) -> None:
        table, row = self._table, self.row
        requests, decoding, pending = self.local[0] + self.remote[0], self.local[2] + self.remote[2], self._pending()
        table.requests[row] = requests
        table.decoding[row] = decoding
        table.pending_tokens[row] = pending
        before = self.has_capacity, self.is_mostly_idle, self.has_best_effort_capacity
        # A request whose prompt is computed takes the place of a sequence too, soon.
        busy = max(requests, decoding) >= self._max_sequences
        seconds = pending * self._token_seconds
        is_short = seconds < self._capacity_seconds or pending < self._capacity_tokens
        self.has_capacity = not busy and is_short
        self.is_mostly_idle = not busy and seconds < _MOSTLY_IDLE_PART * self._capacity_seconds
        held = max(requests, decoding) + max(self.best_effort, self._reported_best_effort)
        most_held = _BEST_EFFORT_PART * min(self._max_sequences, _MOST_BEST_EFFORT)
        self.has_best_effort_capacity = self.schedules_best_effort and held < most_held
        after = self.has_capacity, self.is_mostly_idle, self.has_best_effort_capacity
        if any(is_so and not was_so for is_so, was_so in zip(after, before, strict=True)):
            self._on_capacity()

    def _set_pace(self, reported: engine_pb2.Pace) -> None:
        pace = StepTimes(
            reported.step_seconds, reported.token_seconds, reported.sequence_seconds, reported.host_block_seconds
        )
        for seconds in (pace.step_seconds, pace.token_seconds, pace.sequence_seconds, pace.host_block_seconds):
            if not 0.0 <= seconds <= _SLOWEST:  # not a number, too
                return
        self._table.set_step_times(self.row, pace)
        self._update_token_seconds()

    def _update_token_seconds(self) -> None:
        """What a prompt's token takes where steps are full of them, its part of each step's own time included."""
        table, row = self._table, self.row
        self._token_seconds = float(table.token_seconds[row] + table.step_seconds[row] / table.step_tokens[row])


_MEMORY = 2.0
"""Seconds over which the other routers' dispatches are averaged."""

_LATEST = 1 / 16
"""Weight of the latest message in the mean of how long messages take."""


class UnseenLoadEstimate:
    """How much work the other routers have sent to engines that this one does not know of yet. By Little's law it is
    what they dispatch in a second times the seconds until a message of theirs is received. How long that takes a router
    measures by its own messages, as it receives those too. ``clock`` is monotonic, in seconds.
    """

    __slots__ = ("_age", "_changed", "_clock", "_dispatched", "_noted", "_published")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._dispatched = 0.0
        self._noted = clock()
        self._age = 0.0
        self._changed: float | None = None
        self._published: tuple[int, float] | None = None

    def tokens(self) -> float:
        """Returns the prompt tokens, on average."""
        return self._age * self._dispatched * self._decay() / _MEMORY

    def on_remote_dispatch(self, tokens: int) -> None:
        """Records that another router has sent so many more to engines."""
        self._dispatched = self._dispatched * self._decay() + tokens
        self._noted = self._clock()

    def on_local_change(self) -> None:
        """Records that what this router has in flight changed, which is not published yet."""
        if self._changed is None:
            self._changed = self._clock()

    def on_published(self, sequence: int) -> None:
        """Records that this router's message of this number was published, with all changes so far."""
        if self._published is None and self._changed is not None:
            self._published = sequence, self._changed
        self._changed = None

    def on_received(self, sequence: int) -> None:
        """Records that this router's own message arrived, as it did at the others."""
        if self._published is not None and sequence >= self._published[0]:
            age = self._clock() - self._published[1]
            self._age += (age - self._age) * (_LATEST if self._age else 1.0)
            self._published = None

    def _decay(self) -> float:
        return exp((self._noted - self._clock()) / _MEMORY)


MAX_PEERS = 256
CAPACITY_SECONDS = 0.25
"""A step or two: an engine must not run dry, and what waits in it waits in the order in which it came, from all
routers. In the fleet simulator it costs nothing against 2 s, and others' waits during a flood a third.
"""


@dataclass(slots=True)
class _RemoteRouter:
    """Another router's last message, and for how many ticks it is valid."""

    message: LoadMessage
    ticks: int


class LedgerEntry:
    """What one dispatched request counts for, from ``LoadLedger.begin`` until ``end``. Each may be called twice. One
    that is best effort counts as that where the engine knows it, and else as any other.
    """

    __slots__ = ("_best_effort", "_counts", "_load", "_sequences")

    def __init__(self, load: EngineLoad, *, pending_tokens: int, sequences: int, best_effort: bool = False) -> None:
        self._load = load
        self._sequences = sequences
        self._counts = ZERO_COUNTS
        self._best_effort = sequences if best_effort and load.schedules_best_effort else 0
        if self._best_effort:
            load.change_best_effort(self._best_effort)
        else:
            self._set((1, max(0, pending_tokens), 0))

    def on_first_output(self) -> None:
        """Counts its first output: its prompt is computed, and its sequences decode."""
        if self._counts != ZERO_COUNTS:
            self._set((1, 0, self._sequences))

    def end(self) -> None:
        """Ends the count."""
        if self._best_effort:
            self._load.change_best_effort(-self._best_effort)
            self._best_effort = 0
        if self._counts != ZERO_COUNTS:
            self._set(ZERO_COUNTS)

    def _set(self, counts: Counts) -> None:
        before, self._counts = self._counts, counts
        self._load.change_local(before, counts)


class LoadLedger:
    """The work in flight of all routers at all engines, added up in the columns of the table. Each router counts its
    own, and receives the others' messages. A message replaces the one before, so one that was lost costs nothing but
    time, and a router that is silent for its lease is forgotten with all it had.

    ``on_change`` is called when this router's own load has changed,
    ``on_capacity`` when an engine got capacity (see ``EngineLoad``). ``clock`` is monotonic, in seconds. The publisher
    of this router's load reports to ``unseen`` when it published a message and when it received its own.
    """

    def __init__(
        self,
        table: EngineTable,
        *,
        capacity_seconds: float = CAPACITY_SECONDS,
        on_capacity: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._table = table
        self._capacity_seconds = capacity_seconds
        self._on_capacity = on_capacity
        self._clock = clock
        self._engines: dict[str, EngineLoad] = {}
        self._peers: dict[str, _RemoteRouter] = {}
        self.unseen = UnseenLoadEstimate(clock)

    def __len__(self) -> int:
        """How many other routers are known."""
        return len(self._peers)

    # Engines

    def add(self, engine_id: str, *, reports_tokens: bool = True) -> EngineLoad:
        """Creates a new engine's load, which includes what the other routers have in flight there already."""
        load = self._engines[engine_id] = EngineLoad(
            self._table,
            self._table.add(engine_id),
            capacity_seconds=self._capacity_seconds,
            reports_tokens=reports_tokens,
            on_local_change=self._on_local_change,
            on_capacity=self._on_capacity,
            clock=self._clock,
        )
        for share in self._remote_loads():
            load.change_remote(ZERO_COUNTS, share.engines.get(engine_id, ZERO_COUNTS))
        return load

    def remove(self, engine_id: str) -> None:
        """Closes the load of an engine that this router has nothing in flight on."""
        load = self._engines.pop(engine_id)
        assert (load.local, load.best_effort) == (ZERO_COUNTS, 0), "a request of this router is in flight there"
        load.closed = True
        self._table.remove(engine_id)

    # In flight at this router

    def begin(
        self, engine_id: str, *, pending_tokens: int, sequences: int = 1, best_effort: bool = False
    ) -> LedgerEntry:
        """Counts a dispatched request: ``pending_tokens`` of its prompt are not cached there. Raises ``KeyError``."""
        load = self._engines[engine_id]
        return LedgerEntry(load, pending_tokens=pending_tokens, sequences=sequences, best_effort=best_effort)

    def local_load(self) -> RouterLoad:
        """Returns what this router has in flight, for the others."""
        return RouterLoad({engine_id: load.local for engine_id, load in self._engines.items() if load.local[0]})

    # In flight at the other routers

    def on_message(self, message: LoadMessage, ticks: int) -> bool:
        """Applies another router's message, which is valid for so many ticks; an older one is ignored. Returns False
        if too many routers are known.
        """
        peer = self._peers.get(message.router_id)
        if peer is None and len(self._peers) >= MAX_PEERS:
            return False
        if peer is not None and message.sequence <= peer.message.sequence:
            return True
        self._peers[message.router_id] = _RemoteRouter(message, ticks)
        self._replace_load(peer.message.load if peer else RouterLoad(), message.load)
        if peer is not None:
            self.unseen.on_remote_dispatch(_dispatched(peer.message.load, message.load))
        self._table.unseen_tokens = self.unseen.tokens()
        return True

    def tick(self) -> None:
        """Counts a tick, and forgets the routers whose messages have expired."""
        for router_id, peer in list(self._peers.items()):
            peer.ticks -= 1
            if peer.ticks <= 0:
                del self._peers[router_id]
                self._replace_load(peer.message.load, RouterLoad())
        self._table.unseen_tokens = self.unseen.tokens()

    def _on_local_change(self) -> None:
        self.unseen.on_local_change()
        self.on_change()

    def _remote_loads(self) -> Iterator[RouterLoad]:
        return (peer.message.load for peer in self._peers.values())

    def _replace_load(self, before: RouterLoad, after: RouterLoad) -> None:
        """Changes the loads that differ. Engines that are not known here keep in the share until they are."""
        for engine_id, counts in after.engines.items():
            self._change_remote(engine_id, before.engines.get(engine_id, ZERO_COUNTS), counts)
        for engine_id, counts in before.engines.items():
            if engine_id not in after.engines:
                self._change_remote(engine_id, counts, ZERO_COUNTS)

    def _change_remote(self, engine_id: str, before: Counts, after: Counts) -> None:
        if before != after and (load := self._engines.get(engine_id)) is not None:
            load.change_remote(before, after)


def _dispatched(before: RouterLoad, after: RouterLoad) -> int:
    """Returns the prompt tokens that were dispatched from one message to the next."""
    more = (
        pending - before.engines.get(engine_id, ZERO_COUNTS)[1] for engine_id, (_, pending, _) in after.engines.items()
    )
    return sum(tokens for tokens in more if tokens > 0)
