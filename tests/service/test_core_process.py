"""Real engines whose core runs in a process of its own: they answer as others do, and end with either process."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from quire.v1 import engine_pb2 as pb
from quire.v1 import types_pb2 as types
from quire_proto.structured_output import Structured, StructuredKind

from tests.service.conftest import DEMO, FLOAT32, SMALL_POOLS
from tests.service.test_engine_start import broken, sentence_of
from tests.support.adapters import write_adapter
from tests.support.engine_session import EngineSession, check_events_match_snapshot
from tests.support.forked_engines import ForkedEngine
from tests.support.processes import Engine, eventually, fetch

FLAG = "--engine-core-process"
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
PROMPT = list(range(300, 340))
SECONDS = 60


@dataclass(frozen=True)
class Pair:
    """Engines with the same settings: one whose core is a thread, and one whose core is a process."""

    thread: Engine
    process: Engine
    adapters: Path


def core_of(engine: Engine) -> psutil.Process:
    """The process of an engine's core."""
    (core,) = [each for each in psutil.Process(engine.popen.pid).children() if "core_main" in " ".join(each.cmdline())]
    return core


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("engines")
    for name, seed in (("a", 1), ("b", 2)):
        write_adapter(folder / name, DEMO, rank=8, seed=seed)
    flags = (*SMALL_POOLS, *FLOAT32, *LORA, "--lora-modules", f"a={folder / 'a'}")
    engines = [ForkedEngine(DEMO, folder, *flags), ForkedEngine(DEMO, folder, *flags, FLAG)]
    try:
        yield Pair(*[engine.wait_ready() for engine in engines], folder)
    finally:
        codes = [engine.stop() for engine in engines]
    assert codes == [0, 0], [engine.text for engine in engines]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One that a test may kill."""
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, FLAG, "--stall-timeout", "2", "--shutdown-timeout", "60")
    try:
        yield engine.wait_ready()
    finally:
        if engine.popen.poll() is None:
            engine.kill()


REQUESTS = {
    "greedy": {"temperature": 0.0, "max_tokens": 40},
    "sampled": {"temperature": 0.9, "seed": 5, "max_tokens": 40, "repetition_penalty": 1.2, "logit_bias": ((7, 2.0),)},
    "log-probabilities": {"temperature": 0.8, "seed": 3, "logprobs": 3, "prompt_logprobs": 2},
    "several choices": {"temperature": 0.9, "seed": 9, "n": 3},
    "beams": {"beam_width": 2, "n": 2},
    "stop token": {"stop_token_ids": (100,), "logit_bias": ((100, 100.0),), "logprobs": 0},
    "grammar": {
        "temperature": 0.9,
        "seed": 4,
        "max_tokens": 30,
        "ignore_eos": False,
        "structured": Structured(StructuredKind.JSON_OBJECT),
    },
    "adapter": {"lora": "a"},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_outputs_are_those_of_a_core_on_a_thread(pair: Pair, name: str) -> None:
    thread, process = (outputs_of(engine, name, REQUESTS[name]) for engine in (pair.thread, pair.process))
    assert thread == process
    assert all(choice[-1].finish_reason for choice in process)


def outputs_of(engine: Engine, name: str, params: dict[str, object]) -> list[list[pb.SequenceOutput]]:
    """The outputs of each choice in their order. How many a step has depends on the machine."""
    with EngineSession(engine, f"of {name}".replace(" ", "-")) as link:
        link.snapshot()
        link.submit("r", PROMPT, **params)
        choices: list[list[pb.SequenceOutput]] = [[] for _ in range(int(params.get("n", 1)))]
        while not all(outputs and outputs[-1].finish_reason for outputs in choices):
            for output in link.batch().outputs:
                choices[output.index].append(output)
    for output in (each for outputs in choices for each in outputs):
        output.ClearField("cached_tokens")  # the first engine that runs a prompt finds none of it
    return choices


def test_many_streams_at_once_are_those_of_a_core_on_a_thread(pair: Pair) -> None:
    thread, process = (streams_of(engine) for engine in (pair.thread, pair.process))
    assert thread == process


def streams_of(engine: Engine) -> dict[int, list[int]]:
    """The tokens of requests that share steps, of which only the first comes as a message."""
    with EngineSession(engine, "many") as link:
        link.snapshot()
        streams: dict[int, list[int]] = {handle: [] for handle in range(1, 17)}
        for handle in streams:
            sampling = types.SamplingParams(max_tokens=50, ignore_eos=True, temperature=1.0, seed=handle)
            link.send(
                submit=pb.Submit(request_id=str(handle), prompt_token_ids=PROMPT, sampling=sampling, handle=handle)
            )
        while min(map(len, streams.values())) < 50:
            batch = link.batch()
            for handle, token_id, position in zip(
                batch.tokens.handles, batch.tokens.token_ids, batch.tokens.positions, strict=True
            ):
                assert position == len(streams[handle])
                streams[handle].append(token_id)
            for output in batch.outputs:
                streams[int(output.request_id)] += output.token_ids
    return streams


def test_a_cancelled_request_ends_and_frees_its_blocks(pair: Pair) -> None:
    with EngineSession(pair.process, "cancel") as link:
        link.snapshot()
        link.submit("long", PROMPT, max_tokens=1500)
        link.batch()
        link.send(cancel=pb.Cancel(request_id="long"))
        _, last = collect_rest(link)
        assert last.finish_reason == types.FINISH_REASON_ABORT
        inspected = link.engine.Inspect(pb.InspectRequest(), timeout=SECONDS)
    assert inspected.device.used == 0
    assert inspected.device.total > 0
    assert inspected.generated_tokens > 0


def collect_rest(link: EngineSession) -> tuple[list[int], pb.SequenceOutput]:
    tokens: list[int] = []
    while True:
        for output in link.batch().outputs:
            tokens += output.token_ids
            if output.finish_reason:
                return tokens, output


def test_a_second_session_hears_of_the_blocks_that_the_first_one_filled(pair: Pair) -> None:
    check_events_match_snapshot(pair.process)


def test_a_grammar_that_is_refused_is_refused_in_the_same_words(pair: Pair) -> None:
    params = {"structured": Structured(StructuredKind.REGEX, "("), "ignore_eos": False}
    ((thread,),), ((process,),) = (outputs_of(engine, "bad", params) for engine in (pair.thread, pair.process))
    assert thread == process
    assert "regular expression" in process.error.message


def test_adapters_are_loaded_and_unloaded_while_it_serves(pair: Pair) -> None:
    with EngineSession(pair.process, "adapters") as link:
        assert [lora.name for lora in link.snapshot().loras.loras] == ["a"]
        link.engine.LoadLora(pb.LoadLoraRequest(lora_name="b", lora_path=str(pair.adapters / "b")), timeout=SECONDS)
        with pytest.raises(Exception, match="no adapter at"):
            link.engine.LoadLora(pb.LoadLoraRequest(lora_name="c", lora_path="/nowhere"), timeout=SECONDS)
        link.submit("with", PROMPT, lora="b", max_tokens=6)
        tokens, last = link.collect("with")
        assert (len(tokens), last.finish_reason) == (6, types.FINISH_REASON_LENGTH)
        link.engine.UnloadLora(pb.UnloadLoraRequest(lora_name="b"), timeout=SECONDS)


def test_it_sleeps_and_is_woken_up_by_a_request(pair: Pair) -> None:
    with EngineSession(pair.process, "sleep") as link:
        link.snapshot()
        link.engine.Sleep(pb.SleepRequest(), timeout=SECONDS)
        assert link.engine.IsSleeping(pb.IsSleepingRequest(), timeout=SECONDS).is_sleeping
        eventually(lambda: pair.process.metric("quire_engine_sleeping") == 1)
        link.submit("wakes", PROMPT, max_tokens=4)
        tokens, _ = link.collect("wakes")
        assert len(tokens) == 4
        assert not link.engine.IsSleeping(pb.IsSleepingRequest(), timeout=SECONDS).is_sleeping
    assert pair.process.metric("quire_engine_wake_ups_total") >= 1


def test_its_metrics_are_those_of_the_core(pair: Pair) -> None:
    before = pair.process.metric("quire_engine_generation_tokens_total")
    with EngineSession(pair.process, "metrics") as link:
        link.snapshot()
        link.submit("a", PROMPT, max_tokens=5)
        link.collect("a")
    eventually(lambda: pair.process.metric("quire_engine_generation_tokens_total") == before + 5)
    text = fetch(pair.process.metrics_port, "/metrics")[1]
    for phase in ("imports", "weights", "serving"):
        assert f'phase="{phase}"' in text
    assert pair.process.metric("quire_engine_heartbeat_age_seconds") < 2


@pytest.mark.parametrize("signalled", ["server", "core", "both"])
def test_a_signal_to_either_process_drains_it(engine: Engine, signalled: str) -> None:
    """A service manager may send it to all processes of a service."""
    core = core_of(engine)
    processes = {"server": [engine.popen.pid], "core": [core.pid], "both": [engine.popen.pid, core.pid]}[signalled]
    with EngineSession(engine, "drain") as link:
        link.snapshot()
        link.submit("long", PROMPT, max_tokens=300)
        link.batch()
        for process in processes:
            os.kill(process, signal.SIGTERM)
        _, last = collect_rest(link)
    assert last.finish_reason == types.FINISH_REASON_LENGTH
    assert engine.wait() == 0, engine.text
    assert is_gone(core)


def test_it_ends_when_its_core_is_killed(engine: Engine) -> None:
    core = core_of(engine)
    with EngineSession(engine, "killed") as link:
        link.snapshot()
        link.submit("lost", PROMPT, max_tokens=1500)
        link.batch()
        core.kill()
        with pytest.raises(Exception, match=r"(?i)unavailable|cancelled"):
            collect_rest(link)
    assert engine.wait() == 1
    assert f"The engine core (process {core.pid}) was killed by SIGKILL" in engine.text
    assert "Traceback" not in engine.text


def test_its_core_ends_when_it_is_killed(engine: Engine) -> None:
    core = core_of(engine)
    engine.kill()
    eventually(lambda: is_gone(core), 5)


def test_a_core_that_hangs_is_not_live(engine: Engine) -> None:
    assert fetch(engine.metrics_port, "/live")[0] == 200
    core = core_of(engine)
    core.suspend()
    eventually(lambda: fetch(engine.metrics_port, "/live")[0] == 503, 20)
    core.resume()
    eventually(lambda: fetch(engine.metrics_port, "/live")[0] == 200, 20)


def test_it_ends_when_a_rank_is_lost(tmp_path: Path) -> None:
    engine = ForkedEngine(DEMO, tmp_path, *SMALL_POOLS, FLAG, "--tensor-parallel-size", "2").wait_ready()
    (rank,) = [each for each in core_of(engine).children() if "rank_main" in " ".join(each.cmdline())]
    rank.kill()
    assert engine.wait() == 1
    assert f"Rank 1 (process {rank.pid}) was killed by SIGKILL" in engine.text
    assert "The engine ends." in engine.text


@pytest.mark.parametrize(
    "flags",
    [(), ("--kv-cache-memory", "1000"), (*LORA, "--lora-modules", "a=/nowhere")],
    ids=["folder", "memory", "lora"],
)
def test_a_start_that_fails_has_the_same_sentence(tmp_path: Path, flags: Sequence[str]) -> None:
    folder = DEMO
    if not flags:
        (folder := broken(tmp_path)).joinpath("model.safetensors").unlink()
    assert sentence_of(folder, tmp_path, *flags, FLAG) == sentence_of(folder, tmp_path, *flags)
