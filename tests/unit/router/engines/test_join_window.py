"""Routers that open their sessions at once, before engines on a machine that is short of processors, on a simulated
clock: all sessions are open in bounded time, and hardly any is begun twice because it was late.
"""

from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_router.engines.connection import MAX_PATIENCE
from quire_router.engines.join_window import (
    LOOK_INTERVAL,
    MAX_SIZE,
    MIN_SIZE,
    OVERDUE,
    Join,
    JoinWindow,
)
from quire_router.engines.settings import ConnectionSettings

from tests.support.simulated_clock import Clock, Machine

CONNECT_TIMEOUT = ConnectionSettings().connect_timeout


@dataclass(eq=False)
class Try:
    """One try to open a session."""

    engine: int
    join: Join
    answered: bool = False
    given_up: bool = False


class Router:
    """Opens a session with each of the engines, of which those in ``dead`` never answer."""

    def __init__(self, clock: Clock, machine: Machine, engines: int, dead: frozenset[int] = frozenset()) -> None:
        self._clock, self._machine, self._dead = clock, machine, dead
        self.window = JoinWindow()
        self._waiting = deque(range(engines))
        self._patience = dict.fromkeys(range(engines), 1)
        self.open: set[int] = set()
        self.timeouts = self.most = 0
        clock.after(0.0, self._look)

    def _look(self) -> None:
        self.window.look(self._clock.now)
        self._admit()
        self._clock.after(LOOK_INTERVAL, self._look)

    def _admit(self) -> None:
        while self._waiting and self.window.has_room():
            self._begin(self._waiting.popleft())
            self.most = max(self.most, len(self.window))

    def _begin(self, engine: int) -> None:
        begun = Try(engine, self.window.begin(self._clock.now))
        self._clock.after(CONNECT_TIMEOUT * self._patience[engine], lambda: self._on_timeout(begun))
        if engine not in self._dead:
            self._machine.serve(lambda: self._on_answer(begun))

    def _on_answer(self, begun: Try) -> None:
        if not begun.given_up:
            begun.answered = True
            self.window.answered(begun.join, self._clock.now)
            self._admit()
            self._machine.serve(lambda: self._on_open(begun))

    def _on_open(self, begun: Try) -> None:
        self.open.add(begun.engine)
        self.window.end(begun.join)
        self._admit()

    def _on_timeout(self, begun: Try) -> None:
        if not begun.answered:
            begun.given_up = True
            self.timeouts += begun.engine not in self._dead
            self._patience[begun.engine] = min(MAX_PATIENCE, 2 * self._patience[begun.engine])
            self.window.timed_out(begun.join, self._clock.now)
            self.window.end(begun.join)
            self._waiting.append(begun.engine)
            self._admit()


def join_all(clock: Clock, routers: list[Router], engines: int, limit: float) -> float:
    """Returns when the last router has so many sessions."""
    clock.run(lambda: all(len(router.open) == engines for router in routers), limit)
    assert [len(router.open) for router in routers] == [engines] * len(routers)
    return clock.now


def test_eight_routers_that_start_at_once_waste_nothing_of_a_machine_that_is_short_of_processors() -> None:
    clock = Clock()
    machine = Machine(clock, 200)
    routers = [Router(clock, machine, 250) for _ in range(8)]
    joins_per_second, ideal = 100, 20.0
    clock.run(lambda: False, ideal / 2)
    assert sum(len(router.window) for router in routers) <= joins_per_second * OVERDUE
    assert join_all(clock, routers, 250, 10 * ideal) <= 1.1 * ideal
    assert sum(router.timeouts for router in routers) == 0


def test_a_machine_that_is_frozen_for_half_a_minute_has_all_sessions_soon_after() -> None:
    clock = Clock()
    machine = Machine(clock, 200, frozen=(5.0, 35.0))
    routers = [Router(clock, machine, 100) for _ in range(8)]
    assert join_all(clock, routers, 100, 600.0) <= 35.0 + 3 * 8


@given(rate=st.floats(100, 2000), routers=st.integers(1, 8), freeze=st.floats(0, 20), length=st.floats(0, 60))
@settings(max_examples=10)
def test_all_sessions_are_open_in_bounded_time(rate: float, routers: int, freeze: float, length: float) -> None:
    clock = Clock()
    machine = Machine(clock, rate, frozen=(freeze, freeze + length))
    started = [Router(clock, machine, 40) for _ in range(routers)]
    ideal = 2 * routers * 40 / rate
    assert join_all(clock, started, 40, 3600.0) <= length + 4 * ideal + MAX_PATIENCE * CONNECT_TIMEOUT
    assert all(router.most <= MAX_SIZE for router in started)


def test_engines_that_are_there_do_not_wait_for_those_that_are_gone() -> None:
    clock = Clock()
    dead = frozenset(range(1000)) - frozenset(range(0, 1000, 10))
    router = Router(clock, Machine(clock, 1000), 1000, dead)
    assert join_all(clock, [router], 100, 600.0) <= 60.0


def test_the_only_engine_of_a_fleet_is_found() -> None:
    clock = Clock()
    router = Router(clock, Machine(clock, 1000), 1000, frozenset(range(999)))
    assert join_all(clock, [router], 1, 600.0) <= 2 * 1000 * LOOK_INTERVAL


def test_requests_wait_for_no_new_session() -> None:
    window = JoinWindow()
    while window.has_room():
        window.begin(0.0)
    assert window.has_room(urgent=True)
    window.begin(0.0, urgent=True)
    assert not window.has_room()


def test_a_router_that_was_held_up_hears_what_has_come_before_it_begins_more() -> None:
    window = JoinWindow()
    window.look(0.0)
    while window.has_room():
        window.begin(0.0)
    stalled = 100.0
    window.look(stalled)
    assert not window.has_room()
    looks = [stalled + (number + 1) * LOOK_INTERVAL for number in range(round(OVERDUE / LOOK_INTERVAL))]
    for now in looks[:-1]:
        window.look(now)
        assert not window.has_room()
    window.look(looks[-1] + LOOK_INTERVAL)
    assert window.has_room()


def test_the_window_follows_what_engines_need_not_how_far_they_are() -> None:
    window, now = JoinWindow(), 0.0
    for _ in range(100):  # an answer takes half a second, because they are on another continent
        join = window.begin(now)
        now += 0.5
        window.answered(join, now)
        window.end(join)
    assert window.size == MAX_SIZE
    for _ in range(100):
        join = window.begin(now)
        now += 2.0
        window.answered(join, now)
        window.end(join)
    assert window.size == MIN_SIZE
