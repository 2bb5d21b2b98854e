"""Compiles the grammars of requests. ``GrammarCompiler`` compiles each grammar once, on its own threads and within
limits. ``ModelGrammars`` is its backend: it translates a grammar for llguidance, tries it in a sandbox, and compiles it
for the model's vocabulary.
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from queue import LifoQueue
from threading import RLock
from time import perf_counter

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.structured_output import Structured

from quire_engine.structured_output.guidance import GrammarBackend, ModelGuidance, SizedGrammar
from quire_engine.structured_output.llguidance import (
    RejectedError,
    UnusableTokenizerError,
    import_llguidance,
    rejection,
    to_llguidance,
)
from quire_engine.structured_output.sandbox import GrammarSandbox, SandboxLostError
from quire_engine.structured_output.tenant_turns import Job, TenantTurns

log = logging.getLogger(__name__)
NUM_THREADS = 2
MAX_PENDING = 256
PENDING_SHARE, ALIVE_SHARE = 1 / 8, 1 / 2  # fractions of these that one tenant with a salt may have
# The limits of the cache, and of all grammars in use.
MAX_CACHED = 1024
MAX_CACHED_BYTES = 32 << 20
MAX_ALIVE_BYTES = 64 << 20
TOKENIZER = "tokenizer.json"
ATTEMPTS = 2


class CompileOutcome(StrEnum):
    """The outcome of a submitted grammar."""

    COMPILED = "compiled"
    KNOWN = "known"
    REFUSED = "refused"
    OVERLOADED = "overloaded"
    FAILED = "failed"


Observer = Callable[[CompileOutcome, float], None]


class GrammarCompiler:
    """The grammars of one model, each compiled once. Thread-safe.

    ``observer`` is called on any thread with the outcome of each submitted grammar and the seconds that compiling it
    took. It must return quickly. ``max_alive_bytes`` limits the grammars in use at once; None means
    ``MAX_ALIVE_BYTES``.
    """

    def __init__(
        self, backend: "ModelGrammars", observer: Observer = lambda *_: None, *, max_alive_bytes: int | None = None
    ) -> None:
        self.observer = observer
        self._max_alive_bytes = max_alive_bytes
        self._backend = backend
        self._turns = TenantTurns(NUM_THREADS, "grammars")
        self._lock = RLock()  # an RLock, because a grammar's finalizer may run on the thread that holds it
        self._cache: OrderedDict[Structured, Future[SizedGrammar]] = OrderedDict()
        self._waiters: Counter[Structured] = Counter()
        self._jobs: dict[Structured, Job] = {}
        self._num_pending: Counter[bytes] = Counter()
        self._alive_bytes: Counter[bytes] = Counter()

    def submit(self, structured: Structured, tenant: bytes = b"") -> "Future[SizedGrammar]":
        """Returns a future of the compiled grammar, which equal grammars share. Grammars are compiled in turns of their
        ``tenant``, a cache salt. The future fails with ``QuireError`` INVALID for an invalid grammar. Call ``withdraw``
        to stop waiting. Raises ``QuireError`` OVERLOADED if too many grammars are pending or in use, in total or for
        the tenant.
        """
        with self._lock:
            self._waiters[structured] += 1
            if (cached := self._cache.get(structured)) is not None:
                self._cache.move_to_end(structured)
                if cached.done():
                    del self._waiters[structured]
                elif (job := self._jobs.get(structured)) is not None:
                    self._turns.submit(tenant, job)  # its first tenant may have many jobs before it
                self.observer(CompileOutcome.KNOWN, 0.0)
                return cached
            if self._is_full(tenant):
                del self._waiters[structured]
                self.observer(CompileOutcome.OVERLOADED, 0.0)
                raise QuireError(ErrorCode.OVERLOADED, "The engine has too many grammars at once.", retry_after=1.0)
            self._num_pending[tenant] += 1
            job = self._jobs[structured] = Job(partial(self._compile, structured, tenant))
            future: Future[SizedGrammar] = job.future
            self._cache[structured] = future
            future.add_done_callback(lambda done: self._on_compiled(structured, tenant, done))
            self._turns.submit(tenant, job)
        return future

    def _is_full(self, tenant: bytes) -> bool:
        """Whether too many grammars are pending or in use, in total or for a tenant with a salt, which has a share."""
        max_alive = MAX_ALIVE_BYTES if self._max_alive_bytes is None else self._max_alive_bytes
        for counts, most, share in (
            (self._num_pending, MAX_PENDING, PENDING_SHARE),
            (self._alive_bytes, max_alive, ALIVE_SHARE),
        ):
            if counts.total() >= most or (tenant and counts[tenant] >= max(1, int(most * share))):
                return True
        return False

    def prepare(self) -> None:
        """Imports the grammar library on a thread. The engine starts without it, but the first request must not open
        its files: the process may have run out of descriptors by then.
        """
        self._turns.submit(b"", Job(import_llguidance))

    def withdraw(self, structured: Structured) -> None:
        """Undoes one ``submit``. A grammar without waiters is cancelled if its compilation has not started."""
        with self._lock:
            if structured not in self._waiters:
                return  # it has just been compiled
            self._waiters[structured] -= 1
            if self._waiters[structured] <= 0 and (cached := self._cache.get(structured)) is not None:
                cached.cancel()

    def close(self) -> None:
        """Cancels pending grammars and stops the threads."""
        self._turns.close()
        self._backend.close()

    def _compile(self, structured: Structured, tenant: bytes) -> SizedGrammar:
        begin = perf_counter()
        outcome, grammar, rejected = CompileOutcome.FAILED, None, None
        try:
            grammar = self._backend.compile(structured)
            outcome = CompileOutcome.COMPILED
        except QuireError as error:
            # Without its traceback: the error is cached, and its frames would keep the whole grammar.
            rejected = error.about(error.param)
            outcome = CompileOutcome.REFUSED
        finally:
            self.observer(outcome, perf_counter() - begin)
        if rejected is not None:
            raise rejected
        assert grammar is not None
        self._track_memory(grammar, tenant, _num_bytes(structured, grammar))
        return grammar

    def _track_memory(self, grammar: SizedGrammar, tenant: bytes, size: int) -> None:
        with self._lock:
            self._alive_bytes[tenant] += size
        weakref.finalize(grammar, self._release, tenant, size)

    def _release(self, tenant: bytes, size: int) -> None:
        with self._lock:
            _subtract(self._alive_bytes, tenant, size)

    def _on_compiled(self, structured: Structured, tenant: bytes, done: "Future[SizedGrammar]") -> None:
        with self._lock:
            _subtract(self._num_pending, tenant, 1)
            self._jobs.pop(structured, None)
            self._waiters.pop(structured, None)
            if not _is_cacheable(done):
                self._cache.pop(structured, None)
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        compiled = [structured for structured, future in self._cache.items() if future.done()]
        sizes = [_num_bytes(structured, _result_or_none(self._cache[structured])) for structured in compiled]
        cached_bytes = sum(sizes)
        for index, (oldest, size) in enumerate(zip(compiled, sizes, strict=True)):
            if len(compiled) - index <= MAX_CACHED and cached_bytes <= MAX_CACHED_BYTES:
                return
            cached_bytes -= size
            del self._cache[oldest]


def _subtract(counts: Counter[bytes], tenant: bytes, count: int) -> None:
    counts[tenant] -= count
    if not counts[tenant]:
        del counts[tenant]


def _is_cacheable(done: "Future[SizedGrammar]") -> bool:
    """Whether compiling again would give the same result."""
    if done.cancelled():
        return False
    error = done.exception()
    return error is None or (isinstance(error, QuireError) and error.code is ErrorCode.INVALID)


def _result_or_none(settled: "Future[SizedGrammar]") -> SizedGrammar | None:
    return None if settled.cancelled() or settled.exception() is not None else settled.result()


def _num_bytes(structured: Structured, grammar: SizedGrammar | None) -> int:
    """Returns bytes in memory: the text, the minimum that a grammar takes, and this one's measured size."""
    return len(structured.text) + 1024 + (0 if grammar is None else grammar.num_bytes)


