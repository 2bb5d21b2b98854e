"""The Session stream of a real engine: order, refusals, cancellation, and what happens when the stream breaks."""

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc, types_pb2

from tests.service.conftest import DEMO, SMALL_POOLS
from tests.support.engine_session import EngineSession, check_events_match_snapshot
from tests.support.forked_engines import ForkedEngine
from tests.support.processes import Engine, eventually

GRACE = 2.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = ForkedEngine(DEMO, tmp_path_factory.mktemp("engine"), *SMALL_POOLS, "--session-grace", str(GRACE))
    try:
        yield engine.wait_ready()
    finally:
        assert engine.stop() == 0, engine.text


PROMPT = list(range(10, 50))


def test_a_resubmitted_request_resumes_at_its_next_token(engine: Engine) -> None:
    with EngineSession(engine, "resubmit") as link:
        link.snapshot()
        link.submit("whole", PROMPT, max_tokens=20, temperature=1.0, seed=5)
        whole, _ = link.collect("whole")
        link.submit("rest", PROMPT, tuple(whole[:7]), max_tokens=20, temperature=1.0, seed=5)
        link.skipped = 7
        rest, last = link.collect("rest")
    assert whole[7:] == rest
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH


def test_sequences_have_no_gaps_and_the_load_returns_to_nothing(engine: Engine) -> None:
    with EngineSession(engine, "sequences") as link:
        snapshot = link.snapshot()
        assert not snapshot.resumed
        link.submit("a", PROMPT)
        batches = [link.batch()]
        while not any(output.finish_reason for output in batches[-1].outputs):
            batches.append(link.batch())
    assert [batch.sequence for batch in batches] == list(
        range(snapshot.sequence + 1, snapshot.sequence + 1 + len(batches))
    )
    load = batches[-1].load
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)


def test_snapshot_and_events_match_the_cached_blocks(engine: Engine) -> None:
    check_events_match_snapshot(engine)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 3000}, "context length is 2048 tokens"),
        ({"prompt": [1] * 2040, "max_tokens": 9}, "context length is 2048 tokens"),
        ({"prompt": [1 << 30]}, "Token ids must be between"),
        ({"prompt": [-1]}, "Token ids must be between"),
        ({"prompt": PROMPT, "request_id": "no spaces"}, "request id"),
        ({"prompt": PROMPT, "output": (1, 2), "max_tokens": 2}, "has reached max_tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_the_engine_continues(
    engine: Engine, fields: dict[str, object], words: str
) -> None:
    with EngineSession(engine, "refusals") as link:
        link.snapshot()
        request_id = str(fields.get("request_id", "bad"))
        link.submit(**{"request_id": request_id, **fields})
        link.submit("good", PROMPT)
        outputs: dict[str, pb.SequenceOutput] = {}
        while len(outputs) < 2:
            outputs |= {output.request_id: output for output in link.batch().outputs if output.finish_reason}
    refusal = outputs[request_id]
    assert refusal.finish_reason == types_pb2.FINISH_REASON_ERROR
    assert refusal.error.code == types_pb2.ERROR_CODE_INVALID
    assert words in refusal.error.message
    assert outputs["good"].finish_reason == types_pb2.FINISH_REASON_LENGTH


def test_parameters_out_of_range_are_refused(engine: Engine) -> None:
    with EngineSession(engine, "ranges") as link:
        link.snapshot()
        sampling = types_pb2.SamplingParams(temperature=9.0, max_tokens=4)
        link.send(submit=pb.Submit(request_id="hot", prompt_token_ids=PROMPT, sampling=sampling))
        (output,) = link.batch().outputs
    assert output.error.param == "temperature"


def test_a_repeated_submit_changes_nothing(engine: Engine) -> None:
    with EngineSession(engine, "twice") as link:
        link.snapshot()
        for _ in range(2):
            link.submit("same", PROMPT, max_tokens=1200)
        tokens, last = link.collect("same")
        assert len(tokens) == 1200
        assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
        link.submit("next", PROMPT, max_tokens=3)
        while not (outputs := link.batch().outputs):
            pass  # a heartbeat: an engine that works sends one twice a second
        assert {output.request_id for output in outputs} == {"next"}


