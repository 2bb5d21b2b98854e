"""Compiles what requests ask for: each grammar once, on threads of its own, within bounds. Knows no request."""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from queue import LifoQueue
from threading import Lock, RLock
from time import perf_counter
from typing import Protocol

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.structured_output import Structured

from quire_engine.core.step import Grammar
from quire_engine.structured_output.llguidance import (
    CompiledGrammar,
    Guidance,
    RejectedError,
    UnusableTokenizerError,
    refusal,
    to_llguidance,
)
from quire_engine.structured_output.sandbox import GrammarSandbox, SandboxLostError

log = logging.getLogger(__name__)

WORKERS = 2
MAX_PENDING = 256
# What is kept for requests to come, and what may be alive in all.
MAX_KEPT = 1024
MAX_KEPT_BYTES = 32 << 20
MAX_ALIVE_BYTES = 64 << 20


class CompileOutcome(StrEnum):
    """What became of a grammar that was asked for."""

    COMPILED = "compiled"
    KNOWN = "known"
    REFUSED = "refused"
    OVERLOADED = "overloaded"
    FAILED = "failed"


Observer = Callable[[CompileOutcome, float], None]


class Compiled(Grammar, Protocol):
    """A grammar whose size is known."""

    num_bytes: int


class GrammarBackend(Protocol):
    """Where grammars come from, such as ``ModelGrammars``."""

    def compile(self, structured: Structured) -> Compiled:
        """May take seconds, on any thread. Raises ``QuireError`` INVALID for what is no grammar."""
        ...

    def close(self) -> None:
        """Gives back what is held."""
        ...


