"""What else happens in a cluster: engines come back under other addresses, the API server dies, certificates are
replaced, and a new version is rolled out. Faults, too.
"""

import asyncio
import random
import signal
from collections.abc import Sequence
from typing import Any

from tests.chaos.faults import FAULTS, Fault, missed, one
from tests.chaos.network_faults import NETWORK_FAULTS
from tests.chaos.redis_faults import REDIS_FAULTS, forget_scripts
from tests.chaos.serving_faults import SERVING_FAULTS, load_adapters_while_engines_die
from tests.chaos.stack import EnginePart, Form, Part, Stack
from tests.support.processes import Process, Router

_LEAVES = 300.0  # seconds that a process may take to stop
_UNNOTICED = 1.0  # seconds at most that a cluster takes to hear of what died
_UNTOLD = 0.5  # part of the time that a router leaves, in which clients still turn to it


async def replace_engine(stack: Stack, chance: random.Random, _pause: float) -> None:
    """One engine is lost with its machine. Another one starts elsewhere, and the lost one is listed for a moment."""
    engine = one(stack.engines, chance)
    async with engine.lock:
        engine.kill()
        engine.process = engine.start_another()
        proxy, host = engine.move()
        await asyncio.gather(proxy.stop(), _forget(stack, host, chance.uniform(0.0, _UNNOTICED)), engine.ready())
        await engine.open()


async def rename_engine(stack: Stack, chance: random.Random, pause: float) -> None:
    """One engine gets another address: known at once, or after none. What it streams goes on for a while."""
    engine = one(stack.engines, chance)
    async with engine.lock:
        proxy, host = engine.move()
        steps = [engine.open(), _forget(stack, host, chance.uniform(0.0, _UNNOTICED))]
        for step in chance.sample(steps, len(steps)):
            await step
        await asyncio.sleep(pause)
        await proxy.stop()


async def kill_api_server(stack: Stack, chance: random.Random, pause: float) -> None:
    """The API server is away for a while. It may have dropped resource versions when it is back."""
    assert stack.cluster is not None
    async with stack.cluster_lock:
        await stack.cluster.api.stop()
        await asyncio.sleep(pause)
        if chance.random() < 0.5:
            stack.cluster.api.compact()
        await stack.cluster.api.start()


async def rotate_certificates(stack: Stack, chance: random.Random, _pause: float) -> None:
    """Another authority, in three steps, after each of which connections to an engine break."""
    assert stack.certificates is not None
    async with stack.cluster_lock:
        for step in (stack.certificates.trust_next, stack.certificates.issue, stack.certificates.distrust_former):
            await asyncio.to_thread(step)
            chance.choice(stack.engines).proxy.cut()
            await asyncio.sleep(chance.uniform(0.0, _UNNOTICED))


async def upgrade(stack: Stack, _chance: random.Random, _pause: float) -> None:
    """All engines and all routers are replaced, of each kind one after the other, as Deployments do it."""
    await asyncio.gather(_roll_engines(stack), _roll_routers(stack))


CHANGES: tuple[Fault, ...] = (replace_engine, rename_engine, kill_api_server, rotate_certificates, upgrade)
_ALL = (*FAULTS, *REDIS_FAULTS, *NETWORK_FAULTS, *SERVING_FAULTS, *CHANGES)
_NEEDS_CLUSTER = (replace_engine, rename_engine, kill_api_server, upgrade)
_NEEDS_REDIS = (
    forget_scripts,
    load_adapters_while_engines_die,
    *(fault for fault in _ALL if "redis" in fault.__name__),
)


def possible(form: Form) -> list[Fault]:
    """All that can happen to such a stack."""
    missing = [*(() if form.cluster else _NEEDS_CLUSTER), *(() if form.tls else (rotate_certificates,))]
    missing += (*_NEEDS_REDIS, upgrade) if form.journal_file else ()  # two routers cannot have one file
    return [fault for fault in _ALL if fault not in missing]


def named(names: Sequence[str]) -> list[Fault]:
    """The faults of these names. Raises ``KeyError``."""
    known = {fault.__name__: fault for fault in _ALL}
    return [known[name] for name in names]


async def _roll_engines(stack: Stack) -> None:
    for engine in stack.engines:
        async with engine.lock:
            await _roll_engine(stack, engine)


async def _roll_engine(stack: Stack, engine: EnginePart) -> None:
    """A new one at a new address; once it is ready the former terminates, and leaves the list when it has ended."""
    assert stack.cluster is not None
    former, engine.process = engine.process, engine.start_another()
    stack.beside.append(former)
    proxy, host = engine.move()
    await engine.ready()
    await engine.open()
    stack.cluster.publish(host, terminating=True)
    former.signal(signal.SIGTERM)
    await _end(engine, former)
    stack.cluster.forget(host)
    await proxy.stop()


async def _roll_routers(stack: Stack) -> None:
    for router in stack.routers:
        async with router.lock:
            await _roll_router(stack, router)


async def _roll_router(stack: Stack, router: Part[Router]) -> None:
    """A new router; once it is ready the former one is terminated, and clients learn of that some time later."""
    another = router.start_another()
    stack.beside += [router.process, another]
    await asyncio.to_thread(another.wait_ready)
    former, router.process = router.process, another
    stack.leaving.append(former)
    with missed(stack, router):
        former.signal(signal.SIGTERM)
        await asyncio.sleep(_UNTOLD * stack.form.delay)
        stack.leaving.remove(former)
        await _end(router, former)


async def _end(part: Part[Any], process: Process) -> None:
    status = await asyncio.to_thread(process.wait, _LEAVES)
    assert status == 0, f"{part.name} ended with {status}:\n{process.text}"


async def _forget(stack: Stack, host: str, seconds: float) -> None:
    assert stack.cluster is not None
    await asyncio.sleep(seconds)
    stack.cluster.forget(host)
