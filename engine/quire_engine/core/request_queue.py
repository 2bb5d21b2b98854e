"""Queues of sequences, the order of the waiting one, and what an admission may have to wait for.

No order is that of a set or of addresses, and nothing here is linear in what waits.
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
    """Sequences that were admitted once: a list that ``push`` and ``remove`` keep in the order of their preemption
    keys. ``num_seqs``: the sum of theirs. ``num_best_effort``: how many are best effort; they are the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_seqs = 0
        self.num_best_effort = 0

    def push(self, sequence: Sequence) -> None:
        """Adds where its precedence puts it."""
        insort(self, sequence, key=_preemption_key)
        self.num_seqs += sequence.num_seqs
        self.num_best_effort += sequence.best_effort

    def first(self) -> Sequence:
        """The one that is preempted last."""
        return self[0]

    def last(self) -> Sequence:
        """The one that is preempted first."""
        return self[-1]

    def remove(self, sequence: Sequence) -> None:
        """Takes one out, wherever it stands."""
        del self[bisect_left(self, sequence.preemption_key, key=_preemption_key)]
        self.num_seqs -= sequence.num_seqs
        self.num_best_effort -= sequence.best_effort


class AdmissionGate(Protocol):
    """Something that an admission may have to wait for besides its turn and the memory: a slot for its adapter, blocks
    that come from a tier.

    The gate holds a sequence that it does not admit, and those behind it go first, until the gate releases it. (vLLM
    has them in a second queue, ``skipped_waiting``, each with the status of what it waits for.)
    """

    def release(self) -> "Iterable[Sequence]":
        """Held sequences that may be admitted now, or that are to be asked for again; they are held no more. Called
        once in each step that may admit anything, before the first call of ``admits``.
        """
        ...

    def admits(self, sequence: Sequence) -> bool:
        """Whether a sequence whose turn has come may be admitted now. It is held if not."""
        ...

    def on_admission(self, sequence: Sequence) -> None:
        """All gates and the memory admitted a sequence."""
        ...

    def on_abort(self, sequence: Sequence) -> None:
        """A waiting sequence, held or not, has ended."""
        ...


