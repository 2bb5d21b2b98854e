"""Processes that run together: ``ProcessTree`` starts them at once, starts again what dies, and ends all in order.

All of it runs in one event loop. A process counts as ready once its own health probe answers 200. One that ends before
that has failed to start: where it ended by itself and was never ready, it would do so again, and all end; otherwise
it is started again after a growing delay, ``MAX_FAILED_STARTS`` times. Programs that cannot run without each other
are ``grouped``: they end together by themselves, and one that does not, as a stopped process cannot, is killed.
"""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from quire_engine.core.startup import PROGRESS_MARK
from quire_proto.supervise import Backoff

from quire_cli.machine.sockets import LOCALHOST, listens
from quire_cli.serve import child
from quire_cli.serve.log import SELF, WriteLine

MAX_FAILED_STARTS = 3
LAST_LINES = 5  # of a process that cannot be started
PROBE_PERIOD = 0.05  # seconds
_PROBE_TIMEOUT = 2.0  # seconds
_FIRST_DELAY, _LAST_DELAY = 0.25, 10.0  # seconds before a process that died is started again
_STABLE = 30.0  # seconds of life after which the delay is the first one again
# Seconds in which the others of a group end that lost one: they notice it after 10 seconds of silence at the latest.
GROUP_END_TIMEOUT = 15.0
_OUTPUT_TIMEOUT = 2.0  # seconds in which the output of a process that ended is read
_PIECE = 1 << 16  # bytes
_WARNING = re.compile(r"\S+ \S+ WARNING ")  # behind the date and the time


@dataclass(frozen=True)
class Program:
    """What one process of the tree runs: a module and its arguments.

    ``kind`` is stopped together. ``probe`` is the port and path of its health, at ``host``. It may take
    ``stop_timeout`` seconds to end after SIGTERM. ``grouped`` ones of a kind cannot run without each other.
    """

    name: str
    kind: str
    module: str
    arguments: Sequence[str]
    probe: tuple[int, str]
    stop_timeout: float = 8.0
    environment: dict[str, str] = field(default_factory=dict)
    host: str = LOCALHOST
    grouped: bool = False


class End(NamedTuple):
    """Why all end: the sentences that explain it, none if a user asked for it, and the status to exit with."""

    status: int
    sentences: Sequence[str] = ()


