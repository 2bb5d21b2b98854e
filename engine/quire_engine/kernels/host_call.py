"""Work of the host between kernels that a CPU graph does again whenever it is replayed: see ``worker/cpu_graph.py``."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HostCall = Callable[[], object]

_of_this_thread = threading.local()


def host_call(work: HostCall) -> None:
    """Does ``work``, and has a graph that this thread captures do it at this place. It raises what ``work`` does."""
    record: Callable[[HostCall], object] | None = getattr(_of_this_thread, "record", None)
    if record is not None:
        record(work)
    work()


@contextmanager
def recorded_host_calls(record: Callable[[HostCall], object]) -> Iterator[None]:
    """``record`` is called with each host call that this thread makes inside the context."""
    _of_this_thread.record = record
    try:
        yield
    finally:
        del _of_this_thread.record
