"""Host work between kernels that a CPU graph repeats at each replay. See ``worker/cpu_graph.py``."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HostCall = Callable[[], object]

_of_this_thread = threading.local()


def host_call(work: HostCall) -> None:
    """Does ``work``, and records it at this place in a graph that this thread is capturing. Raises what ``work``
    raises.
    """
    record: Callable[[HostCall], object] | None = getattr(_of_this_thread, "record", None)
    if record is not None:
        record(work)
    work()


@contextmanager
def recorded_host_calls(record: Callable[[HostCall], object]) -> Iterator[None]:
    """Calls ``record`` with each host call that this thread makes inside the context."""
    _of_this_thread.record = record
    try:
        yield
    finally:
        del _of_this_thread.record
