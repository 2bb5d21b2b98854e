"""Attention on the CPU: a compiled kernel over the pages, or the same in torch, one sequence at a time.

The kernel itself checks nothing. This module checks what the kernel may touch: the plan once per step and the tensors
once per layer. It owns only the pointers of the step's plan.

Measured on one thread with AVX-512 in bf16, as medians of alternating runs:

* Prefill of 2,048 tokens (9 query and 3 KV heads of 64) takes a third of the time of torch's
  ``scaled_dot_product_attention`` on contiguous keys and values. So long chunks need no second path.
* Up to 8 query rows per KV head, as in a decode, read keys and values directly from the pages. So 32 sequences of 200
  tokens take 0.6 of the time that the tiles of long chunks would take, with the same bits.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from quire_engine.attention.base import AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import load_pages, row_size, store_rows
from quire_engine.attention.reference import softmax_weights
from quire_engine.kernels.bindings import DTYPES, AttentionCall, AttentionPlan, library

_NO_WINDOW = 2**62
_Int32 = npt.NDArray[np.int32]


class CpuAttention:
    """Paged attention for one batch at a time. Implements ``AttentionBackend``.

    ``use_kernel`` False computes in torch, and True requires the kernel. None uses the kernel if it is available (see
    ``library``) and the tensors suit it: queries in bf16 with an even head size, or in fp32.

    Each row of the kernel's result depends only on its own sequence, bit for bit. The batch, the division into chunks,
    the choice of pages and the number of threads do not change it. ``last_page`` is the largest page id of the step,
    which nothing checks when captured calls are replayed.
    """

    def __init__(self, shape: AttentionShape, *, use_kernel: bool | None = None) -> None:
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads evenly")
        self._shape = shape
        self._kernels = None if use_kernel is False else library()
        if use_kernel and self._kernels is None:
            raise RuntimeError("the CPU attention kernel is not available")
        self.batches: Sequence[AttentionBatch] = ()
        self.last_page = -1
        self._plans: list[_Plan] = []
        self._calls: list[_GroupCalls] = []

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel computes tensors that suit it."""
        return self._kernels is not None

    def prepare(self, *batches: AttentionBatch) -> None:
        """Takes the plan of the step.

        Raises:
            ValueError: the plan contradicts itself; nothing of it is kept.
        """
        self.batches, self._plans, self.last_page = (), [], -1
        while len(self._calls) < len(batches):
            self._calls.append(_GroupCalls(self._shape))
        block_size = self._shape.block_size
        self._plans = [_Plan(batch, calls.plan, block_size) for batch, calls in zip(batches, self._calls, strict=False)]
        self.batches, self.last_page = batches, max((each.last_page for each in self._plans), default=-1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        window: int | None,
        *,
        group: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``: stores, then attends. Raises ``ValueError``, before it touches any page, if
        a tensor does not fit the prepared plan.
        """
        if group >= len(self._plans):
            raise ValueError("attention: prepare comes before forward")
        _require(window is None or window > 0, f"a window of {window}")
        if sinks is not None:
            _require(sinks.shape == (self._shape.num_heads,), "sinks have another shape", sinks)
            if sinks.dtype is not torch.float32 or not sinks.is_contiguous():  # never in a graph
                sinks = sinks.float().contiguous()
        plan, calls, layer = self._plans[group], self._calls[group], _LayerTensors(query, key, value, kv, window, sinks)
        _require(plan.last_page < kv.shape[0], f"kv has no page {plan.last_page}", kv)
        form = layer.form()
        if form != calls.checked or len(query) != plan.num_tokens:
            _check(layer, self._shape, plan.num_tokens)
            calls.set_layout(layer, form)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._kernels is None or not calls.suit_kernel:
            _forward_in_torch(layer, plan, self._shape, out)
        else:
            calls.set_pointers(layer, out)
            self._kernels.quire_attention(calls.reference)
        return out


class _LayerTensors(NamedTuple):
    """The arguments of ``forward``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv: torch.Tensor
    window: int | None
    sinks: torch.Tensor | None

    def form(self) -> tuple[object, ...]:
        """Returns all properties of the tensors that are checked. Layers of equal form need only one check."""
        query, key, value, kv, *_ = self
        shapes = query.shape, key.shape, value.shape, kv.shape
        strides = query.stride(), key.stride(), value.stride(), kv.stride()
        dtypes = query.dtype, key.dtype, value.dtype, kv.dtype
        return shapes, strides, dtypes, (query.is_cpu, key.is_cpu, value.is_cpu, kv.is_cpu)


def _check(layer: _LayerTensors, shape: AttentionShape, num_tokens: int) -> None:
    query, key, value, kv, *_ = layer
    stored = (num_tokens, shape.num_kv_heads, shape.head_dim)
    _require(query.shape == (num_tokens, shape.num_heads, shape.head_dim), "query has another shape", query)
    _require(key.shape == value.shape == stored, "key or value has another shape", key, value)
    _require(kv.dim() == 5 and kv.shape[1:] == _page_shape(shape, kv.dtype), "kv has another shape", kv)
    _require(kv.stride(4) == 1 and kv.stride(3) == kv.shape[4], "kv has gaps in a page", kv)
    _require(query.dtype == key.dtype == value.dtype, "dtypes differ", query, key, value)
    _require(kv.dtype in (key.dtype, torch.int8), "kv is neither of the keys' dtype nor int8", key, kv)
    _require(all(t.device.type == "cpu" for t in (query, key, value, kv)), "a tensor is not on the CPU")
    _require(query.stride(2) == key.stride(2) == value.stride(2) == 1, "rows have gaps", query, key, value)


class _GroupCalls:
    """The kernel's arguments for the layers of one group, in all steps. ``plan`` is the plan of the current step: all
    calls point there, in CPU graphs too.

    ``checked`` is the form of the last layer that fit. In most models all layers of a step have that form.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self.plan = AttentionPlan()
        self._call = AttentionCall(
            plan=ctypes.addressof(self.plan),
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=shape.block_size,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
        )
        self.reference = ctypes.pointer(self._call)
        self.checked: tuple[object, ...] | None = None
        self.suit_kernel = False

    def set_layout(self, layer: _LayerTensors, form: tuple[object, ...]) -> None:
        """Sets what all layers of one ``form`` have in common."""
        call, (query, key, value, kv, *_) = self._call, layer
        self.checked = form
        self.suit_kernel = key.dtype in DTYPES and key.shape[2] * key.element_size() % 4 == 0
        call.query_token, call.query_head, _ = query.stride()
        call.key_token, call.key_head, _ = key.stride()
        call.value_token, call.value_head, _ = value.stride()
        call.kv_page, call.kv_plane, call.kv_head, _, _ = kv.stride()
        call.bf16, call.int8 = int(key.dtype == torch.bfloat16), int(kv.dtype == torch.int8)

    def set_pointers(self, layer: _LayerTensors, out: torch.Tensor) -> None:
        """Points the call at the tensors of one layer."""
        call, (query, key, value, kv, window, sinks) = self._call, layer
        call.window = window or _NO_WINDOW
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.kv, call.out, call.threads = kv.data_ptr(), out.data_ptr(), torch.get_num_threads()


class _Plan:
    """The checked plan of one step for one group of layers, for the kernel, which reads ``read``, and for torch. Raises
    ``ValueError`` if the batch contradicts itself.
    """

    def __init__(self, batch: AttentionBatch, read: AttentionPlan, block_size: int) -> None:
        tensors = batch.query_indptr, batch.page_indptr, batch.page_ids, batch.context_lens
        if not all(each.dtype == torch.int32 and each.is_cpu and each.is_contiguous() for each in tensors):
            raise ValueError("attention: the plan is not in packed int32 on the host")
        self._arrays: list[_Int32] = [tensor.numpy() for tensor in tensors]
        self._block_size = block_size
        query_indptr, page_indptr, page_ids, context_lens = self._arrays
        self.num_chunks = read.chunks = len(context_lens)
        if not all(each.shape == (self.num_chunks + 1,) and each[0] == 0 for each in (query_indptr, page_indptr)):
            raise ValueError("attention: indptr is not [B+1] from 0")
        tokens, pages = np.diff(query_indptr), np.diff(page_indptr)
        self.num_tokens, used = int(query_indptr[-1]), page_ids[: page_indptr[-1]]
        checks = {
            "indptr falls": (tokens >= 0).all() and (pages >= 0).all(),
            "page_ids is shorter than page_indptr says": len(used) == page_indptr[-1],
            "a page id is negative": (used >= 0).all(),
            "a context is shorter than its chunk": (tokens <= context_lens).all(),
            "a context is longer than its pages": (context_lens <= pages * self._block_size).all(),
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(f"attention: {message}")
        self.last_page = int(used.max(initial=-1))
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None
        read.query_indptr, read.page_indptr, read.page_ids, read.context_lens = (each.data_ptr() for each in tensors)

    def tokens_of(self, chunk: int) -> slice:
        """Returns the slice of the chunk's tokens in the packed batch."""
        query_indptr = self._arrays[0]
        return slice(int(query_indptr[chunk]), int(query_indptr[chunk + 1]))

    def pages_of(self, chunk: int) -> torch.Tensor:
        """Returns the chunk's pages, in order, as an index."""
        _, page_indptr, page_ids, _ = self._arrays
        return torch.from_numpy(page_ids[page_indptr[chunk] : page_indptr[chunk + 1]]).long()

    def context_of(self, chunk: int) -> int:
        """Returns the number of tokens known to the chunk's attention."""
        return int(self._arrays[3][chunk])

    def token_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the page and the slot of each token of the batch, as indices."""
        if self._slots is None:
            query_indptr, page_indptr, page_ids, context_lens = self._arrays
            tokens = np.diff(query_indptr)
            start = context_lens - tokens - query_indptr[:-1]
            positions = np.arange(self.num_tokens) + np.repeat(start, tokens)
            table = np.repeat(page_indptr[:-1], tokens) + positions // self._block_size
            pages = page_ids[table].astype(np.int64)
            self._slots = torch.from_numpy(pages), torch.from_numpy(positions % self._block_size)
        return self._slots


def _forward_in_torch(layer: _LayerTensors, plan: _Plan, shape: AttentionShape, out: torch.Tensor) -> None:
    query, key, value, kv, window, sinks = layer
    pages, slots = plan.token_slots()
    store_rows(kv, 0, pages, slots, key)
    store_rows(kv, 1, pages, slots, value)
    for chunk in range(plan.num_chunks):
        tokens = plan.tokens_of(chunk)
        past = plan.context_of(chunk) - (tokens.stop - tokens.start)
        if tokens.start == tokens.stop:
            continue
        first = max(0, past + 1 - window) if window else 0
        seen = _seen(past, first, plan.context_of(chunk), window)
        gathered = load_pages(kv, plan.pages_of(chunk), query.shape[2])
        keys, values = _select(gathered, slice(first, plan.context_of(chunk)))
        rows = query[tokens].to(keys.dtype)
        if shape.soft_cap is None and sinks is None:
            out[tokens] = _attend(rows, keys, values, seen, shape.scale)
        else:
            scores = _scores(rows, keys, shape)
            hidden = torch.zeros_like(scores[0], dtype=torch.bool) if seen is None else ~seen
            weights = softmax_weights(scores, hidden, shape.soft_cap, sinks)
            out[tokens] = (weights @ _of_each_head(values, shape)).transpose(0, 1)


def _select(pages: torch.Tensor, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values, [kv_heads, tokens, head_dim] each, of the tokens in ``span`` of one sequence's
    ``pages`` [P, 2, kv_heads, block_size, head_dim].
    """
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, span]
    return keys, values


