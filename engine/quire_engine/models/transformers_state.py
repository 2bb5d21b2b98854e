"""Layers that keep a state instead of keys and values: gated delta nets (Qwen3-Next, Qwen3.5, OLMo Hybrid) and short
convolutions (LFM2), as in transformers.

The states are rows of memory. A step says which row each of its chunks begins with, and where the state goes that comes
after (see ``attention.state_cache``).
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch

from quire_engine.attention.state_cache import StateRun, StateViews
from quire_engine.checkpoint.support import STATE_LAYER_TYPES
from quire_engine.errors import ModelError

STATE_MODEL_TYPES = ("lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Models whose layers of these types are known to take their state from a cache like ``LayerState``."""

_ALIGNMENT = 16


class LayerState:
    """The state of one layer for sequences of equal length, with the interface of a cache in transformers. None is the
    state before the first token.
    """

    def __init__(self, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None) -> None:
        self.conv, self.recurrent = conv, recurrent

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The existing parts of the state, [sequences, ...]."""
        return [part for part in (self.conv, self.recurrent) if part is not None]

    def get_conv_state(self, *_: object, **__: object) -> torch.Tensor | None:
        """Returns the last columns of a convolution's input. Layers may change it in place."""
        return self.conv

    def get_recurrent_state(self, *_: object, **__: object) -> torch.Tensor | None:
        """Returns the state of a recurrence."""
        return self.recurrent

    def is_recording_past(self, *_: object) -> bool:
        """Whether more than the last state is recorded: never."""
        return False

    def update_conv_state(self, states: torch.Tensor, *_: object, conv_kernel_size: int) -> torch.Tensor:
        """Adds columns [..., T] of the input. Returns them with the columns before."""
        seen = states if self.conv is None else torch.cat((self.conv, states), -1)
        missing = max(0, conv_kernel_size - seen.shape[-1])
        self.conv = torch.nn.functional.pad(seen, (missing, 0))[..., -conv_kernel_size:].contiguous()
        return seen

    def update_recurrent_state(self, state: torch.Tensor, *_: object) -> torch.Tensor:
        """Sets the state after the last token."""
        self.recurrent = state
        return state


class StatePart(NamedTuple):
    """A tensor of a layer's state for one sequence, and its byte offset in a row."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns this part of ``rows`` [N, bytes] uint8, as [N, *shape]."""
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        return rows[:, self.offset : self.offset + size].view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True, slots=True)
class _Step:
    runs: Sequence[StateRun]
    views: StateViews


class StateLayers:
    """The ``RecurrentLayers`` of one decoder. ``modules`` are their modules, by the index of the layer; it replaces
    their ``forward``. Use it from one thread.
    """

    def __init__(self, modules: dict[int, Any]) -> None:
        self._forwards = {index: module.forward for index, module in modules.items()}
        self._cache_names = {index: _cache_name(module) for index, module in modules.items()}
        self._parts: dict[int, list[StatePart]] = {}
        self.num_bytes = 0
        self._step: _Step | None = None
        for index, module in modules.items():
            module.forward = self._forward_of(index)

    @property
    def indices(self) -> Set[int]:
        """The indexes of the layers that keep a state."""
        return self._forwards.keys()

    def views(self, rows: torch.Tensor) -> StateViews:
        """See ``RecurrentLayers.views``."""
        return {index: [part.view(rows) for part in parts] for index, parts in self._parts.items()}

    @contextmanager
    def step(self, runs: Sequence[StateRun], views: StateViews) -> Iterator[None]:
        """See ``RecurrentLayers.step``."""
        self._step = _Step(runs, views)
        try:
            yield
        finally:
            self._step = None

    def _forward_of(self, index: int) -> Callable[..., torch.Tensor]:
        def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            if self._step is None:
                return self._probe(index, hidden_states)
            return self._run(index, hidden_states[0], self._step)[None]

        return forward

    def _probe(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Runs a layer for tokens of one sequence, from its first on. The first call finds the layout of the layer's
        state.
        """
        state = LayerState()
        out = self._call(index, hidden_states, state)
        if index not in self._parts:
            self._parts[index] = []
            for tensor in state.tensors:
                self._parts[index].append(StatePart(tuple(tensor.shape[1:]), tensor.dtype, self.num_bytes))
                self.num_bytes += -(-tensor[0].nbytes // _ALIGNMENT) * _ALIGNMENT
        return out

    def _run(self, index: int, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """Returns the layer's output [T, hidden] for the tokens of a step."""
        out = torch.empty_like(hidden)
        stored = step.views[index]
        for run in step.runs:
            # Copies, because layers may change a state in place. That of a convolution comes first.
            state = LayerState(*([] if run.read is None else [part.index_select(0, run.read) for part in stored]))
            made = self._call(index, hidden[run.tokens].view(len(run.write), run.length, -1), state)
            out[run.tokens] = made.flatten(0, 1)
            for part, new in zip(stored, state.tensors, strict=True):
                part.index_copy_(0, run.write, new)
        return out

    def _call(self, index: int, hidden_states: torch.Tensor, state: LayerState) -> torch.Tensor:
        """Runs the layer itself."""
        cache = {self._cache_names[index]: state}
        made: torch.Tensor = self._forwards[index](hidden_states=hidden_states, **cache)
        return made


def state_modules(decoder: Any) -> dict[int, Any]:
    """Returns the modules of a decoder that keep a state, by the index of the layer. Raises ``ModelError`` for unknown
    modules.
    """
    kinds = getattr(decoder.config, "layer_types", None) or ()
    layers = [index for index, kind in enumerate(kinds) if kind in STATE_LAYER_TYPES]
    return {index: _state_module(decoder.layers[index], kinds[index]) for index in layers}


def _state_module(layer: Any, kind: str) -> Any:
    for module in layer.children():
        if any(hasattr(module, name) for name in ("conv", "conv1d")):
            return module
    raise ModelError(f"Its layers of type {kind} have no convolution, whose state is kept.")


def _cache_name(module: Any) -> str:
    """Returns the name of the module's cache argument."""
    names = signature(module.forward).parameters
    return next(name for name in ("cache_params", "past_key_values") if name in names)
