"""What is kept for a sequence between its draws: a cache, made from its ``SampleRequest`` and at any time made anew."""

from collections.abc import Iterable

from quire_engine.sampling.bias import Bias
from quire_engine.sampling.forbidden import Forbidden
from quire_engine.sampling.grammar_mask import GrammarPlace
from quire_engine.sampling.penalties import Penalties
from quire_engine.scheduling.plan import SampleRequest

MAX_SEQUENCES = 1 << 16


class SequenceState:
    """What one sequence's parameters ask for, in the form that the processors read; None for what it does not ask."""

    __slots__ = (
        "_always", "bias", "draw", "forbidden", "greedy", "is_beam", "penalties", "place", "sequence_id",
        "wants_logprobs",
    )  # fmt: skip

    def __init__(self, draw: SampleRequest, vocab_size: int) -> None:
        self.draw = draw
        self.sequence_id = draw.sequence_id
        self.greedy = draw.params.greedy
        self.is_beam = draw.num_candidates > 0
        self.wants_logprobs = draw.params.wants_logprobs
        self.bias = Bias.of(draw.params, vocab_size)
        self.penalties = Penalties.of(draw)
        self.forbidden = Forbidden.of(draw)
        self.place = None if draw.grammar is None else GrammarPlace(draw)
        self._always = bool(self.bias or self.penalties or self.place)

    @property
    def is_processed(self) -> bool:
        """Whether the next draw is from anything but the model's own logits."""
        return self._always or (self.forbidden is not None and bool(self.forbidden.token_ids()))


class SequenceStates:
    """The states of the sequences that were drawn for lately, at most ``limit``. Used by one thread."""

    def __init__(self, vocab_size: int, limit: int = MAX_SEQUENCES) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self._by_id: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, draw: SampleRequest) -> SequenceState:
        """The state of the draw's sequence."""
        state = self._by_id.get(draw.sequence_id)
        # Only the very same draw goes on with what was counted: ids are one scheduler's, and another may use them too.
        if state is None or state.draw is not draw:
            state = self._by_id[draw.sequence_id] = SequenceState(draw, self._vocab_size)
            if len(self._by_id) > self._limit:
                del self._by_id[next(iter(self._by_id))]
        return state

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences; unknown ones are ignored."""
        for sequence_id in sequence_ids:
            self._by_id.pop(sequence_id, None)
