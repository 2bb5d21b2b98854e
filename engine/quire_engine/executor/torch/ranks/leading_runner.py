"""``MultiprocRunner``: rank 0's runner, which has all ranks make each call together. Knows batches and block copies."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from quire_engine.executor.torch.batch import ModelInput
from quire_engine.executor.torch.graphs import NO_GRAPHS, CaptureError
from quire_engine.executor.torch.model_runner import ModelRunner, Runner
from quire_engine.executor.torch.parts import LoadedModel
from quire_engine.executor.torch.ranks.calls import RpcMethod, batch_to_arrays, copies_to_arrays
from quire_engine.executor.torch.ranks.group import TensorParallelGroup
from quire_engine.executor.torch.ranks.wire import RpcArray, json_to_array
from quire_engine.executor.torch.ranks.workers import RankWorkers
from quire_engine.executor.torch.sizing import CacheSizes
from quire_engine.kv.capacity import KVCacheConfig
from quire_engine.kv.copy import BlockCopy

T = TypeVar("T")
log = logging.getLogger(__name__)


class MultiprocRunner:
    """The ``Runner`` of a model that ``workers`` share with this process: each rank has a runner of its own, with its
    ``parts`` and KV memory of ``pools``. Decode steps are recorded as graphs on all ranks or on none.

    A call that fails on all ranks in the same way raises what it raises here. Where ranks part, it raises
    ``RankError``.
    """

    def __init__(self, workers: RankWorkers, group: TensorParallelGroup, parts: LoadedModel, pools: CacheSizes) -> None:
        self._workers = workers
        self._group = group
        try:
            self._own_runner = self._make_runners(parts, pools)
        except CaptureError as error:
            log.warning(NO_GRAPHS, error)
            self._own_runner = self._make_runners(replace(parts, graph_sizes=()), pools)

    def _make_runners(self, parts: LoadedModel, pools: CacheSizes) -> Runner:
        arrays = [json_to_array(asdict(pools)), json_to_array(bool(parts.graph_sizes))]
        number, own = call_all_ranks(
            self._workers, self._group, RpcMethod.MAKE_RUNNER, arrays, lambda: ModelRunner(parts, pools, alone=False)
        )
        self._workers.wait_for_replies(number)
        return own

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See ``Runner.kv_cache_config``. Blocks are everyone's; the bytes of one are a rank's."""
        return self._own_runner.kv_cache_config

    @property
    def dtype(self) -> torch.dtype:
        """See ``Runner.dtype``."""
        return self._own_runner.dtype

    def copy(self, out: Sequence[BlockCopy], within: Sequence[BlockCopy], into: Sequence[BlockCopy]) -> None:
        """See ``Runner.copy``."""
        if out or within or into:
            arrays = copies_to_arrays((out, within, into))
            self._call_all_ranks(RpcMethod.COPY_BLOCKS, arrays, lambda: self._own_runner.copy(out, within, into))

    def forward(self, batch: ModelInput, pending: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Runner.forward``. Tokens that are pending go from device to device."""

        def compute() -> torch.Tensor:
            if pending is not None:
                self._group.broadcast(pending)
            return self._own_runner.forward(batch, pending)

        return self._call_all_ranks(RpcMethod.FORWARD, batch_to_arrays(batch), compute)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Runner.logits``."""
        return self._call_all_ranks(RpcMethod.LOGITS, [rows.numpy()], lambda: self._own_runner.logits(hidden, rows))

    def close(self) -> None:
        """See ``Runner.close``. Does nothing for ranks that are gone."""
        if self._workers.is_usable:
            self._workers.request(RpcMethod.CLOSE_RUNNER)
        self._own_runner.close()

    def _call_all_ranks(self, call: RpcMethod, arrays: Sequence[RpcArray], work: Callable[[], T]) -> T:
        return call_all_ranks(self._workers, self._group, call, arrays, work)[1]


def call_all_ranks(
    workers: RankWorkers, group: TensorParallelGroup, call: RpcMethod, arrays: Sequence[RpcArray], work: Callable[[], T]
) -> tuple[int, T]:
    """Has the other ranks make ``call`` while this one does ``work``: the call's number, and what ``work`` returns.
    Raises what it raises where all ranks fail alike, else ``RankError``.
    """
    number = workers.begin_call(call, arrays)
    before = group.num_collectives
    try:
        result = work()
    except Exception as error:
        workers.call_failed(group.num_collectives - before, error)
        raise
    workers.call_succeeded()
    return number, result
