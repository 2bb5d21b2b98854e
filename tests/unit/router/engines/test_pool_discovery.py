"""How the fleet follows discovery: which engines get requests, and that no stream is cut by a change."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from quire.v1 import engine_pb2, types_pb2
from quire_proto.supervise import Backoff
from quire_router.clients.kube_client import KubeAccess
from quire_router.discovery.base import Endpoint, KubernetesService, Readiness
from quire_router.discovery.kubernetes import KubernetesDiscovery, WatchSettings
from quire_router.engines.attempt import EngineLost
from quire_router.engines.connection import EngineConnection
from quire_router.engines.join_window import FIRST_SIZE
from quire_router.engines.pool import EnginePool
from quire_router.engines.rates import MAX_RECONNECTS_PER_SECOND, JoinRank, ReconnectLimiter
from quire_router.engines.settings import ConnectionSettings

from tests.support.http_engines import VllmEngine, demo_tokenizer, serving
from tests.support.kube_api import endpoint, kube_api, slice_of
from tests.support.scripted_discovery import ScriptedDiscovery
from tests.support.scripted_engine import STOP, ScriptedEngine, output
from tests.support.waiting import until

QUICK = ConnectionSettings(grace=0.05, backoff=0.01, silence=600, stall=600)  # an engine that says nothing stays ready


def submit(request_id: str) -> engine_pb2.Submit:
    sampling = types_pb2.SamplingParams(max_tokens=20)
    return engine_pb2.Submit(request_id=request_id, prompt_token_ids=[1], sampling=sampling)


@asynccontextmanager
async def announced(
    settings: ConnectionSettings = QUICK,
) -> AsyncIterator[tuple[EnginePool, ScriptedDiscovery, ScriptedEngine, Endpoint]]:
    """A fleet that finds what is announced, and an engine that is not yet, with its endpoint."""
    engine, discovery = ScriptedEngine(), ScriptedDiscovery()
    fleet = EnginePool(discovery, ["m"], settings)
    await fleet.start()
    try:
        yield fleet, discovery, engine, Endpoint(await engine.start())
    finally:
        await fleet.close()
        await engine.stop()


@pytest.mark.parametrize(("readiness", "counts"), [("hint", False), ("external", False), ("all", True)])
async def test_readiness_counts_where_the_operator_says_so(readiness: Readiness, counts: bool) -> None:
    async with announced(replace(QUICK, readiness=readiness)) as (fleet, discovery, engine, there):
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)
        with fleet.dispatch(there.address, submit("a"), pending_tokens=1) as outputs:
            await engine.submit()
            discovery.publish(replace(there, ready=False))
            await until(lambda: not fleet.engines()[0].endpoint.ready)
            assert fleet.ready("m") == (0 if counts else 1)
            engine.send(output("a", [7], 0, STOP))
            assert (await anext(outputs)).token_ids == [7]
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)


@pytest.mark.parametrize(("readiness", "counts"), [("hint", False), ("external", True), ("all", True)])
async def test_readiness_of_others_servers_may_count_alone(readiness: Readiness, counts: bool) -> None:
    server, discovery = VllmEngine(), ScriptedDiscovery()
    fleet = EnginePool(discovery, ["m"], replace(QUICK, readiness=readiness), tokenizers={"m": demo_tokenizer()})
    there = Endpoint(f"vllm+{server.url}")
    async with serving(server):
        await fleet.start()
        try:
            discovery.publish(there)
            await until(lambda: fleet.ready("m") == 1)
            discovery.publish(replace(there, ready=False))
            await until(lambda: not fleet.engines()[0].endpoint.ready)
            assert fleet.ready("m") == (0 if counts else 1)
            discovery.publish(there)
            await until(lambda: fleet.ready("m") == 1)
        finally:
            await fleet.close()


async def test_a_terminating_engine_ends_what_it_runs_and_gets_nothing_new() -> None:
    async with announced() as (fleet, discovery, engine, there):
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)
        with fleet.dispatch(there.address, submit("a"), pending_tokens=1) as outputs:
            await engine.submit()
            discovery.publish(replace(there, ready=False, terminating=True))
            await until(lambda: fleet.ready("m") == 0)
            assert not fleet.rows("m").size
            engine.send(output("a", [7], 0))
            assert (await anext(outputs)).token_ids == [7]
            discovery.publish()  # its pod is gone from the list before its last word
            await until(discovery.lists.empty)
            engine.send(output("a", [8], 1, STOP))
            assert (await anext(outputs)).token_ids == [8]
        assert not list(fleet.table)


async def test_a_terminating_engine_is_removed_when_it_is_idle_and_not_reconnected() -> None:
    async with announced() as (fleet, discovery, engine, there):
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)
        leaving = replace(there, terminating=True)
        for view in ((leaving,), (leaving, Endpoint("127.0.0.1:1"))):
            discovery.publish(*view)
            await until(lambda: discovery.lists.empty() and there.address not in dict(fleet.table))
        with pytest.raises(EngineLost):
            fleet.dispatch(there.address, submit("b"), pending_tokens=1)
        assert engine.opened.qsize() == 1
        discovery.publish(there)  # another pod with its address
        await until(lambda: fleet.ready("m") == 1)


async def test_an_engine_with_an_open_session_is_eligible_whatever_its_readiness_probe() -> None:
    async with announced() as (fleet, discovery, engine, there):
        discovery.publish(replace(there, ready=False))
        await until(lambda: fleet.ready("m") == 1)
        discovery.publish(there)
        discovery.publish(replace(there, ready=False))
        with fleet.dispatch(there.address, submit("a"), pending_tokens=1) as outputs:
            await engine.submit()
            await until(discovery.lists.empty)
            engine.send(output("a", [7], 0, STOP))
            assert (await anext(outputs)).token_ids == [7]
        assert fleet.ready("m") == 1


async def test_an_engine_that_becomes_ready_is_connected_to_at_once() -> None:
    patient = ConnectionSettings(grace=0.05, backoff=600, max_backoff=600)
    async with announced(patient) as (fleet, discovery, engine, there):
        await engine.stop()
        discovery.publish(replace(there, ready=False))
        await until(lambda: there.address in dict(fleet.table))
        for _ in range(2):
            assert not await fleet.wait_ready(0.2)  # its first try fails, and the next is minutes away
        await engine.start()
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)


async def test_flapping_readiness_causes_no_storm_of_connection_attempts() -> None:
    tries = 0

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        writer.close()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    link = EngineConnection(
        f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", ConnectionSettings(backoff=600, max_backoff=600)
    )
    link.start()
    await until(lambda: tries > 0)
    first = tries  # a channel may try more than once by itself
    for _ in range(100):
        link.retry_now()
        await asyncio.sleep(0.005)
    await link.close()
    listener.close()
    assert tries <= 3 * first


async def test_another_engine_at_the_address_of_one_that_left_is_another_engine() -> None:
    async with announced() as (fleet, discovery, engine, there):
        discovery.publish(there)
        await until(lambda: fleet.ready("m") == 1)
        with fleet.dispatch(there.address, submit("a"), pending_tokens=1) as outputs:
            await engine.submit()
            discovery.publish(replace(there, terminating=True))
            await until(lambda: fleet.ready("m") == 0)
            await engine.stop()
            other = ScriptedEngine(generation=2, models=["other"])
            other.address = there.address
            await other.start()
            discovery.publish(there)
            with pytest.raises(EngineLost):
                await anext(outputs)
        await until(lambda: other.opened.qsize() == 1 and discovery.lists.empty())
        assert fleet.ready("m") == 0  # it is connected, and serves another model
        assert [address for address, _ in fleet.table] == [there.address]
        await other.stop()


def test_a_large_fleet_that_is_away_is_tried_at_a_bounded_rate() -> None:
    away, settings = ReconnectLimiter(), ConnectionSettings()
    backoff = Backoff(settings.backoff, settings.max_backoff)
    with ExitStack() as waiting:
        for _ in range(5000):
            waiting.enter_context(away.waiting())
        delays = [backoff.next(away.spacing) for _ in range(20)]
    assert delays[0] <= settings.backoff  # who is away for a moment only is not made to wait
    assert 5000 / delays[-1] <= 2 * MAX_RECONNECTS_PER_SECOND
    assert max(backoff.next(away.spacing) for _ in range(2)) <= 5000 / MAX_RECONNECTS_PER_SECOND
    assert backoff.next(away.spacing) <= settings.max_backoff


async def test_sessions_open_as_others_complete_and_those_with_requests_first() -> None:
    limiter, begun, release = ReconnectLimiter(), list[tuple[JoinRank, int]](), asyncio.Semaphore(0)

    async def join(rank: JoinRank, number: int) -> None:
        async with limiter.turn(rank) as turn:
            begun.append((rank, number))
            await release.acquire()
            turn.answered()

    new = [asyncio.create_task(join(JoinRank.NEW, number)) for number in range(3 * FIRST_SIZE)]
    await until(lambda: begun == [(JoinRank.NEW, number) for number in range(FIRST_SIZE)])
    more = [asyncio.create_task(join(rank, 0)) for rank in (JoinRank.KNOWN, JoinRank.URGENT)]
    new[-1].cancel()  # its engine has left meanwhile
    await until(lambda: begun[FIRST_SIZE:][:1] == [(JoinRank.URGENT, 0)])  # requests wait for it
    release.release()
    await until(lambda: begun[FIRST_SIZE + 1 :][:1] == [(JoinRank.KNOWN, 0)])
    for _ in (*new, *more):
        release.release()
    await asyncio.gather(*new[:-1], *more)
    assert len(begun) == 3 * FIRST_SIZE + 1


async def test_engines_finish_their_requests_while_their_pods_terminate(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    host, _, port = (await engine.start()).rpartition(":")
    async with kube_api() as server:
        service = KubernetesService(None, "engines", int(port))
        server.put(slice_of("a", [endpoint(host, ready=True)]))
        access = KubeAccess(server.kubeconfig(tmp_path))
        fleet = EnginePool(KubernetesDiscovery(service, access, WatchSettings(backoff=0.001)), ["m"], QUICK)
        await fleet.start()
        await until(lambda: fleet.ready("m") == 1)
        with fleet.dispatch(engine.address, submit("a"), pending_tokens=1) as outputs:
            await engine.submit()
            server.put(slice_of("a", [endpoint(host, ready=False, serving=True, terminating=True)]))
            await until(lambda: fleet.ready("m") == 0)
            await server.stop()
            engine.send(output("a", [7], 0, STOP))
            assert (await anext(outputs)).token_ids == [7]
        await fleet.close()
    await engine.stop()
