"""Two routers, three engines and Redis as real processes, each of which can die and come back on its ports."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from tests.chaos.demo import make_model
from tests.chaos.proxy import Proxy
from tests.support.ports import free_port
from tests.support.processes import Engine, Process, Router
from tests.support.redis_server import RedisServer, redis_server

MODEL = "quire-demo"
KEYS = {"house": "the-key-of-the-house", "guests": "the-key-of-all-guests"}
"""Of each tenant. That of guests has limits that these clients do not meet, and that are counted all the same."""
_TENANTS = f"""
[[tenants]]
name = "house"
keys = ["{KEYS["house"]}"]

[[tenants]]
name = "guests"
keys = ["{KEYS["guests"]}"]
requests_per_minute = 100_000
tokens_per_minute = 100_000_000
max_concurrent = 1_000
"""
# fp32: the tokens of an answer do not depend on what else is in its batches.
SMALL_POOLS = ("--kv-cache-memory", str(48 << 20), "--swap-space", "0.05")
ENGINE_FLAGS = ("--dtype", "float32", *SMALL_POOLS, "--max-num-seqs", "64", "--shutdown-timeout", "3")
ROUTER_FLAGS = ("--hold-timeout", "60", "--request-timeout", "600", "--shutdown-timeout", "2")

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
    """When Redis or a router was not there for others, by ``time.monotonic``; and whether Redis came back ``empty``."""

    name: str
    begin: float
    end: float
    empty: bool = False

    def meets(self, begin: float, end: float) -> bool:
        """Whether it was away at some time between these."""
        return self.begin < end and begin < self.end


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
    def absent(self, name: str, aftermath: float, *, empty: bool = False) -> Iterator[None]:
        """Notes that something is away within the block, and that this may be felt for ``aftermath`` seconds more."""
        begin = monotonic()
        try:
            yield
        finally:
            self.absences.append(Absence(name, begin, monotonic() + aftermath, empty))

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
    model, tenants = make_model(folder), folder / "tenants.toml"
    tenants.write_text(_TENANTS)
    with redis_server(persistent=True) as redis:
        engine_parts = [_engine(number, model, folder) for number in range(engines)]
        proxies = [Proxy(part.process.port) for part in engine_parts]
        for proxy in proxies:
            await proxy.start()
        addresses = [proxy.address for proxy in proxies]
        flags = ("--redis-url", redis.url, "--tenants", str(tenants))
        stack = Stack(redis, engine_parts, [_router(n, model, addresses, flags) for n in range(routers)], proxies)
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


def _engine(number: int, model: Path, folder: Path) -> Part[Engine]:
    port = free_port()
    return Part(f"engine {number}", lambda: Engine(model, folder, *ENGINE_FLAGS, port=port))


def _router(number: int, model: Path, engines: list[str], flags: tuple[str, ...]) -> Part[Router]:
    ports = (free_port(), free_port(), free_port())
    return Part(f"router {number}", lambda: Router(model, engines, model.parent, *ROUTER_FLAGS, *flags, ports=ports))
