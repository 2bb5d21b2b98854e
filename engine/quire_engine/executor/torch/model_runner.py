"""``ModelRunner``: one model, its KV memory and its attention backend on one device. Every rank has one.

It knows batches and block copies: neither plans nor what is made of logits. On CUDA nothing here waits for the device.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from quire_engine.device.transfers import upload
from quire_engine.executor.torch.batch import ModelInput, scatter_pending
from quire_engine.executor.torch.graphs import (
    NO_GRAPHS,
    CaptureError,
    CudaGraphCapturer,
    CudaGraphRunner,
    GraphCapturer,
    capture_graphs,
)
from quire_engine.executor.torch.parts import LoadedModel
from quire_engine.executor.torch.sizing import CacheSizes
from quire_engine.executor.torch.tapes import make_cpu_graphs
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.copy import BlockCopy

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes batches, on one device or on several that act as one. Used by one thread, in inference mode."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Blocks of both pools; constant."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What weights and KV memory are held in."""
        ...

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """Copies blocks to the host, within the device, and from the host, in this order. Raises ``CopyError``."""
        ...

    def forward(self, batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states [T, hidden] of the batch, on the device; they hold until the next call. ``pending`` [P]
        int64, on the device too, are the tokens at ``batch.pending_rows``. Raises ``IndexError`` for a token that is
        none of the vocabulary.
        """
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits [R, vocabulary] of the hidden states at ``rows`` [R], which rise."""
        ...

    def close(self) -> None:
        """Gives the KV memory back. Nothing can be computed any more."""
        ...


class ModelRunner:
    """The ``Runner`` of one device. ``capture`` captures the CUDA graphs of decode steps; by default a
    ``CudaGraphCapturer`` does.

    Where they cannot be captured, a runner that is ``alone`` logs a warning and does without. One of several that share
    a model raises ``CaptureError``: a rank that left a capture without the others would leave them waiting in an
    exchange.
    """

    def __init__(
        self, model: LoadedModel, sizes: CacheSizes, capture: GraphCapturer | None = None, *, alone: bool = True
    ) -> None:
        self._model = model.model
        self._attention = model.attention
        self._vocab_size = model.config.vocab_size
        self._kv_cache = model.make_kv_cache(sizes)
        if capture is None and model.device.type == "cuda" and model.graph_sizes:
            capture = CudaGraphCapturer()
        self._cuda_graphs = self._cpu_graphs = None
        if capture is None and model.device.type == "cpu" and model.graph_sizes:
            self._cpu_graphs = make_cpu_graphs(model.model, self._kv_cache.blocks, model.attention)
        if capture is not None:
            self._cuda_graphs = self._capture_graphs(model, capture, alone)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See ``Runner.kv_cache_config``."""
        return self._kv_cache.capacity

    @property
    def dtype(self) -> torch.dtype:
        """See ``Runner.dtype``."""
        return self._model.dtype

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See ``Runner.copy``."""
        self._kv_cache.copy(out, within, into)

    def forward(self, batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Runner.forward``."""
        batch.check_vocabulary(self._vocab_size)
        try:
            if self._cuda_graphs is not None and self._cuda_graphs.can_run(batch):
                return self._cuda_graphs.forward(batch, pending)
            return self._forward(batch, pending)
        finally:
            # After a failure too: what was launched before it still reads and writes blocks.
            self._kv_cache.record_compute()

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Runner.logits``."""
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, upload(rows, hidden.device))
        return self._model.logits(hidden)

    def _capture_graphs(self, model: LoadedModel, capture: GraphCapturer, alone: bool) -> CudaGraphRunner | None:
        pages = -(-model.max_model_len // model.block_size)
        kv, sizes = self._kv_cache.blocks, model.graph_sizes
        try:
            with torch.inference_mode():
                return capture_graphs(model.model, kv, model.attention, sizes=sizes, max_pages=pages, capture=capture)
        except CaptureError as error:
            if alone:
                log.warning(NO_GRAPHS, error)
                return None
            self._kv_cache.close()
            raise

    def close(self) -> None:
        """See ``Runner.close``."""
        self._cuda_graphs = self._cpu_graphs = None
        self._kv_cache.close()

    def _forward(self, batch: ModelInput, pending: torch.Tensor | None) -> torch.Tensor:
        self._attention.prepare(batch.attention)
        kv = self._kv_cache.blocks
        token_ids, positions = upload(batch.token_ids, kv.device), upload(batch.attention.positions, kv.device)
        if pending is not None:
            scatter_pending(token_ids, batch.pending_rows, pending)
        if self._cpu_graphs is not None and batch.is_decode and self._cpu_graphs.can_run(len(token_ids)):
            return self._cpu_graphs.forward(token_ids, positions)
        return self._model.forward(token_ids, positions, kv, self._attention)
