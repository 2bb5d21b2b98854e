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
from quire_engine.kernels.tape import CpuGraph, NotCapturableError, capture
from quire_engine.models.base import LayeredModel, LayerInputs, Model

log = logging.getLogger(__name__)

# Beyond this the kernels are long enough to hide the interpreter.
LARGEST_BATCH = 256
# A tape takes about as much memory as one layer does while it computes.
MAX_GRAPHS = 64


class _CapturedStep(NamedTuple):
    """A tape, and where it reads what is new in each step."""

    graph: CpuGraph
    inputs: LayerInputs


def make_cpu_graphs(model: Model, kv: torch.Tensor, attention: AttentionBackend) -> "CpuGraphRunner | None":
    """The tapes of ``model`` over ``kv``; None where it computes with more than the compiled kernels."""
    compiled = isinstance(attention, CpuAttention) and attention.is_compiled
    if not (compiled and model.capturable and hasattr(model, "layers")):
        return None
    return CpuGraphRunner(cast(LayeredModel, model), kv, cast(CpuAttention, attention))


class CpuGraphRunner:
    """The tapes of one model over one KV memory. Used by one thread, in inference mode."""

    def __init__(self, model: LayeredModel, kv: torch.Tensor, attention: CpuAttention) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._graphs: OrderedDict[int, _CapturedStep] = OrderedDict()
        self._not_capturable = False

    def can_run(self, size: int) -> bool:
        """Whether a step of one token of each of ``size`` sequences may run from a tape."""
        return size <= LARGEST_BATCH and not self._not_capturable

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As ``Model.forward``, for a step that fits and that the attention is prepared for. The hidden states hold
        until the next call.
        """
        fresh = self._model.inputs(token_ids, positions)
        known = self._graphs.get(len(token_ids))
        if known is None:
            return self._capture(fresh)
        self._graphs.move_to_end(len(token_ids))
        for place, new in zip(known.inputs, fresh, strict=True):
            place.copy_(new)
        self._attention.check_pages(self._kv)
        known.graph.replay()
        return known.graph.result

    def _capture(self, inputs: LayerInputs) -> torch.Tensor:
        states = inputs.hidden_states.clone()
        try:
            tape = capture(lambda: self._model.layers(inputs, self._kv, self._attention))
        except NotCapturableError as error:
            log.info("decode steps are not recorded: %s", error)
            self._not_capturable = True
            # What was computed so far only wrote what is now written again.
            return self._model.layers(inputs._replace(hidden_states=states), self._kv, self._attention)
        self._graphs[len(states)] = _CapturedStep(tape, inputs)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return tape.result
