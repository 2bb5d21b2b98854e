"""``CallServer``: makes the calls of rank 0 in the process of another rank. Knows no plans and no requests."""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quire_engine.executor.torch.devices import computing
from quire_engine.executor.torch.gauge import MemoryGauge
from quire_engine.executor.torch.heap import keep_freed_memory
from quire_engine.executor.torch.model_runner import ModelRunner
from quire_engine.executor.torch.parts import Parts
from quire_engine.executor.torch.ranks.calls import (
    Call,
    Report,
    batch_from_arrays,
    copies_from_arrays,
    rows_from_arrays,
)
from quire_engine.executor.torch.ranks.group import TensorGroup
from quire_engine.executor.torch.ranks.settings import RankSettings
from quire_engine.executor.torch.ranks.wire import Array, Message, as_json, from_json, receive, send
from quire_engine.executor.torch.ranks.workers import describe
from quire_engine.executor.torch.sizing import Pools
from quire_engine.models.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loaded:
    """What this rank has, once it was told what to load."""

    parts: Parts
    gauge: MemoryGauge
    group: TensorGroup
    store: Path


class CallServer:
    """Makes calls until ``link`` ends. Their results stay here: rank 0 is told of failures, and answered where
    it asks.
    """

    def __init__(self, link: socket.socket, rank: int) -> None:
        self._link = link
        self._rank = rank
        self._loaded: _Loaded | None = None
        self._runner: ModelRunner | None = None
        self._hidden = torch.empty(0)
        self._calls: dict[int, Callable[[Sequence[Array]], object]] = {
            Call.LOAD: self._load,
            Call.JOIN: self._join,
            Call.MEASURE: self._measure,
            Call.MAKE_RUNNER: self._make_runner,
            Call.CLOSE_RUNNER: self._close_runner,
            Call.COPY: self._copy,
            Call.FORWARD: self._forward,
            Call.LOGITS: self._logits,
        }

    def run(self, until: Call | None = None) -> None:
        """Makes calls until one of the kind ``until``, or to the end of the link."""
        while (message := self._next()) is not None and message.kind != until:
            self._make(message)

    def _next(self) -> Message | None:
        try:
            return receive(self._link)
        except OSError:  # rank 0 ended without reading the last report
            return None

    def _make(self, message: Message) -> None:
        begun = self._collectives
        try:
            value = self._calls[message.kind](message.arrays)
        except Exception as error:
            log.debug("call %d failed", message.number, exc_info=True)
            self._report(Report.FAILED, message.number, _failure(error, self._collectives - begun))
        else:
            if Call(message.kind).is_answered:
                self._report(Report.DONE, message.number, value)

    @property
    def _collectives(self) -> int:
        return self._loaded.group.collectives if self._loaded else 0

    def _report(self, kind: Report, number: int, value: object) -> None:
        with suppress(OSError):  # rank 0 has ended, and so will the loop
            send(self._link, Message(kind, number, [as_json(value)]))

    def _load(self, arrays: Sequence[Array]) -> None:
        settings = RankSettings.from_plain(from_json(arrays[0]))
        logging.basicConfig(
            level=settings.log_level, format=f"%(asctime)s %(levelname)s %(name)s: rank {self._rank}: %(message)s"
        )
        torch.set_num_threads(settings.threads)
        device, group = settings.device_of(self._rank), settings.group_of(self._rank)
        gauge = MemoryGauge(device)
        with computing(device):
            parts = settings.load(group)
        if device.type == "cpu":
            keep_freed_memory()
        self._loaded = _Loaded(parts, gauge, group, settings.store)

    def _join(self, _: Sequence[Array]) -> None:
        loaded = self._whole
        with computing(loaded.parts.device):
            loaded.group.connect(loaded.store)

    def _measure(self, arrays: Sequence[Array]) -> dict[str, Any]:
        """Measures this rank; the calls up to END_MEASURE are the largest step, if there is to be one."""
        with_step: bool = from_json(arrays[0])
        return asdict(self._whole.gauge.read((lambda: self.run(Call.END_MEASURE)) if with_step else None))

    def _make_runner(self, arrays: Sequence[Array]) -> None:
        parts, with_graphs = self._whole.parts, from_json(arrays[1])
        if not with_graphs:
            parts = replace(parts, graph_sizes=())
        with computing(parts.device):
            self._runner = ModelRunner(parts, Pools(**from_json(arrays[0])), alone=False)

    def _close_runner(self, _: Sequence[Array]) -> None:
        self._own.close()
        self._runner, self._hidden = None, torch.empty(0)

    def _copy(self, arrays: Sequence[Array]) -> None:
        with computing(self._whole.parts.device):
            self._own.copy(*copies_from_arrays(arrays))

    def _forward(self, arrays: Sequence[Array]) -> None:
        batch, loaded, pending = batch_from_arrays(arrays), self._whole, None
        with computing(loaded.parts.device):
            if len(batch.pending_rows):
                pending = torch.empty(len(batch.pending_rows), dtype=torch.int64, device=loaded.parts.device)
                loaded.group.broadcast(pending)
            self._hidden = self._own.forward(batch, pending)

    def _logits(self, arrays: Sequence[Array]) -> None:
        with computing(self._whole.parts.device):
            self._own.logits(self._hidden, rows_from_arrays(arrays))

    @property
    def _whole(self) -> _Loaded:
        assert self._loaded is not None, "LOAD comes first"
        return self._loaded

    @property
    def _own(self) -> ModelRunner:
        assert self._runner is not None, "MAKE_RUNNER comes first"
        return self._runner


def _failure(error: Exception, collectives: int) -> dict[str, Any]:
    user_error = isinstance(error, ModelError)
    return {"collectives": collectives, "text": str(error) if user_error else describe(error), "user_error": user_error}
