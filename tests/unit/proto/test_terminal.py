"""What takes long says so in a terminal, and nowhere else."""

import subprocess
import sys

from quire_proto.terminal import CLEAR_LINE, DIM

from tests.support.terminals import in_terminal

PROGRAM = """
from time import sleep
from quire_proto.terminal import waiting
with waiting("working"):
    sleep(1.8)
print("done")
"""


def test_a_line_counts_the_seconds_until_the_work_is_done() -> None:
    shown = in_terminal([sys.executable, "-c", PROGRAM], environment={"NO_COLOR": ""})
    assert f"{CLEAR_LINE}{DIM}working (1 s)" in shown
    assert shown.endswith(f"{CLEAR_LINE}done\r\n")


def test_elsewhere_nothing_is_shown() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
