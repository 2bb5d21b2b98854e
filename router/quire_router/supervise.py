"""The router's tasks that live as long as it does. ``supervise`` is the only way to begin one."""

from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakSet

from quire_proto.supervise import RestartSettings, SupervisedTask

from quire_router import metrics

__all__ = ["SupervisedTask", "failing_tasks", "supervise"]
_vital: WeakSet[SupervisedTask] = WeakSet()


def supervise(
    kind: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    of: str = "",
    vital: bool = True,
    settings: RestartSettings | None = None,
) -> SupervisedTask:
    """Begins a task that runs ``work``, again whenever it fails, until it is stopped (see ``SupervisedTask``).

    ``kind`` is its label in ``quire_router_task_restarts_total``, one of a few words of the code; ``of`` tells tasks of
    one kind apart in the log. While a ``vital`` one keeps failing, ``failing_tasks`` names it and ``/live`` says no:
    those of which there is one each, so that no single engine can have a router restarted.
    """
    restarts = metrics.TASK_RESTARTS.labels(kind)
    task = SupervisedTask(f"{kind} of {of}" if of else kind, work, restarts.inc, settings)
    if vital:
        _vital.add(task)
    return task


def failing_tasks() -> list[str]:
    """The vital tasks of this process that starting again did not mend."""
    return sorted(task.name for task in _vital if task.failing)