class GrammarCompiler:
    """The grammars of one model, each compiled once. May be used from any thread.

    ``observer`` is told what became of each grammar that was asked for, and the seconds that compiling it took; it is
    called on any thread and must return quickly. ``max_alive_bytes`` of grammars may be in use at once, so much as an
    engine has to spare for clients by default.
    """

    def __init__(
        self, source: GrammarBackend, observer: Observer = lambda *_: None, *, max_alive_bytes: int | None = None
    ) -> None:
        self.observer = observer
        self._max_alive_bytes = max_alive_bytes
        self._source = source
        self._pool = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="grammars")
        self._lock = RLock()  # the end of a grammar may be noticed by a thread that holds it
        self._known: OrderedDict[Structured, Future[Compiled]] = OrderedDict()
        self._waiters: Counter[Structured] = Counter()
        self._pending = 0
        self._alive = 0

    def submit(self, structured: Structured) -> "Future[Compiled]":
        """The grammar, once it is compiled; equal ones share a future: who does not wait for it any more calls
        ``withdraw``. It fails with ``QuireError`` INVALID for what is no grammar. Raises ``QuireError`` OVERLOADED when
        too many are waited for or in use.
        """
        with self._lock:
            self._waiters[structured] += 1
            if (known := self._known.get(structured)) is not None:
                self._known.move_to_end(structured)
                if known.done():
                    del self._waiters[structured]
                self.observer(CompileOutcome.KNOWN, 0.0)
                return known
            max_alive = MAX_ALIVE_BYTES if self._max_alive_bytes is None else self._max_alive_bytes
            if self._pending >= MAX_PENDING or self._alive >= max_alive:
                del self._waiters[structured]
                self.observer(CompileOutcome.OVERLOADED, 0.0)
                raise QuireError(ErrorCode.OVERLOADED, "The engine has too many grammars at once.", retry_after=1.0)
            self._pending += 1
            future = self._known[structured] = self._pool.submit(self._work, structured)
        future.add_done_callback(lambda done: self._settle(structured, done))
        return future

    def withdraw(self, structured: Structured) -> None:
        """One who submitted this waits no more; what nobody waits for is not begun."""
        with self._lock:
            if structured not in self._waiters:
                return  # it has just been settled
            self._waiters[structured] -= 1
            if self._waiters[structured] <= 0 and (known := self._known.get(structured)) is not None:
                known.cancel()

    def close(self) -> None:
        """Compiles nothing any more; what is still waited for is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._source.close()

    def _work(self, structured: Structured) -> Compiled:
        begin = perf_counter()
        outcome, grammar, refused = CompileOutcome.FAILED, None, None
        try:
            grammar = self._source.compile(structured)
            outcome = CompileOutcome.COMPILED
        except QuireError as error:
            # Without the frames that it came through: it is kept, and they hold the whole grammar.
            refused = QuireError(error.code, error.message, param=error.param, retry_after=error.retry_after)
            outcome = CompileOutcome.REFUSED
        finally:
            self.observer(outcome, perf_counter() - begin)
        if refused is not None:
            raise refused
        assert grammar is not None
        self._watch(grammar, _weight(structured, grammar))
        return grammar

    def _watch(self, grammar: Compiled, weight: int) -> None:
        with self._lock:
            self._alive += weight
        weakref.finalize(grammar, self._release, weight)

    def _release(self, weight: int) -> None:
        with self._lock:
            self._alive -= weight

    def _settle(self, structured: Structured, done: "Future[Compiled]") -> None:
        with self._lock:
            self._pending -= 1
            self._waiters.pop(structured, None)
            if not _is_lasting(done):
                self._known.pop(structured, None)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        settled = [structured for structured, future in self._known.items() if future.done()]
        weights = [_weight(structured, _grammar(self._known[structured])) for structured in settled]
        kept = sum(weights)
        for index, (oldest, weight) in enumerate(zip(settled, weights, strict=True)):
            if len(settled) - index <= MAX_KEPT and kept <= MAX_KEPT_BYTES:
                return
            kept -= weight
            del self._known[oldest]


def _is_lasting(done: "Future[Compiled]") -> bool:
    """Whether asking again would give the same."""
    if done.cancelled():
        return False
    error = done.exception()
    return error is None or (isinstance(error, QuireError) and error.code is ErrorCode.INVALID)


def _grammar(settled: "Future[Compiled]") -> Compiled | None:
    return None if settled.cancelled() or settled.exception() is not None else settled.result()


def _weight(structured: Structured, grammar: Compiled | None) -> int:
    """Bytes of its text, of what the smallest grammar takes, and of what this one was measured to take."""
    return len(structured.text) + 1024 + (0 if grammar is None else grammar.num_bytes)


# The grammars of one model: said in the library's words, tried out, then compiled for the model's vocabulary.


TOKENIZER = "tokenizer.json"
ATTEMPTS = 2


class ModelGrammars:
    """Compiles for the model in ``folder``. The tokenizer is read, and a process started, when a grammar first asks for
    them. May be used from any thread; ``trials`` grammars can be tried at once.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int], *, trials: int = 2) -> None:
        self._path = folder / TOKENIZER
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._guidance: Guidance | UnusableTokenizerError | None = None
        self._lock = Lock()
        self._trials = [GrammarSandbox(self._path, vocab_size, self._eos_token_ids) for _ in range(trials)]
        self._idle: LifoQueue[GrammarSandbox] = LifoQueue()
        for trial in reversed(self._trials):
            self._idle.put(trial)

    def compile(self, structured: Structured) -> CompiledGrammar:
        """May take seconds. Raises ``QuireError`` INVALID for what is no grammar, needs too much, or cannot be had of
        this model, and OVERLOADED when there was no time to find that out, or no file, process or memory to be had.
        """
        definition = to_llguidance(structured)
        try:
            guidance = self._loaded(structured)
            num_bytes, definition = self._try(definition)
            grammar = guidance.compile(definition)
        except RejectedError as error:
            raise refusal(structured, str(error)) from None
        except (OSError, MemoryError) as error:  # the machine's, not the grammar's: another engine may do
            log.warning("a grammar could not be compiled: %s", error)
            message = "The engine cannot compile grammars now."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0) from None
        grammar.num_bytes = num_bytes
        return grammar

    def close(self) -> None:
        """Ends the processes."""
        for trial in self._trials:
            trial.close()

    def _try(self, definition: str) -> tuple[int, str]:
        """See ``GrammarSandbox.check``. Once more when the trial was lost; then it is to be asked for again later."""
        trial = self._idle.get()
        try:
            for _ in range(ATTEMPTS):
                with suppress(SandboxLostError):
                    return trial.check(definition)
        finally:
            self._idle.put(trial)
        raise QuireError(ErrorCode.OVERLOADED, "The grammar could not be compiled in time.", retry_after=1.0)

    def _loaded(self, structured: Structured) -> Guidance:
        with self._lock:
            if self._guidance is None:
                self._guidance = self._load()
        if isinstance(self._guidance, Guidance):
            return self._guidance
        raise _unavailable(structured)

    def _load(self) -> Guidance | UnusableTokenizerError:
        try:
            return Guidance.load(self._path, self._vocab_size, self._eos_token_ids)
        except UnusableTokenizerError as error:
            log.warning("there is no structured output with this model: %s", error)
            return error


def _unavailable(structured: Structured) -> QuireError:
    return invalid(structured.param, "This model takes no structured output, because its tokenizer cannot be used.")
