"""The logits processors, in their order.

    1. logit bias is added;
    2. repetition penalty, then frequency penalty, then presence penalty;
    3. what would complete a bad word, or end an output before ``min_tokens``, becomes -inf;
    4. what the grammar does not allow becomes -inf.

Temperature, top-k, top-p and min-p come after them, in this order, in ``sampler``. The order is vLLM's, but for min-p,
which vLLM applies before top-k, and transformers where we do. The position of the last two makes no difference to
what is drawn, as -inf stays -inf; they are last so that the others see finite numbers only.

Each one touches only the rows that ask for it.
"""

from collections.abc import Sequence

import torch

from quire_engine.sampling.bias import apply_logit_bias
from quire_engine.sampling.forbidden import apply_bans
from quire_engine.sampling.grammar_mask import GrammarBitmask, apply_grammar_bitmask
from quire_engine.sampling.penalties import apply_penalties
from quire_engine.sampling.state import SequenceSamplingState


def apply_logits_processors(
    scores: torch.Tensor, states: Sequence[SequenceSamplingState], bitmask: GrammarBitmask
) -> None:
    """Applies to ``scores`` [R, V] float32, finite and contiguous, in place, what the sequence of each row asks for.
    ``bitmask`` has the rows of grammars. Afterwards scores are finite or -inf.
    """
    rows = list(enumerate(states))
    apply_logit_bias(scores, [(row, state.bias) for row, state in rows if state.bias])
    apply_penalties(scores, [(row, state.penalties) for row, state in rows if state.penalties])
    apply_bans(scores, [(row, state.bans) for row, state in rows if state.bans])
    apply_grammar_bitmask(scores, [(row, state.sequence_id) for row, state in rows if state.grammar_state], bitmask)
