"""An engine of two processes serves as one, and ends as one: neither outlives the other, however it dies."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.engine_session import EngineSession
from tests.support.forked_engines import ForkedEngine
from tests.support.processes import eventually

SECONDS_TO_END = 5.0
PROMPT = list(range(100, 140))


class Pair(ForkedEngine):
    """An engine on the demo model whose second rank can be found."""

    def __init__(self, folder: Path, divided: str) -> None:
        super().__init__(DEMO, folder, *SMALL_POOLS, *FLOAT32, divided, "2")

    @property
    def other(self) -> psutil.Process:
        (child,) = psutil.Process(self.popen.pid).children()
        return child


@pytest.fixture(params=["--tensor-parallel-size", pytest.param("--pipeline-parallel-size", marks=pytest.mark.soak)])
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tmp_path, request.param).wait_ready()
    other = pair.other
    yield pair
    if pair.popen.poll() is None:
        pair.kill()
    gone(other)


def gone(process: psutil.Process) -> None:
    eventually(lambda: not process.is_running(), SECONDS_TO_END, "a rank is left")


@contextmanager
def working(pair: Pair, max_tokens: int = 1500) -> Iterator[EngineSession]:
    """A request is being computed."""
    with EngineSession(pair, "work") as link:
        link.snapshot()
        link.submit("long", PROMPT, max_tokens=max_tokens)
        while not any(output.token_ids for output in link.batch().outputs):
            pass
        yield link


def test_a_terminated_engine_finishes_its_requests_and_ends_all_ranks(pair: Pair) -> None:
    other = pair.other
    with working(pair, max_tokens=40) as link:
        # Ctrl-C reaches every process of a terminal: the second rank leaves it to the first.
        other.send_signal(signal.SIGINT)
        pair.signal(signal.SIGINT)
        while not any(output.finish_reason for output in link.batch().outputs):
            pass
    assert pair.wait(60) == 0, pair.text
    assert "CRITICAL" not in pair.text
    gone(other)


def test_an_idle_engine_ends_when_a_rank_is_killed(pair: Pair) -> None:
    other = pair.other
    other.kill()
    assert pair.wait(SECONDS_TO_END) == 1
    sentence = f"Rank 1 (process {other.pid}) was killed by SIGKILL"
    assert len(re.findall(rf"CRITICAL.*{re.escape(sentence)}", pair.text)) == 1, pair.text
    assert "Traceback" not in pair.text


def test_a_working_engine_ends_when_a_rank_is_killed_even_while_it_waits_for_it(pair: Pair) -> None:
    other = pair.other
    with working(pair):
        other.suspend()
        time.sleep(0.3)
        other.kill()
        assert pair.wait(SECONDS_TO_END) == 1
    assert f"Rank 1 (process {other.pid}) was killed by SIGKILL" in pair.text


def test_no_rank_outlives_the_engine_even_if_it_is_stopped(pair: Pair) -> None:
    other = pair.other
    with working(pair):
        other.suspend()
        os.kill(pair.popen.pid, signal.SIGKILL)
        pair.wait(SECONDS_TO_END)
        gone(other)
