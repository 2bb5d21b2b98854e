"""Work that would hold up the streams of others, such as tokenising a long prompt: done on threads, in fair turns."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from quire_proto.errors import ErrorCode, QuireError

from quire_router.admission.reason import Reason
from quire_router.admission.refusals import counting_refusals

T = TypeVar("T")

THREADS, OF_ONE_TENANT = 3, 2
MAX_WAITING = 16 * 2**20  # characters or bytes of text, of all tenants together; a tenant has half of it
_A_SECOND = 2**20  # about as many are worked through in a second, so that clients are told a time that is enough


class Aside:
    """A tenant never has all of the threads: one is left for the others, however much it asks for at once. Nor does it
    have all of the room in which texts wait for a thread.
    """

    def __init__(self, *, max_waiting: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "text")
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._max_waiting = max_waiting
        self._waiting: Counter[str] = Counter()

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """What the work on ``size`` characters or bytes of text gives, or raises. Raises ``QuireError`` OVERLOADED
        where too much waits already. A caller that is cancelled keeps its thread until the work has ended.
        """
        places = self._places.get(tenant)
        if places is None:
            places = self._places[tenant] = asyncio.Semaphore(OF_ONE_TENANT)
        with self._in_line(tenant, size):
            await places.acquire()
        done = self._threads.submit(work)
        done.add_done_callback(partial(_release, places, asyncio.get_running_loop()))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Lets go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _in_line(self, tenant: str, size: int) -> Iterator[None]:
        """Counts what waits for one of its tenant's threads. What comes first may be of any size."""
        waiting, own = self._waiting.total(), self._waiting[tenant]
        if (waiting and waiting + size > self._max_waiting) or (own and own + size > self._max_waiting // 2):
            message = "Too much text waits to be read and tokenised here."
            with counting_refusals():
                raise QuireError(
                    ErrorCode.OVERLOADED, message, retry_after=1 + waiting / _A_SECOND, reason=Reason.TOKENIZER_FULL
                )
        self._waiting[tenant] += size
        try:
            yield
        finally:
            self._waiting[tenant] -= size
            if not self._waiting[tenant]:
                del self._waiting[tenant]


def _release(places: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _done: object) -> None:
    with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(places.release)
