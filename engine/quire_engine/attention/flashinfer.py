"""Attention on a GPU with FlashInfer (Ye et al. 2025). A decode kernel computes chunks of single tokens, and a prefill
kernel all others; on Hopper, FA3 (Shah et al. 2024) computes long chunks. Layers with sinks use their own prefill
kernel for every step.

Each wrapper plans once per step, on the host, how the step's work is cut into tiles. The plan is copied asynchronously
from the wrapper's pinned staging buffer, hence the fence.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE, AttentionBackend, AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import encode_rows
from quire_engine.device.accelerator import stage_arrays
from quire_engine.errors import first_line

log = logging.getLogger(__name__)
LAYOUT = "HND"
"""FlashInfer's name for pages [kv_heads, block_size, head_dim]."""
MIN_WORKSPACE_BYTES = 128 << 20
"""The workspace size that FlashInfer recommends."""
_FA2, _FA3 = "fa2", "fa3"
_DECODE, _SINKS = "decode", "sinks"
# Measured on an H200: the CUDA cores read keys and values faster if at most two query heads share a KV head. FA3
# computes prompts in about half the time but decodes in twice the time (docs/evidence/performance.md). An FA3 tile has
# 128 queries.
_MAX_GROUP_ON_CUDA_CORES = 2
_MIN_FA3_QUERIES = 128
# Two kernels cost the host more launches than one: after decodes, prompts of 512 tokens got slower and prompts of 2,048
# faster.
_MIN_TOKENS_BEHIND_DECODES = 1024
_MEASURED = (torch.bfloat16, 128)
"""The dtype and head size of both measurements. Others use FA2 on tensor cores."""
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# The plan of a decode step takes a few bytes per tile. FlashInfer's default is 8 MiB for every wrapper.
_GRAPH_PLAN_BYTES = 1 << 20
# The parts of a workspace are aligned to 16 bytes. This is the most bytes that the padding takes.
_ALIGNMENTS = 64
_MAX_THREADS, _VALUES_A_THREAD = 1024, 8


