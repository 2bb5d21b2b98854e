"""A peer in a process of its own, in the environment where it is installed. Knows its lines, not what it is.

The child is told its settings on its command line. Then it reads a JSON line for each workload, ``{"prompts",
"outputs"}``, and answers with one: ``{"ready": name and version}`` first, then ``{"seconds"}``, or ``{"error"}`` in one
sentence.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire_engine.bench.measure import SystemFailedError
from quire_engine.bench.workload import Workload

SCRIPTS = Path(__file__).parent / "peers"
SECONDS_TO_END = 20.0
SHOWN_LINES = 3


class PeerProcess:
    """A running peer. A ``System``."""

    def __init__(
        self, python: Path, script: str, settings: Mapping[str, object], environment: Mapping[str, str]
    ) -> None:
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(  # noqa: S603 - our own script, and no shell
            [str(python), str(SCRIPTS / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            self.name = str(self._answer()["ready"])
        except BaseException:
            self.close()
            raise

    def seconds(self, workload: Workload) -> float:
        """See ``System.seconds``."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"prompts": workload.prompts, "outputs": workload.outputs}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemFailedError(self._stderr_tail()) from None
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """Lets it end by itself, and ends it and all that it started where it does not."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            _end_group(self._process.pid)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemFailedError(self._stderr_tail())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemFailedError(str(answer["error"]))
        return answer

    def _stderr_tail(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read()[-4096:].splitlines() if line.strip()]
        return f"It ended: {' / '.join(lines[-SHOWN_LINES:]) or 'it said nothing'}"


def has_module(python: Path, module: str) -> bool:
    """Whether the environment of an interpreter has ``module``."""
    test = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", test], check=False, capture_output=True, timeout=60).returncode == 0  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False


def own_python() -> Path:
    """The interpreter that runs this."""
    return Path(sys.executable)


def _end_group(process: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
