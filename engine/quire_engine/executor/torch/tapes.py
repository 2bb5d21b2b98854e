"""Tapes of decode steps on the CPU: recorded when a batch size first comes, replayed whenever it comes again.

A decode step of a small model is hundreds of short kernels, and between two of them the interpreter takes as long as
they do. What CUDA graphs are on a GPU (see ``graphs``); but recording costs no more than the step itself, so sizes need
no ladder and batches no padding. Knows models and attention, neither batches nor plans.
"""

import logging
from collections import OrderedDict
from typing import NamedTuple, cast

import torch

from quire_engine.attention.base import AttentionBackend
from quire_engine.attention.cpu import CpuAttention
from quire_engine.kernels.tape import NotRecordableError, Tape, record
from quire_engine.models.base import LayeredModel, LayerInputs, Model

log = logging.getLogger(__name__)

# Beyond this the kernels are long enough to hide the interpreter.
LARGEST_BATCH = 256
# A tape takes about as much memory as one layer does while it computes.
MOST_TAPES = 64


class _Recorded(NamedTuple):
    """A tape, and where it reads what is new in each step."""

    tape: Tape
    inputs: LayerInputs


def make_tapes(model: Model, kv: torch.Tensor, attention: AttentionBackend) -> "DecodeTapes | None":
    """The tapes of ``model`` over ``kv``; None where it computes with more than the compiled kernels."""
    compiled = isinstance(attention, CpuAttention) and attention.is_compiled
    if not (compiled and model.capturable and hasattr(model, "layers")):
        return None
    return DecodeTapes(cast(LayeredModel, model), kv, cast(CpuAttention, attention))


class DecodeTapes:
    """The tapes of one model over one KV memory. Used by one thread, in inference mode."""

    def __init__(self, model: LayeredModel, kv: torch.Tensor, attention: CpuAttention) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._tapes: OrderedDict[int, _Recorded] = OrderedDict()
        self._gave_up = False

    def fits(self, size: int) -> bool:
        """Whether a step of one token of each of ``size`` sequences may run from a tape."""
        return size <= LARGEST_BATCH and not self._gave_up

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``Model.forward``, for a step that fits and that the attention is prepared for. The hidden states hold
        until the next call.
        """
        fresh = self._model.inputs(token_ids, positions)
        known = self._tapes.get(len(token_ids))
        if known is None:
            return self._record(fresh)
        self._tapes.move_to_end(len(token_ids))
        for place, new in zip(known.inputs, fresh, strict=True):
            place.copy_(new)
        self._attention.check_pages(self._kv)
        known.tape.replay()
        return known.tape.result

    def _record(self, inputs: LayerInputs) -> torch.Tensor:
        states = inputs.hidden_states.clone()
        try:
            tape = record(lambda: self._model.layers(inputs, self._kv, self._attention))
        except NotRecordableError as error:
            log.info("decode steps are not recorded: %s", error)
            self._gave_up = True
            # What was computed so far only wrote what is now written again.
            return self._model.layers(inputs._replace(hidden_states=states), self._kv, self._attention)
        self._tapes[len(states)] = _Recorded(tape, inputs)
        if len(self._tapes) > MOST_TAPES:
            self._tapes.popitem(last=False)
        return tape.result
