"""Recorded steps of a model draw the same tokens when they are run again, and the command says so."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.step_recording import RecordedEngine, StepRecorder, read_steps
from quire_engine.simulation.replay import run_steps
from quire_proto.sampling import SamplingParams

from tests.model.engine import load, run
from tests.model.models import SmallModels
from tests.support.guessing import guess

STYLES = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logprobs": 2, "seed": 4},
    {"temperature": 1.0, "n": 3, "seed": 5},
    {"temperature": 0, "prompt_logprobs": 1},
    {"temperature": 0, "beam_width": 2, "n": 2},
]


def record(
    path: Path,
    models: SmallModels,
    guesses: Callable[[Scheduler], None] = lambda _: None,
    **settings: object,
) -> int:
    """Records a run of a small model in memory that does not suffice. Returns how many tokens were drawn."""
    with closing(load(models.folder("llama3"), 24, 24, **settings)) as executor:
        engine = RecordedEngine("llama3", executor.config.vocab_size, executor.kv_cache_config)
        recorder = StepRecorder(path, engine, 1 << 30)
        params = [SamplingParams(max_tokens=20, ignore_eos=True, **style) for style in STYLES]
        made = run(executor, models.prompts[: len(params)], params, guesses=guesses, recorder=recorder)
        recorder.close()
    assert made.statistics.preemptions, "nothing was preempted"
    return sum(step.scheduler_output.total_num_draws for step in read_steps(path)[1])


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"guesses": partial(guess, seed=1)}])
def test_a_recorded_run_makes_the_same_tokens_again(
    tmp_path: Path, small_models: SmallModels, settings: dict[str, object]
) -> None:
    path = tmp_path / "steps"
    num_draws = record(path, small_models, **settings)
    with closing(load(small_models.folder("llama3"), 24, 24)) as executor:
        report = run_steps(executor, read_steps(path)[1])
    assert not report.ended
    assert num_draws * 0.6 < report.num_equal == report.num_compared


def test_the_command_replays_on_a_model_and_on_the_simulated_executor(
    tmp_path: Path, small_models: SmallModels
) -> None:
    path = tmp_path / "steps"
    record(path, small_models)
    command = [sys.executable, "-m", "quire_engine.cli", "replay", str(path)]
    model = ["--model", str(small_models.folder("llama3")), "--dtype", "float32", "--enforce-eager"]
    replayed, simulated = (
        subprocess.run([*command, *flags], capture_output=True, text=True, check=False) for flags in (model, [])
    )
    assert (replayed.returncode, simulated.returncode) == (0, 0), replayed.stderr + simulated.stderr
    assert "llama3, on the model" in replayed.stdout
    compared = replayed.stdout.splitlines()[-1].split()
    assert compared[0] == compared[2], "other tokens were drawn"
    assert "on the simulated executor" in simulated.stdout
    assert "decoding alone" in simulated.stdout


def test_what_cannot_be_replayed_is_said_in_one_sentence(tmp_path: Path, small_models: SmallModels) -> None:
    path = tmp_path / "steps"
    record(path, small_models)
    command = [sys.executable, "-m", "quire_engine.cli", "replay"]
    other = ["--model", str(small_models.folder("gemma3")), "--dtype", "float32"]
    for arguments, status, said in (
        ([], 2, "usage: quire-engine replay FILE"),
        ([str(tmp_path / "missing")], 1, "cannot be read"),
        ([str(path), *other], 1, "in 1 groups of layers"),
    ):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == status, ended.stderr
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr
