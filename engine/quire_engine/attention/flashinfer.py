"""Attention on a GPU, through FlashInfer (Ye et al. 2025): a decode kernel for steps of single tokens and a prefill
kernel for all others, both on tensor cores. Layers with sinks take a prefill kernel of their own for every step.

Each wrapper plans once a step, on the host: how the step's work is cut into tiles. The plan goes through a pinned
staging buffer of the wrapper, from which it is copied asynchronously; hence the fence.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE, AttentionBackend, AttentionBatch, AttentionShape
from quire_engine.attention.kv_rows import encode_rows
from quire_engine.device.accelerator import stage_arrays

LAYOUT = "HND"
"""FlashInfer's name for pages [kv_heads, block_size, head_dim]."""
MIN_WORKSPACE_BYTES = 128 << 20
"""Bytes that FlashInfer recommends for it."""
_BACKEND = "fa2"
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# A plan of a decode step fills a few bytes for each tile; FlashInfer's own default is 8 MiB for every wrapper.
_GRAPH_PLAN_BYTES = 1 << 20
# The parts of a workspace begin at multiples of 16 bytes: the most bytes that this padding takes.
_ALIGNMENTS = 64
_MAX_THREADS, _VALUES_A_THREAD = 1024, 8


def unsupported_reason(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Why FlashInfer cannot serve models of ``dtype`` on a GPU of this compute capability, as half a sentence; None if
    it can.
    """
    if capability < (7, 5):
        return f"needs a GPU of compute capability 7.5 or newer, and this one has {capability[0]}.{capability[1]}"
    if dtype not in _DTYPES:
        return f"computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "computes in bfloat16 only on GPUs of compute capability 8.0 or newer"
    return None


def unsupported_shape_reason(shape: AttentionShape) -> str | None:
    """Why FlashInfer cannot serve a model of this shape, as half a sentence; None if it can."""
    if shape.head_dim not in _HEAD_DIMS:
        return f"knows heads of {', '.join(map(str, _HEAD_DIMS))} numbers, not of {shape.head_dim}"
    if shape.num_kv_heads * shape.head_dim // max(_VALUES_A_THREAD, shape.head_dim // 32) > _MAX_THREADS:
        return f"stores no {shape.num_kv_heads} KV heads of {shape.head_dim} numbers"
    return None


@dataclass(frozen=True, slots=True)
class PageArrays:
    """The arrays of an ``AttentionBatch`` as FlashInfer takes them, int32 on one device, and ``chunk_ids`` [T], the
    chunk of each token.
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


class _PreparedStep(NamedTuple):
    """The arrays of a prepared step. Plans take page ids from ``device``, and the kernels read ``read``: the same
    arrays, or in a graph the fixed ones.
    """

    host: PageArrays
    device: PageArrays
    read: PageArrays


class _Kind(NamedTuple):
    """What layers of one shape may differ in. One plan serves all layers of a kind."""

    window: int | None
    has_sinks: bool


class _PlannedAttention:
    """An ``AttentionBackend`` that plans each step once for each kind of layers."""

    def __init__(self, shared: "_SharedState") -> None:
        self._shared = shared
        self._step: _PreparedStep | None = None
        self._planned: dict[_Kind, Any] = {}

    def prepare(self, batch: AttentionBatch) -> None:
        """See ``AttentionBackend.prepare``. Waits for the copies of the previous plans, and for nothing else."""
        self._step, self._planned = None, {}
        self._shared.fence.wait()
        try:
            self._step = step = self._stage(batch)
            for kind in self._shared.kinds:
                self._plan(step, kind)
        finally:
            # When one plan fails, those before it are being copied all the same.
            self._shared.fence.record()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv: torch.Tensor,
        window: int | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionBackend.forward``.

        Raises:
            ValueError: no step was prepared, or the tensors do not match it.
        """
        if self._step is None:
            raise ValueError("attention: prepare comes before forward")
        kind = _Kind(window, sinks is not None)
        if kind not in self._planned:
            self._add_kind(self._step, kind)
        read = self._step.read
        self._shared.flashinfer.append_paged_kv_cache(
            *(encode_rows(key, kv.dtype), encode_rows(value, kv.dtype), read.chunk_ids, read.positions),
            *(kv, read.page_ids, read.page_indptr, read.last_page_len),
            kv_layout=LAYOUT,
        )
        # Allocated here, as FlashInfer would fill its own with zeros first.
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # The kernel with sinks was made for them, and takes what it needs in this order.
        extra = () if sinks is None else (sinks.float(), self._shared.shape.scale)
        self._planned[kind].run(query, kv, *extra, out=out)
        return out

    def _add_kind(self, step: _PreparedStep, kind: _Kind) -> None:
        """Plans a kind that is used for the first time; from the next step on ``prepare`` does."""
        if kind not in self._shared.kinds:
            self._shared.kinds.append(kind)
        self._plan(step, kind)
        self._shared.fence.record()

    def _plan(self, step: _PreparedStep, kind: _Kind) -> None:
        wrapper = self._wrapper(step, kind)
        self._shared.plan(wrapper, kind, step.host, step.device)
        self._planned[kind] = wrapper

    def _stage(self, batch: AttentionBatch) -> _PreparedStep:
        raise NotImplementedError

    def _wrapper(self, step: _PreparedStep, kind: _Kind) -> Any:
        raise NotImplementedError


class FlashInferAttention(_PlannedAttention):
    """Paged attention for one batch at a time. An ``AttentionBackend``, and a ``GraphAttention``.

    With ``deterministic``, each token is a request of its own to the decode kernel, and no context is split. The result
    for a token is then a function of its sequence alone: not of its chunk, nor of the batch, nor of whether a graph
    computed it. (In a prefill kernel the size of the tiles, and so the order of every sum,
    depends on the mean length of the batch's chunks, even without splitting.)
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
        self._wrappers: dict[tuple[bool, _Kind], Any] = {}

    def for_graph(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """See ``GraphAttention.for_graph``."""
        if not 0 < batch_size <= MAX_GRAPH_BATCH_SIZE:
            raise ValueError(f"a graph's batch size is 1 to {MAX_GRAPH_BATCH_SIZE}, not {batch_size}")
        return _GraphDecode(self._shared, batch_size, max_pages)

    def _stage(self, batch: AttentionBatch) -> _PreparedStep:
        host, device = self._shared.stage(batch)
        return _PreparedStep(host, device, device)

    def _wrapper(self, step: _PreparedStep, kind: _Kind) -> Any:
        decode = step.host.is_decode and not kind.has_sinks
        if (decode, kind) not in self._wrappers:
            shared = self._shared
            made = shared.make_sink_wrapper(kind) if kind.has_sinks else shared.make_wrapper(decode=decode)
            self._wrappers[decode, kind] = made
        return self._wrappers[decode, kind]


class _GraphDecode(_PlannedAttention):
    """Decode steps of one batch size, on arrays of fixed addresses."""

    def __init__(self, shared: "_SharedState", batch_size: int, max_pages: int) -> None:
        super().__init__(shared)
        self._fixed = shared.graph_arrays(batch_size, max_pages)
        self._wrappers: dict[_Kind, Any] = {}

    def _stage(self, batch: AttentionBatch) -> _PreparedStep:
        """Copies the positions to their fixed array. The wrappers copy the arrays that they have buffers for."""
        expected = len(self._fixed.positions)
        if not len(batch.positions) == len(batch.last_page_len) == expected:
            raise ValueError(f"attention: a graph of {expected} tokens was given {len(batch.positions)}")
        host, device = self._shared.stage(batch)
        self._fixed.positions.copy_(device.positions)
        return _PreparedStep(host, device, self._fixed)

    def _wrapper(self, step: _PreparedStep, kind: _Kind) -> Any:
        del step
        if kind.has_sinks:
            raise ValueError("attention: FlashInfer's kernel with sinks is in no graph")
        if kind not in self._wrappers:
            self._wrappers[kind] = self._shared.make_graph_wrapper(kind, self._fixed)
        return self._wrappers[kind]


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
        self._graph_memory: PageArrays | None = None
        self._graph_plans: dict[_Kind, torch.Tensor] = {}

    def stage(self, batch: AttentionBatch) -> tuple[PageArrays, PageArrays]:
        """The batch on the host and on the device, with a chunk for each token if ``deterministic``."""
        return stage(split_tokens(batch, self.shape.block_size) if self.deterministic else batch, self.device)

    def plan(self, wrapper: Any, kind: _Kind, host: PageArrays, device: PageArrays) -> None:
        """Has the wrapper plan the step. Page ids are copied on the device, all other arrays are read on the host, so
        that the device is never waited for.
        """
        pages = (host.page_indptr, device.page_ids, host.last_page_len)
        shape = self.shape
        decode = host.is_decode and not kind.has_sinks
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

    def make_wrapper(self, *, decode: bool) -> Any:
        """A wrapper for steps of any size."""
        if decode:
            return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, LAYOUT, use_tensor_cores=True, backend=_BACKEND
            )
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, LAYOUT, backend=_BACKEND)

    def make_sink_wrapper(self, kind: _Kind) -> Any:
        """A wrapper for steps of any size, for layers of one kind with sinks."""
        return self.flashinfer.BatchAttentionWithAttentionSinkWrapper(
            self.workspace,
            LAYOUT,
            backend=_BACKEND,
            q_data_type=self._dtype,
            kv_data_type=self._kv_dtype,
            head_dim_qk=self.shape.head_dim,
            head_dim_vo=self.shape.head_dim,
            window_left=_window_left(kind),
        )

    def make_graph_wrapper(self, kind: _Kind, fixed: PageArrays) -> Any:
        """A wrapper for the layers of one kind in a graph, whose plans are copied to ``fixed``."""
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend=_BACKEND,
            paged_kv_indptr_buffer=fixed.page_indptr,
            paged_kv_indices_buffer=fixed.page_ids,
            paged_kv_last_page_len_buffer=fixed.last_page_len,
        )
        if kind not in self._graph_plans:
            self._graph_plans[kind] = torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=self.device)
        wrapper.reset_workspace_buffer(self.workspace, self._graph_plans[kind])
        return wrapper

    def graph_arrays(self, batch_size: int, max_pages: int) -> PageArrays:
        """The fixed arrays of a graph. Graphs share memory: smaller ones use the beginning of the first one's arrays,
        as each is planned again before it is replayed.
        """
        memory = self._graph_memory
        if memory is None or len(memory.positions) < batch_size or len(memory.page_ids) < max_pages:
            memory = self._graph_memory = _null_pages(batch_size, max_pages, self.device)
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
    """The tokens before itself that a token sees, as FlashInfer counts them; -1 for all."""
    return -1 if kind.window is None else kind.window - 1


