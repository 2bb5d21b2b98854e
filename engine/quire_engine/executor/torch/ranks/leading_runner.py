"""``LeadingRunner``: rank 0's runner, which has all ranks make each call together. Knows batches and block copies."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from quire_engine.executor.torch.batch import ForwardBatch
from quire_engine.executor.torch.graphs import NO_GRAPHS, RecordingError
from quire_engine.executor.torch.model_runner import ModelRunner, Runner
from quire_engine.executor.torch.parts import Parts
from quire_engine.executor.torch.ranks.calls import Call, batch_to_arrays, copies_to_arrays
from quire_engine.executor.torch.ranks.group import TensorGroup
from quire_engine.executor.torch.ranks.wire import Array, as_json
from quire_engine.executor.torch.ranks.workers import Workers
from quire_engine.executor.torch.sizing import Pools
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.copy import BlockCopy

T = TypeVar("T")
log = logging.getLogger(__name__)


class LeadingRunner:
    """The ``Runner`` of a model that ``workers`` share with this process: each rank has a runner of its own, with its
    ``parts`` and KV memory of ``pools``. Decode steps are recorded as graphs on all ranks or on none.

    A call that fails on all ranks in the same way raises what it raises here. Where ranks part, it raises
    ``RankError``.
    """

    def __init__(self, workers: Workers, group: TensorGroup, parts: Parts, pools: Pools) -> None:
        self._workers = workers
        self._group = group
        try:
            self._own = self._make(parts, pools)
        except RecordingError as error:
            log.warning(NO_GRAPHS, error)
            self._own = self._make(replace(parts, graph_sizes=()), pools)

    def _make(self, parts: Parts, pools: Pools) -> Runner:
        arrays = [as_json(asdict(pools)), as_json(bool(parts.graph_sizes))]
        number, own = together(
            self._workers, self._group, Call.MAKE_RUNNER, arrays, lambda: ModelRunner(parts, pools, alone=False)
        )
        self._workers.answers(number)
        return own

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See ``Runner.kv_cache_config``. Blocks are everyone's; the bytes of one are a rank's."""
        return self._own.kv_cache_config

    @property
    def dtype(self) -> torch.dtype:
        """See ``Runner.dtype``."""
        return self._own.dtype

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See ``Runner.copy``."""
        if out or within or into:
            arrays = copies_to_arrays((out, within, into))
            self._together(Call.COPY, arrays, lambda: self._own.copy(out, within, into))

    def forward(self, batch: ForwardBatch, pending: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Runner.forward``. Tokens that are pending go from device to device."""

        def compute() -> torch.Tensor:
            if pending is not None:
                self._group.broadcast(pending)
            return self._own.forward(batch, pending)

        return self._together(Call.FORWARD, batch_to_arrays(batch), compute)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Runner.logits``."""
        return self._together(Call.LOGITS, [rows.numpy()], lambda: self._own.logits(hidden, rows))

    def close(self) -> None:
        """See ``Runner.close``. Does nothing for ranks that are gone."""
        if self._workers.usable:
            self._workers.ask(Call.CLOSE_RUNNER)
        self._own.close()

    def _together(self, call: Call, arrays: Sequence[Array], work: Callable[[], T]) -> T:
        return together(self._workers, self._group, call, arrays, work)[1]


def together(
    workers: Workers, group: TensorGroup, call: Call, arrays: Sequence[Array], work: Callable[[], T]
) -> tuple[int, T]:
    """Has the other ranks make ``call`` while this one does ``work``: the call's number, and what ``work`` returns.
    Raises what it raises where all ranks fail alike, else ``RankError``.
    """
    number = workers.begin(call, arrays)
    before = group.collectives
    try:
        result = work()
    except Exception as error:
        workers.failed(group.collectives - before, error)
        raise
    workers.succeeded()
    return number, result
