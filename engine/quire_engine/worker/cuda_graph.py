"""CUDA graphs of decode steps: captured once for a list of batch sizes, and replayed for every batch that fits one of
them.

A decode step of a small batch is hundreds of short kernels. Launching them takes the host longer than the device needs
to run them; a graph is launched as one. A graph works on fixed addresses, so each step's tokens and positions are
copied to its inputs, and the batch is padded to the next captured size.
"""

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch

from quire_engine.attention.base import MAX_GRAPH_BATCH_SIZE, AttentionBackend, GraphAttention, LayerKV
from quire_engine.device.accelerator import pin
from quire_engine.errors import first_line
from quire_engine.models.base import Model
from quire_engine.worker.input_batch import ModelInput, dummy_decode, pad_decode, scatter_pending

log = logging.getLogger(__name__)
NO_GRAPHS = "no CUDA graphs: %s; short steps take longer to launch"


class CapturedGraph(Protocol):
    """Work on the device that can be replayed, such as a ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Repeats the work, on the same memory with its present contents."""
        ...


# Captures the work of a function by calling it once. On CUDA that call computes nothing.
GraphCapturer = Callable[[Callable[[], object]], CapturedGraph]


class GraphCaptureError(RuntimeError):
    """The decode steps of a model cannot be captured. The text says why."""


def capture_sizes(largest: int) -> list[int]:
    """Returns the batch sizes to capture: 1, 2, 4, the multiples of 8, and ``largest``, none above
    ``MAX_GRAPH_BATCH_SIZE``.
    """
    top = min(largest, MAX_GRAPH_BATCH_SIZE)
    return sorted({size for size in (1, 2, 4, *range(8, top, 8), top) if 1 <= size <= top})


class CudaGraphRunner:
    """Captures and replays the graphs of one model over one KV memory. Use it from one thread, on one stream, in
    inference mode.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[LayerKV],
        attention: GraphAttention,
        *,
        sizes: Sequence[int],
        max_pages: int,
        capture: GraphCapturer,
    ) -> None:
        """Captures a graph for each of ``sizes``. No sequence may have more than ``max_pages`` pages. Raises
        ``RuntimeError``, ``ValueError`` or ``NotImplementedError`` if the work cannot be captured.
        """
        self._sizes = sorted(sizes)
        self._inputs = torch.zeros(2 * self._sizes[-1], dtype=torch.int64, device=kv[0].pages.device)
        self._hidden: torch.Tensor | None = None
        self._graphs: dict[int, tuple[AttentionBackend, CapturedGraph]] = {}
        # The largest first: its memory is enough for all others.
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(size, model, kv, attention.for_graph(size, size * max_pages), capture)

    def can_run(self, batch: ModelInput) -> bool:
        """Whether there is a graph for ``batch``. Batches with adapters have none, because their matrix products change
        from batch to batch.
        """
        return batch.is_decode and len(batch.token_ids) <= self._sizes[-1] and not batch.has_loras

    def forward(self, batch: ModelInput, pending: torch.Tensor | None) -> torch.Tensor:
        """Does ``ModelRunner.forward`` for a batch that ``can_run``. The next call overwrites the hidden states."""
        count = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        attention, graph = self._graphs[size]
        padded = [pad_decode(each, size) for each in batch.attention]
        # Planned outside the graph before each replay: the graph captured addresses, not their contents.
        attention.prepare(*padded)
        inputs = torch.zeros((2, size), dtype=torch.int64)
        inputs[0, :count], inputs[1, :count] = batch.token_ids, batch.positions
        token_ids, _ = self._inputs_of(size)
        self._inputs[: 2 * size].copy_(pin(inputs.view(-1), self._inputs.device), non_blocking=True)
        if pending is not None:
            scatter_pending(token_ids[:count], batch.pending_rows, pending)
        graph.replay()
        assert self._hidden is not None
        return self._hidden[:count]

    def _capture(
        self,
        size: int,
        model: Model,
        kv: Sequence[LayerKV],
        attention: AttentionBackend,
        capture: GraphCapturer,
    ) -> tuple[AttentionBackend, CapturedGraph]:
        token_ids, positions = self._inputs_of(size)
        attention.prepare(*[dummy_decode(size)] * (1 + max(layer.group for layer in kv)))
        # Warm up without a graph: libraries allocate workspaces and compile kernels at their first call.
        warm_up = model.forward(token_ids, positions, kv, attention)
        hidden = self._hidden = torch.zeros_like(warm_up) if self._hidden is None else self._hidden
        return attention, capture(lambda: hidden[:size].copy_(model.forward(token_ids, positions, kv, attention)))

    def _inputs_of(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the token ids and positions [size] that the graph of ``size`` reads. They are adjacent, so that one
        copy fills both.
        """
        return self._inputs[:size], self._inputs[size : 2 * size]


def capture_graphs(
    model: Model,
    kv: Sequence[LayerKV],
    attention: AttentionBackend,
    *,
    sizes: Sequence[int],
    max_pages: int,
    capture: GraphCapturer,
) -> "CudaGraphRunner | None":
    """Returns a ``CudaGraphRunner`` of ``model``. Returns None if ``sizes`` is empty, or if the model or the attention
    makes decisions on the host while it computes. Raises ``GraphCaptureError``.
    """
    if not (sizes and model.capturable and hasattr(attention, "for_graph")):
        return None
    try:
        with _gc_disabled():
            graphs = CudaGraphRunner(
                model, kv, cast(GraphAttention, attention), sizes=sizes, max_pages=max_pages, capture=capture
            )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise GraphCaptureError(first_line(error)) from error
    log.info("decode steps of up to %d sequences run as CUDA graphs", max(sizes))
    return graphs


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Collects garbage before the context and none inside it: freeing a device tensor would invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraphCapturer:
    """Captures CUDA graphs that share one memory pool, since no two of them run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> CapturedGraph:
        """Implements ``GraphCapturer``."""
        graph: CapturedGraph = torch.cuda.CUDAGraph()
        # torch leaves the current stream changed if the end of a capture fails.
        restore_stream = torch.cuda.stream(torch.cuda.current_stream())
        # Calls of other threads, such as a watchdog that queries events, do not belong to this capture.
        with restore_stream, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph
