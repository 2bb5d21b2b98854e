"""Two routers, three engines and Redis as real processes, each of which can die and come back on its ports, or be
replaced by another one elsewhere.
"""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from tests.chaos.certificates import Certificates
from tests.chaos.cluster import Cluster
from tests.chaos.demo import make_model
from tests.chaos.proxy import Proxy
from tests.support.forked_engines import LAST, ForkedEngine, ForkedRouter
from tests.support.ports import free_port
from tests.support.processes import Engine, Process, Router
from tests.support.redis_server import Clock, RedisServer, redis_server

MODEL = "quire-demo"
KEYS = {"house": "the-key-of-the-house", "guests": "the-key-of-all-guests"}
"""Of each tenant. That of guests has limits that these clients do not meet, and that are counted all the same."""
FEW = "the-key-of-those-who-ask-seldom"
"""Of a tenant with a limit that counts, which only a fault asks for."""
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

[[tenants]]
name = "few"
keys = ["{FEW}"]
requests_per_minute = 60
"""
# fp32: the tokens of an answer do not depend on what else is in its batches.
SMALL_POOLS = ("--kv-cache-memory", str(48 << 20), "--swap-space", "0.05")
ENGINE_FLAGS = ("--dtype", "float32", *SMALL_POOLS, "--max-num-seqs", "64")
ROUTER_FLAGS = ("--hold-timeout", "60", "--request-timeout", "600")

P = TypeVar("P", bound=Process)


@dataclass(frozen=True)
class Form:
    """How a stack is put together. With ``cluster`` routers find engines by a Kubernetes API; with ``tls`` they and
    engines show each other certificates. A router that is terminated waits for ``delay`` seconds and drains for
    ``grace``, an engine for half of the first and a second longer than the second. Engines guess tokens by ``method``.
    With ``journal_file`` there is one router, whose journal is a file, and nobody asks Redis for anything.
    """

    cluster: bool = True
    tls: bool = True
    delay: float = 1.0
    grace: float = 2.0
    method: str = "none"
    journal_file: bool = False

    @property
    def num_routers(self) -> int:
        """A journal's file is one router's."""
        return 1 if self.journal_file else 2

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """How an engine stops, and guesses."""
        stopping = "--shutdown-delay", str(self.delay / 2), "--shutdown-timeout", str(self.grace + 1)
        return *stopping, "--speculative-method", self.method

    @property
    def router_flags(self) -> tuple[str, ...]:
        """How a router stops."""
        return "--shutdown-delay", str(self.delay), "--shutdown-timeout", str(self.grace)


PLAIN = Form(cluster=False, tls=False, delay=0.0)
"""A list of engines, and plain text."""


class Part(Generic[P]):
    """One process that is started again with the same ports after every death. ``place`` finds it other ports, and
    says how it is started there.
    """

    def __init__(self, name: str, place: Callable[[], Callable[[], P]]) -> None:
        self.name = name
        self._place = place
        self._make = place()
        self.process = self._make()
        self.lock = asyncio.Lock()  # one fault at a time

    def kill(self) -> None:
        """As by SIGKILL."""
        self.process.kill()

    def restart(self) -> None:
        """Once it is dead."""
        self.process = self._make()

    def start_another(self) -> P:
        """Starts one elsewhere, which is to be its ``process`` from some moment on."""
        self._make = self._place()
        return self._make()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.signal(number)

    async def terminate(self) -> int:
        """SIGTERM, and its exit status."""
        return await asyncio.to_thread(self.process.stop, 60.0)

    async def ready(self) -> None:
        """Waits until it says that it is healthy."""
        await asyncio.to_thread(self.process.wait_ready)  # type: ignore[attr-defined]


class EnginePart(Part[Engine]):
    """An engine, which routers reach through the proxy at ``host``; in a cluster under an address of its own."""

    def __init__(self, name: str, place: Callable[[], Callable[[], Engine]], cluster: Cluster | None) -> None:
        super().__init__(name, place)
        self._cluster = cluster
        self.proxy, self.host = self._new_proxy()

    async def open(self) -> None:
        """It can be reached."""
        await self.proxy.start()
        if self._cluster is not None:
            self._cluster.publish(self.host)

    def move(self) -> tuple[Proxy, str]:
        """Gives it another address, where it can be reached once it is opened; returns the former one."""
        former = self.proxy, self.host
        self.proxy, self.host = self._new_proxy()
        return former

    def _new_proxy(self) -> tuple[Proxy, str]:
        if self._cluster is None:
            return Proxy(self.process.port), ""
        host = self._cluster.new_host()
        return Proxy(self.process.port, (host, self._cluster.port)), host


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
    """Routers reach each engine through a proxy, whose connections can be cut, and Redis by ``redis_proxy``, which
    ``standby`` takes over after a failover: it does not run before. Faults
    note in ``absences`` what was away because of them, and for how long it may have been missed. Routers that are
    ``leaving`` still get requests. ``beside`` are processes that parts are about to have, or had. While ``admits`` is
    cleared clients begin nothing.
    """

    redis: RedisServer
    standby: RedisServer
    engines: list[EnginePart]
    routers: list[Part[Router]]
    form: Form = PLAIN
    cluster: Cluster | None = None
    certificates: Certificates | None = None
    redis_proxy: Proxy | None = None
    absences: list[Absence] = field(default_factory=list)
    leaving: list[Router] = field(default_factory=list)
    beside: list[Process] = field(default_factory=list)
    redis_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    cluster_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    admits: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.admits.set()

    @contextmanager
    def absent(self, name: str, aftermath: float, *, empty: bool = False) -> Iterator[None]:
        """Notes that something is away within the block, and that this may be felt for ``aftermath`` seconds more."""
        begin = monotonic()
        try:
            yield
        finally:
            self.absences.append(Absence(name, begin, monotonic() + aftermath, empty))

    @asynccontextmanager
    async def dead_redis(self) -> AsyncIterator[None]:
        """SIGKILL of Redis, which starts again after the block. Connections are refused meanwhile."""
        assert self.redis_proxy is not None
        self.redis.kill()
        await self.redis_proxy.stop()
        yield
        await asyncio.to_thread(self.redis.start)
        await self.redis_proxy.start()

    @property
    def parts(self) -> list[EnginePart | Part[Router]]:
        """All processes but Redis."""
        return [*self.engines, *self.routers]

    @property
    def fronts(self) -> list[Router]:
        """The routers that clients may turn to."""
        return [*(router.process for router in self.routers), *self.leaving]

    @property
    def urls(self) -> list[str]:
        """Of these."""
        return [router.url for router in self.fronts]

    async def ready(self) -> None:
        """Waits until everything is healthy."""
        await asyncio.gather(*(part.ready() for part in self.parts))


@asynccontextmanager
async def running_stack(folder: Path, form: Form = PLAIN, *, engines: int = 3) -> AsyncIterator[Stack]:
    """A whole Quire for the length of a block."""
    model, tenants = make_model(folder), folder / "tenants.toml"
    tenants.write_text(_TENANTS)
    certificates = Certificates(folder / "certificates") if form.tls else None
    async with AsyncExitStack() as ending:
        clock = _clock(folder)
        redis = ending.enter_context(redis_server(persistent=True, clock=clock))
        standby = ending.enter_context(redis_server(persistent=True, clock=clock, started=False))
        cluster = Cluster() if form.cluster else None
        if cluster is not None:
            await cluster.api.start()
            ending.push_async_callback(cluster.api.stop)
        stack = Stack(
            redis, standby, [], [], form, cluster, certificates, Proxy(redis.port, ("127.0.0.1", free_port()))
        )
        assert stack.redis_proxy is not None
        await stack.redis_proxy.start()
        ending.push_async_callback(_end, stack)
        for number in range(engines):
            stack.engines.append(_engine(number, model, stack))
            await stack.engines[-1].open()
        redis_flags = "--redis-url", f"redis://{stack.redis_proxy.address}/0"
        journal = ("--journal-file", str(folder / "journal.db")) if form.journal_file else redis_flags
        flags = (*journal, "--tenants", str(tenants))
        for number in range(form.num_routers):
            stack.routers.append(_router(number, model, flags, stack))
        await stack.ready()
        yield stack


async def _end(stack: Stack) -> None:
    for process in (*(part.process for part in stack.parts), *stack.beside):
        with suppress(ProcessLookupError):
            process.signal(signal.SIGCONT)
            process.kill()
    for engine in stack.engines:
        await engine.proxy.stop()
    if stack.redis_proxy is not None:
        await stack.redis_proxy.stop()


def _clock(folder: Path) -> Clock | None:
    """A clock that can be set; None where there is no C compiler."""
    try:
        return Clock(folder)
    except (OSError, subprocess.CalledProcessError):
        return None


def _engine(number: int, model: Path, stack: Stack) -> EnginePart:
    certified = stack.certificates.engine_flags if stack.certificates is not None else ()

    def place() -> Callable[[], Engine]:
        port, flags = free_port(), (*ENGINE_FLAGS, *stack.form.engine_flags, *certified)
        # What computes comes last: everything that it sends, and Redis too, passes the proxies of this one process.
        return lambda: ForkedEngine(model, model.parent, *flags, port=port, **{LAST: "yes"})

    return EnginePart(f"engine {number}", place, stack.cluster)


def _router(number: int, model: Path, flags: tuple[str, ...], stack: Stack) -> Part[Router]:
    certified = stack.certificates.router_flags if stack.certificates is not None else ()
    found = [engine.proxy.address for engine in stack.engines] if stack.cluster is None else [stack.cluster.engines]
    access = {"KUBECONFIG": stack.cluster.api.kubeconfig(model.parent)} if stack.cluster is not None else {}

    def place() -> Callable[[], Router]:
        ports, every = (
            (free_port(), free_port(), free_port()),
            (*ROUTER_FLAGS, *stack.form.router_flags, *certified, *flags),
        )
        return lambda: ForkedRouter(model, found, model.parent, *every, ports=ports, **access)

    return Part(f"router {number}", place)