def test_a_command_that_cannot_be_read_ends_the_stream(engine: Engine) -> None:
    with grpc.insecure_channel(engine.address) as channel:
        call = channel.stream_stream("/quire.v1.Engine/Session")
        opening = pb.SessionRequest(open=pb.Open(session_id="garbage")).SerializeToString()
        for sent in ([b"\xff\xff"], [opening, b"\xff\xff\xff"]):
            with pytest.raises(grpc.RpcError) as ended:
                list(call(iter(sent), timeout=20))
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_cancelled_request_frees_its_blocks_within_two_steps(engine: Engine) -> None:
    """A Submit goes down right after the Cancel: no later than its first token, the cancelled request is gone."""
    with EngineSession(engine, "cancel") as link:
        link.snapshot()
        link.submit("long", PROMPT, max_tokens=1900)
        for _ in range(3):
            link.batch()
        link.send(cancel=pb.Cancel(request_id="long"))
        link.submit("marker", PROMPT, max_tokens=5)
        aborted = first_of_marker = None
        while aborted is None or first_of_marker is None:
            batch = link.batch()
            for output in batch.outputs:
                if output.request_id == "marker" and first_of_marker is None:
                    first_of_marker = batch
                if output.finish_reason == types_pb2.FINISH_REASON_ABORT:
                    aborted = batch
    assert aborted.step <= first_of_marker.step + 1
    assert aborted.load.running <= 1, "the aborted request still holds blocks"
    held = aborted.load.blocks_total - aborted.load.blocks_free
    assert held <= 3, "more is held than the second request needs"


def test_a_session_that_reconnects_in_time_misses_nothing(engine: Engine) -> None:
    with EngineSession(engine, "resume") as link:
        link.snapshot()
        link.submit("whole", PROMPT, max_tokens=200)
        whole, _ = link.collect("whole")
    link = EngineSession(engine, "resume-2")
    generation = link.snapshot().generation
    link.submit("long", PROMPT, max_tokens=200)
    seen: list[int] = []
    for _ in range(10):
        batch = link.batch()
        seen += [token for output in batch.outputs for token in output.token_ids]
    link.break_off()
    time.sleep(0.3)
    with EngineSession(engine, "resume-2", last_sequence=batch.sequence) as link:
        snapshot = link.snapshot()
        assert snapshot.resumed
        assert (snapshot.generation, snapshot.sequence) == (generation, batch.sequence)
        link.skipped = len(seen)
        rest, _ = link.collect("long")
    assert seen + rest == whole


def test_a_session_that_stays_away_is_forgotten_with_its_requests(engine: Engine) -> None:
    link = EngineSession(engine, "away")
    link.snapshot()
    link.submit("long", PROMPT, max_tokens=2000)
    batch = link.batch()
    link.break_off()
    # The demo model may reach its limit before the grace is over, so what counts is that nothing runs afterwards.
    time.sleep(GRACE + 1)
    eventually(lambda: engine.metric("quire_engine_running_sequences") == 0)
    with EngineSession(engine, "away", last_sequence=batch.sequence) as again:
        assert not again.snapshot().resumed


@pytest.mark.parametrize(
    "first",
    [
        pb.SessionRequest(ack=pb.Ack(sequence=1)),
        pb.SessionRequest(),
        pb.SessionRequest(open=pb.Open(session_id="a b")),
        pb.SessionRequest(open=pb.Open(session_id="x" * 65)),
    ],
)
def test_a_session_must_begin_with_a_proper_open(engine: Engine, first: pb.SessionRequest) -> None:
    with grpc.insecure_channel(engine.address) as channel, pytest.raises(grpc.RpcError) as refused:
        list(engine_pb2_grpc.EngineStub(channel).Session(iter([first])))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_sigterm_lets_running_requests_end(tmp_path: Path) -> None:
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS).wait_ready()
    with EngineSession(engine, "drain") as link:
        link.snapshot()
        link.submit("long", PROMPT, max_tokens=300)
        link.skipped = sum(len(output.token_ids) for output in link.batch().outputs)
        engine.popen.terminate()
        tokens, last = link.collect("long")
    assert link.skipped + len(tokens) == 300
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert engine.stop() == 0
