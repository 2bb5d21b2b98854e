"""Steps come out of a file as they went in, in a file that is its owner's, and can be run again."""

import gzip
import json
import os
from array import array
from dataclasses import replace
from pathlib import Path
from stat import S_IMODE

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine.core.block_pool import KVCacheConfig, KVCacheGroup
from quire_engine.core.config import SchedulerConfig
from quire_engine.core.engine_core import AddRequest, EngineCore
from quire_engine.core.executor import ExecutorError
from quire_engine.core.kv_cache_manager import KVCacheManager
from quire_engine.core.lora import LoRARequest
from quire_engine.core.request import Request
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step import ModelOutput, NewRequest, SampleRequest, ScheduledChunk, SchedulerOutput
from quire_engine.core.step_recording import FORMAT, RecordedEngine, RecordingError, StepRecorder, read_steps
from quire_engine.simulation.replay import run_steps
from quire_proto.pooling import PoolingParams, Task
from quire_proto.sampling import SamplingParams

from tests.support.overlapping_executor import OverlappingPagedExecutor
from tests.support.paged_executor import VOCAB_SIZE, PagedExecutor
from tests.support.processes import eventually
from tests.support.sampling_inputs import ModuloGrammar
from tests.support.scenario import Run, Scenario

GROUPS = (KVCacheGroup(), KVCacheGroup(8))
ENGINE = RecordedEngine("m", VOCAB_SIZE, KVCacheConfig(4, 30, 9, 64, GROUPS, 8))


class Recording(Run):
    """A run whose steps are recorded, and kept."""

    def __init__(self, scenario: Scenario, executor: PagedExecutor, path: Path) -> None:
        self.path, self.kept = path, list[tuple[SchedulerOutput, list[int]]]()
        self.capacity = scenario.capacity
        super().__init__(scenario, executor)
        self.core._recorder.close()

    def prepare(self) -> None:
        recorder = StepRecorder(self.path, RecordedEngine("m", VOCAB_SIZE, self.capacity), 1 << 30)
        record = recorder.record
        self.core._recorder = recorder

        def keep(scheduler_output: SchedulerOutput, model_output: ModelOutput, seconds: float) -> None:
            self.kept.append((scheduler_output, model_output.token_ids))
            record(scheduler_output, model_output, seconds)

        recorder.record = keep


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), overlaps=st.booleans())
def test_steps_are_read_as_they_were_and_make_the_same_tokens_again(
    tmp_path_factory: pytest.TempPathFactory, seed: int, overlaps: bool
) -> None:
    path, scenario = tmp_path_factory.mktemp("steps") / "steps.gz", Scenario(seed)
    run = Recording(scenario, (OverlappingPagedExecutor if overlaps else PagedExecutor)(scenario.capacity), path)
    engine, steps = read_steps(path)
    assert engine.capacity == scenario.capacity
    assert [(step.scheduler_output, step.token_ids) for step in steps] == run.kept
    if not overlaps:  # else a token is pending, which this executor does not know
        report = run_steps(PagedExecutor(scenario.capacity), read_steps(path)[1])
        assert not report.ended
        assert report.num_equal == report.num_compared > 0


def test_all_that_a_step_may_have_is_kept(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.5, logit_bias=((3, 1.5),), bad_words=((1, 2), (3,)), stop_token_ids=(4,))
    request = SampleRequest(params, 1 << 63, 2, frozenset({4, 9}), num_candidates=3)
    held = replace(request, grammar=ModuloGrammar())
    tables = (array("i", [1, 2]), array("i", [0, 7]))
    new = [
        NewRequest(0, array("i", [5, 6]), tables, (request, request), 2, LoRARequest("a", 1, "/a", b"digest")),
        NewRequest(1, array("i", [5]), tables, (held,)),
        NewRequest(2, array("i", [5]), tables, pooling=PoolingParams(Task.EMBED, dimensions=8)),
    ]
    step = SchedulerOutput(7, new=new, new_blocks=(array("i", [0, 1, 2]), array("i")), max_seconds=0.5)
    step.add_chunk(ScheduledChunk(10, 0, 0, 2, 2))
    step.add_chunk(ScheduledChunk(11, 1, 3, 3, 3, draft_token_ids=(8, 9)))
    step.add_chunk(ScheduledChunk(12, 2, 4, 1, 1, awaits_token=True))
    recorder = StepRecorder(tmp_path / "steps", ENGINE, 1 << 20)
    recorder.record(step, ModelOutput([1, 2, 3, 4, 5, 0]), 0.25)
    recorder.close()
    engine, (found,) = read_steps(tmp_path / "steps")
    assert engine == ENGINE
    assert found.scheduler_output == replace(step, new=[new[0], replace(new[1], sample_requests=(request,)), new[2]])
    assert (found.token_ids, found.seconds, found.rows_with_grammar) == ([1, 2, 3, 4, 5, 0], 0.25, {1})


