"""MoE layers on the CPU with ``experts.cpp``: ``route`` chooses each token's experts, and ``ExpertsKernel`` sums their
outputs, with all experts in one grouped product.
"""

import ctypes
from collections.abc import Sequence

import torch

from quire_engine.kernels.bindings import DTYPES, ExpertsCall, GroupsCall, Int8Call, LinearLayer, RouteCall, library
from quire_engine.kernels.ops import ClampedSwiGLU
from quire_engine.kernels.packed_linear import PackedProduct, PackedWeight

Packed = PackedWeight | PackedProduct
_KINDS: tuple[type[ctypes.Structure], ...] = (LinearLayer, Int8Call, GroupsCall)


def route(logits: torch.Tensor, top: int, *, normalise: bool, round_weights: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights and ids of each token's ``top`` experts from ``logits`` [T, experts], both [T, top], by
    descending weight.

    Weights are fp32. They come from the softmax over all experts, or add up to 1 with ``normalise``. With
    ``round_weights`` they are rounded to the dtype of ``logits``. Ids are int64, and distinct for any logits.
    """
    kernels = library() if logits.is_cpu and logits.dtype in DTYPES and logits.is_contiguous() else None
    if kernels is None:
        topk_weights, topk_ids = logits.softmax(-1, dtype=torch.float32).topk(top, dim=-1)
        if normalise:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return topk_weights.to(logits.dtype).float() if round_weights else topk_weights, topk_ids
    tokens, experts = logits.shape
    topk_weights, topk_ids = torch.empty(tokens, top), torch.empty(tokens, top, dtype=torch.int64)
    bf16 = logits.dtype is torch.bfloat16
    call = RouteCall(
        *(logits.data_ptr(), topk_weights.data_ptr(), topk_ids.data_ptr(), tokens, experts, top),
        *(int(normalise), int(round_weights and bf16), int(bf16), torch.get_num_threads()),
    )
    kernels.quire_route(ctypes.pointer(call))
    return topk_weights, topk_ids


class ExpertsKernel:
    """Consecutive experts of an MoE layer, from the expert ``first``. Implements ``Experts`` of ``layers/mlp.py``.

    Args: for each expert the packed ``gate_up`` [2 * inner, hidden] and ``down`` [hidden, inner], for activations of
    ``dtype``. With ``round_weights``, weights have that dtype, and products with them are rounded. The activation is
    ``silu_mul``, or ``clamped`` if that is given. Call it from one thread at a time.
    """

    is_capturable = True

    def __init__(
        self,
        gate_up: Sequence[Packed],
        down: Sequence[Packed],
        first: int,
        dtype: torch.dtype,
        *,
        round_weights: bool,
        clamped: ClampedSwiGLU | None = None,
    ) -> None:
        kernels = library()
        assert kernels is not None, "there are packed layers"
        self._dtype, self._run = dtype, kernels.quire_experts
        tables = [
            (ctypes.c_void_p * len(each))(*(ctypes.addressof(one.call) for one in each)) for each in (gate_up, down)
        ]
        self._kept = gate_up, down, tables
        paired = clamped is None and all(getattr(one.call, "paired", True) for one in gate_up)
        self._call = ExpertsCall(
            gate_up=ctypes.addressof(tables[0]),
            down=ctypes.addressof(tables[1]),
            gate_up_kind=_kind_of(gate_up[0]),
            down_kind=_kind_of(down[0]),
            hidden=gate_up[0].call.inputs,
            width=gate_up[0].call.outputs // (2 if paired else 1),
            paired=int(paired),
            first=first,
            count=len(gate_up),
            round=int(round_weights and dtype is torch.bfloat16),
            bf16=int(dtype is torch.bfloat16),
            alpha=0.0 if clamped is None else clamped.alpha,
            limit=0.0 if clamped is None else clamped.limit,
        )
        self._reference = ctypes.pointer(self._call)

    @classmethod
    def of(
        cls,
        gate_up: Sequence[Packed | None],
        down: Sequence[Packed | None],
        first: int,
        dtype: torch.dtype,
        *,
        round_weights: bool,
        clamped: ClampedSwiGLU | None = None,
    ) -> "ExpertsKernel | None":
        """Makes the kernel for these experts, or returns None if they are not packed, or not all in the same way."""
        known = [[each for each in layers if each is not None] for layers in (gate_up, down)]
        if any(len(layers) < max(1, len(gate_up)) or len(set(map(_kind_of, layers))) > 1 for layers in known):
            return None
        return cls(known[0], known[1], first, dtype, round_weights=round_weights, clamped=clamped)

    def __call__(self, states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """See ``Experts``. Raises ``ValueError`` for tensors that the kernel must not read."""
        call, (tokens, hidden), top = self._call, states.shape, topk_ids.shape[1]
        if states.dtype is not self._dtype or hidden != call.hidden or states.stride(1) != 1:
            raise ValueError(f"{states.dtype} {tuple(states.shape)} is not {self._dtype} [T, {call.hidden}] in rows")
        for each, dtype in ((topk_weights, torch.float32), (topk_ids, torch.int64)):
            if each.dtype is not dtype or each.shape != (tokens, top) or not each.is_contiguous():
                raise ValueError(f"{each.dtype} {tuple(each.shape)} is not {dtype} [{tokens}, {top}]")
        out = torch.empty(tokens, hidden, dtype=self._dtype)
        by_expert = torch.empty(tokens * top, hidden, dtype=self._dtype)
        between = torch.empty(tokens * top, call.width, dtype=self._dtype)
        call.x, call.stride, call.rows, call.top = states.data_ptr(), states.stride(0), tokens, top
        call.weights, call.chosen, call.out = topk_weights.data_ptr(), topk_ids.data_ptr(), out.data_ptr()
        call.sorted, call.between, call.threads = by_expert.data_ptr(), between.data_ptr(), torch.get_num_threads()
        self._run(self._reference)
        return out


def _kind_of(layer: Packed) -> int:
    return _KINDS.index(type(layer.call))
