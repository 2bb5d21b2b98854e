"""Programs that tests start leave nobody behind."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.processes import eventually

ROOT = Path(__file__).parents[3]
TEST = """
import sys
from pathlib import Path
from tests.support.processes import Process
print(Process(["sleep", "600"], Path(sys.argv[1])).popen.pid)
raise SystemExit("it failed before it stopped what it had started")
"""


def test_a_program_that_was_not_stopped_ends_with_the_tests(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", TEST, str(tmp_path / "log")], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert run.returncode == 1
    eventually(lambda: not is_running(int(run.stdout)))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
