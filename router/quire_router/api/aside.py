"""Work that would hold up the streams of others, such as tokenising a long prompt: done on threads, in fair turns."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

THREADS, OF_ONE_TENANT = 3, 2


class Aside:
    """A tenant never has all of the threads: one is left for the others, however much it asks for at once."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "text")
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """What the work gives, or raises. Who is cancelled keeps its place until the work has ended."""
        places = self._places.get(tenant)
        if places is None:
            places = self._places[tenant] = asyncio.Semaphore(OF_ONE_TENANT)
        await places.acquire()
        done = self._threads.submit(work)
        done.add_done_callback(partial(_release, places, asyncio.get_running_loop()))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Lets go of the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _release(places: asyncio.Semaphore, loop: asyncio.AbstractEventLoop, _done: object) -> None:
    with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(places.release)
