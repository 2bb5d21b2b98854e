"""Eight routers and a hundred engines that have half a core each, together: overload never becomes collapse."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from json import dumps, loads
from pathlib import Path

import pytest

from tests.bench.scale import MeasuredRouter, slices
from tests.bench.scale_engines import Engines, engines
from tests.bench.steady_engine import MODEL
from tests.support.cpu_quota import cpu_quota
from tests.support.ports import free_port

ENGINES, ROUTERS, CORES = 100, 8, 0.5
TOKENS = 20
PACE = 1.0
"""Steps of an engine a second: each is an update for eight routers."""

BOUND = 400.0
"""Seconds in which all sessions are open. Eight starts of Python take half of a minute of half a core."""


@dataclass
class Sessions:
    """How many sessions all engines have, and the most that they ever had."""

    fleet: Engines
    most: int = 0
    counts: list[int] = field(default_factory=list)

    def look(self) -> int:
        count = sum(sum(each) for each in self.fleet.sessions())
        self.counts.append(count)
        self.most = max(self.most, count)
        assert count >= 0.9 * self.most, self.counts
        return count

    def wait_for_all(self) -> None:
        """Until each router has each engine, of which it may lose a tenth on the way and not more."""
        deadline = time.monotonic() + BOUND
        while self.look() < ENGINES * ROUTERS:
            assert time.monotonic() < deadline, self.counts
            time.sleep(1.0)

    def stay(self, seconds: float) -> None:
        """None is lost for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(1.0)


@pytest.mark.soak
def test_the_number_of_sessions_rises_until_all_are_there_and_requests_lose_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack:
        api = stack.enter_context(slices(tmp_path))
        fleet = stack.enter_context(engines(ENGINES, free_port(), 2))
        fleet.set_pace(PACE)
        api.put(fleet)
        routers: list[MeasuredRouter] = []
        stack.enter_context(cpu_quota(lambda: [router.popen.pid for router in routers], CORES))
        stack.enter_context(cpu_quota(lambda: fleet.pids, CORES))
        for number in range(ROUTERS):
            own = tmp_path / f"router-{number}"
            own.mkdir()
            routers.append(MeasuredRouter(sys.executable, api, own))
            stack.callback(routers[-1].kill)
        sessions = Sessions(fleet)
        with clients(routers) as answers:
            sessions.wait_for_all()
            assert fleet.take_opened().sessions <= 1.1 * ENGINES * ROUTERS
            answers.wait_for(ROUTERS)
            for frozen in ([router.popen.pid for router in routers], fleet.pids):
                freeze(frozen, 8.0)
                sessions.stay(20.0)
            answers.wait_for(ROUTERS)
        fleet.stop()
        fleet.start()
        sessions.most = 0
        sessions.wait_for_all()


def freeze(pids: Iterable[int], seconds: float) -> None:
    """All at once, as a machine that is paused. The quota's own SIGCONT may come meanwhile: it is repeated."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


class Answers:
    """What clients got."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.problems: list[str] = []

    def wait_for(self, count: int) -> None:
        """Until there are so many more, all alike: an engine's tokens depend on their position alone."""
        count += len(self.texts)
        deadline = time.monotonic() + BOUND
        while len(self.texts) < count:
            assert not self.problems
            assert time.monotonic() < deadline, f"{len(self.texts)} answers"
            time.sleep(0.5)
        assert len(set(self.texts)) == 1
        assert not self.problems


@contextmanager
def clients(routers: Iterable[MeasuredRouter]) -> Iterator[Answers]:
    """One for each router, which asks again and again. A request may be refused, and what was begun has to end."""
    answers, ended = Answers(), threading.Event()
    threads = [threading.Thread(target=_ask, args=(router.http_port, answers, ended.is_set)) for router in routers]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _ask(port: int, answers: Answers, ended: Callable[[], bool]) -> None:
    while not ended():
        connection = HTTPConnection("127.0.0.1", port, timeout=BOUND)
        try:
            body = {"model": MODEL, "prompt": "Count.", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
            connection.request("POST", "/v1/completions", dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
        except (OSError, HTTPException):  # it is not there yet
            time.sleep(1.0)
            continue
        try:
            text = response.read().decode()
        except (OSError, HTTPException) as error:
            answers.problems.append(f"the stream broke: {error!r}")
            return
        finally:
            connection.close()
        if response.status == 200:
            _take(text, answers)
        else:
            time.sleep(float(response.headers.get("retry-after", 1)))


def _take(text: str, answers: Answers) -> None:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    try:
        assert events[-1] == "[DONE]"
        choices = [choice for event in events[:-1] for choice in loads(event)["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        answers.texts.append("".join(choice["text"] for choice in choices))
    except (AssertionError, KeyError, IndexError):
        answers.problems.append(text[-2000:])