class WaitingQueue:
    """Sequences for which nothing is computed, in the order of their ranks, the tokens that this work amounts to
    (``uncomputed_tokens``: without what is best effort), and how many sequences are best effort (``num_best_effort``)
    and wait for each adapter (``loras``).

    ``rank`` computes a sequence's rank when it arrives. With ``max_overtakes`` ranks may become smaller while sequences
    wait, and whoever has been overtaken by so many later arrivals is next, whatever its rank. It is enough to count for
    the oldest: everyone who overtook a younger one has overtaken the oldest as well. Those that are held wait for an
    ``AdmissionGate``, and are passed over until they are released. What is best effort has the last ranks, is never
    next because it was overtaken, and overtakes nobody.
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
        """How many are not best effort."""
        return len(self._regular)

    @property
    def has_ready(self) -> bool:
        """Whether any waits that is not held."""
        return len(self.sequences) > len(self._held)

    @property
    def has_regular_ready(self) -> bool:
        """Whether any waits that is neither held nor best effort."""
        return bool(self._regular) and self.has_ready and not self.first().best_effort

    def hold(self, sequence: Sequence) -> None:
        """Passes over one until ``release``."""
        self._held[sequence.id] = None

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Gives some that are held their places again."""
        for sequence in sequences:
            del self._held[sequence.id]
            heappush(self._by_rank, (sequence.queue_key, sequence.id))
        self._compact()

    def rank_some(self) -> None:
        """Computes the ranks of a few again, in turn, where they may change: what was cached since they arrived makes
        them shorter.
        """
        for _ in range(min(REORDERED_PER_STEP, len(self)) if self._max_overtakes is not None else 0):
            sequence = self.next_round_robin()
            self.reorder(sequence, self._rank(sequence))

    def next(self) -> Sequence:
        """The sequence to admit next. Where ranks may change, the first one's is computed again before it is."""
        sequence = self.first()
        for _ in range(REORDERED_PER_STEP if self._max_overtakes is not None else 0):
            self.reorder(sequence, self._rank(sequence))
            first = self.first()
            if first is sequence:
                break
            sequence = first
        return sequence

    def first(self) -> Sequence:
        """The one with the least rank, or that was overtaken too often, of those that are not held."""
        if self._max_overtakes is not None and len(self._overtakers) >= self._max_overtakes:
            oldest = next(iter(self._regular.values()))
            if oldest.id not in self._held:
                return oldest
        while not self._is_current(*self._by_rank[0]):
            heappop(self._by_rank)
        return self.sequences[self._by_rank[0][1]]

    def next_round_robin(self) -> Sequence:
        """Everyone in turn, again and again."""
        while (sequence_id := self._turns.popleft()) not in self.sequences:
            pass
        self._turns.append(sequence_id)
        return self.sequences[sequence_id]

    def reorder(self, sequence: Sequence, rank: float) -> None:
        """Moves one to where its new rank puts it."""
        if rank != sequence.queue_key:
            sequence.queue_key = rank
            heappush(self._by_rank, (rank, sequence.id))
            self._compact()

    def remove_admitted(self, sequence: Sequence) -> None:
        """Takes one out because its turn has come; call it before anything of the sequence changes."""
        if self._max_overtakes is not None and not sequence.best_effort:
            insort(self._overtakers, sequence.id)
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes one out, wherever it stands; call it before anything of the sequence changes."""
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
        """Throws out what has left, once that is most of the heap: constant work for each one that left."""
        if len(self._by_rank) > 2 * len(self.sequences) + 16:
            self._by_rank = sorted((sequence.queue_key, sequence.id) for sequence in self.sequences.values())
        if len(self._turns) > 2 * len(self.sequences) + 16:
            self._turns = deque(self.sequences)

    def _forget_overtakers(self) -> None:
        """Only those that came after the oldest have overtaken it; there are never more than the bound."""
        oldest = next(iter(self._regular), None)
        if oldest is None:
            self._overtakers.clear()
        else:
            del self._overtakers[: bisect_left(self._overtakers, oldest)]


AGING = 0.02


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """What a policy may know of a sequence that waits: the tokens that it needs computed and that no cache holds, all
    tokens that the engine had computed when it arrived, and its request's priority.
    """

    uncached_tokens: int
    served_at_arrival: int
    priority: int


def fcfs(job: QueuedRequest) -> float:
    """First come, first served."""
    del job
    return 0.0


def sjf(job: QueuedRequest) -> float:
    """The shortest job first, by the tokens that it needs computed, aged by those that others were given meanwhile.

    Waiting while the engine computes a token counts as much as being ``AGING`` tokens shorter. The token that is served
    now is the same for all that wait, so it cancels out, and the rank of a job never changes with time. Aging by tokens
    instead of seconds is SGLang's idea.
    """
    return job.uncached_tokens + AGING * job.served_at_arrival


def priority(job: QueuedRequest) -> float:
    """Small numbers first; first come, first served among equals."""
    return float(job.priority)


POLICIES: "Mapping[Policy, Callable[[QueuedRequest], float]]" = {"fcfs": fcfs, "sjf": sjf, "priority": priority}
"""In which order waiting requests are admitted: the lowest rank first, of equal ranks the earliest arrival."""


def rank_by(policy: "Policy", kv_cache_manager: KVCacheManager) -> Callable[[Sequence], float]:
    """The rank of a waiting sequence under a policy, by what the prefix cache has of it now. What another engine has
    begun is before all else, as what was preempted here is: its turn has come, and somebody is reading it. What is best
    effort is behind all else, and shadows behind that. All of these are in the order in which they came.
    """
    rank, by_length = POLICIES[policy], policy == "sjf"

    def rank_of(sequence: Sequence) -> float:
        if sequence.best_effort:
            return inf if sequence.request.priority >= SHADOW else float_info.max
        if sequence.request.all_resumed_outputs:
            return -inf
        looks = by_length and not sequence.group.needs_prompt_logprobs
        cached = len(kv_cache_manager.get_cached_blocks(sequence.table, sequence.token_ids)) if looks else 0
        uncached = sequence.num_tokens - cached * kv_cache_manager.block_size
        return rank(QueuedRequest(uncached, sequence.served_at_arrival, sequence.request.priority))

    return rank_of
