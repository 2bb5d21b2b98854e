"""What is cached for a sequence between its draws: made from its ``SampleRequest``, at any time again."""

from collections.abc import Iterable

from quire_engine.sampling.bias import LogitBias
from quire_engine.sampling.forbidden import TokenBans
from quire_engine.sampling.grammar_mask import GrammarState
from quire_engine.sampling.penalties import Penalties
from quire_engine.scheduling.plan import SampleRequest

MAX_CACHED_SEQUENCES = 1 << 16


class SequenceSamplingState:
    """One sequence's parameters in the form that the logits processors read; None for each that it does not use."""

    __slots__ = (
        "_always_needs_processors",
        "bans",
        "bias",
        "draw",
        "grammar_state",
        "greedy",
        "is_beam",
        "penalties",
        "sequence_id",
        "wants_logprobs",
    )  # fmt: skip

    def __init__(self, draw: SampleRequest, vocab_size: int) -> None:
        self.draw = draw
        self.sequence_id = draw.sequence_id
        self.greedy = draw.params.greedy
        self.is_beam = draw.num_candidates > 0
        self.wants_logprobs = draw.params.wants_logprobs
        self.bias = LogitBias.from_params(draw.params, vocab_size)
        self.penalties = Penalties.from_request(draw)
        self.bans = TokenBans.from_request(draw)
        self.grammar_state = None if draw.grammar is None else GrammarState(draw)
        self._always_needs_processors = bool(self.bias or self.penalties or self.grammar_state)

    @property
    def needs_processors(self) -> bool:
        """Whether a logits processor changes the logits of the next draw."""
        return self._always_needs_processors or (self.bans is not None and bool(self.bans.token_ids()))


class SamplingStateCache:
    """The states of the sequences that were drawn for last, at most ``limit``. Used by one thread."""

    def __init__(self, vocab_size: int, limit: int = MAX_CACHED_SEQUENCES) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self._by_id: dict[int, SequenceSamplingState] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, draw: SampleRequest) -> SequenceSamplingState:
        """The state of the draw's sequence."""
        state = self._by_id.get(draw.sequence_id)
        # Only the very same draw goes on with what was counted: ids are one scheduler's, and another may use them too.
        if state is None or state.draw is not draw:
            state = self._by_id[draw.sequence_id] = SequenceSamplingState(draw, self._vocab_size)
            if len(self._by_id) > self._limit:
                del self._by_id[next(iter(self._by_id))]
        return state

    def remove(self, sequence_ids: Iterable[int]) -> None:
        """Drops the states of sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            self._by_id.pop(sequence_id, None)
