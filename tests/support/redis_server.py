"""A real ``redis-server`` of a test's own: on a free port, in a folder that goes away, and never left behind."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ports import free_port


class RedisServer:
    """``persistent`` keeps what was written over a restart; without it a restart begins empty."""

    def __init__(self, folder: Path, *, persistent: bool = False, password: str | None = None) -> None:
        self._folder = folder
        self._persistent = persistent
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it answers. It listens on the same port after every start."""
        self._process = subprocess.Popen(self._command(), cwd=self._folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start on port {self.port}")
            time.sleep(0.01)

    def kill(self) -> None:
        """As by SIGKILL: at once, in the middle of whatever it did."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """For example SIGSTOP: it hangs, and its connections stay."""
        if self._process is not None:
            self._process.send_signal(number)

    def forget(self) -> None:
        """Loses all that was written, of a server that is dead."""
        for entry in self._folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def rewind(self, part: float) -> None:
        """Loses what was written last, of a dead server: all but ``part`` of its log."""
        for log in self._folder.glob("appendonlydir/*.incr.aof"):
            os.truncate(log, int(part * log.stat().st_size))

    def restart(self) -> None:
        self.kill()
        self.start()

    def _command(self) -> list[str]:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        if self._persistent:
            command += ["--appendonly", "yes", "--appendfsync", "always"]
        return [*command, "--requirepass", self._password] if self._password else command

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                answer = connection.recv(64)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH"))


@contextmanager
def redis_server(
    *, persistent: bool = False, password: str | None = None, started: bool = True
) -> Iterator[RedisServer]:
    """A server for the length of a block. The test is skipped where Redis is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="quire-redis-") as folder:
        server = RedisServer(Path(folder), persistent=persistent, password=password)
        try:
            if started:
                server.start()
            yield server
        finally:
            server.kill()