def unsupported_reason(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Returns why FlashInfer cannot serve models of ``dtype`` on a GPU of this compute capability, or None if it can.
    The reason completes a sentence that begins with "FlashInfer".
    """
    if capability < (7, 5):
        return f"needs a GPU of compute capability 7.5 or newer, and this one has {capability[0]}.{capability[1]}"
    if dtype not in _DTYPES:
        return f"computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "computes in bfloat16 only on GPUs of compute capability 8.0 or newer"
    return None


def unsupported_shape_reason(shape: AttentionShape) -> str | None:
    """Returns why FlashInfer cannot serve a model of this shape, or None if it can. The reason completes a sentence
    that begins with "FlashInfer".
    """
    if shape.head_dim not in _HEAD_DIMS:
        return f"knows heads of {', '.join(map(str, _HEAD_DIMS))} numbers, not of {shape.head_dim}"
    if shape.num_kv_heads * shape.head_dim // max(_VALUES_A_THREAD, shape.head_dim // 32) > _MAX_THREADS:
        return f"stores no {shape.num_kv_heads} KV heads of {shape.head_dim} numbers"
    return None


@dataclass(frozen=True, slots=True)
class PageArrays:
    """The arrays of an ``AttentionBatch`` for FlashInfer, int32 on one device, and ``chunk_ids`` [T], the chunk of each
    token.
    """

    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    chunk_ids: torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Whether every chunk is one token."""
        return len(self.positions) == len(self.last_page_len)


class _PreparedPart(NamedTuple):
    """A part of a prepared step for one group of layers, which has the ``tokens`` of the step. Plans take page ids from
    ``device``. Kernels read ``read``: the same arrays, or the fixed ones in a graph.
    """

    tokens: slice
    host: PageArrays
    device: PageArrays
    read: PageArrays

    @property
    def has_long_chunks(self) -> bool:
        """Whether chunks have, on average, at least as many tokens as an FA3 tile has queries."""
        return len(self.host.positions) >= _MIN_FA3_QUERIES * len(self.host.last_page_len)


class _Kind(NamedTuple):
    """The properties in which layers of one shape may differ. One plan serves all layers of a kind."""

    window: int | None
    has_sinks: bool
    group: int = 0


class _PlannedAttention:
    """An ``AttentionBackend`` that plans each part of a step once per kind of layer."""

    def __init__(self, shared: "_SharedState") -> None:
        self._shared = shared
        self.batches: Sequence[AttentionBatch] = ()
        # Of the groups that its layers are of: with heads of several shapes, no backend has layers of all.
        self._parts: dict[int, list[_PreparedPart]] = {}
        self._planned: dict[_Kind, list[Any]] = {}
        self._wrappers: dict[tuple[str, bool, _Kind], Any] = {}

    def prepare(self, *batches: AttentionBatch) -> None:
        """See ``AttentionBackend.prepare``. Waits for the copies of the previous plans, and for nothing else."""
        self.batches, self._parts, self._planned = batches, {}, {}
        self._shared.fence.wait()
        try:
            for kind in self._shared.kinds:
                self._plan(kind)
        finally:
            # If one plan fails, the plans before it are still being copied.
            self._shared.fence.record()

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
        """See ``AttentionBackend.forward``. Raises ``ValueError`` if no step was prepared, or if the tensors do not
        match it.
        """
        if group >= len(self.batches):
            raise ValueError("attention: prepare comes before forward")
        kind = _Kind(window, sinks is not None, group)
        if kind not in self._planned:
            self._add_kind(kind)
        key, value = encode_rows(key, kv.dtype), encode_rows(value, kv.dtype)
        # Allocated here, because FlashInfer would fill its own output with zeros first.
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # The kernel with sinks takes these additional arguments in this order.
        extra = () if sinks is None else (sinks.float(), self._shared.shape.scale)
        for (tokens, _, _, read), wrapper in zip(self._parts[group], self._planned[kind], strict=True):
            self._shared.flashinfer.append_paged_kv_cache(
                *(key[tokens], value[tokens], read.chunk_ids, read.positions),
                *(kv, read.page_ids, read.page_indptr, read.last_page_len),
                kv_layout=LAYOUT,
            )
            wrapper.run(query[tokens], kv, *extra, out=out[tokens])
        return out

    def _add_kind(self, kind: _Kind) -> None:
        """Plans a kind that is used for the first time. ``prepare`` plans it from the next step."""
        if kind not in self._shared.kinds:
            self._shared.kinds.append(kind)
        self._plan(kind)
        self._shared.fence.record()

    def _plan(self, kind: _Kind) -> None:
        if kind.group not in self._parts:
            self._parts[kind.group] = self._stage(kind.group)
        self._planned[kind] = [self._plan_part(part, kind) for part in self._parts[kind.group]]

    def _plan_part(self, part: _PreparedPart, kind: _Kind) -> Any:
        """Plans the part. Returns the wrapper that planned it."""
        kernel = self._shared.kernel(part, kind)
        try:
            return self._planned_by(kernel, part, kind)
        except RuntimeError as error:
            if kernel != _FA3:
                raise
            self._shared.give_up_fa3(error)
            return self._planned_by(self._shared.kernel(part, kind), part, kind)

    def _planned_by(self, kernel: str, part: _PreparedPart, kind: _Kind) -> Any:
        name = (kernel, part.host.is_decode, kind)
        if name not in self._wrappers:
            self._wrappers[name] = self._make_wrapper(kernel, kind)
        self._shared.plan(self._wrappers[name], kernel, kind, part.host, part.device)
        return self._wrappers[name]

    def _stage(self, group: int) -> list[_PreparedPart]:
        raise NotImplementedError

    def _make_wrapper(self, kernel: str, kind: _Kind) -> Any:
        raise NotImplementedError


class FlashInferAttention(_PlannedAttention):
    """Paged attention for one batch at a time. Implements ``AttentionBackend`` and ``GraphAttention``.

    With ``deterministic``, each token is a separate request to the decode kernel, and no context is split. Then the
    result of a token depends only on its own sequence: its chunk, the batch and the use of a graph do not change it.
    (In a prefill kernel the tile size, and with it the order of every sum, depends on the mean length of the batch's
    chunks, even without splitting.)
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        super().__init__(_SharedState(shape, device, dtype, kv_dtype or dtype, deterministic))

    def for_graph(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """See ``GraphAttention.for_graph``."""
        if not 0 < batch_size <= MAX_GRAPH_BATCH_SIZE:
            raise ValueError(f"a graph's batch size is 1 to {MAX_GRAPH_BATCH_SIZE}, not {batch_size}")
        return _GraphDecode(self._shared, batch_size, max_pages)

    def _stage(self, group: int) -> list[_PreparedPart]:
        parts, start = [], 0
        for each in self._shared.divide(self.batches[group]):
            host, device = self._shared.stage(each)
            parts.append(_PreparedPart(slice(start, start + len(each.positions)), host, device, device))
            start += len(each.positions)
        return parts

    def _make_wrapper(self, kernel: str, kind: _Kind) -> Any:
        return self._shared.make_wrapper(kernel, kind)


class _GraphDecode(_PlannedAttention):
    """Decode steps of one batch size, on arrays at fixed addresses."""

    def __init__(self, shared: "_SharedState", batch_size: int, max_pages: int) -> None:
        super().__init__(shared)
        self._batch_size, self._max_pages = batch_size, max_pages
        self._fixed: dict[int, PageArrays] = {}

    def prepare(self, *batches: AttentionBatch) -> None:
        """See ``AttentionBackend.prepare``."""
        self.batches = ()
        for batch in batches:
            if not len(batch.positions) == len(batch.last_page_len) == self._batch_size:
                raise ValueError(f"attention: a graph of {self._batch_size} tokens was given {len(batch.positions)}")
        super().prepare(*batches)

    def _stage(self, group: int) -> list[_PreparedPart]:
        """Copies the positions to their fixed array. The wrappers copy the arrays that they have buffers for."""
        if group not in self._fixed:
            self._fixed[group] = self._shared.graph_arrays(group, self._batch_size, self._max_pages)
        fixed = self._fixed[group]
        host, device = self._shared.stage(self.batches[group])
        fixed.positions.copy_(device.positions)
        return [_PreparedPart(slice(self._batch_size), host, device, fixed)]

    def _make_wrapper(self, kernel: str, kind: _Kind) -> Any:
        if kernel != _DECODE:
            raise ValueError("attention: FlashInfer's kernel with sinks is in no graph")
        return self._shared.make_graph_wrapper(kind, self._fixed[kind.group])


@dataclass(frozen=True, slots=True)
class _GraphMemory:
    """What the graphs of all sizes share: the arrays of each group of layers, and the memory of each kind's plans."""

    pages: dict[int, PageArrays] = field(default_factory=dict)
    plans: dict[_Kind, torch.Tensor] = field(default_factory=dict)


class _SharedState:
    """The state that the backends of one model share: its shape, the workspace, the fence, and the kinds of its
    layers.
    """

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        import flashinfer

        self.flashinfer: Any = flashinfer
        self.shape, self.device, self.deterministic = shape, device, deterministic
        # Zeros, because kernels count arrivals in it and reset the counts themselves.
        self.workspace = torch.zeros(_workspace_bytes(shape, device), dtype=torch.uint8, device=device)
        self.fence = StagingFence(device)
        self.kinds: list[_Kind] = []
        self._dtype, self._kv_dtype = dtype, kv_dtype
        is_plain = dtype == kv_dtype and shape.soft_cap is None and not deterministic
        is_measured = is_plain and (dtype, shape.head_dim) == _MEASURED
        group = shape.num_heads // shape.num_kv_heads
        self._on_tensor_cores = group > _MAX_GROUP_ON_CUDA_CORES or not is_measured
        self._has_fa3 = is_measured and _gpu(device)[1][0] == 9
        self._graph_memory = _GraphMemory()

    def stage(self, batch: AttentionBatch) -> tuple[PageArrays, PageArrays]:
        """Returns the batch on the host and on the device. With ``deterministic``, each token is a chunk."""
        return stage(split_tokens(batch, self.shape.block_size) if self.deterministic else batch, self.device)

    def divide(self, batch: AttentionBatch) -> list[AttentionBatch]:
        """Returns the batch, or the decodes at its start and the chunks after them, if FA3 computes those."""
        if not self._has_fa3:
            return [batch]
        is_long = np.diff(batch.query_indptr.numpy()) > 1
        decodes, chunks = int(is_long.argmax()) if is_long.any() else len(is_long), len(is_long)
        fewest = max((chunks - decodes) * _MIN_FA3_QUERIES, _MIN_TOKENS_BEHIND_DECODES)
        if not decodes or len(batch.positions) - decodes < fewest:
            return [batch]
        return [take_chunks(batch, 0, decodes), take_chunks(batch, decodes, chunks)]

    def kernel(self, part: _PreparedPart, kind: _Kind) -> str:
        """Returns which kernel computes a part in layers of a kind."""
        if kind.has_sinks:
            return _SINKS
        if part.host.is_decode:
            return _DECODE
        return _FA3 if self._has_fa3 and part.has_long_chunks and kind.window is None else _FA2

    def give_up_fa3(self, error: Exception) -> None:
        """Switches all prompts to FA2."""
        log.warning("FlashInfer's FA3 kernels cannot be used: %s; prompts take longer", first_line(error))
        self._has_fa3 = False

    def plan(self, wrapper: Any, kernel: str, kind: _Kind, host: PageArrays, device: PageArrays) -> None:
        """Makes the wrapper plan a part. Copies page ids on the device and reads all other arrays on the host, so the
        host never waits for the device.
        """
        pages = (host.page_indptr, device.page_ids, host.last_page_len)
        shape = self.shape
        decode = kernel == _DECODE
        options: dict[str, Any] = {} if decode else {"causal": True}
        if shape.soft_cap is not None:
            options["logits_soft_cap"] = shape.soft_cap
        wrapper.plan(
            *(pages if decode else (host.query_indptr, *pages)),
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size),
            sm_scale=shape.scale,
            window_left=_window_left(kind),
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            seq_lens=host.context_lens,
            non_blocking=True,
            disable_split_kv=self.deterministic,
            **options,
        )

    def make_wrapper(self, kernel: str, kind: _Kind) -> Any:
        """Makes a wrapper for parts of any size, for layers of one kind."""
        if kernel == _DECODE:
            return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, LAYOUT, use_tensor_cores=self._on_tensor_cores, backend=_FA2
            )
        if kernel != _SINKS:
            return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, LAYOUT, backend=kernel)
        return self.flashinfer.BatchAttentionWithAttentionSinkWrapper(
            self.workspace,
            LAYOUT,
            backend=_FA2,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            head_dim_qk=self.shape.head_dim,
            head_dim_vo=self.shape.head_dim,
            window_left=_window_left(kind),
        )

    def make_graph_wrapper(self, kind: _Kind, fixed: PageArrays) -> Any:
        """Makes a wrapper for the layers of one kind in a graph. Its plans are copied to ``fixed``."""
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=self._on_tensor_cores,
            backend=_FA2,
            paged_kv_indptr_buffer=fixed.page_indptr,
            paged_kv_indices_buffer=fixed.page_ids,
            paged_kv_last_page_len_buffer=fixed.last_page_len,
        )
        plans = self._graph_memory.plans
        if kind not in plans:
            plans[kind] = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self.workspace, plans[kind])
        return wrapper

    def graph_arrays(self, group: int, batch_size: int, max_pages: int) -> PageArrays:
        """Returns the fixed arrays of a graph for one group of layers. Graphs share memory: smaller graphs use the
        start of the first graph's arrays, because each is planned again before its replay.
        """
        memory = self._graph_memory.pages.get(group)
        if memory is None or len(memory.positions) < batch_size or len(memory.page_ids) < max_pages:
            memory = self._graph_memory.pages[group] = _null_pages(batch_size, max_pages, self.device)
        return PageArrays(
            query_indptr=memory.query_indptr[: batch_size + 1],
            page_indptr=memory.page_indptr[: batch_size + 1],
            page_ids=memory.page_ids[:max_pages],
            last_page_len=memory.last_page_len[:batch_size],
            context_lens=memory.context_lens[:batch_size],
            positions=memory.positions[:batch_size],
            chunk_ids=memory.chunk_ids[:batch_size],
        )


