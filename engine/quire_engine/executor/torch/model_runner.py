"""``ModelRunner``: one model, its KV memory and its attention backend on one device. Every rank has one.

It knows batches and block copies: neither plans nor what is made of logits. On CUDA nothing here waits for the device.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from quire_engine.device.transfers import upload
from quire_engine.executor.torch.batch import ForwardBatch, place
from quire_engine.executor.torch.graphs import (
    NO_GRAPHS,
    CudaRecorder,
    DecodeGraphs,
    Recorder,
    RecordingError,
    record_graphs,
)
from quire_engine.executor.torch.parts import Parts
from quire_engine.executor.torch.sizing import Pools
from quire_engine.executor.torch.tapes import make_tapes
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

    def forward(self, batch: ForwardBatch, pending: torch.Tensor | None = None) -> torch.Tensor:
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
    """The ``Runner`` of one device. ``record`` records the graphs of decode steps; by default CUDA's own does.

    Where they cannot be recorded, a runner that is ``alone`` logs a warning and does without. One of several that share
    a model raises ``RecordingError``: a rank that left a recording without the others would leave them waiting in an
    exchange.
    """

    def __init__(self, parts: Parts, pools: Pools, record: Recorder | None = None, *, alone: bool = True) -> None:
        self._model = parts.model
        self._attention = parts.attention
        self._vocab_size = parts.config.vocab_size
        self._kv = parts.kv_cache(pools)
        if record is None and parts.device.type == "cuda" and parts.graph_sizes:
            record = CudaRecorder()
        self._graphs = self._tapes = None
        if record is None and parts.device.type == "cpu" and parts.graph_sizes:
            self._tapes = make_tapes(parts.model, self._kv.device, parts.attention)
        if record is not None:
            self._graphs = self._record(parts, record, alone)

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See ``Runner.kv_cache_config``."""
        return self._kv.capacity

    @property
    def dtype(self) -> torch.dtype:
        """See ``Runner.dtype``."""
        return self._model.dtype

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See ``Runner.copy``."""
        self._kv.copy(out, within, into)

    def forward(self, batch: ForwardBatch, pending: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Runner.forward``."""
        batch.check_vocabulary(self._vocab_size)
        try:
            if self._graphs is not None and self._graphs.fits(batch):
                return self._graphs.forward(batch, pending)
            return self._forward(batch, pending)
        finally:
            # After a failure too: what was launched before it still reads and writes blocks.
            self._kv.computed()

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Runner.logits``."""
        if len(rows) < len(hidden):
            hidden = hidden.index_select(0, upload(rows, hidden.device))
        return self._model.logits(hidden)

    def _record(self, parts: Parts, record: Recorder, alone: bool) -> DecodeGraphs | None:
        pages = -(-parts.max_model_len // parts.block_size)
        kv, sizes = self._kv.device, parts.graph_sizes
        try:
            with torch.inference_mode():
                return record_graphs(parts.model, kv, parts.attention, sizes=sizes, pages=pages, record=record)
        except RecordingError as error:
            if alone:
                log.warning(NO_GRAPHS, error)
                return None
            self._kv.close()
            raise

    def close(self) -> None:
        """See ``Runner.close``."""
        self._graphs = self._tapes = None
        self._kv.close()

    def _forward(self, batch: ForwardBatch, pending: torch.Tensor | None) -> torch.Tensor:
        self._attention.prepare(batch.attention)
        kv = self._kv.device
        token_ids, positions = upload(batch.token_ids, kv.device), upload(batch.attention.positions, kv.device)
        if pending is not None:
            place(token_ids, batch.pending_rows, pending)
        if self._tapes is not None and batch.is_decode and self._tapes.fits(len(token_ids)):
            return self._tapes.forward(token_ids, positions)
        return self._model.forward(token_ids, positions, kv, self._attention)
