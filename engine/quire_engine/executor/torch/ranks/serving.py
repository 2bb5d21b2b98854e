"""``RankWorker``: makes the calls of rank 0 in the process of another rank. Knows no plans and no requests."""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire_engine.executor.torch.devices import inference_on
from quire_engine.executor.torch.gauge import MemoryProfiler
from quire_engine.executor.torch.heap import tune_malloc
from quire_engine.executor.torch.model_runner import ModelRunner
from quire_engine.executor.torch.parts import LoadedModel
from quire_engine.executor.torch.ranks.calls import (
    RpcMethod,
    RpcReply,
    batch_from_arrays,
    copies_from_arrays,
    rows_from_arrays,
)
from quire_engine.executor.torch.ranks.group import TensorParallelGroup
from quire_engine.executor.torch.ranks.settings import RankSettings
from quire_engine.executor.torch.ranks.wire import RpcArray, RpcMessage, json_from_array, json_to_array, receive, send
from quire_engine.executor.torch.ranks.workers import describe_error
from quire_engine.executor.torch.sizing import CacheSizes
from quire_engine.models.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _LoadedRank:
    """What this rank has, once it was told what to load."""

    parts: LoadedModel
    gauge: MemoryProfiler
    group: TensorParallelGroup
    store: Path


class RankWorker:
    """Makes calls until ``link`` ends. Their results stay here: rank 0 is told of failures, and answered where
    it asks.
    """

    def __init__(self, link: socket.socket, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._loaded_rank: _LoadedRank | None = None
        self._runner: ModelRunner | None = None
        self._hidden = torch.empty(0)
        self._handlers: dict[int, Callable[[Sequence[RpcArray]], object]] = {
            RpcMethod.LOAD: self._load,
            RpcMethod.CONNECT: self._connect,
            RpcMethod.PROFILE_MEMORY: self._profile_memory,
            RpcMethod.MAKE_RUNNER: self._make_runner,
            RpcMethod.CLOSE_RUNNER: self._close_runner,
            RpcMethod.COPY_BLOCKS: self._copy_blocks,
            RpcMethod.FORWARD: self._forward,
            RpcMethod.LOGITS: self._logits,
        }

    def run(self, until: RpcMethod | None = None) -> None:
        """Makes calls until one of the kind ``until``, or to the end of the link."""
        while (message := self._receive()) is not None and message.code != until:
            self._handle(message)

    def _receive(self) -> RpcMessage | None:
        try:
            return receive(self._link)
        except OSError:  # rank 0 ended without reading the last report
            return None

    def _handle(self, message: RpcMessage) -> None:
        begun = self._num_collectives
        try:
            value = self._handlers[message.code](message.arrays)
        except Exception as error:
            log.debug("call %d failed", message.call_number, exc_info=True)
            self._reply(RpcReply.FAILED, message.call_number, _failure_to_plain(error, self._num_collectives - begun))
        else:
            if RpcMethod(message.code).has_reply:
                self._reply(RpcReply.DONE, message.call_number, value)

    @property
    def _num_collectives(self) -> int:
        return self._loaded_rank.group.num_collectives if self._loaded_rank else 0

    def _reply(self, kind: RpcReply, number: int, value: object) -> None:
        with suppress(OSError):  # rank 0 has ended, and so will the loop
            send(self._link, RpcMessage(kind, number, [json_to_array(value)]))

    def _load(self, arrays: Sequence[RpcArray]) -> None:
        settings = RankSettings.from_plain(json_from_array(arrays[0]))
        logging.basicConfig(
            level=settings.log_level, format=f"%(asctime)s %(levelname)s %(name)s: rank {self._rank}: %(message)s"
        )
        torch.set_num_threads(settings.threads)
        device, group = settings.device_for(self._rank), settings.make_group(self._rank)
        gauge = MemoryProfiler(device)
        with inference_on(device):
            parts = settings.load(group)
        if device.type == "cpu":
            tune_malloc()
        self._loaded_rank = _LoadedRank(parts, gauge, group, settings.store)

    def _connect(self, _: Sequence[RpcArray]) -> None:
        loaded = self._loaded_or_fail
        with inference_on(loaded.parts.device):
            loaded.group.connect(loaded.store)

    def _profile_memory(self, arrays: Sequence[RpcArray]) -> dict[str, Any]:
        """Measures this rank; the calls up to END_MEASURE are the largest step, if there is to be one."""
        with_step: bool = json_from_array(arrays[0])
        return asdict(
            self._loaded_or_fail.gauge.profile((lambda: self.run(RpcMethod.END_PROFILE)) if with_step else None)
        )

    def _make_runner(self, arrays: Sequence[RpcArray]) -> None:
        parts, with_graphs = self._loaded_or_fail.parts, json_from_array(arrays[1])
        if not with_graphs:
            parts = replace(parts, graph_sizes=())
        with inference_on(parts.device):
            self._runner = ModelRunner(parts, CacheSizes(**json_from_array(arrays[0])), alone=False)

    def _close_runner(self, _: Sequence[RpcArray]) -> None:
        self._runner_or_fail.close()
        self._runner, self._hidden = None, torch.empty(0)

    def _copy_blocks(self, arrays: Sequence[RpcArray]) -> None:
        with inference_on(self._loaded_or_fail.parts.device):
            self._runner_or_fail.copy(*copies_from_arrays(arrays))

    def _forward(self, arrays: Sequence[RpcArray]) -> None:
        batch, loaded, pending = batch_from_arrays(arrays), self._loaded_or_fail, None
        with inference_on(loaded.parts.device):
            if len(batch.pending_rows):
                pending = torch.empty(len(batch.pending_rows), dtype=torch.int64, device=loaded.parts.device)
                loaded.group.broadcast(pending)
            self._hidden = self._runner_or_fail.forward(batch, pending)

    def _logits(self, arrays: Sequence[RpcArray]) -> None:
        with inference_on(self._loaded_or_fail.parts.device):
            self._runner_or_fail.logits(self._hidden, rows_from_arrays(arrays))

    @property
    def _loaded_or_fail(self) -> _LoadedRank:
        assert self._loaded_rank is not None, "LOAD comes first"
        return self._loaded_rank

    @property
    def _runner_or_fail(self) -> ModelRunner:
        assert self._runner is not None, "MAKE_RUNNER comes first"
        return self._runner


def _failure_to_plain(error: Exception, collectives: int) -> dict[str, Any]:
    user_error = isinstance(error, ModelError)
    return {
        "collectives": collectives,
        "reason": str(error) if user_error else describe_error(error),
        "user_error": user_error,
    }