class StagingFence:
    """Orders the plans of two steps: the second may not overwrite a staging buffer that is still being copied from."""

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
    """The batch on the host, from where FlashInfer copies some arrays again, and on the device. Does not wait for the
    device.
    """
    arrays = (
        *(batch.query_indptr, batch.page_indptr, batch.page_ids, batch.last_page_len),
        *(batch.context_lens, batch.positions, _chunk_ids(batch.query_indptr)),
    )
    host, on_device = stage_arrays([array.numpy() for array in arrays], device)
    return PageArrays(*host), PageArrays(*on_device)


def split_tokens(batch: AttentionBatch, block_size: int) -> AttentionBatch:
    """The same tokens, each as a chunk of its own whose context ends with itself."""
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
    """Arrays of single tokens, all zeros: their pages are the null page."""

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
    """The bytes that the partial results of split contexts need, in float32: for each head a vector and a sum of each
    row.

    A tile has 16, 64 or 128 rows of queries and their heads, of which ``group`` share a KV head; on GPUs older than
    compute capability 8.0 there are none of 16. Outside of graphs at most two tiles for each multiprocessor are split.
    In a graph of B tokens there may be as many tiles as B requests of any lengths, but B tokens in all, can need: at
    most B more than those tokens fill.
    """
    processors, capability = _gpu(device)
    group = shape.num_heads // shape.num_kv_heads
    tile = 128 if group > 16 else 16 if capability >= (8, 0) else 64
    rows = max(
        2 * processors // shape.num_kv_heads * 128, MAX_GRAPH_BATCH_SIZE + -(-MAX_GRAPH_BATCH_SIZE * tile // group)
    )
    return max(MIN_WORKSPACE_BYTES, 4 * shape.num_heads * rows * (shape.head_dim + 1) + _ALIGNMENTS)


def _gpu(device: torch.device) -> tuple[int, tuple[int, int]]:
    """The multiprocessors of a GPU, and its compute capability; minimal values for an emulation on the CPU."""
    if device.type != "cuda":
        return 1, (8, 0)
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
