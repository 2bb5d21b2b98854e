"""``TokenizerPool``: threads for work that would stall other streams, such as tokenising a long prompt, fair between
tenants.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from quire_router.admission.limits import counting_refusals
from quire_router.api.request_limits import TenantBudget
from quire_router.core.errors import tokenizer_full

T = TypeVar("T")

THREADS, THREADS_PER_TENANT = 3, 2
MAX_QUEUED_TEXT = 16 * 2**20  # characters or bytes of text, of all tenants together; see ``TenantBudget``
_CHARACTERS_PER_SECOND = 2**20  # characters that are tokenised in a second at least, for Retry-After


class TokenizerPool:
    """Runs work on ``THREADS`` threads, of which one tenant uses at most ``THREADS_PER_TENANT`` at once, so that one is
    left for the others. The texts that wait for a thread of their tenant are bounded by a ``TenantBudget``.
    """

    def __init__(self, *, max_queued: int = MAX_QUEUED_TEXT) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "text")
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._queued = TenantBudget(max_queued)

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Returns or raises what ``work`` on ``size`` characters or bytes of text does. Raises ``QuireError``
        OVERLOADED where too much waits already. A caller that is cancelled keeps its thread until the work has ended.
        """
        semaphore = self._semaphore(tenant)
        with self._queue_slot(tenant, size):
            await semaphore.acquire()
        return await self._run(semaphore, work)

    async def run_admitted(self, tenant: str, work: Callable[[], T]) -> T:
        """As ``run``, for what was bounded before it came here: it waits for its turn, however much does."""
        semaphore = self._semaphore(tenant)
        await semaphore.acquire()
        return await self._run(semaphore, work)

    def close(self) -> None:
        """Ends the threads once their work is done; drops what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _semaphore(self, tenant: str) -> asyncio.Semaphore:
        semaphore = self._semaphores.get(tenant)
        if semaphore is None:
            semaphore = self._semaphores[tenant] = asyncio.Semaphore(THREADS_PER_TENANT)
        return semaphore

    async def _run(self, semaphore: asyncio.Semaphore, work: Callable[[], T]) -> T:
        done = self._threads.submit(work)
        done.add_done_callback(partial(_release, semaphore, asyncio.get_running_loop()))
        return await asyncio.wrap_future(done)

    @contextmanager
    def _queue_slot(self, tenant: str, size: int) -> Iterator[None]:
        """Counts a text while it waits for a thread of its tenant."""
        waiting = self._queued.used
        if not self._queued.try_acquire(tenant, size):
            with counting_refusals():
                raise tokenizer_full(1 + waiting / _CHARACTERS_PER_SECOND)
        try:
            yield
        finally:
            self._queued.release(tenant, size)


def _release(semaphore: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _done: object) -> None:
    with suppress(RuntimeError):  # the loop is closed, and nothing waits any more
        loop.call_soon_threadsafe(semaphore.release)
