"""Layers that keep a state instead of keys and values, on the blocks of the KV cache: gated delta nets (Qwen3-Next,
Qwen3.5) and short convolutions (LFM2), as in transformers.

A block stores, after the keys and values of its tokens, the state of every such layer after the block's last token. So
a state is found, copied, swapped, stored and shared with the block of the same tokens, and no other code has to know of
it. A sequence can continue from the blocks of a prefix. (vLLM also keeps Mamba states at the ends of blocks.)

A step reads the state before each of its chunks from the previous block, or from the chunk's own block if the chunk
begins in the middle of it. It writes a state at every end of a block and at the end of the chunk. Unlike keys, a state
is overwritten, and a failed step that runs again must not start from the state that it left behind. Each block
therefore also has the number of tokens in its state, and the state before a step is kept until its sequence continues.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from quire_engine.attention.base import AttentionBatch
from quire_engine.checkpoint.support import STATE_LAYER_TYPES
from quire_engine.errors import ModelError

STATE_MODEL_TYPES = ("lfm2", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Models whose layers of these types are known to take their state from a cache like ``LayerState``."""

_COUNT = torch.int64
_LOST = -1  # the count of a state that is being written


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
    """A tensor of a layer's state for one sequence, and its byte offset in a block's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def view(self, states: torch.Tensor) -> torch.Tensor:
        """Returns this part of ``states`` [N, bytes], as [N, *shape]."""
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        return states[:, self.offset : self.offset + size].view(self.dtype).unflatten(1, self.shape)


class Piece(NamedTuple):
    """Tokens ``[start, end)`` of the batch that belong to one chunk and one block. ``chunk`` is the chunk's number, and
    ``seen`` the number of tokens of its sequence up to ``end``.
    """

    chunk: int
    start: int
    end: int
    block: int
    seen: int


@dataclass(slots=True)
class _Step:
    """The pieces of a step by round: a chunk's second piece follows its first. ``begin`` [chunks, bytes] are the states
    before the chunks, and ``has_past`` says which chunks have one.
    """

    rounds: list[list[Piece]]
    has_past: list[bool]
    begin: torch.Tensor
    states: torch.Tensor


class StateLayers:
    """The layers of one decoder that keep a state. ``modules`` are their modules, by the index of the layer; their
    ``forward`` is replaced. Use it from one thread.
    """

    def __init__(self, modules: dict[int, Any]) -> None:
        self._forwards = {index: module.forward for index, module in modules.items()}
        self._cache_names = {index: _cache_name(module) for index, module in modules.items()}
        self._parts: dict[int, list[StatePart]] = {}
        self.num_bytes = _COUNT.itemsize if modules else 0
        self._step: _Step | None = None
        self._begun: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()
        self._most_chunks = 1
        for index, module in modules.items():
            module.forward = self._forward_of(index)

    @property
    def indices(self) -> Set[int]:
        """The indexes of the layers that keep a state."""
        return self._forwards.keys()

    @contextmanager
    def step(self, batch: AttentionBatch, block_size: int, states: torch.Tensor) -> Iterator[None]:
        """Within this context the layers compute the step of ``batch``, on the ``states`` [blocks, bytes] of all
        blocks. Raises ``RuntimeError`` if the state before a chunk is lost.
        """
        self._begin(batch, block_size, states)
        try:
            yield
            self._end()
        finally:
            self._step = None

    def _begin(self, batch: AttentionBatch, block_size: int, states: torch.Tensor) -> None:
        pieces = pieces_of(batch, block_size)
        counts = states[:, : _COUNT.itemsize].view(_COUNT)[:, 0]
        begin, has_past = self._load(batch, block_size, states, counts)
        written = torch.tensor([piece.block for piece in pieces], device=states.device)
        counts[written] = _LOST
        self._step = _Step(list(_rounds(pieces)), has_past, begin, states)

    def _end(self) -> None:
        """Marks the states of the step as complete, after all layers have computed."""
        step = self._step
        assert step is not None
        counts = step.states[:, : _COUNT.itemsize].view(_COUNT)[:, 0]
        pieces = [piece for each in step.rounds for piece in each]
        blocks, ends = ([piece.block for piece in pieces], [piece.seen for piece in pieces])
        counts[torch.tensor(blocks, device=counts.device)] = torch.tensor(ends, device=counts.device)

    def _load(
        self, batch: AttentionBatch, block_size: int, states: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, list[bool]]:
        """Returns the state before each chunk, and which chunks have one. Raises ``RuntimeError`` if one is lost."""
        starts = (batch.context_lens - batch.query_indptr.diff()).tolist()
        firsts = batch.page_indptr[:-1].tolist()
        last = [first + max(0, start - 1) // block_size for first, start in zip(firsts, starts, strict=True)]
        blocks = batch.page_ids[torch.tensor(last, dtype=torch.long)].long().to(states.device)
        begin = states[blocks]  # a copy
        for row, (block, start, count) in enumerate(zip(blocks.tolist(), starts, counts[blocks].tolist(), strict=True)):
            if start == 0:
                continue
            if count != start:
                known, kept = self._begun.get(block, (_LOST, begin[row]))
                if known != start:
                    raise RuntimeError(f"block {block} has the state behind {count} tokens, and not behind {start}")
                begin[row] = kept
            if start % block_size:  # the state is about to be overwritten
                self._begun[block] = (start, begin[row].clone())
                self._begun.move_to_end(block)
        self._most_chunks = max(self._most_chunks, len(starts))
        while len(self._begun) > self._most_chunks:
            self._begun.popitem(last=False)
        return begin, [start > 0 for start in starts]

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
                self.num_bytes += -(-tensor[0].nbytes // _COUNT.itemsize) * _COUNT.itemsize
        return out

    def _run(self, index: int, hidden: torch.Tensor, step: _Step) -> torch.Tensor:
        """Returns the layer's output [T, hidden] for the tokens of a step. Computes pieces of equal length together."""
        out = torch.empty_like(hidden)
        current = [part.view(step.begin) for part in self._parts[index]]
        stored = [part.view(step.states) for part in self._parts[index]]
        has_past = list(step.has_past)
        for each in step.rounds:
            kinds: dict[tuple[int, bool], list[Piece]] = {}
            for piece in each:
                kinds.setdefault((piece.end - piece.start, has_past[piece.chunk]), []).append(piece)
            for (length, past), pieces in kinds.items():
                chunks = torch.tensor([piece.chunk for piece in pieces], device=hidden.device)
                blocks = torch.tensor([piece.block for piece in pieces], device=hidden.device)
                tokens = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces]).to(hidden.device)
                # The state of a convolution comes first.
                state = LayerState(*(tensor[chunks] for tensor in current)) if past else LayerState()
                made = self._call(index, hidden[tokens].view(len(pieces), length, -1), state)
                out[tokens] = made.flatten(0, 1)
                for tensor, all_blocks, new in zip(current, stored, state.tensors, strict=True):
                    tensor[chunks] = new
                    all_blocks[blocks] = new
                for piece in pieces:
                    has_past[piece.chunk] = True
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


def pieces_of(batch: AttentionBatch, block_size: int) -> list[Piece]:
    """Returns the tokens of a step, cut at the ends of blocks."""
    pieces: list[Piece] = []
    bounds, pages = batch.query_indptr.tolist(), batch.page_indptr.tolist()
    for chunk, ((first, end), context) in enumerate(zip(pairwise(bounds), batch.context_lens.tolist(), strict=True)):
        start = first
        while start < end:
            position = context - (end - start)
            size = min(end - start, block_size - position % block_size)
            block = int(batch.page_ids[pages[chunk] + position // block_size])
            pieces.append(Piece(chunk, start, start + size, block, position + size))
            start += size
    return pieces


def _rounds(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yields the first pieces of all chunks, then the second ones, and so on."""
    left: dict[int, list[Piece]] = {}
    for piece in pieces:
        left.setdefault(piece.chunk, []).append(piece)
    for number in range(max(map(len, left.values()), default=0)):
        yield [each[number] for each in left.values() if number < len(each)]
