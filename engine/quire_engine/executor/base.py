"""The ``Executor`` protocol: carries out step plans. Knows no scheduler, no request and no text."""

from typing import Protocol

from quire_engine.kv.capacity import KvCapacity
from quire_engine.scheduling.plan import StepPlan, StepResult
from quire_engine.scheduling.rates import Rates

__all__ = ["CopyError", "Executor", "KvCapacity", "Rates"]


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
        """Plans that may be under way at once: 1 runs step by step."""
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
