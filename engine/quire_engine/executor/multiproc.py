"""Tensor and pipeline parallelism, from rank 0's side.

``MultiprocLeader`` starts and ends the processes of the other ranks. ``MultiprocRanks`` executes each step on all ranks
together. ``compute_rank_cache_sizes`` decides the size of the KV caches from the memory profiles of all ranks.
"""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from quire_proto.logs import log_format
from quire_proto.tls import TlsError

from quire_engine.config import NodeArgs
from quire_engine.core.kv_transfer.transfer import TransferResult
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.distributed.rank_group import RankGroup, RankStore
from quire_engine.errors import ModelError
from quire_engine.executor.engine_group import EngineGroup
from quire_engine.executor.node_agent import node_facts
from quire_engine.executor.node_hub import NodeHub
from quire_engine.executor.rank_processes import RankFailureTracker, RankWorkers
from quire_engine.executor.rank_worker import RankSettings
from quire_engine.executor.rpc import (
    RpcArray,
    RpcMethod,
    bitmask_to_arrays,
    json_to_array,
    step_to_arrays,
)
from quire_engine.sampling.grammar_bitmask import GrammarBitmask
from quire_engine.worker.cuda_graph import NO_GRAPHS, GraphCaptureError
from quire_engine.worker.memory import CacheBudget, CacheSizes, MemoryProfile, MemoryProfiler, compute_cache_sizes
from quire_engine.worker.model_runner import LoadedModel, ModelRunner
from quire_engine.worker.request_states import Indices
from quire_engine.worker.worker import AsyncStep, Ranks, on_device

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_OVERLAP = "--enable-dbo changes nothing: sums go through shared memory, where the cores that multiply add them up"


class MultiprocLeader:
    """Starts the processes of the other ranks, which immediately begin to load their weights, and leads them. Ranks on
    other machines join through ``nodes``. ``engines`` is this engine's data-parallel group.

    ``on_lost`` is called on another thread, with the reason, when a rank has died or has failed alone, and the model
    can no longer run. Without ``on_lost`` the reason is logged. The rank processes live until then or until ``close``.
    """

    def __init__(
        self,
        settings: RankSettings,
        on_lost: Callable[[str], None] | None,
        nodes: NodeArgs | None = None,
        engines: EngineGroup | None = None,
    ) -> None:
        self._device = settings.device_for(0)
        self._group = settings.make_group(0)
        self._rendezvous_folder = TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True)
        self._on_lost = on_lost
        self._store = RankStore() if engines is None else engines.store
        self._hub = None if nodes is None or settings.nnodes == 1 else _make_hub(settings, nodes)
        try:
            failures = RankFailureTracker(settings.size - 1, settings.last_stage)
            ranks, store = settings.ranks_per_node, self._store
            self._workers = RankWorkers(ranks, failures, store, self._on_rank_lost, self._hub)
        except BaseException:
            self._close_hub()
            raise
        try:
            # Rank 0 logs what all ranks would log.
            level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.ERROR
            addresses = () if self._hub is None else tuple(self._hub.addresses)
            settings = replace(settings, log_level=level, log_format=log_format())
            settings = replace(settings, rendezvous=self._rendezvous, addresses=addresses)
            self._load_call = self._workers.request(RpcMethod.LOAD, [json_to_array(settings.to_plain())])
        except BaseException:
            self.close()
            raise
        self._settings = settings
        log.info("rank 0 has started the others: %s", ", ".join(self._workers.places))

    @property
    def group(self) -> RankGroup:
        """The ``RankGroup`` of rank 0, for the model."""
        return self._group

    def connect(self) -> None:
        """Waits until all ranks have loaded their weights, then connects them. Raises ``ModelError``, ``RankError``."""
        self._workers.wait_for_replies(self._load_call)
        with on_device(self._device):
            number, _ = call_all_ranks(
                self._workers,
                self._group,
                RpcMethod.CONNECT,
                [],
                lambda: self._settings.connect(0, self._group, self._store),
            )
        self._workers.wait_for_replies(number)
        if self._settings.engine.enable_dbo and not self._group.communicator.overlaps_sums:
            log.warning("%s", NO_OVERLAP)
        if self._device.type == "cpu":
            self._rendezvous_folder.cleanup()  # NCCL still reads the folder later

    def profile_memory(
        self, profiler: MemoryProfiler, largest_step: Callable[[], object] | None
    ) -> list[MemoryProfile]:
        """Returns the memory profile of each rank, in rank order.

        Runs ``largest_step`` on all ranks, unless it is None. The other ranks handle the calls of that step inside
        PROFILE_MEMORY, until END_PROFILE.
        """
        number = self._workers.request(RpcMethod.PROFILE_MEMORY, [json_to_array(largest_step is not None)])
        own = profiler.profile(largest_step)
        if largest_step is not None:
            self._workers.request(RpcMethod.END_PROFILE)
        return [own, *(MemoryProfile(**answer) for answer in self._workers.wait_for_replies(number))]

    def make_ranks(self, model: LoadedModel, cache_sizes: CacheSizes) -> Ranks:
        """Makes the ranks. ``cache_sizes`` is rank 0's KV memory in bytes."""
        return MultiprocRanks(self._workers, self._group, model, cache_sizes)

    def close(self) -> None:
        """Ends the other ranks. Nothing can run afterwards."""
        self._workers.close()
        self._close_hub()
        self._group.close()
        self._rendezvous_folder.cleanup()

    def announce_ready(self) -> None:
        """Tells the other nodes that the engine serves."""
        if self._hub is not None:
            self._hub.announce_ready()

    def _close_hub(self) -> None:
        if self._hub is not None:
            self._hub.close()

    @property
    def _rendezvous(self) -> Path:
        return Path(self._rendezvous_folder.name)

    def _on_rank_lost(self, sentence: str) -> None:
        self._group.abort()
        self._rendezvous_folder.cleanup()
        if self._on_lost is None:
            log.error("%s", sentence)
        else:
            self._on_lost(sentence)


