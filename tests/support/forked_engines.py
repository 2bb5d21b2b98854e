"""Engines and routers that are there at once: forked off a process that has imported all that they need, which takes
far longer than anything else that one does to start.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection, forkserver
from pathlib import Path
from threading import Lock

from tests.support.net_namespace import enter
from tests.support.processes import Engine, Process, Router

NET_NAMESPACE = "QUIRE_TEST_NET_NAMESPACE"
"""The variable of the environment that names the network namespace of a process."""
LAST = "QUIRE_TEST_LAST"
"""The variable of the environment of a process that gets the processors when nobody else wants them."""
_LAST = 10  # of -20 to 19
_AUTOGROUP = Path("/proc/self/autogroup")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "quire_engine.cli",
        "quire_engine.executor.torch_executor",
        "quire_engine.executor.rank_worker",
        "quire_router.app",
        "tests.support.frozen",
    ]
)


def warm_up(*, wait: bool = False) -> None:
    """Begins to import, in the background, for all that is to come, and with ``wait`` returns when that is done."""
    forkserver.ensure_running()
    if wait:
        first = _CONTEXT.Process(target=int)
        first.start()
        first.join()


class Forked:
    """What tests use of ``subprocess.Popen``, of a process that calls ``target``. It ends with the tests."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._process = _CONTEXT.Process(target=target, args=args, daemon=True)
        self._reading = Lock()  # the status can be read once
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._reading:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedProcess(Process):
    """A program whose command is ``python -m MODULE ...``."""

    def _start(self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> Forked:  # type: ignore[override]
        assert stdout is None
        return Forked(_run, command, self.log, environment)


class ForkedEngine(ForkedProcess, Engine):
    """A ``quire-engine``, the model of which is one of the Llama family. Ranks but the first are processes as ever."""


class ForkedRouter(ForkedProcess, Router):
    """A ``quire-router`` of one process, where nothing depends on the memory or the libraries of that."""


def _run(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    if (network := environment.get(NET_NAMESPACE)) is not None:
        enter(network)
    if LAST in environment:
        os.nice(_LAST)
        with suppress(OSError):  # where Linux weighs sessions, a process' own niceness counts only within its session
            _AUTOGROUP.write_text(str(_LAST))
    sys.argv = list(command[2:])
    import_module(command[2]).main()
