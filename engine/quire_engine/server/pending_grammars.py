"""``PendingGrammars``: the requests whose grammars are being compiled. Everything here runs on the event loop."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

from quire_proto.errors import ErrorCode, QuireError, internal

from quire_engine.core.request import Request
from quire_engine.structured_output.compiler import GrammarCompiler
from quire_engine.structured_output.guidance import SizedGrammar

log = logging.getLogger(__name__)

GRAMMAR_TIMEOUT_SECONDS = 15.0
"""How long a request waits for its grammar. Compiling one takes at most a second or two; the rest is queueing."""

Ready = Callable[[Request, list[tuple[int, ...]]], None]
Failed = Callable[[Request, QuireError], None]


@dataclass(slots=True)
class _Waiting:
    request: Request
    timer: asyncio.TimerHandle
    cancelled: list[tuple[int, ...]] = field(default_factory=list)


class PendingGrammars:
    """The requests whose grammars are being compiled, by ``compiler``. For each one that is not withdrawn, calls either
    ``ready``, with the grammar in the request and the choices cancelled meanwhile, or ``failed``. Runs on the event
    loop.
    """

    def __init__(self, compiler: GrammarCompiler, ready: Ready, failed: Failed) -> None:
        self._compiler = compiler
        self._ready = ready
        self._failed = failed
        self._waiting: dict[str, _Waiting] = {}

    def compile(self, request: Request) -> "Future[SizedGrammar] | None":
        """Returns the future grammar of a request; None if it has none. Raises like ``GrammarCompiler.submit``."""
        structured = request.sampling.structured
        return None if structured is None else self._compiler.submit(structured, request.cache_salt)

    def start(self, request: Request, compiled: "Future[SizedGrammar]") -> None:
        """Adds a request that waits for ``compiled``. Calls back at once if that is done."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(GRAMMAR_TIMEOUT_SECONDS, self._time_out, request.request_id)
        self._waiting[request.request_id] = _Waiting(request, timer)
        if compiled.done():
            self._on_compiled(request.request_id, compiled)
        else:
            compiled.add_done_callback(lambda done: _on_loop(loop, self._on_compiled, request.request_id, done))

    def withdraw(self, key: str) -> Request | None:
        """Removes and returns a request. Returns None if it does not wait here."""
        waiting = self._pop(key)
        if waiting is None:
            return None
        self._release_grammar(waiting.request)
        return waiting.request

    def cancel(self, key: str, indexes: tuple[int, ...]) -> bool:
        """Records cancelled choices. Returns False if the request does not wait here."""
        if (waiting := self._waiting.get(key)) is None:
            return False
        waiting.cancelled.append(indexes)
        return True

    def _on_compiled(self, key: str, compiled: "Future[SizedGrammar]") -> None:
        waiting = self._pop(key)
        if waiting is None:
            return
        if (error := _error_of(compiled)) is not None:
            self._failed(waiting.request, error)
        else:
            self._ready(replace(waiting.request, grammar=compiled.result()), waiting.cancelled)

    def _time_out(self, key: str) -> None:
        if (waiting := self._pop(key)) is not None:
            self._release_grammar(waiting.request)
            message = "The engine has too many grammars to compile."
            self._failed(waiting.request, QuireError(ErrorCode.OVERLOADED, message, retry_after=1.0))

    def _release_grammar(self, request: Request) -> None:
        if request.sampling.structured is not None:
            self._compiler.withdraw(request.sampling.structured)

    def _pop(self, key: str) -> _Waiting | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting


def _on_loop(
    loop: asyncio.AbstractEventLoop,
    callback: Callable[[str, "Future[SizedGrammar]"], None],
    key: str,
    done: "Future[SizedGrammar]",
) -> None:
    with suppress(RuntimeError):  # the loop is closed, and the request with it
        loop.call_soon_threadsafe(callback, key, done)


def _error_of(compiled: "Future[SizedGrammar]") -> QuireError | None:
    if compiled.cancelled():
        return QuireError(ErrorCode.UNAVAILABLE, "The engine is shutting down.", retry_after=1.0)
    error = compiled.exception()
    if error is None or isinstance(error, QuireError):
        return error
    log.error("a grammar could not be compiled", exc_info=error)
    return internal()
