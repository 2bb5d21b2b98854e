"""The logits processors, in their order. Knows scores and what each row asks for, neither draws nor results.

    1. logit bias is added;
    2. repetition penalty, then frequency penalty, then presence penalty;
    3. what would complete a bad word, or end an output before ``min_tokens``, becomes -inf;
    4. what the grammar does not allow becomes -inf.

Temperature, top-k, top-p and min-p come after them, in this order, in ``sampler``. The order is vLLM's, but for min-p,
which vLLM applies before top-k, and transformers where we do. Where the last two steps stand makes no difference to
what is drawn, as -inf stays -inf; they are last so that the others see finite numbers only.

Each step touches what the rows that ask for it need, and no other row.
"""

from collections.abc import Sequence

import torch

from quire_engine.sampling.bias import add_bias
from quire_engine.sampling.forbidden import forbid
from quire_engine.sampling.grammar_mask import Masks, constrain
from quire_engine.sampling.penalties import penalise
from quire_engine.sampling.state import SequenceState


def process(scores: torch.Tensor, states: Sequence[SequenceState], masks: Masks) -> None:
    """Applies to ``scores`` [R, V] float32, finite and contiguous, in place, what the sequence of each row asks for.
    ``masks`` hold the grammars' rows. Afterwards scores are finite or -inf.
    """
    rows = list(enumerate(states))
    add_bias(scores, [(row, state.bias) for row, state in rows if state.bias])
    penalise(scores, [(row, state.penalties) for row, state in rows if state.penalties])
    forbid(scores, [(row, state.forbidden) for row, state in rows if state.forbidden])
    constrain(scores, [(row, state.sequence_id) for row, state in rows if state.place], masks)
