"""Two routers, three engines and Redis as real processes, each of which can die and come back on its ports."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from tests.chaos.proxy import Proxy
from tests.support.processes import Engine, Process, Router, free_port
from tests.support.redis_server import RedisServer, redis_server

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
MODEL = "quire-demo"
# fp32: the tokens of an answer do not depend on what else is in its batches.
SMALL_POOLS = ("--kv-cache-memory", str(48 << 20), "--swap-space", "0.05")
ENGINE_FLAGS = ("--dtype", "float32", *SMALL_POOLS, "--max-num-seqs", "64")
ROUTER_FLAGS = ("--hold-timeout", "60", "--request-timeout", "600")

P = TypeVar("P", bound=Process)


class Part(Generic[P]):
    """One process that is started again with the same ports after every death."""

    def __init__(self, name: str, make: Callable[[], P]) -> None:
        self.name = name
        self._make = make
        self.process = make()
        self.lock = asyncio.Lock()  # one fault at a time

    def kill(self) -> None:
        """As by SIGKILL."""
        self.process.kill()

    def restart(self) -> None:
        """Once it is dead."""
        self.process = self._make()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.signal(number)

    async def terminate(self) -> int:
        """SIGTERM, and its exit status."""
        return await asyncio.to_thread(self.process.stop, 60.0)

    async def ready(self) -> None:
        """Waits until it says that it is healthy."""
        await asyncio.to_thread(self.process.wait_ready)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Absence:
    """When Redis or a router was not there for others, by ``time.monotonic``."""

    name: str
    begin: float
    end: float


@dataclass
class Stack:
    """Routers reach each engine through a proxy, whose connections can be cut. Faults note in ``absences`` what was
    away because of them, and for how long it may have been missed.
    """

    redis: RedisServer
    engines: list[Part[Engine]]
    routers: list[Part[Router]]
    proxies: list[Proxy]
    absences: list[Absence] = field(default_factory=list)
    redis_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextmanager
    def absent(self, name: str, aftermath: float) -> Iterator[None]:
        """Notes that something is away within the block, and that this may be felt for ``aftermath`` seconds more."""
        begin = monotonic()
        try:
            yield
        finally:
            self.absences.append(Absence(name, begin, monotonic() + aftermath))

    @property
    def parts(self) -> list[Part[Engine] | Part[Router]]:
        """All processes but Redis."""
        return [*self.engines, *self.routers]

    @property
    def urls(self) -> list[str]:
        """Of the routers."""
        return [router.process.url for router in self.routers]

    async def ready(self) -> None:
        """Waits until everything is healthy."""
        await asyncio.gather(*(part.ready() for part in self.parts))


@asynccontextmanager
async def running_stack(folder: Path, *, routers: int = 2, engines: int = 3) -> AsyncIterator[Stack]:
    """A whole Quire for the length of a block."""
    with redis_server(persistent=True) as redis:
        engine_parts = [_engine(number, folder) for number in range(engines)]
        proxies = [Proxy(part.process.port) for part in engine_parts]
        for proxy in proxies:
            await proxy.start()
        addresses = [proxy.address for proxy in proxies]
        stack = Stack(redis, engine_parts, [_router(n, addresses, redis.url, folder) for n in range(routers)], proxies)
        try:
            await stack.ready()
            yield stack
        finally:
            for part in stack.parts:
                with suppress(ProcessLookupError):
                    part.signal(signal.SIGCONT)
                    part.kill()
            for proxy in proxies:
                await proxy.stop()


def _engine(number: int, folder: Path) -> Part[Engine]:
    port = free_port()
    return Part(f"engine {number}", lambda: Engine(DEMO, folder, *ENGINE_FLAGS, "--shutdown-timeout", "3", port=port))


def _router(number: int, engines: list[str], redis: str, folder: Path) -> Part[Router]:
    ports = (free_port(), free_port(), free_port())
    flags = (*ROUTER_FLAGS, "--redis-url", redis, "--shutdown-timeout", "2")
    return Part(f"router {number}", lambda: Router(DEMO, engines, folder, *flags, ports=ports))