class ProcessTree:
    """``programs`` are stopped in the opposite of their order. ``say`` prints a line of one of them;
    ``on_ready`` is called whenever one is ready, and ``on_progress`` with the name of one and how far its start is.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        say: WriteLine,
        on_ready: Callable[[], None] = lambda: None,
        on_progress: WriteLine = lambda _program, _record: None,
    ) -> None:
        self._programs = list(programs)
        self._say = say
        self._on_ready = on_ready
        self._on_progress = on_progress
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._end: asyncio.Future[End] | None = None
        self._stopping = False
        self._killed: set[str] = set()  # names of those that did not end with their group, until they have
        self._restarted: set[str] = set()  # names of those that died and were started again
        self._warnings: dict[tuple[str, str], str] = {}  # of each kind's starts, and who gave each first
        self.ready: set[str] = set()
        """Names of the programs that are ready now."""

    async def run(self) -> int:
        """Runs them until ``stop``, or until one cannot be started. Returns the status to exit with."""
        self._end = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            keepers = {program.name: tasks.create_task(self._keep_running(program)) for program in self._programs}
            try:
                end = await self._end
                for sentence in end.sentences:
                    self._say(sentence, SELF)
            finally:
                self._stopping = True
                await self._stop_all(keepers)
        return end.status

    def stop(self, status: int) -> None:
        """Begins to end all; may be called repeatedly."""
        self._finish(End(status))

    @property
    def is_stopping(self) -> bool:
        """Whether all of it is about to end."""
        return self._stopping or (self._end is not None and self._end.done())

    def kill(self) -> None:
        """Kills what still runs while it is being stopped."""
        for process in self._running.values():
            _signal_group(process, signal.SIGKILL)

    def kill_one(self, name: str) -> None:
        """Kills a program, as a crash would; it is started again."""
        if process := self._running.get(name):
            _signal_group(process, signal.SIGKILL)

    def _finish(self, end: End) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(end)

    async def _stop_all(self, keepers: dict[str, asyncio.Task[None]]) -> None:
        """Stops the last first, and programs of one kind together, so that a program outlives its users: a router
        drains while its engines still run.
        """
        for _, alike in groupby(reversed(self._programs), key=lambda program: program.kind):
            programs = list(alike)
            for program in programs:
                if process := self._running.get(program.name):
                    _signal_group(process, signal.SIGTERM)
                else:
                    keepers[program.name].cancel()  # it waits to be started again
            waiting = [keepers[program.name] for program in programs]
            await asyncio.wait(waiting, timeout=max(program.stop_timeout for program in programs))
            for program in programs:
                if process := self._running.get(program.name):
                    self._say(f"{program.name} does not end and is killed", SELF)
                    _signal_group(process, signal.SIGKILL)
            await asyncio.wait(waiting)

    async def _keep_running(self, program: Program) -> None:
        backoff, loop = Backoff(_FIRST_DELAY, _LAST_DELAY), asyncio.get_running_loop()
        failed_starts, was_ready = 0, False
        while True:
            began = loop.time()
            status, ready, last_lines = await self._run_once(program)
            if self._stopping:
                return
            if program.name in self._killed:
                self._killed.remove(program.name)
            elif program.grouped:
                self._end_group(program)
            was_ready, failed_starts = was_ready or ready, 0 if ready else failed_starts + 1
            told = f"{program.name} {_describe_end(status)}"
            if failed_starts == MAX_FAILED_STARTS or (status > 0 and not was_ready):
                again = f", {failed_starts} times in a row" if failed_starts > 1 else ""
                said = [f"its last lines:\n{last_lines}"] if last_lines and failed_starts > 1 else []
                return self._finish(End(_exit_status(status), [f"{told}{again}; the others are stopped", *said]))
            if loop.time() - began > _STABLE:
                backoff.reset()
            self._say(f"{told} and is started again", SELF)
            self._restarted.add(program.name)
            await asyncio.sleep(backoff.next())

    def _end_group(self, ended: Program) -> None:
        """Kills the others of the group that still run after ``GROUP_END_TIMEOUT``. Those that are not ready now are
        left alone: they have been started again, and are of the next group.
        """
        others = [
            (other.name, self._running[other.name])
            for other in self._programs
            if other.grouped and other.kind == ended.kind and other.name in self.ready
        ]

        def kill() -> None:
            for name, process in others:
                if process.returncode is None and name not in self._killed and not self._stopping:
                    self._killed.add(name)
                    self._say(f"{name} does not end although {ended.name} has, and is killed", SELF)
                    _signal_group(process, signal.SIGKILL)

        asyncio.get_running_loop().call_later(GROUP_END_TIMEOUT, kill)

    async def _run_once(self, program: Program) -> tuple[int, bool, str]:
        """Runs a program to its end. Returns its status, whether it was ready at any time, and its last lines."""
        try:
            process, output = await _start(program)
        except OSError as error:  # no memory, processes or descriptors: likely when something was killed for memory
            self._say(f"{program.name} cannot be started: {error}", SELF)
            return -signal.SIGKILL, False, ""
        self._running[program.name] = process
        lines: deque[str] = deque(maxlen=LAST_LINES)
        loop = asyncio.get_running_loop()
        if self._stopping:  # while it was being started, so it got no signal
            _signal_group(process, signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._print(program, output, lines))
                probing = tasks.create_task(self._probe(program, process.pid))
                status = await process.wait()
                _signal_group(process, signal.SIGKILL)  # those that it started, which may hold its ports
                probing.cancel()
                loop.call_later(_OUTPUT_TIMEOUT, reading.cancel)
        finally:
            was_ready = program.name in self.ready
            self.ready.discard(program.name)
            del self._running[program.name]
        return status, was_ready, "\n".join(lines)

    async def _print(self, program: Program, output: asyncio.StreamReader, lines: deque[str]) -> None:
        """Prints what a process writes, line by line, and keeps the last lines."""
        rest = b""
        while piece := await output.read(_PIECE):
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace").rstrip("\r")
                if text.startswith(PROGRESS_MARK):
                    self._on_progress(program.name, text.removeprefix(PROGRESS_MARK))
                    continue
                lines.append(text)
                if not self._is_repeated(program, text):
                    self._say(text, program.name)
        if rest:
            lines.append(rest.decode(errors="replace"))
            self._say(lines[-1], program.name)

    def _is_repeated(self, program: Program, text: str) -> bool:
        """Whether it is a warning of a process that starts, and another one of its kind gave the same: it is about the
        settings, the model or the machine, which are the same for all.
        """
        found = _WARNING.match(text)
        if found is None or program.name in self.ready:
            return False
        return self._warnings.setdefault((program.kind, text[found.end() :]), program.name) != program.name

    async def _probe(self, program: Program, group: int) -> None:
        """Waits until the program is ready, whose processes are in ``group``. Another program may have taken the
        port since it was chosen, and answers there until this one ends because of it.
        """
        began = asyncio.get_running_loop().time()
        await answers(*program.probe, program.host)
        while not listens(group, program.probe[0]):  # it was another program that answered
            await asyncio.sleep(PROBE_PERIOD)
            await answers(*program.probe, program.host)
        if program.name in self._restarted:
            self._say(f"{program.name} is ready again after {asyncio.get_running_loop().time() - began:.1f} s", SELF)
        self.ready.add(program.name)
        self._on_ready()


async def _start(program: Program) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
    """The process, in a session of its own so that a terminal's Ctrl-C does not reach it, and its output."""
    launcher = [sys.executable, "-S", str(Path(child.__file__)), str(os.getpid())]
    # A pipe of our own: the library's would make the process seem to run for as long as anything holds its output.
    read_end, write_end = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *launcher,
            program.module,
            *program.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **program.environment},
            start_new_session=True,
        )
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    output = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb")
    )
    return process, output


async def answers(port: int, path: str, host: str = LOCALHOST) -> None:
    """Returns once a path on this machine answers 200."""
    while await _status(port, path, host) != 200:  # noqa: ASYNC110 - the answer of another process
        await asyncio.sleep(PROBE_PERIOD)


async def _status(port: int, path: str, host: str) -> int:
    """The HTTP status of a path on this machine; 0 without an answer. No proxy is asked."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
                return int(words[1]) if len(words) > 1 else 0
            finally:
                writer.close()
    except (OSError, ValueError):  # TimeoutError is an OSError
        return 0


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal to a process and to those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    cause = " (by the system, if memory ran out)" if status == -signal.SIGKILL else ""
    return f"was killed with {_signal_name(-status)}{cause}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_status(status: int) -> int:
    """As shells report it; never 0, since the end was not asked for."""
    return 128 - status if status < 0 else status or 1
