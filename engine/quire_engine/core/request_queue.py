"""Queues of sequences, the order of the waiting queue, and the interface of admission gates.

No order depends on a set or on addresses, and no operation here is linear in the number of waiting sequences.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from sys import float_info
from typing import TYPE_CHECKING, Protocol

from quire_proto.priority import SHADOW

from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.request import Sequence

if TYPE_CHECKING:
    from quire_engine.config import Policy

REORDERED_PER_STEP = 4

_preemption_key = attrgetter("preemption_key")


class AdmittedQueue(list[Sequence]):
    """Admitted sequences: a list that ``push`` and ``remove`` keep in the order of preemption keys. ``num_seqs``: the
    sum over its sequences. ``num_best_effort``: how many are best effort; these come last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_seqs = 0
        self.num_best_effort = 0

    def push(self, sequence: Sequence) -> None:
        """Inserts a sequence according to its precedence."""
        insort(self, sequence, key=_preemption_key)
        self.num_seqs += sequence.num_seqs
        self.num_best_effort += sequence.best_effort

    def first(self) -> Sequence:
        """Returns the sequence that is preempted last."""
        return self[0]

    def last(self) -> Sequence:
        """Returns the sequence that is preempted first."""
        return self[-1]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence at any position."""
        del self[bisect_left(self, sequence.preemption_key, key=_preemption_key)]
        self.num_seqs -= sequence.num_seqs
        self.num_best_effort -= sequence.best_effort


class AdmissionGate(Protocol):
    """A condition of admission besides the turn and the memory: a slot for an adapter, or blocks that a tier loads.

    The gate holds a sequence that it does not admit until it releases it; meanwhile those after it go first. (vLLM
    keeps such sequences in a second queue, ``skipped_waiting``, with a status for what each waits for.)
    """

    def release(self) -> "Iterable[Sequence]":
        """Returns held sequences that may be admitted now or should be checked again, and stops holding them. Called
        once in each step that may admit anything, before the first call of ``admits``.
        """
        ...

    def admits(self, sequence: Sequence) -> bool:
        """Whether a sequence whose turn has come may be admitted now. Holds it otherwise."""
        ...

    def on_admission(self, sequence: Sequence) -> None:
        """Called after all gates and the memory have admitted a sequence."""
        ...

    def on_abort(self, sequence: Sequence) -> None:
        """Called after a waiting sequence, held or not, has ended."""
        ...


class WaitingQueue:
    """Waiting sequences, in the order of their ranks. Counts the tokens that they need computed (``uncomputed_tokens``,
    without best effort), the best-effort sequences (``num_best_effort``), and the sequences per adapter (``loras``).

    ``rank`` computes a sequence's rank when it arrives. With ``max_overtakes``, ranks may decrease while sequences
    wait, and a sequence that this many later arrivals have overtaken is next, at any rank. Counting for the oldest is
    enough: a sequence that overtook a younger one has overtaken the oldest too. Held sequences wait for an
    ``AdmissionGate`` and are skipped until they are released. Best-effort sequences have the last ranks, are never next
    because of overtakes, and do not count as overtaking.
    """

    def __init__(
        self, max_overtakes: int | None = None, rank: Callable[[Sequence], float] = attrgetter("queue_key")
    ) -> None:
        self.uncomputed_tokens = 0
        self.num_best_effort = 0
        self.loras: Counter[LoRARequest] = Counter()
        self._max_overtakes = max_overtakes
        self._rank = rank
        self.sequences: OrderedDict[int, Sequence] = OrderedDict()
        self._regular: OrderedDict[int, Sequence] = OrderedDict()
        self._by_rank: list[tuple[float, int]] = []
        self._overtakers: list[int] = []
        self._turns: deque[int] = deque()
        self._held: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences.values())

    def push(self, sequence: Sequence) -> None:
        """Adds the newest arrival."""
        sequence.queue_key = self._rank(sequence)
        self.sequences[sequence.id] = sequence
        self.num_best_effort += sequence.best_effort
        if not sequence.best_effort:
            self._regular[sequence.id] = sequence
            self.uncomputed_tokens += sequence.num_uncomputed_tokens
        if (lora := sequence.request.lora) is not None:
            self.loras[lora] += 1
        heappush(self._by_rank, (sequence.queue_key, sequence.id))
        self._turns.append(sequence.id)

    @property
    def num_regular(self) -> int:
        """The number of sequences that are not best effort."""
        return len(self._regular)

    @property
    def has_ready(self) -> bool:
        """Whether any waiting sequence is not held."""
        return len(self.sequences) > len(self._held)

    @property
    def has_regular_ready(self) -> bool:
        """Whether any waiting regular sequence is not held."""
        return bool(self._regular) and self.has_ready and not self.first().best_effort

    def hold(self, sequence: Sequence) -> None:
        """Skips a sequence until ``release``."""
        self._held[sequence.id] = None

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Returns held sequences to their places."""
        for sequence in sequences:
            del self._held[sequence.id]
            heappush(self._by_rank, (sequence.queue_key, sequence.id))
        self._compact()

    def rank_some(self) -> None:
        """Recomputes the ranks of a few sequences, round robin, if ranks may change: blocks that were cached since
        their arrival make them shorter.
        """
        for _ in range(min(REORDERED_PER_STEP, len(self)) if self._max_overtakes is not None else 0):
            sequence = self.next_round_robin()
            self.reorder(sequence, self._rank(sequence))

    def next(self) -> Sequence:
        """Returns the sequence to admit next. If ranks may change, recomputes the rank of the first sequence before it
        returns it.
        """
        sequence = self.first()
        for _ in range(REORDERED_PER_STEP if self._max_overtakes is not None else 0):
            self.reorder(sequence, self._rank(sequence))
            first = self.first()
            if first is sequence:
                break
            sequence = first
        return sequence

    def first(self) -> Sequence:
        """Returns the sequence with the lowest rank, or the one that was overtaken too often, among those not held."""
        if self._max_overtakes is not None and len(self._overtakers) >= self._max_overtakes:
            oldest = next(iter(self._regular.values()))
            if oldest.id not in self._held:
                return oldest
        while not self._is_current(*self._by_rank[0]):
            heappop(self._by_rank)
        return self.sequences[self._by_rank[0][1]]

    def next_round_robin(self) -> Sequence:
        """Returns each sequence in turn, again and again."""
        while (sequence_id := self._turns.popleft()) not in self.sequences:
            pass
        self._turns.append(sequence_id)
        return self.sequences[sequence_id]

    def reorder(self, sequence: Sequence, rank: float) -> None:
        """Moves a sequence to the place of its new rank."""
        if rank != sequence.queue_key:
            sequence.queue_key = rank
            heappush(self._by_rank, (rank, sequence.id))
            self._compact()

    def remove_admitted(self, sequence: Sequence) -> None:
        """Removes a sequence whose turn has come. Call it before anything of the sequence changes."""
        if self._max_overtakes is not None and not sequence.best_effort:
            insort(self._overtakers, sequence.id)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence at any position. Call it before anything of the sequence changes."""
        del self.sequences[sequence.id]
        self._held.pop(sequence.id, None)
        self.num_best_effort -= sequence.best_effort
        if not sequence.best_effort:
            del self._regular[sequence.id]
            self.uncomputed_tokens -= sequence.num_uncomputed_tokens
        if (lora := sequence.request.lora) is not None:
            self.loras[lora] -= 1
            if not self.loras[lora]:
                del self.loras[lora]
        self._compact()
        self._forget_overtakers()

    def _is_current(self, rank: float, sequence_id: int) -> bool:
        sequence = self.sequences.get(sequence_id)
        return sequence is not None and sequence.queue_key == rank and sequence_id not in self._held

    def _compact(self) -> None:
        """Drops removed entries when they make up most of the heap: constant work per removal."""
        if len(self._by_rank) > 2 * len(self.sequences) + 16:
            self._by_rank = sorted((sequence.queue_key, sequence.id) for sequence in self.sequences.values())
        if len(self._turns) > 2 * len(self.sequences) + 16:
            self._turns = deque(self.sequences)

    def _forget_overtakers(self) -> None:
        """Forgets overtakers that came before the oldest sequence: they have not overtaken it. ``max_overtakes`` bounds
        the rest.
        """
        oldest = next(iter(self._regular), None)
        if oldest is None:
            self._overtakers.clear()
        else:
            del self._overtakers[: bisect_left(self._overtakers, oldest)]


AGING = 0.02


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """What a policy knows of a waiting sequence: its tokens that must be computed and are not cached, all tokens that
    the engine had computed when it arrived, and its request's priority.
    """

    uncached_tokens: int
    served_at_arrival: int
    priority: int


def fcfs(job: QueuedRequest) -> float:
    """First come, first served."""
    del job
    return 0.0


def sjf(job: QueuedRequest) -> float:
    """Shortest job first, by the tokens to compute, aged by the tokens that were computed for others meanwhile.

    Waiting while the engine computes one token counts as much as being ``AGING`` tokens shorter. The number of tokens
    computed so far is the same for all waiting jobs and cancels out, so a job's rank does not change with time. Aging
    by tokens instead of seconds is SGLang's idea.
    """
    return job.uncached_tokens + AGING * job.served_at_arrival


def priority(job: QueuedRequest) -> float:
    """Smallest number first; first come, first served among equals."""
    return float(job.priority)


POLICIES: "Mapping[Policy, Callable[[QueuedRequest], float]]" = {"fcfs": fcfs, "sjf": sjf, "priority": priority}
"""The order in which waiting requests are admitted: lowest rank first, ties in order of arrival."""


def rank_by(policy: "Policy", kv_cache_manager: KVCacheManager) -> Callable[[Sequence], float]:
    """Returns the rank of a waiting sequence under a policy, from what the prefix cache has of it now. Sequences that
    another engine has begun come first, like preempted ones here: their turn has come, and their clients are reading.
    Best-effort sequences come after all others, and shadow requests after those. Each of these groups is in order of
    arrival.
    """
    rank, by_length = POLICIES[policy], policy == "sjf"

    def rank_of(sequence: Sequence) -> float:
        if sequence.best_effort:
            return inf if sequence.request.priority >= SHADOW else float_info.max
        if sequence.request.all_resumed_outputs:
            return -inf
        looks = by_length and not sequence.group.needs_prompt_logprobs
        cached = len(kv_cache_manager.get_cached_blocks(sequence.block_table, sequence.token_ids)) if looks else 0
        uncached = sequence.num_tokens - cached * kv_cache_manager.block_size
        return rank(QueuedRequest(uncached, sequence.served_at_arrival, sequence.request.priority))

    return rank_of
