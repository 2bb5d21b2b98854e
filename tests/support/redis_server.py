"""A real ``redis-server`` of a test's own: on a free port, in a folder that goes away, and never left behind."""

import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.ports import free_port

# Adds the offset in a shared file to the wall clock; monotonic clocks are left alone. With a mapping and not a read,
# so that it is in force at once, and without a file descriptor.
_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *offset; /* seconds */

__attribute__((constructor)) static void map_offset(void) {
  int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
  if (file < 0) abort();
  offset = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
  if (offset == MAP_FAILED) abort();
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += *offset;
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *seconds) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (seconds) *seconds = exact.tv_sec;
  return exact.tv_sec;
}
"""

# Where the files are, if there is such a folder: what tests kill is the process and never the machine, so memory keeps
# what it wrote, and no other work on the disk makes Redis late.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Clock:
    """A wall clock of a process' own, which can be set while it runs: a shared library before the C library's. Raises
    ``OSError`` or ``subprocess.CalledProcessError`` where no C compiler makes it.
    """

    def __init__(self, folder: Path) -> None:
        source, self._library, self._file = folder / "clock.c", folder / "clock.so", folder / "clock.offset"
        source.write_text(_CLOCK_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self._library, source], check=True, capture_output=True)
        self._file.write_bytes(bytes(8))
        self._offset = 0

    @property
    def environment(self) -> dict[str, str]:
        """What a process is started with that is to have this clock."""
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET_FILE": str(self._file)}

    def move(self, seconds: int) -> None:
        """Forward, or back, from where it is."""
        self._offset += seconds
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as mapped:
            mapped[:] = struct.pack("=q", self._offset)


def documented_rights(password: str) -> list[str]:
    """Name and rules of the user for routers, of the command in docs/durability.md that makes it."""
    text = (Path(__file__).parents[2] / "docs/durability.md").read_text()
    [command] = [line.strip() for line in text.splitlines() if line.strip().startswith("ACL SETUSER quire ")]
    return command.replace(">PASSWORD", f">{password}").split()[2:]


class RedisServer:
    """``persistent`` keeps what was written over a restart; without it a restart begins empty. With a ``clock`` it goes
    by that one. ``settings`` are more of its flags.
    """

    def __init__(
        self,
        folder: Path,
        *,
        persistent: bool = False,
        password: str | None = None,
        clock: Clock | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self.clock = clock
        self._settings = settings
        self._folder = folder
        self._persistent = persistent
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    @property
    def router_url(self) -> str:
        """With a user who has just the rights that the documentation says routers need."""
        return f"redis://quire:secret@127.0.0.1:{self.port}/0"

    def refusals(self) -> list[str]:
        """What users have asked for without the right to it."""
        with redis.Redis(port=self.port, password=self._password, decode_responses=True) as root:
            return [f"{each['username']}: {each['object']} ({each['context']})" for each in root.acl_log()]

    def start(self) -> None:
        """Returns when it answers. It listens on the same port after every start."""
        environment = os.environ | (self.clock.environment if self.clock is not None else {})
        self._process = subprocess.Popen(self._command(), cwd=self._folder, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start on port {self.port}")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Of the process. Raises ``RuntimeError`` when there is none."""
        if self._process is None:
            raise RuntimeError("redis-server does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

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
        command += ["--user", *documented_rights("secret")]
        if self._persistent:
            command += ["--appendonly", "yes", "--appendfsync", "always"]
        if self.clock is not None:  # a thread of jemalloc's waits by the kernel's clock, and would spin
            command += ["--jemalloc-bg-thread", "no"]
        command += self._settings
        return [*command, "--requirepass", self._password] if self._password else command

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                answer = connection.recv(64)
        except OSError:
            return False
        return answer.startswith((b"+PONG", b"-NOAUTH"))


def settable_clock(folder: Path) -> Clock:
    """A clock for ``redis_server``. The test is skipped where there is no C compiler."""
    try:
        return Clock(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler makes a clock that can be set: {error}")


@contextmanager
def redis_server(
    *,
    persistent: bool = False,
    password: str | None = None,
    started: bool = True,
    clock: Clock | None = None,
    settings: Sequence[str] = (),
) -> Iterator[RedisServer]:
    """A server for the length of a block. The test is skipped where Redis is not installed."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="quire-redis-", dir=_MEMORY) as folder:
        server = RedisServer(Path(folder), persistent=persistent, password=password, clock=clock, settings=settings)
        try:
            if started:
                server.start()
            yield server
        finally:
            server.kill()
