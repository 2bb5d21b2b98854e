"""A real engine that is told to stop says so to every router at once, before what it runs has ended."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2

from tests.service.conftest import DEMO, SMALL_POOLS
from tests.support.engine_session import EngineSession
from tests.support.forked_engines import ForkedEngine
from tests.support.processes import Engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS)
    try:
        yield engine.wait_ready()
    finally:
        assert engine.stop() == 0, engine.text


def test_every_router_learns_at_once_that_the_engine_drains(engine: Engine) -> None:
    with EngineSession(engine, "busy") as busy, EngineSession(engine, "idle") as idle:
        for link in (busy, idle):
            assert not link.snapshot().draining
        busy.submit("long", [1, 2, 3], max_tokens=400)
        first = busy.batch()
        engine.signal(signal.SIGTERM)
        heard = idle.batch()
        while not heard.draining:
            heard = idle.batch()
        assert not heard.outputs
        batches = [first, *batches_to_the_end(busy)]
    told = [batch.draining for batch in batches]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (False, True)
    assert "stopping: 1 requests in progress" in engine.text


def batches_to_the_end(link: EngineSession) -> Iterator[pb.StepBatch]:
    while True:
        batch = link.batch()
        yield batch
        for output in batch.outputs:
            if output.finish_reason:
                assert output.finish_reason == types_pb2.FINISH_REASON_LENGTH
                return
