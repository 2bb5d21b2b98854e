"""CUDA graphs on the CPU: the operations of a capture are replayed on the very memory that they were captured on, and
no code of the model runs. With a decode attention that can be captured, and checks what it is prepared with.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from quire_engine.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from quire_engine.attention.reference import ReferenceAttention
from quire_engine.executor import multiproc, rank_worker
from quire_engine.worker import model_runner
from quire_engine.worker.memory import CacheSizes
from quire_engine.worker.model_runner import LoadedModel, ModelRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.item.default}


class CapturedOperations(TorchDispatchMode):
    """A ``CapturedGraph``. What makes the host wait for the device cannot be recorded, as on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing\nmore about it")
        made = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._done:
            made = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(made), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeCapturer:
    """A ``GraphCapturer`` that also counts."""

    def __init__(self) -> None:
        self.captures: list[CapturedOperations] = []
        self.replays = 0

    def __call__(self, work: Callable[[], object]) -> "FakeCapturer.Counted":
        capture = CapturedOperations()
        with capture:
            work()
        self.captures.append(capture)
        return FakeCapturer.Counted(self, capture)

    class Counted:
        def __init__(self, capturer: "FakeCapturer", capture: CapturedOperations) -> None:
            self._capturer, self._capture = capturer, capture

        def replay(self) -> None:
            self._capturer.replays += 1
            self._capture.replay()


def refuse(work: Callable[[], object]) -> Any:
    """A ``GraphCapturer`` that has no memory for a graph, and does not get to the work."""
    raise RuntimeError("out of memory")


def capture_on_the_cpu(capturer: Any) -> None:
    """Has the runners of ranks in this process capture their decode steps with ``capturer``, as they do on CUDA."""

    def make(model: LoadedModel, cache_sizes: CacheSizes, **how: Any) -> ModelRunner:
        model.model.capturable = True
        return ModelRunner(model, cache_sizes, capturer, **how)

    for module in (multiproc, rank_worker):
        module.ModelRunner = make
    model_runner.make_attention = lambda name, shape, *_, **__: GraphReference(shape)


class GraphReference(ReferenceAttention):
    """The reference, and for graphs ``StaticDecode``. A ``GraphAttention``."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.made: list[StaticDecode] = []

    def for_graph(self, batch_size: int, max_pages: int) -> AttentionBackend:
        self.made.append(StaticDecode(self._shape, batch_size, max_pages))
        return self.made[-1]


class StaticDecode:
    """Attention of exactly so many chunks of one token, on memory that never moves: every sequence is looked at with as
    many pages as there can be, and what lies behind its end is hidden.
    """

    def __init__(self, shape: AttentionShape, batch_size: int, max_pages: int) -> None:
        self._shape, self.size, self._max_pages = shape, batch_size, max_pages
        # Of each group of layers, its sequences' pages and how many tokens they have in these.
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.prepared: list[tuple[AttentionBatch, ...]] = []

    def prepare(self, *batches: AttentionBatch) -> None:
        self.prepared.append(batches)
        for group, batch in enumerate(batches):
            check_decode(batch, self.size, self._max_pages, self._shape.block_size)
            if group == len(self._groups):
                pages = torch.zeros(self.size, self._max_pages // self.size, dtype=torch.int64)
                self._groups.append((pages, torch.ones(self.size, dtype=torch.int64)))
            pages, context_lens = self._groups[group]
            pages.zero_()
            for row, (start, end) in enumerate(pairwise(batch.page_indptr.tolist())):
                pages[row, : end - start] = batch.page_ids[start:end]
            context_lens.copy_(batch.context_lens)

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
        assert sinks is None
        pages, context_lens = self._groups[group]
        size, last = self._shape.block_size, context_lens - 1
        page, offset = pages.gather(1, (last // size)[:, None]).squeeze(1), last % size
        kv[page, 0, :, offset] = key
        kv[page, 1, :, offset] = value
        seen = kv[pages].permute(2, 0, 3, 1, 4, 5).flatten(3, 4).float()
        sharing = self._shape.num_heads // self._shape.num_kv_heads
        keys, values = (part.repeat_interleave(sharing, 1) for part in (seen[0], seen[1]))
        distance = last[:, None] - torch.arange(keys.shape[2])
        hidden = (distance < 0) | (distance >= (window or keys.shape[2]))
        scores = (query.float()[:, :, None] @ keys.transpose(2, 3)) * self._shape.scale
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        return (weights @ values.nan_to_num()).squeeze(2).to(query.dtype)


def check_decode(batch: AttentionBatch, size: int, max_pages: int, block_size: int) -> None:
    """What ``GraphAttention.for_graph`` is promised."""
    assert batch.query_indptr.tolist() == list(range(size + 1))
    assert len(batch.context_lens) == len(batch.positions) == len(batch.last_page_len) == size
    assert len(batch.page_ids) == batch.page_indptr[-1] <= max_pages
    assert all(part.dtype == torch.int32 for part in parts_of(batch))
    counts = batch.page_indptr.diff()
    assert torch.equal((counts - 1) * block_size + batch.last_page_len, batch.context_lens)
    assert torch.equal(batch.positions + 1, batch.context_lens)


def parts_of(batch: AttentionBatch) -> Sequence[torch.Tensor]:
    return (
        *(batch.query_indptr, batch.page_indptr, batch.page_ids),
        *(batch.last_page_len, batch.context_lens, batch.positions),
    )