class ModelGrammars:
    """Compiles grammars for the model in ``folder``, with ``backend`` or, without one, in this process. Reads the
    tokenizer and starts sandboxes with the first grammar. Thread-safe; ``num_sandboxes`` grammars can be tried at once.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Collection[int],
        backend: GrammarBackend | None = None,
        *,
        num_sandboxes: int = 2,
    ) -> None:
        path, ends = folder / TOKENIZER, sorted(set(eos_token_ids))
        self.backend: GrammarBackend = ModelGuidance(path, vocab_size, ends) if backend is None else backend
        self._sandboxes = [GrammarSandbox(path, vocab_size, ends) for _ in range(num_sandboxes)]
        self._idle_sandboxes: LifoQueue[GrammarSandbox] = LifoQueue()
        for sandbox in reversed(self._sandboxes):
            self._idle_sandboxes.put(sandbox)

    def compile(self, structured: Structured) -> SizedGrammar:
        """Compiles a grammar, which may take seconds. Raises ``QuireError`` INVALID if the grammar is invalid, needs
        too much time or memory, or is not supported with this model. Raises OVERLOADED if the sandbox timed out, or if
        a file, process or memory was not available.
        """
        try:
            definition = to_llguidance(structured)
            self.backend.load()
            num_bytes, definition = self._check_in_sandbox(definition)
            grammar = self.backend.compile(definition)
        except UnusableTokenizerError:
            raise _unavailable(structured) from None
        except RejectedError as error:
            raise rejection(structured, str(error)) from None
        except (OSError, MemoryError) as error:  # the machine's fault, not the grammar's: another engine may succeed
            log.warning("a grammar could not be compiled: %s", error)
            message = "The engine cannot compile grammars now."
            raise QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0) from None
        grammar.num_bytes = num_bytes
        return grammar

    def close(self) -> None:
        """Ends the sandbox processes."""
        for sandbox in self._sandboxes:
            sandbox.close()

    def _check_in_sandbox(self, definition: str) -> tuple[int, str]:
        """See ``GrammarSandbox.check``. Tries again if the sandbox was lost. Raises ``QuireError`` OVERLOADED after
        ``ATTEMPTS`` losses.
        """
        sandbox = self._idle_sandboxes.get()
        try:
            for _ in range(ATTEMPTS):
                with suppress(SandboxLostError):
                    return sandbox.check(definition)
        finally:
            self._idle_sandboxes.put(sandbox)
        raise QuireError(ErrorCode.OVERLOADED, "The grammar could not be compiled in time.", retry_after=1.0)


def _unavailable(structured: Structured) -> QuireError:
    return invalid(structured.param, "This model takes no structured output, because its tokenizer cannot be used.")