def _window_left(kind: _Kind) -> int:
    """Returns how many tokens before itself a token sees, in FlashInfer's counting; -1 for all."""
    return -1 if kind.window is None else kind.window - 1


class StagingFence:
    """Orders the plans of two steps, so that the second does not overwrite a staging buffer that is still being
    copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Waits for the copies that were enqueued before the latest ``record``."""
        if self._event is not None:
            self._event.synchronize()

    def record(self) -> None:
        """Records that the copies of a step's plans are enqueued on the current stream."""
        if self._event is not None:
            self._event.record()


def stage(batch: AttentionBatch, device: torch.device) -> tuple[PageArrays, PageArrays]:
    """Returns the batch on the host, from which FlashInfer copies some arrays again, and on the device. Does not wait
    for the device.
    """
    arrays = (
        *(batch.query_indptr, batch.page_indptr, batch.page_ids, batch.last_page_len),
        *(batch.context_lens, batch.positions, _chunk_ids(batch.query_indptr)),
    )
    host, on_device = stage_arrays([array.numpy() for array in arrays], device)
    return PageArrays(*host), PageArrays(*on_device)


def take_chunks(batch: AttentionBatch, first: int, end: int) -> AttentionBatch:
    """Returns the chunks ``[first, end)`` of a batch."""
    queries, pages = batch.query_indptr[first : end + 1], batch.page_indptr[first : end + 1]
    return AttentionBatch(
        query_indptr=queries - queries[0],
        page_indptr=pages - pages[0],
        page_ids=batch.page_ids[int(pages[0]) : int(pages[-1])],
        last_page_len=batch.last_page_len[first:end],
        context_lens=batch.context_lens[first:end],
        positions=batch.positions[int(queries[0]) : int(queries[-1])],
    )


