"""``quire demo`` as a reader of the README runs it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def demo(*arguments: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_cli.main", "demo", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300, check=False)


def test_an_answer_survives_the_engine_that_writes_it() -> None:
    shown = demo()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    order = ["Once upon a time", "kill -9 engine-", "the other engine continues", "400 tokens in", "the same text"]
    places = [shown.stdout.find(words) for words in order]
    assert -1 not in places
    assert places == sorted(places)


def test_outside_of_a_clone_it_asks_for_a_model(tmp_path: Path) -> None:
    shown = demo(where=tmp_path)
    assert shown.returncode == 1
    assert shown.stderr == (
        "error: demo/model is not here\ntip: run this in a clone of the repository, or name a MODEL\n"
    )