class MultiprocRanks:
    """The ``Ranks`` of a multi-process model, on rank 0. Each rank has its own runner, with its shard of the model. All
    ranks have as many KV blocks as rank 0 has in ``cache_sizes``. Decode steps are captured as graphs on all ranks or
    on none.

    In a pipeline every rank makes the calls in the same order, and later stages make them later.

    A call that fails on all ranks in the same way raises rank 0's error. A call that fails only on some ranks raises
    ``RankError``.
    """

    def __init__(self, workers: RankWorkers, group: RankGroup, model: LoadedModel, cache_sizes: CacheSizes) -> None:
        self._workers = workers
        self._group = group
        self.rank = 0
        self.is_sampler = group.num_stages == 1
        self._sampled = array("i")
        self._num_exchanges_before = 0
        try:
            self.runner = self._make_runners(model, cache_sizes)
        except GraphCaptureError as error:
            log.warning(NO_GRAPHS, error)
            self.runner = self._make_runners(replace(model, graph_sizes=()), cache_sizes)

    def _make_runners(self, model: LoadedModel, cache_sizes: CacheSizes) -> ModelRunner:
        num_blocks = cache_sizes.kv_cache_bytes // model.block_bytes, cache_sizes.swap_bytes // model.block_bytes
        arrays = [json_to_array(num_blocks), json_to_array(bool(model.graph_sizes))]
        number, runner = call_all_ranks(
            self._workers,
            self._group,
            RpcMethod.MAKE_RUNNER,
            arrays,
            lambda: ModelRunner(model, model.cache_sizes(*num_blocks), alone=False),
        )
        self._workers.wait_for_replies(number)
        return runner

    def execute(
        self, output: SchedulerOutput, without_loras: Sequence[int], work: Callable[[], AsyncStep]
    ) -> AsyncStep:
        """See ``Ranks.execute``."""
        sampled, self._sampled = self._sampled, array("i")
        self._workers.begin_call(RpcMethod.EXECUTE, step_to_arrays(output, sampled, without_loras))
        self._num_exchanges_before = self._group.num_exchanges
        step = self._failing_alike(work)
        if not (self.is_sampler and step.needs_logits):  # otherwise sampling is part of the call
            self._workers.call_succeeded()
        return step

    def compute_logits(self, work: Callable[[], T]) -> T:
        """See ``Ranks.compute_logits``."""
        result = self._failing_alike(work)
        self._workers.call_succeeded()
        return result

    def get_output(self) -> ModelOutput:
        """See ``Ranks.get_output``."""
        return self._workers.wait_for_output()

    def send_bitmask(self, bitmask: GrammarBitmask) -> None:
        """See ``Ranks.send_bitmask``."""
        self._workers.send(RpcMethod.BITMASK, bitmask_to_arrays(bitmask))

    def queue_sampled_tokens(self, rows: Indices, positions: Indices, token_ids: Indices) -> None:
        """See ``Ranks.queue_sampled_tokens``."""
        self._sampled.frombytes(np.stack((rows, positions, token_ids), 1).astype(np.int32).tobytes())

    def broadcast(self, pending: torch.Tensor) -> None:
        """See ``Ranks.broadcast``. Copies from device to device."""
        self._group.broadcast(pending)

    def execute_dummy_batch(self) -> None:
        """See ``Ranks.execute_dummy_batch``."""
        call_all_ranks(self._workers, self._group, RpcMethod.EXECUTE_DUMMY_BATCH, [], self.runner.execute_dummy_batch)

    def call(self, name: str, arguments: Sequence[Any], work: Callable[[], object]) -> list[Any]:
        """See ``Ranks.call``."""
        number = self._workers.request(RpcMethod.CALL, [json_to_array([name, *arguments])])
        own = work()
        return [own, *self._workers.wait_for_replies(number)]

    def report_to(self, report: Callable[[TransferResult], object]) -> None:
        """See ``Ranks.report_to``."""
        self._workers.on_transfer = report

    def close(self) -> None:
        """See ``Ranks.close``. Skips the other ranks if they are lost already."""
        if self._workers.is_usable:
            self._workers.request(RpcMethod.CLOSE_RUNNER)
        self.runner.close()

    def _failing_alike(self, work: Callable[[], T]) -> T:
        """Does rank 0's work in the current call. Reports an error to the other ranks' tracker, then raises it."""
        try:
            return work()
        except Exception as error:
            self._workers.call_failed(self._group.num_exchanges - self._num_exchanges_before, error)
            raise


