"""The ``Executor`` protocol: carries out step plans. Knows no scheduler, no request and no text."""

from typing import Protocol

from quire_engine.kv.capacity import KvCapacity
from quire_engine.scheduling.plan import StepPlan, StepResult
from quire_engine.scheduling.rates import Rates

__all__ = ["CopyError", "Executor", "KvCapacity", "LaunchedStep", "OverlappingExecutor", "Rates"]


class CopyError(Exception):
    """A block copy failed. No single request is at fault and the pools cannot be trusted any more: the engine must
    end.
    """


class Executor(Protocol):
    """Carries out plans, one after the other, on one device."""

    @property
    def capacity(self) -> KvCapacity:
        """What the scheduler's pools are made from. Constant."""
        ...

    @property
    def rates(self) -> Rates:
        """How fast it computes and copies. Constant."""
        ...

    @property
    def depth(self) -> int:
        """Plans that may be under way at once: 1 runs step by step. What has more is an ``OverlappingExecutor``."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Copies, computes and samples.

        Raises ``CopyError`` when a copy fails. Any other exception means that the forward pass failed: the copies are
        done, the tokens of the chunks are not, and the chunks may be run again, together or alone.
        """
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


class LaunchedStep(Protocol):
    """A plan that is under way. ``draw`` is called once, then ``result`` once."""

    def draw(self) -> None:
        """Has the tokens drawn. By now the lists of the plan's draws hold every token before the one to be drawn, those
        that were pending at the launch included: grammars, penalties and whatever else looks at them is done here.
        Returns without waiting for the device, as far as that can be.
        """
        ...

    def result(self) -> StepResult:
        """Waits until the step is done. Raises as ``Executor.run``."""
        ...


class OverlappingExecutor(Executor, Protocol):
    """Computes a step while the next one is planned. Steps are carried out in the order of their launch: what one
    writes, the next one reads.

    With depth 2, a round of the loop is: plan, launch it, take the result of the step before and commit that, and then
    have this step's tokens drawn. So when a step is launched, the one before it has had its ``draw`` but not its
    ``result``, and nothing else is under way. ``run`` may be called when nothing is.
    """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begins with the copies and the forward pass. Raises as ``Executor.run``; then nothing of the plan but its
        copies is under way.
        """
        ...
