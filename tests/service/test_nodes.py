"""An engine on two machines, which are addresses of this one, serves as one, and ends as one."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.support.certificates import Authority
from tests.support.engine_session import EngineSession
from tests.support.forked_engines import ForkedEngine
from tests.support.nodes import MASTER, NODE_NAME, Node, tls_flags
from tests.support.ports import free_port
from tests.support.processes import Engine, fetch

SECONDS_TO_END = 20.0
PROMPT = list(range(100, 140))
SPLIT = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--master-addr", MASTER, "--dist-timeout", "60")


@dataclass
class Pair:
    engine: Engine
    node: Node


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """On loopback addresses no certificates are needed, so that the gRPC port is plain."""
    where = (*SMALL_POOLS, *FLOAT32, *SPLIT, "--master-port", str(free_port()))
    node = Node(tmp_path, "--model", str(DEMO), "--served-model-name", "quire-demo", "--headless", *where)
    engine = ForkedEngine(DEMO, tmp_path, *where)
    engine.wait_ready()
    yield Pair(engine, node)
    for process in (engine, node):
        if process.popen.poll() is None:
            process.kill()


def begin(engine: Engine, link: EngineSession, max_tokens: int) -> None:
    link.snapshot()
    link.submit("long", PROMPT, max_tokens=max_tokens)
    while not any(output.token_ids for output in link.batch().outputs):
        pass
    assert engine.popen.poll() is None


@pytest.mark.parametrize("told", [pytest.param("engine", marks=pytest.mark.soak), "node"])
def test_whichever_machine_is_told_to_stop_requests_are_finished_and_both_end(pair: Pair, told: str) -> None:
    assert fetch(pair.node.metrics_port, "/ready")[0] == 200
    with EngineSession(pair.engine, "work") as link:
        begin(pair.engine, link, 40)
        (pair.engine if told == "engine" else pair.node).signal(signal.SIGTERM)
        while not any(output.finish_reason for output in link.batch().outputs):
            pass
    assert pair.engine.wait(SECONDS_TO_END) == 0, pair.engine.text
    assert pair.node.wait(SECONDS_TO_END) == 0, pair.node.text
    assert "CRITICAL" not in pair.engine.text


def test_the_engine_ends_with_a_node_that_is_killed_while_it_works(pair: Pair) -> None:
    with EngineSession(pair.engine, "work") as link:
        begin(pair.engine, link, 1500)
        pair.node.kill()
        assert pair.engine.wait(SECONDS_TO_END) == 1
    assert "CRITICAL quire_engine: Node 1 (127.0.0.3) has closed the connection" in pair.engine.text


def test_all_ranks_end_when_node_0_is_killed(pair: Pair) -> None:
    os.kill(pair.engine.popen.pid, signal.SIGKILL)
    assert pair.node.wait(SECONDS_TO_END) == 1
    assert "error: Node 0 (127.0.0.2:" in pair.node.text
    assert "has closed the connection, and this node ends." in pair.node.text
    assert "Traceback" not in pair.node.text


def test_a_node_without_the_certificate_does_not_join_and_learns_why(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "foreign")
    right = tls_flags(ours.issue(NODE_NAME), ours)
    wrong = tls_flags(theirs.issue(NODE_NAME, files="foreign"), theirs)
    where = (*SMALL_POOLS, *FLOAT32, *SPLIT, "--master-port", str(free_port()))
    engine = ForkedEngine(DEMO, tmp_path, *where, *right)
    while "waiting for node 1 to join" not in engine.text:
        assert engine.popen.poll() is None, engine.text
        time.sleep(0.1)
    node = Node(tmp_path, "--model", str(DEMO), "--served-model-name", "quire-demo", *where, *wrong)
    assert node.wait(60) == 1
    assert "has a certificate that does not pass --tls-client-ca" in node.text
    assert engine.popen.poll() is None
    engine.kill()