def split_tokens(batch: AttentionBatch, block_size: int) -> AttentionBatch:
    """Returns the same tokens, each as a separate chunk whose context ends with the token."""
    context_lens = batch.positions.numpy() + 1
    page_counts = -(-context_lens // block_size)
    page_indptr = np.concatenate(([0], np.cumsum(page_counts)))
    first_pages = batch.page_indptr.numpy()[_chunk_ids(batch.query_indptr).numpy()]
    indices = np.repeat(first_pages - page_indptr[:-1], page_counts) + np.arange(page_indptr[-1])
    return AttentionBatch(
        query_indptr=torch.arange(len(context_lens) + 1, dtype=torch.int32),
        page_indptr=_int32(page_indptr),
        page_ids=_int32(batch.page_ids.numpy()[indices]),
        last_page_len=_int32(context_lens - (page_counts - 1) * block_size),
        context_lens=_int32(context_lens),
        positions=batch.positions,
    )


def _chunk_ids(query_indptr: torch.Tensor) -> torch.Tensor:
    lengths = np.diff(query_indptr.numpy())
    return _int32(np.repeat(np.arange(len(lengths)), lengths))


def _int32(values: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _null_pages(batch_size: int, max_pages: int, device: torch.device) -> PageArrays:
    """Returns zeroed arrays for single tokens, whose pages are the null page."""

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return PageArrays(
        query_indptr=zeros(batch_size + 1),
        page_indptr=zeros(batch_size + 1),
        page_ids=zeros(max_pages),
        last_page_len=zeros(batch_size),
        context_lens=zeros(batch_size),
        positions=zeros(batch_size),
        chunk_ids=torch.arange(batch_size, dtype=torch.int32, device=device),
    )


def _workspace_bytes(shape: AttentionShape, device: torch.device) -> int:
    """Returns the bytes for the partial results of split contexts in float32: one vector and one sum for each row of
    each head.

    A tile has 16, 64 or 128 rows of queries and their heads, of which ``group`` share a KV head. GPUs older than
    compute capability 8.0 have no tiles of 16. Outside graphs at most two tiles per multiprocessor are split. A graph
    of B tokens needs room for as many tiles as B requests of B tokens in total can need: at most B more than those
    tokens fill.
    """
    processors, capability = _gpu(device)
    group = shape.num_heads // shape.num_kv_heads
    tile = 128 if group > 16 else 16 if capability >= (8, 0) else 64
    rows = max(
        2 * processors // shape.num_kv_heads * 128, MAX_GRAPH_BATCH_SIZE + -(-MAX_GRAPH_BATCH_SIZE * tile // group)
    )
    return max(MIN_WORKSPACE_BYTES, 4 * shape.num_heads * rows * (shape.head_dim + 1) + _ALIGNMENTS)


def _gpu(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Returns the number of multiprocessors of a GPU and its compute capability, or minimal values for an emulation on
    the CPU.
    """
    if device.type != "cuda":
        return 1, (8, 0)
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
