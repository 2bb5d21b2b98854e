"""``TenantTurns`` runs jobs on a few threads, taking turns between tenants, so that none waits for all jobs of another.
An engine identifies tenants by their cache salts; requests without a salt share one tenant.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any


@dataclass(slots=True, eq=False)
class Job:
    """Work that is done once, for the first of its ``tenants`` whose turn comes. Its future may be cancelled before."""

    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)
    tenants: set[bytes] = field(default_factory=set)
    begun: bool = False


class TenantTurns:
    """Runs jobs on ``threads`` threads, taking each tenant's next job in turn. A tenant with a salt uses at most one
    thread. Thread-safe.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._threads = threads
        self._lock = Lock()
        self._waiting: OrderedDict[bytes, deque[Job]] = OrderedDict()
        self._running: Counter[bytes] = Counter()
        self._closed = False

    def submit(self, tenant: bytes, job: Job) -> None:
        """Adds a job for a tenant, unless the job has begun or the tenant has it already."""
        with self._lock:
            if tenant in job.tenants or job.begun:
                return
            job.tenants.add(tenant)
            self._waiting.setdefault(tenant, deque()).append(job)
            self._begin()

    def close(self) -> None:
        """Cancels waiting jobs and lets the threads end."""
        with self._lock:
            self._closed = True
            waiting = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in waiting:
            job.future.cancel()
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        while not self._closed and self._running.total() < self._threads and (found := self._next()) is not None:
            tenant, job = found
            self._running[tenant] += 1
            self._pool.submit(self._run, tenant, job)

    def _next(self) -> tuple[bytes, Job] | None:
        """Takes the next job of the tenant that waited longest for a turn; None if no job may start now."""
        for tenant, jobs in list(self._waiting.items()):
            while jobs and (jobs[0].begun or jobs[0].future.cancelled()):
                jobs.popleft()
            if not jobs:
                del self._waiting[tenant]
            elif self._running[tenant] < (1 if tenant else self._threads):
                self._waiting.move_to_end(tenant)
                job = jobs.popleft()
                job.begun = True
                return tenant, job
        return None

    def _run(self, tenant: bytes, job: Job) -> None:
        try:
            if job.future.set_running_or_notify_cancel():
                try:
                    result = job.work()
                except BaseException as error:  # noqa: BLE001 - raised where the future is read
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)
        finally:
            del job  # the traceback of an error holds this frame, and the future would keep the error
            with self._lock:
                self._running[tenant] -= 1
                self._begin()
