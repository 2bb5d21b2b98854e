"""What a router concludes about servers that do not say it: which blocks they have cached (``PredictedCache``), from
what it sent there, and how fast they are (``ObservedPace``), from when they answered. Does no I/O.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.v1 import engine_pb2

KvEventListener = Callable[[engine_pb2.KvEvent], None]
_MISSING = object()


class PredictedCache:
    """The blocks that a server should have: those of the prompts and answers that this router had computed there, and
    of the prompts that other routers had, the ``capacity`` used last. Servers evict what was used longest ago, too, and
    of one prompt the last blocks first; what other clients send is not seen. ``on_event`` is called with each change,
    as an engine of Quire would report it. Where the server's own events are read they are entered here, too.
    """

    def __init__(self, capacity: int, on_event: KvEventListener) -> None:
        self._capacity = capacity
        self._on_event = on_event
        self._blocks: OrderedDict[bytes, object] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, hashes: Iterable[bytes]) -> int:
        """How many leading blocks of a prompt it has."""
        found = 0
        for block_hash in hashes:
            if block_hash not in self._blocks:
                break
            found += 1
        return found

    def add(self, hashes: Sequence[bytes]) -> None:
        """The server has computed, or used, these blocks of one sequence of tokens, from its beginning on."""
        hashes = hashes[: self._capacity]
        new = [block_hash for block_hash in hashes if block_hash not in self._blocks]
        for block_hash in reversed(hashes):  # so that the last ones are evicted first
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        if new:
            stored = engine_pb2.KvStored(block_hashes=new, tier=engine_pb2.KV_TIER_DEVICE)
            self._on_event(engine_pb2.KvEvent(stored=stored))
        self._report_removed([self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)])

    def remove(self, hashes: Iterable[bytes]) -> None:
        """The server has evicted these blocks, and says so."""
        known = self._blocks
        self._report_removed([each for each in hashes if known.pop(each, _MISSING) is not _MISSING])

    def clear(self) -> None:
        """The server has nothing any more, or it is not known what."""
        self.remove(list(self._blocks))

    def _report_removed(self, hashes: Sequence[bytes]) -> None:
        if hashes:
            removed = engine_pb2.KvRemoved(block_hashes=hashes, tier=engine_pb2.KV_TIER_DEVICE)
            self._on_event(engine_pb2.KvEvent(removed=removed))


_GAP_WEIGHT = 1 / 256
_PROMPT_WEIGHT = 1 / 8
_LEAST_PROMPT = 32  # tokens: the times of shorter prompts are those of a step
_MIN_SPREAD = 0.25  # variance of the number of sequences above which a slope can be fitted
_SEQUENCE_PART = 0.02
"""What a sequence adds to a step where that cannot be fitted, of the step's own time: the ratio that placement assumes
of engines of which it knows nothing.
"""


class ObservedPace:
    """How long a server's steps take, as seen from the router: with the network, and with whatever else the server did.

    The time between two outputs of one choice is a step's, ``step_seconds`` plus ``sequence_seconds`` for each sequence
    that decodes beside it: a line fitted by least squares in which older steps count less and less. The time of a first
    output is that of its prompt, where no other prompt was before it: so much for each token that was not cached.
    """

    def __init__(self) -> None:
        self._gap = self._sequences = 0.0
        self._spread = self._slope_sum = 0.0
        self._gaps = 0
        self._token_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        """The time between two outputs, on average; 0 before there were any."""
        return self._gap

    def on_gap(self, seconds: float, sequences: int) -> None:
        """Outputs of a choice came ``seconds`` apart, a token each, while so many sequences decoded."""
        self._gaps += 1
        weight = max(_GAP_WEIGHT, 1 / self._gaps)
        off_gap, off_sequences = seconds - self._gap, sequences - self._sequences
        self._gap += weight * off_gap
        self._sequences += weight * off_sequences
        keep = 1 - weight
        self._spread = keep * (self._spread + weight * off_sequences * off_sequences)
        self._slope_sum = keep * (self._slope_sum + weight * off_sequences * off_gap)

    def on_prompt(self, seconds: float, tokens: int) -> None:
        """A prompt with ``tokens`` that were not cached had its first output after ``seconds``, alone."""
        if tokens < _LEAST_PROMPT or not self._gaps:
            return
        each = max(0.0, seconds - self._gap) / tokens
        before = self._token_seconds
        self._token_seconds = each if before is None else before + _PROMPT_WEIGHT * (each - before)

    def pace(self) -> engine_pb2.Pace | None:
        """What is known; None before the first prompt and the first gap."""
        if self._token_seconds is None:
            return None
        slope = self._slope_sum / self._spread if self._spread > _MIN_SPREAD else 0.0
        if not 0 < slope * self._sequences < self._gap:
            slope = _SEQUENCE_PART * self._gap
        step = max(0.0, self._gap - slope * self._sequences)
        return engine_pb2.Pace(step_seconds=step, token_seconds=self._token_seconds, sequence_seconds=slope)