def _seen(past: int, first: int, context: int, window: int | None) -> torch.Tensor | None:
    """Returns which of the keys ``[first, context)`` each token from ``past`` onwards sees, [tokens, keys]; None for
    all.
    """
    if context - past == 1:
        return None
    position = torch.arange(past, context)[:, None]
    key = torch.arange(first, context)
    seen = key <= position
    return seen & (key > position - window) if window else seen


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Computes one chunk, [tokens, heads, head_dim], with torch's own attention.

    For a single token, the heads that share a KV head are rows of one product, because ``enable_gqa`` is 8 times slower
    there. For more tokens they are a separate dimension, so that they share the mask.
    """
    tokens, heads, dim = query.shape
    shared = query.reshape(tokens, len(keys), heads // len(keys), dim)
    if seen is None:
        result = F.scaled_dot_product_attention(shared, keys[None], values[None], scale=scale)
        return result.reshape(query.shape)
    each = (len(keys), heads // len(keys), *keys.shape[1:])
    result = F.scaled_dot_product_attention(
        *(shared.permute(1, 2, 0, 3), keys[:, None].expand(each), values[:, None].expand(each)),
        attn_mask=seen,
        scale=scale,
    )
    return result.permute(2, 0, 1, 3).reshape(query.shape)


def _scores(query: torch.Tensor, keys: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Returns the scores [heads, tokens, keys] in float32. Used with a soft cap or sinks, which torch's own attention
    lacks.
    """
    return query.float().transpose(0, 1) @ _of_each_head(keys, shape).transpose(1, 2) * shape.scale


def _of_each_head(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Repeats rows [kv_heads, tokens, head_dim] for each query head, in float32."""
    return rows.float().repeat_interleave(shape.num_heads // shape.num_kv_heads, 0)


def _page_shape(shape: AttentionShape, dtype: torch.dtype) -> tuple[int, ...]:
    return 2, shape.num_kv_heads, shape.block_size, row_size(shape.head_dim, dtype)


def _require(condition: bool, message: str, *tensors: torch.Tensor) -> None:
    if not condition:
        seen = (f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in tensors)
        raise ValueError("; ".join([f"attention: {message}", *seen]))
