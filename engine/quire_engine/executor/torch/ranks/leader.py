"""``MultiprocLeader``: rank 0's side of a tensor-parallel model, from starting the other processes to ending them; and
``SingleProcess``, the same interface for a model in one process.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from quire_engine.executor.torch.devices import inference_on
from quire_engine.executor.torch.gauge import MemoryProfiler
from quire_engine.executor.torch.model_runner import ModelRunner, Runner
from quire_engine.executor.torch.parts import LoadedModel
from quire_engine.executor.torch.ranks.calls import RpcMethod
from quire_engine.executor.torch.ranks.leading_runner import MultiprocRunner, call_all_ranks
from quire_engine.executor.torch.ranks.settings import RankSettings
from quire_engine.executor.torch.ranks.wire import json_to_array
from quire_engine.executor.torch.ranks.workers import RankWorkers
from quire_engine.executor.torch.sizing import CacheSizes, MemoryProfile
from quire_engine.models.ranks import SINGLE_RANK, Communicator

log = logging.getLogger(__name__)


class RankGroup(Protocol):
    """What an executor needs of the ranks of its model, however many there are."""

    @property
    def communicator(self) -> Communicator:
        """Them, as the model sees them."""
        ...

    def connect(self) -> None:
        """Waits until all have loaded their parts, and connects them. Raises ``ModelError`` and ``RankError``."""
        ...

    def profile_memory(self, gauge: MemoryProfiler, largest_step: Callable[[], object] | None) -> list[MemoryProfile]:
        """What each has measured, in their order. ``largest_step`` has all of them compute."""
        ...

    def make_runner(self, parts: LoadedModel, pools: CacheSizes) -> Runner:
        """A runner with pools of this size on each rank."""
        ...

    def close(self) -> None:
        """Ends the others. Nothing can be run any more."""
        ...


class SingleProcess:
    """One rank. A ``RankGroup``."""

    communicator: Communicator = SINGLE_RANK

    def connect(self) -> None:
        """There is nobody else."""

    def profile_memory(self, gauge: MemoryProfiler, largest_step: Callable[[], object] | None) -> list[MemoryProfile]:
        """See ``RankGroup.profile_memory``."""
        return [gauge.profile(largest_step)]

    def make_runner(self, parts: LoadedModel, pools: CacheSizes) -> Runner:
        """See ``RankGroup.make_runner``."""
        return ModelRunner(parts, pools)

    def close(self) -> None:
        """There is nobody else."""


class MultiprocLeader:
    """Starts the other ranks, which begin to load their parts. A ``RankGroup``.

    ``on_lost`` is told, on another thread, why the model cannot be run any more: a rank has died or has failed alone;
    without it, the log is. The other processes exist until then or until ``close``.
    """

    def __init__(self, settings: RankSettings, on_lost: Callable[[str], None] | None) -> None:
        self._device = settings.device_for(0)
        self._group = settings.make_group(0)
        self._rendezvous_folder = TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True)
        self._on_lost = on_lost
        self._workers = RankWorkers(settings.size, self._on_rank_lost)
        try:
            # Rank 0 speaks for all of what all of them find.
            level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.ERROR
            settings = replace(settings, store=self._store_path, log_level=level)
            self._load_call = self._workers.request(RpcMethod.LOAD, [json_to_array(settings.to_plain())])
        except BaseException:
            self.close()
            raise
        log.info("rank 0 has started the others: processes %s", ", ".join(map(str, self._workers.pids)))

    @property
    def communicator(self) -> Communicator:
        """See ``RankGroup.communicator``."""
        return self._group

    def connect(self) -> None:
        """See ``RankGroup.connect``."""
        self._workers.wait_for_replies(self._load_call)
        with inference_on(self._device):
            number, _ = call_all_ranks(
                self._workers, self._group, RpcMethod.CONNECT, [], lambda: self._group.connect(self._store_path)
            )
        self._workers.wait_for_replies(number)
        if self._device.type == "cpu":
            self._rendezvous_folder.cleanup()  # NCCL goes on to look into it

    def profile_memory(self, gauge: MemoryProfiler, largest_step: Callable[[], object] | None) -> list[MemoryProfile]:
        """See ``RankGroup.profile_memory``. The calls of the step are made by the others within theirs."""
        number = self._workers.request(RpcMethod.PROFILE_MEMORY, [json_to_array(largest_step is not None)])
        own = gauge.profile(largest_step)
        if largest_step is not None:
            self._workers.request(RpcMethod.END_PROFILE)
        return [own, *(MemoryProfile(**answer) for answer in self._workers.wait_for_replies(number))]

    def make_runner(self, parts: LoadedModel, pools: CacheSizes) -> Runner:
        """See ``RankGroup.make_runner``."""
        return MultiprocRunner(self._workers, self._group, parts, pools)

    def close(self) -> None:
        """See ``RankGroup.close``."""
        self._workers.close()
        self._group.close()
        self._rendezvous_folder.cleanup()

    @property
    def _store_path(self) -> Path:
        return Path(self._rendezvous_folder.name) / "store"

    def _on_rank_lost(self, sentence: str) -> None:
        self._group.abort()
        self._rendezvous_folder.cleanup()
        if self._on_lost is None:
            log.error("%s", sentence)
        else:
            self._on_lost(sentence)


def start_ranks(settings: RankSettings, on_lost: Callable[[str], None] | None = None) -> RankGroup:
    """The ranks of a model with these settings, started where there are others. See ``MultiprocLeader``."""
    return SingleProcess() if settings.size == 1 else MultiprocLeader(settings, on_lost)
