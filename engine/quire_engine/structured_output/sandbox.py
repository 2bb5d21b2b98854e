"""``GrammarSandbox`` compiles grammars in a separate process, in which a grammar that takes all time, memory or stack
does no harm.

The library limits most of the costs of a grammar, but not all. With one more pattern compiling takes hours, or a chain
of rules overflows the stack, which would end the engine. Each definition is therefore compiled here first, at low
priority, under limits that the operating system enforces. The engine itself compiles only definitions that have passed.
"""

import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire_engine.structured_output.llguidance import Guidance, RejectedError, prepare

# Seconds of processor time for one definition. The system counts whole seconds, so a definition gets up to one more.
CPU_SECONDS = 1
MEMORY_BYTES = 256 << 20
# The memory that a compiled grammar may keep. A schema of a few thousand characters takes about 1 MiB.
MAX_GRAMMAR_BYTES = 16 << 20
# Less than the stack of the engine's threads, so that a grammar that is too deep fails here.
STACK_BYTES = 2 << 20
# Seconds to wait for an answer, and for the process to start. Only an overloaded machine needs this long.
ANSWER_TIMEOUT = 20.0
START_TIMEOUT = 60.0
_TOO_LARGE = "compiling it takes too much time or memory"
# The exit codes of a process whose grammar exceeds a limit: processor time, stack, memory.
RESOURCE_SIGNALS = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


class SandboxLostError(Exception):
    """The process ended, or did not answer in time, not necessarily because of the grammar."""


class GrammarSandbox:
    """The handle of the process, which starts with the first grammar and again after a grammar has ended it.
    Thread-safe; calls are serialised.
    """

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._arguments = [str(path), str(vocab_size), *map(str, eos_token_ids)]
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def check(self, definition: str) -> tuple[int, str]:
        """Returns the bytes that the compiled ``definition`` takes, and the definition to compile (EBNF as Lark).
        Raises ``RejectedError`` if it cannot be compiled within the limits, ``SandboxLostError`` if the process ended
        or timed out for another reason, and ``OSError`` if the process cannot be started.
        """
        with self._lock:
            process = self._ensure_started()
            with suppress(BrokenPipeError):
                _send_definition(process, definition)
            answer = _read_answer(process, ANSWER_TIMEOUT)
            if answer is None:
                raise self._failure(process)
        if answer["reason"] is not None:
            raise RejectedError(answer["reason"])
        return int(answer["bytes"]), str(answer["definition"] or definition)

    def close(self) -> None:
        """Ends the process, even while it works."""
        process = self._process
        if process is not None:
            process.kill()  # so that a thread that waits for its answer releases the lock
        with self._lock:
            self._stop()

    def _failure(self, process: "subprocess.Popen[str]") -> Exception:
        """Returns the error for a missing answer. The grammar is at fault if a resource limit has ended the process."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        exceeded_limit = process.returncode in RESOURCE_SIGNALS
        self._stop()
        return RejectedError(_TOO_LARGE) if exceeded_limit else SandboxLostError()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ensure_started(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self._stop()  # it was killed while idle: not the next grammar's fault
        if self._process is None:
            command = [sys.executable, "-m", __name__, *self._arguments]
            self._process = subprocess.Popen(  # noqa: S603 - our own module, with numbers and a path
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if _read_answer(self._process, START_TIMEOUT) is None:
                self._stop()
                raise ChildProcessError("the process that tries grammars out did not start")
        return self._process


def _read_answer(process: "subprocess.Popen[str]", timeout: float) -> dict[str, Any] | None:
    """Returns the next line that the process writes; None if it ends or does not answer within ``timeout`` seconds."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(1000 * timeout) else ""
    return json.loads(line) if line.endswith("\n") else None


def _send_definition(process: "subprocess.Popen[str]", definition: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(definition) + "\n")
    process.stdin.flush()


def main() -> None:
    """Runs the process: reads one definition per line and writes one answer per line until the input ends."""
    path, vocab_size, *eos_token_ids = sys.argv[1:]
    guidance = Guidance.load(Path(path), int(vocab_size), list(map(int, eos_token_ids)))
    os.nice(10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; here it would look like a grammar's fault
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(guidance,))
    worker.start()
    worker.join()


def _serve(guidance: Guidance) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + MEMORY_BYTES,) * 2)
    _write_answer(None)
    for line in sys.stdin:
        _limit_cpu_time(CPU_SECONDS)
        try:
            definition = prepare(json.loads(line))
            before = _resident_bytes()
            grammar = guidance.compile(definition)
        except (RejectedError, ValueError) as error:
            _write_answer(str(error))
        except MemoryError:
            _write_answer(_TOO_LARGE)
        else:
            size = max(0, _resident_bytes() - before)
            _write_answer(_TOO_LARGE if size > MAX_GRAMMAR_BYTES else None, size, definition)
            del grammar
        # If malloc kept freed memory, the next grammar would look too small.
        libc.malloc_trim(0)


def _write_answer(reason: str | None, num_bytes: int = 0, definition: str | None = None) -> None:
    sys.stdout.write(json.dumps({"reason": reason, "bytes": num_bytes, "definition": definition}) + "\n")
    sys.stdout.flush()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _limit_cpu_time(seconds: int) -> None:
    """Limits processor time from now on; at the limit the kernel kills the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
