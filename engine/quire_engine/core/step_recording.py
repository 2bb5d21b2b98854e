"""Recordings of steps: the scheduler output, the sampled tokens and the duration of each step, for a replay elsewhere.

A recording is one line of JSON per step, after a line about the engine, compressed with gzip. It contains prompts and
outputs, so only its owner may read the file.
"""

import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from time import monotonic
from typing import Any, BinaryIO

from quire_proto import __version__
from quire_proto.errors import QuireError

from quire_engine.core.block_pool import KVCacheConfig, KVCacheGroup, StateCacheConfig
from quire_engine.core.step import ModelOutput, SchedulerOutput
from quire_engine.core.step_plain import step_from_plain, step_to_plain

log = logging.getLogger(__name__)

FORMAT = 2
_MOST_WAITING = 256  # steps
_FLUSH_SECONDS = 1.0  # a killed engine loses at most the last second
_END_SECONDS = 10.0


class RecordingError(Exception):
    """A recording that cannot be read. The text is one sentence."""


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """The engine whose steps a recording has."""

    model: str
    vocab_size: int
    capacity: KVCacheConfig


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of a recording: the ``token_ids`` of its draws, how many draws and chunks ``failed``, and its ``seconds``
    on the engine's clock. ``rows_with_grammar`` are new rows whose grammar is not in the file.
    """

    scheduler_output: SchedulerOutput
    token_ids: list[int]
    failed: int
    seconds: float
    rows_with_grammar: frozenset[int] = frozenset()


class StepRecorder:
    """Writes steps to the new file ``path`` on its own thread. The recording ends when the file has ``max_bytes``, or
    when the disk is so slow that steps would have to wait. Raises ``OSError`` if the file exists or cannot be created.
    """

    def __init__(self, path: Path, engine: RecordedEngine, max_bytes: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._path, self._max_bytes = path, max_bytes
        self._steps: Queue[RecordedStep | None] = Queue(_MOST_WAITING)
        self._is_over = False
        self._thread = Thread(target=self._write, args=(engine,), name="step-recorder", daemon=True)
        self._thread.start()

    def record(self, scheduler_output: SchedulerOutput, model_output: ModelOutput, seconds: float) -> None:
        """Adds a step. Returns at once."""
        if self._is_over:
            return
        failed = len(model_output.errors) + len(model_output.draw_errors)
        try:
            self._steps.put_nowait(RecordedStep(scheduler_output, model_output.token_ids, failed, seconds))
        except Full:
            self._end("steps come faster than they can be written")

    def close(self) -> None:
        """Closes the file after all recorded steps were written. Waits for a slow disk for ``_END_SECONDS``."""
        self._is_over = True
        with suppress(Full):
            self._steps.put(None, timeout=_END_SECONDS)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            log.warning("the last steps are missing in %s: the disk is too slow", self._path)

    def _end(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            log.warning("no more steps are recorded in %s: %s", self._path, reason)

    def _write(self, engine: RecordedEngine) -> None:
        try:
            with self._file, gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=1) as lines:
                head = {"quire_steps": FORMAT, "version": __version__, "engine": asdict(engine)}
                _write_line(lines, head)
                self._write_steps(lines)
        except Exception as error:  # noqa: BLE001 - a failed recording must not stop the engine
            self._end(str(error) or type(error).__name__)
        finally:
            self._is_over = True
            while not self._steps.empty():  # ``close`` may wait for a free place
                self._steps.get()

    def _write_steps(self, lines: gzip.GzipFile) -> None:
        flushed = monotonic()
        while self._file.tell() < self._max_bytes:
            if monotonic() - flushed >= _FLUSH_SECONDS:
                lines.flush()
                flushed = monotonic()
            try:
                step = self._steps.get(timeout=_FLUSH_SECONDS)
            except Empty:
                continue
            if step is None:
                return
            _write_line(lines, _recorded_to_plain(step))
        self._end(f"it has {self._max_bytes} bytes")


def read_steps(path: Path) -> tuple[RecordedEngine, Iterator[RecordedStep]]:
    """Returns the engine of a recording and an iterator that reads its steps on demand. If the engine was killed, the
    steps end where the file was cut off. Raises ``RecordingError``, now or while iterating.
    """
    lines = _read_lines(path)
    head = next(lines, {})
    if head.get("quire_steps") != FORMAT:
        raise RecordingError(f"{path} does not hold steps of this version.")
    try:
        plain = head["engine"]
        groups = tuple(KVCacheGroup(**group) for group in plain["capacity"].pop("groups"))
        states = plain["capacity"].pop("states", None)
        states = None if states is None else StateCacheConfig(**states)
        capacity = KVCacheConfig(**plain["capacity"], groups=groups, states=states)
        engine = RecordedEngine(plain["model"], plain["vocab_size"], capacity)
    except (KeyError, TypeError) as error:
        raise RecordingError(f"{path} does not say what engine it is of: {error}.") from error
    return engine, _read_steps(path, lines)


def _read_steps(path: Path, lines: Iterator[dict[str, Any]]) -> Iterator[RecordedStep]:
    for number, line in enumerate(lines, 2):
        try:
            yield _recorded_from_plain(line)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError, QuireError) as error:
            raise RecordingError(f"Line {number} of {path} does not hold a step: {error!r}.") from error


def _write_line(lines: BinaryIO | gzip.GzipFile, value: object) -> None:
    lines.write(json.dumps(value, separators=(",", ":"), default=list).encode() + b"\n")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") as lines:
            for line in lines:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise RecordingError(f"{path} does not hold steps.")
                yield value
    except EOFError:
        return  # the writer was killed
    except (OSError, ValueError, zlib.error) as error:
        raise RecordingError(f"{path} cannot be read: {error}.") from error


def _recorded_to_plain(step: RecordedStep) -> dict[str, Any]:
    made = {"token_ids": step.token_ids, "failed": step.failed}
    return {
        **step_to_plain(step.scheduler_output),
        "seconds": round(step.seconds, 6),
        **{name: value for name, value in made.items() if value},
    }


def _recorded_from_plain(plain: Mapping[str, Any]) -> RecordedStep:
    output, new = step_from_plain(plain), plain.get("new", ())
    held = [each["row"] for each in new if any(request["has_grammar"] for request in each["sample_requests"])]
    return RecordedStep(output, plain.get("token_ids", []), plain.get("failed", 0), plain["seconds"], frozenset(held))
