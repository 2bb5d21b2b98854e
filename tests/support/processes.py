"""Real processes for tests: engines and routers on free ports, with their output kept for when a test fails."""

import atexit
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support.ports import free_port

START_TIMEOUT = 180.0
ANSWER_TIMEOUT = 15.0  # of a process that has little to say; those that are stopped give none
MIB = 1 << 20
Value = TypeVar("Value")


class Process:
    """One started program. Leaves nothing behind when stopped, and ends with the tests: where stopping one fails, those
    that stand behind it in a fixture are not stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        self.log = log
        self._output = log.open("ab")
        self.popen = self._start(command, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, stdout)

    def _start(self, command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> subprocess.Popen:
        popen = subprocess.Popen(
            command,
            stdout=self._output if stdout is None else stdout,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        atexit.register(popen.kill)
        return popen

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def resident_mib(self) -> float:
        return float(psutil.Process(self.popen.pid).memory_info().rss) / MIB

    def wait(self, timeout: float = 60.0) -> int:
        return self.popen.wait(timeout)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM, and SIGKILL when that is not heard; the exit status."""
        if self.popen.poll() is None:
            self.popen.terminate()
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        finally:
            self._output.close()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._output.close()


class Engine(Process):
    """A ``quire-engine``."""

    def __init__(
        self, model: Path, folder: Path, *flags: str, name: str = "quire-demo", port: int = 0, **environment: str
    ) -> None:
        self.port, self.metrics_port = port or free_port(), free_port()
        command = [sys.executable, "-m", "quire_engine.cli", "--model", str(model), "--served-model-name", name]
        command += ["--port", str(self.port), "--metrics-port", str(self.metrics_port), *flags]
        super().__init__(command, folder / f"engine-{self.metrics_port}.log", environment)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_ready(self) -> "Engine":
        wait_healthy(self, self.metrics_port)
        return self

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.metrics_port, name, **labels)


class Router(Process):
    """A ``quire-router``."""

    def __init__(
        self,
        model: Path,
        engines: Sequence[str],
        folder: Path,
        *flags: str,
        name: str = "quire-demo",
        ports: tuple[int, int, int] | None = None,
        **environment: str,
    ) -> None:
        self.http_port, self.grpc_port, self.metrics_port = ports or (free_port(), free_port(), free_port())
        command = [sys.executable, "-m", "quire_router.main", "--model", f"{name}={model}"]
        command += ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        command += ["--metrics-port", str(self.metrics_port), *flags]
        command += [part for address in engines for part in ("--engine", address)]
        super().__init__(command, folder / f"router-{self.http_port}.log", environment)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def wait_ready(self) -> "Router":
        wait_healthy(self, self.http_port)
        return self

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.metrics_port, name, **labels)


def wait_healthy(process: Process, port: int, path: str = "/health") -> None:
    """Returns once ``path`` on ``port`` answers 200; fails with the process's output when it ends or takes too
    long.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.popen.poll() is not None:
            raise AssertionError(f"the process ended with {process.popen.returncode}:\n{process.text}")
        if fetch(port, path)[0] == 200:
            return
        time.sleep(0.1)
    process.signal(signal.SIGKILL)
    raise AssertionError(f"not healthy after {START_TIMEOUT} s:\n{process.text}")


def fetch(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET; status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_TIMEOUT) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metric(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels; 0 when there are none."""
    total = 0.0
    for line in fetch(port, "/metrics")[1].splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and all(f'{key}="{wanted}"' in sample for key, wanted in labels.items()):
            total += float(value)
    return total


def eventually(condition: object, timeout: float = 60.0, message: str = "it never became true") -> None:
    """Polls a callable until it returns something true, at first often."""
    assert callable(condition)
    deadline, pause = time.monotonic() + timeout, 0.002
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def at_rest(read: Callable[[], Value], seconds: float = 1.0) -> Value:
    """What ``read`` returns once that has not changed for so long: what is written after answers is there then."""
    value, since = read(), time.monotonic()
    while time.monotonic() < since + seconds:
        time.sleep(0.1)
        if (now := read()) != value:
            value, since = now, time.monotonic()
    return value
