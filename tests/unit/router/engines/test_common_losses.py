"""Sessions that end within a moment of each other are one event: what ends it for one is tried for all at once."""

import asyncio
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.supervise import Backoff
from quire_router.engines.connection import EngineConnection
from quire_router.engines.external.client import ExternalEngine
from quire_router.engines.join_window import FIRST_SIZE, LOOK_INTERVAL, Join, JoinWindow
from quire_router.engines.rates import MAX_RECONNECTS_PER_SECOND, MOMENT, CommonLosses, ReconnectLimiter
from quire_router.engines.settings import ConnectionSettings, KnownModel

from tests.support.http_engines import VllmEngine
from tests.support.scripted_engine import ScriptedEngine
from tests.support.simulated_clock import Clock, Machine
from tests.support.waiting import until

SETTINGS = ConnectionSettings()
MINUTES = replace(SETTINGS, backoff=600, max_backoff=600, connect_timeout=600, poll_silence=600, stall=600)
REFUSED_AFTER = 0.05  # seconds until a try fails while the network is cut


class CutRouter:
    """Loses all of its sessions within a moment, and opens them again once the network is back ``at``."""

    def __init__(self, clock: Clock, machine: Machine, lost_at: list[float], at: float) -> None:
        self._clock, self._machine, self._back_at = clock, machine, at
        self._window, self._losses = JoinWindow(), CommonLosses[int]()
        self._backoffs = [Backoff(SETTINGS.backoff, SETTINGS.max_backoff) for _ in lost_at]
        self._turns = [0] * len(lost_at)
        self._waiting = deque[int]()
        self._away = 0
        self.open, self.tries = set[int](), 0
        for engine, when in enumerate(lost_at):
            clock.after(when, partial(self._lose, engine))
        clock.after(0.0, self._look)

    def _lose(self, engine: int) -> None:
        self._away += 1
        self._losses.lost(engine, self._clock.now)
        self._pause(engine)

    def _pause(self, engine: int) -> None:
        seconds = self._backoffs[engine].next(self._away / MAX_RECONNECTS_PER_SECOND)
        self._clock.after(seconds, partial(self._queue, engine, self._turns[engine]))

    def _queue(self, engine: int, turn: int) -> None:
        if turn == self._turns[engine]:  # its pause was not ended before
            self._turns[engine] += 1
            self._waiting.append(engine)
            self._admit()

    def _look(self) -> None:
        self._window.look(self._clock.now)
        self._admit()
        self._clock.after(LOOK_INTERVAL, self._look)

    def _admit(self) -> None:
        while self._waiting and self._window.has_room():
            engine, join = self._waiting.popleft(), self._window.begin(self._clock.now)
            self.tries += 1
            if self._clock.now < self._back_at:
                self._clock.after(REFUSED_AFTER, partial(self._on_failure, engine, join))
            else:
                self._machine.serve(partial(self._on_open, engine, join))

    def _on_failure(self, engine: int, join: Join) -> None:
        self._window.end(join)
        self._pause(engine)
        self._admit()

    def _on_open(self, engine: int, join: Join) -> None:
        self._window.answered(join, self._clock.now)
        self._window.end(join)
        self._away -= 1
        self.open.add(engine)
        for other in self._losses.opened(engine):
            self._backoffs[other].reset()
            self._queue(other, self._turns[other])
        self._admit()


@given(
    engines=st.sampled_from([1, 20, 200, 1000]),
    cut=st.floats(0.5, 90),
    spread=st.floats(0, MOMENT),
    seed=st.integers(0, 999),
)
@settings(max_examples=10, deadline=None)
def test_all_sessions_are_back_soon_after_a_cut_however_many_it_ended(
    engines: int, cut: float, spread: float, seed: int
) -> None:
    clock, rate, random = Clock(), 1000.0, Random(seed)
    router = CutRouter(clock, Machine(clock, rate), [random.uniform(0, spread) for _ in range(engines)], spread + cut)
    clock.run(lambda: len(router.open) == engines and clock.now > spread, 3600.0)
    assert clock.now <= spread + cut + SETTINGS.max_backoff + REFUSED_AFTER + 2 * LOOK_INTERVAL + 2 * engines / rate
    doublings = 8  # from the first pause to the longest
    assert router.tries <= engines * doublings + 2 * MAX_RECONNECTS_PER_SECOND * (cut + spread + SETTINGS.max_backoff)


@given(
    st.lists(
        st.tuples(st.sampled_from(["lost", "opened", "forget"]), st.integers(0, 5), st.floats(0, 2 * MOMENT)),
        max_size=40,
    )
)
def test_an_event_has_what_was_lost_in_it_and_ends_once(steps: list[tuple[str, int, float]]) -> None:
    losses, events, now, last = CommonLosses[int](), list[set[int]](), 0.0, -9.0
    away: set[int] = set()
    for action, connection, pause in steps:
        now += pause
        event = next((each for each in events if connection in each), set[int]())
        if action == "lost" and connection not in away:
            losses.lost(connection, now)
            if now - last > MOMENT:
                events.append(set())
            events[-1].add(connection)
            away.add(connection)
            last = now
        elif action == "opened":
            assert sorted(losses.opened(connection)) == sorted(event - {connection})
            away.discard(connection)
            event.clear()
        elif action == "forget":
            losses.forget(connection)
            event.discard(connection)
            away.discard(connection)


def server_of_others(url: str, limiter: ReconnectLimiter) -> ExternalEngine:
    models = {"m": KnownModel()}
    return ExternalEngine(
        url, MINUTES, url=url, kind="vllm", models=models, reconnect_limiter=limiter, poll_period=0.02
    )


async def test_engines_and_servers_of_others_that_left_together_are_tried_with_the_first_that_is_back() -> None:
    limiter, engines, servers = ReconnectLimiter(), [ScriptedEngine() for _ in range(2)], [VllmEngine(), VllmEngine()]
    async with AsyncExitStack() as stack:
        links: list[EngineConnection | ExternalEngine] = []
        for engine in (*engines, *servers):
            await engine.start()
            stack.push_async_callback(engine.stop)
        links += [EngineConnection(engine.address, MINUTES, reconnect_limiter=limiter) for engine in engines]
        links += [server_of_others(server.url, limiter) for server in servers]
        for link in links:
            link.start()
            stack.push_async_callback(link.close)
        await until(lambda: all(link.ready for link in links))
        await asyncio.gather(*(engine.stop() for engine in (*engines, *servers)))
        await until(lambda: not any(link.ready for link in links))
        await until(lambda: limiter.spacing == len(links) / MAX_RECONNECTS_PER_SECOND)  # all wait for minutes
        for engine in (*engines, *servers):
            await engine.start()
        links[-1].retry_now()
        await until(lambda: all(link.ready for link in links))


async def test_servers_of_others_are_asked_in_turns() -> None:
    asked, release = 0, asyncio.Event()

    async def keep_waiting(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        with suppress(ConnectionError):
            await release.wait()
            writer.close()

    limiter = ReconnectLimiter()
    async with await asyncio.start_server(keep_waiting, "127.0.0.1", 0) as listener, AsyncExitStack() as stack:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for _ in range(3 * FIRST_SIZE):
            client = server_of_others(url, limiter)
            client.start()
            stack.push_async_callback(client.close)
        await until(lambda: asked == FIRST_SIZE)
        await asyncio.sleep(2 * LOOK_INTERVAL)
        assert asked == FIRST_SIZE
        release.set()
        await until(lambda: asked >= 3 * FIRST_SIZE)