def test_the_file_is_new_and_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        StepRecorder(tmp_path / "steps", ENGINE, 1 << 20).close()
    finally:
        os.umask(before)
    assert S_IMODE((tmp_path / "steps").stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("steps", "link", "missing/steps"):
        with pytest.raises(OSError, match=name):
            StepRecorder(tmp_path / name, ENGINE, 1 << 20)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_full_gets_no_more_steps_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, draw = StepRecorder(tmp_path / "steps", ENGINE, 4096), array("i", os.urandom(40_000))
    for number in range(500):
        recorder.record(SchedulerOutput(number, freed_rows=draw), ModelOutput(), 0.1)
    recorder.close()
    assert (tmp_path / "steps").stat().st_size < 1 << 20
    assert "no more steps are recorded" in caplog.text
    assert len(caplog.records) == 1
    assert 1 <= len(list(read_steps(tmp_path / "steps")[1])) < 100


def steps_in(path: Path) -> list[int]:
    """The numbers of the steps that the file has by now."""
    try:
        return [step.scheduler_output.step for step in read_steps(path)[1]]
    except RecordingError:
        return []


def test_what_was_recorded_is_in_the_file_a_second_later(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "steps", ENGINE, 1 << 20)
    recorder.record(SchedulerOutput(5, freed_rows=array("i", [1])), ModelOutput(), 0.1)
    eventually(lambda: steps_in(tmp_path / "steps") == [5], 20)
    recorder.close()


def test_a_step_that_cannot_be_written_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = StepRecorder(tmp_path / "steps", ENGINE, 1 << 20)
    recorder.record(SchedulerOutput(1), ModelOutput([object()]), 0.1)
    for number in range(2, 600):
        recorder.record(SchedulerOutput(number), ModelOutput(), 0.1)
    recorder.close()
    recorder.close()
    assert "no more steps are recorded" in caplog.text


def test_a_core_that_fails_closes_the_file(tmp_path: Path) -> None:
    class Failing(PagedExecutor):
        def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
            if scheduler_output.step == 3:
                raise ExecutorError("the device is lost")
            return super().execute_model(scheduler_output)

    capacity = KVCacheConfig(4, 30, 0)
    scheduler = Scheduler(SchedulerConfig(max_model_len=40, vocab_size=VOCAB_SIZE), KVCacheManager(capacity))
    recorder = StepRecorder(tmp_path / "steps", RecordedEngine("m", VOCAB_SIZE, capacity), 1 << 20)
    core = EngineCore(scheduler, Failing(capacity), lambda _: None, recorder=recorder)
    core.send(AddRequest(Request("a", [1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))))
    with pytest.raises(ExecutorError):
        core.run()
    assert [step.scheduler_output.step for step in read_steps(tmp_path / "steps")[1]] == [1, 2]


def test_what_an_engine_that_was_killed_has_written_is_read(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path / "steps", ENGINE, 1 << 30)
    for number in range(200):
        recorder.record(SchedulerOutput(number, freed_rows=array("i", os.urandom(4000))), ModelOutput(), 0.1)
    recorder.close()
    whole = (tmp_path / "steps").read_bytes()
    (tmp_path / "steps").write_bytes(whole[: len(whole) // 2])
    found = [step.scheduler_output.step for step in read_steps(tmp_path / "steps")[1]]
    assert found == list(range(len(found)))
    assert 20 < len(found) < 200


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "does not hold steps"),
        ([[1]], "does not hold steps"),
        ([{"quire_steps": 99}], "does not hold steps of this version"),
        ([{"quire_steps": FORMAT, "engine": {"model": "m"}}], "does not say what engine"),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, lines: list[object], said: str) -> None:
    path = tmp_path / "steps"
    path.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    with pytest.raises(RecordingError, match=said):
        read_steps(path)


@pytest.mark.parametrize(
    "contents",
    [b"", b"no gzip", gzip.compress(b"{"), gzip.compress(b"\xff\n"), gzip.compress(b"{}")[:10] + b"\xff" * 20],
    ids=["empty", "no gzip", "no JSON", "no text", "damaged"],
)
def test_what_is_no_text_of_lines_is_refused_too(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "steps"
    path.write_bytes(contents)
    with pytest.raises(RecordingError, match=str(path)):
        read_steps(path)
    with pytest.raises(RecordingError, match="cannot be read"):
        read_steps(tmp_path / "missing")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5), st.data())
def test_a_step_that_was_tampered_with_is_an_error_of_its_line(
    tmp_path_factory: pytest.TempPathFactory, value: object, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("steps")
    recorder, step = StepRecorder(folder / "steps", ENGINE, 1 << 20), SchedulerOutput(1)
    step.new.append(NewRequest(0, array("i", [5]), (array("i", [1]),), (SampleRequest(SamplingParams(), 0, 1),)))
    step.add_chunk(ScheduledChunk(0, 0, 0, 1, 1))
    recorder.record(step, ModelOutput([3]), 0.5)
    recorder.close()
    head, line = gzip.decompress((folder / "steps").read_bytes()).splitlines()
    plain = json.loads(line)
    place = data.draw(st.sampled_from([plain, plain["new"][0], plain["new"][0]["sample_requests"][0]]))
    place[data.draw(st.sampled_from(sorted(place)))] = value
    (folder / "steps").write_bytes(gzip.compress(head + b"\n" + json.dumps(plain).encode()))
    said = []
    try:
        list(read_steps(folder / "steps")[1])
    except RecordingError as error:
        said.append(str(error))
    assert all(each.startswith(f"Line 2 of {folder}") for each in said)
