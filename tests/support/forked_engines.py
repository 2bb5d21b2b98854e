"""Engines that are there at once: forked off a process that has imported all that an engine needs, which takes far
longer than anything else that one does to start.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from quire_engine.cli import main

from tests.support.processes import Engine

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "quire_engine.cli",
        "quire_engine.executor.torch_executor",
        "transformers.models.llama.configuration_llama",
        "transformers.modeling_rope_utils",
    ]
)


def warm_up(*, wait: bool = False) -> None:
    """Begins to import, in the background, for all engines to come, and with ``wait`` returns when that is done."""
    forkserver.ensure_running()
    if wait:
        first = _CONTEXT.Process(target=int)
        first.start()
        first.join()


class Forked:
    """What tests use of ``subprocess.Popen``, of a process that runs the engine's command with ``arguments``. It ends
    with the tests.
    """

    def __init__(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process = _CONTEXT.Process(target=_run, args=(arguments, log, environment), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("quire-engine", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedEngine(Engine):
    """A ``quire-engine`` of one rank, the model of which is one of the Llama family."""

    def _start(self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> Forked:  # type: ignore[override]
        assert stdout is None
        return Forked(command[command.index("quire_engine.cli") :], self.log, environment)


def _run(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    sys.argv = list(arguments)
    main()
