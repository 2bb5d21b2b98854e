"""``Leader``: rank 0's side of a model that several processes share, from the start of the others to their end; and
``Solo``, the same for a model that one process has for itself. Knows no plans.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from quire_engine.executor.torch.devices import computing
from quire_engine.executor.torch.gauge import MemoryGauge
from quire_engine.executor.torch.model_runner import ModelRunner, Runner
from quire_engine.executor.torch.parts import Parts
from quire_engine.executor.torch.ranks.calls import Call
from quire_engine.executor.torch.ranks.leading_runner import LeadingRunner, together
from quire_engine.executor.torch.ranks.settings import RankSettings
from quire_engine.executor.torch.ranks.wire import as_json
from quire_engine.executor.torch.ranks.workers import Workers
from quire_engine.executor.torch.sizing import Measured, Pools
from quire_engine.models.ranks import ALONE, Ranks

log = logging.getLogger(__name__)


class Leading(Protocol):
    """What an executor needs of the ranks of its model, however many there are."""

    @property
    def ranks(self) -> Ranks:
        """Them, as the model sees them."""
        ...

    def join(self) -> None:
        """Waits until all have loaded their parts, and connects them. Raises ``ModelError`` and ``RankError``."""
        ...

    def measure(self, gauge: MemoryGauge, largest_step: Callable[[], object] | None) -> list[Measured]:
        """What each has measured, in their order. ``largest_step`` has all of them compute."""
        ...

    def make_runner(self, parts: Parts, pools: Pools) -> Runner:
        """A runner with pools of this size on each rank."""
        ...

    def close(self) -> None:
        """Ends the others. Nothing can be run any more."""
        ...


class Solo:
    """One rank. A ``Leading``."""

    ranks: Ranks = ALONE

    def join(self) -> None:
        """There is nobody else."""

    def measure(self, gauge: MemoryGauge, largest_step: Callable[[], object] | None) -> list[Measured]:
        """See ``Leading.measure``."""
        return [gauge.read(largest_step)]

    def make_runner(self, parts: Parts, pools: Pools) -> Runner:
        """See ``Leading.make_runner``."""
        return ModelRunner(parts, pools)

    def close(self) -> None:
        """There is nobody else."""


class Leader:
    """Starts the other ranks, which begin to load their parts. A ``Leading``.

    ``on_lost`` is told, on another thread, why the model cannot be run any more: a rank has died or has failed alone;
    without it, the log is. The other processes exist until then or until ``close``.
    """

    def __init__(self, settings: RankSettings, on_lost: Callable[[str], None] | None) -> None:
        self._device = settings.device_of(0)
        self._group = settings.group_of(0)
        self._meeting = TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True)
        self._on_lost = on_lost
        self._workers = Workers(settings.size, self._lose)
        try:
            # Rank 0 speaks for all of what all of them find.
            level = logging.DEBUG if log.isEnabledFor(logging.DEBUG) else logging.ERROR
            settings = replace(settings, store=self._store, log_level=level)
            self._loading = self._workers.ask(Call.LOAD, [as_json(settings.to_plain())])
        except BaseException:
            self.close()
            raise
        log.info("rank 0 has started the others: processes %s", ", ".join(map(str, self._workers.pids)))

    @property
    def ranks(self) -> Ranks:
        """See ``Leading.ranks``."""
        return self._group

    def join(self) -> None:
        """See ``Leading.join``."""
        self._workers.answers(self._loading)
        with computing(self._device):
            number, _ = together(self._workers, self._group, Call.JOIN, [], lambda: self._group.connect(self._store))
        self._workers.answers(number)
        if self._device.type == "cpu":
            self._meeting.cleanup()  # NCCL goes on to look into it

    def measure(self, gauge: MemoryGauge, largest_step: Callable[[], object] | None) -> list[Measured]:
        """See ``Leading.measure``. The calls of the step are made by the others within theirs."""
        number = self._workers.ask(Call.MEASURE, [as_json(largest_step is not None)])
        own = gauge.read(largest_step)
        if largest_step is not None:
            self._workers.ask(Call.END_MEASURE)
        return [own, *(Measured(**answer) for answer in self._workers.answers(number))]

    def make_runner(self, parts: Parts, pools: Pools) -> Runner:
        """See ``Leading.make_runner``."""
        return LeadingRunner(self._workers, self._group, parts, pools)

    def close(self) -> None:
        """See ``Leading.close``."""
        self._workers.close()
        self._group.close()
        self._meeting.cleanup()

    @property
    def _store(self) -> Path:
        return Path(self._meeting.name) / "store"

    def _lose(self, sentence: str) -> None:
        self._group.abort()
        self._meeting.cleanup()
        if self._on_lost is None:
            log.error("%s", sentence)
        else:
            self._on_lost(sentence)


def lead(settings: RankSettings, on_lost: Callable[[str], None] | None = None) -> Leading:
    """The ranks of a model with these settings, started where there are others. See ``Leader``."""
    return Solo() if settings.size == 1 else Leader(settings, on_lost)