def _make_hub(settings: RankSettings, nodes: NodeArgs) -> NodeHub:
    facts = node_facts(settings.engine, settings.config, torch.device(settings.device), settings.nnodes)
    try:
        return NodeHub(nodes, facts, settings.ranks_per_node)
    except TlsError as error:
        raise ModelError(f"{error}.") from error


def call_all_ranks(
    workers: RankWorkers,
    group: RankGroup,
    method: RpcMethod,
    arrays: Sequence[RpcArray],
    work: Callable[[], T],
) -> tuple[int, T]:
    """Calls ``method`` on the other ranks while this rank does ``work``. Returns the call number and the result of
    ``work``.

    Raises the error of ``work`` if all ranks fail alike, else ``RankError``.
    """
    number = workers.begin_call(method, arrays)
    before = group.num_exchanges
    try:
        result = work()
    except Exception as error:
        workers.call_failed(group.num_exchanges - before, error)
        raise
    workers.call_succeeded()
    return number, result


@dataclass(frozen=True, slots=True)
class RankCacheSizes:
    """The cache sizes that the ranks agreed on. ``sizes`` are rank 0's bytes; every rank gets the same number of
    blocks. ``profile`` is the memory profile that decided, and ``num_layers`` the number of layers whose blocks that
    memory holds.
    """

    sizes: CacheSizes
    profile: MemoryProfile
    num_layers: int


def compute_rank_cache_sizes(
    budget: CacheBudget,
    profiles: Sequence[MemoryProfile],
    smallest: CacheSizes,
    num_layers: Sequence[int],
    nnodes: int = 1,
) -> RankCacheSizes:
    """Decides the cache sizes of all ranks. The fullest memory decides.

    ``profiles`` and ``num_layers`` are in rank order; a rank's blocks take memory in proportion to its number of
    layers. ``smallest`` is the least that rank 0 needs. Each of the ``nnodes`` machines has the same number of ranks.

    On the CPU the ranks of a machine share one memory, and ``budget`` is for all of them. On CUDA each rank has its own
    GPU, and the ranks of a machine share its host memory for swap pools. Raises ``ModelError`` like
    ``compute_cache_sizes``.
    """
    own, each = num_layers[0], len(profiles) // nnodes
    decided: list[RankCacheSizes] = []
    for first in range(0, len(profiles), each):
        node, layers = profiles[first : first + each], num_layers[first : first + each]
        if node[0].host_available is None:
            decided.append(_decide(budget, sum_profiles(node), smallest, own, sum(layers)))
            continue
        for profile, count in zip(node, layers, strict=True):
            part = replace(budget, swap_bytes=budget.swap_bytes * count // sum(layers))
            one = replace(profile, host_available=_host_available(node) * count // sum(layers))
            decided.append(replace(_decide(part, one, smallest, own, count), num_layers=own))
    least = min(decided, key=lambda one: one.sizes.kv_cache_bytes)
    swap_bytes = min(one.sizes.swap_bytes for one in decided)
    return replace(least, sizes=CacheSizes(least.sizes.kv_cache_bytes, swap_bytes))


def _host_available(node: Sequence[MemoryProfile]) -> int:
    """Returns the host memory in bytes that the ranks of one machine can have for swap pools in total. A rank does not
    know how much the other ranks use or have pinned within the same limit.
    """
    rest = min(one.host_limit for one in node) - sum(one.host_used for one in node)
    return max(0, min(rest, *(one.host_available or 0 for one in node)))


def _decide(budget: CacheBudget, profile: MemoryProfile, smallest: CacheSizes, own: int, layers: int) -> RankCacheSizes:
    """Sizes the caches in one memory, which holds the blocks of ``layers`` layers. Returns rank 0's bytes, for its
    ``own`` layers.
    """
    sizes = compute_cache_sizes(budget, profile, _scale(smallest, layers, own))
    return RankCacheSizes(_scale(sizes, own, layers), profile, layers)


def _scale(sizes: CacheSizes, layers: int, of: int) -> CacheSizes:
    """Converts ``sizes`` for blocks of ``of`` layers to the bytes that as many blocks of ``layers`` layers take."""
    return CacheSizes(sizes.kv_cache_bytes * layers // of, sizes.swap_bytes * layers // of)


def sum_profiles(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """Merges the profiles of ranks that share one memory. Adds up the bytes in use; pages that ranks share, such as
    code, count once per rank.
    """
    first, loaded = profiles[0], sum(one.used_loaded for one in profiles)
    peaks = [one.peak for one in profiles if one.peak is not None]
    return replace(
        first,
        used_before=sum(one.used_before for one in profiles),
        used_loaded=loaded,
        available=max(0, min(first.limit - loaded, *(one.available for one in profiles))),
        peak=sum(peaks) if len(peaks) == len(profiles) else None,
        growth_reserve=sum(one.growth_reserve for one in profiles),
    )
