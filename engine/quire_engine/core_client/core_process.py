"""``CoreProcess``: runs an engine core in a process of its own, and speaks with it over a private socket."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from itertools import count
from operator import attrgetter
from threading import Event, Thread
from typing import Any
from weakref import finalize

from quire.v1 import engine_pb2 as pb

from quire_engine.checkpoint.gguf_tokenizer import tokenizer_folder_if_any
from quire_engine.config import EngineConfig
from quire_engine.core.engine_core import Command
from quire_engine.core.lora import LoRARequest
from quire_engine.core.startup import StartupTimer, process_start
from quire_engine.core.step import GrammarMatcher
from quire_engine.core_client.client import CoreListener, CoreStats, EngineDeadError, LoadedCore
from quire_engine.core_client.codec import Codec
from quire_engine.core_client.core_messages import (
    STATUS_SECONDS,
    CheckLoRA,
    CompileGrammar,
    Ended,
    FreeGrammar,
    FromCore,
    Leave,
    Leaving,
    Link,
    LoadTokenizer,
    Published,
    Ready,
    RemoteError,
    Reply,
    Run,
    Start,
    Status,
    ToCore,
    make_codecs,
    not_sent,
)
from quire_engine.core_client.loop_link import LoopLink
from quire_engine.errors import ModelError
from quire_engine.executor.child_process import ChildProcess
from quire_engine.structured_output.compiler import ModelGrammars

MODULE = "quire_engine.core_client.core_main"
CLOSE_SECONDS = 5.0
Ask = Callable[[Callable[[Callable[[Any], None]], ToCore]], Any]


def load_core_process(config: EngineConfig, startup: StartupTimer, *, is_traced: bool) -> LoadedCore:
    """Loads the model into a process of its own. ``is_traced`` says whether spans of steps are exported. Raises
    ``ModelError``.
    """
    process = CoreProcess()
    try:
        ready = process.load(Start(config.model_dump(mode="json"), process_start(), is_traced))
    except BaseException:
        process.kill()
        raise
    startup.continue_after(ready.phases)
    description = pb.DescribeResponse.FromString(ready.description)
    folder = tokenizer_folder_if_any(config.model)
    grammars = ModelGrammars(folder, description.vocab_size, description.eos_token_ids, process.grammars)
    return LoadedCore(process, description, grammars)


class CoreProcess:
    """Runs a core in a child process. Implements ``CoreRunner``; ``start`` needs a running event loop."""

    def __init__(self) -> None:
        self._process = ChildProcess(MODULE)
        codecs = make_codecs(Codec(attrgetter("grammar_id"), not_sent), self._codec_of_replies)
        self._link = LoopLink(Link(self._process.link, codecs, ToCore, FromCore), self._on_message, self._on_link_end)
        self._calls: dict[int, Callable[[Sequence[Any]], None]] = {}
        self._call_ids = count()
        self._asked: set[Future[Any]] = set()
        self._heartbeat = _Heartbeat()
        self._ready: Ready | None = None
        self._listener: CoreListener | None = None
        self._ended = Event()
        self.grammars = RemoteGrammars(self._ask, self._link.send_later)

    @property
    def stats(self) -> CoreStats:
        """See ``CoreRunner.stats``."""
        assert self._ready is not None, "load comes first"
        return self._ready.stats

    @property
    def is_sleeping(self) -> bool:
        """See ``EngineCoreClient.is_sleeping``."""
        return self._heartbeat.is_sleeping

    @property
    def seconds_since_progress(self) -> float:
        """See ``EngineCoreClient.seconds_since_progress``. Grows too while the process is silent."""
        return self._heartbeat.seconds

    def load(self, start: Start) -> Ready:
        """Loads the model. Raises ``ModelError``."""
        self._link.send(start)
        while self._ready is None:
            self._link.receive()
        return self._ready

    def start(self, listener: CoreListener) -> None:
        """See ``CoreRunner.start``."""
        self._listener = listener
        self._heartbeat.hear()
        self._link.attach()
        self._link.send(Run())

    def send(self, command: Command) -> None:
        """See ``EngineCoreClient.send``."""
        self._link.send(command)

    def check_lora(self, lora: LoRARequest) -> LoRARequest:
        """See ``CoreRunner.check_lora``."""
        checked: LoRARequest | RemoteError = self._ask(lambda reply: CheckLoRA(lora, reply))
        if isinstance(checked, RemoteError):
            raise checked.to_exception()
        return checked

    def leave(self) -> None:
        """See ``CoreRunner.leave``."""
        self._link.send(Leave())

    def join(self, timeout: float) -> None:
        """See ``CoreRunner.join``."""
        self._ended.wait(timeout)

    def close(self) -> None:
        """Ends the process, by force if it takes longer than ``CLOSE_SECONDS``."""
        self._process.close_link()
        self._process.wait_or_kill(time.monotonic() + CLOSE_SECONDS)

    def kill(self) -> None:
        """Ends the process while it loads the model, and reads nothing."""
        self._process.kill()
        self.close()

    def _codec_of_replies(self, arguments: Sequence[Codec]) -> Codec:
        """Returns the codec of a message's ``reply``: it stays here, and the message has its number."""

        def keep(reply: Callable[..., None]) -> int:
            call_id = next(self._call_ids)
            self._calls[call_id] = lambda values: reply(
                *[codec.decode(value) for codec, value in zip(arguments, values, strict=True)]
            )
            return call_id

        return Codec(keep, not_sent)

    def _ask(self, make: Callable[[Callable[[Any], None]], ToCore]) -> Any:
        """Sends the message that ``make`` makes of a ``reply``, and waits for the reply: on a thread that is not the
        event loop's, or before ``start``. Raises ``EngineDeadError``.
        """
        answer: Future[Any] = Future()
        self._asked.add(answer)
        try:
            self._link.send(make(answer.set_result))
            if self._ended.is_set():
                raise EngineDeadError("The engine core has ended.")
            while not (self._link.is_attached or answer.done()):
                self._link.receive()
            return answer.result()
        finally:
            self._asked.discard(answer)

    def _on_message(self, message: FromCore) -> None:
        self._heartbeat.hear()
        match message:
            case Published(outputs, stats):
                self._heartbeat.reported = 0.0
                self._heartbeat.is_sleeping = outputs.load.is_sleeping
                _update(self.stats.scheduler, stats)
                self._started.on_outputs(outputs)
            case Reply(call_id, values):
                self._calls.pop(call_id)(values)
            case Status(seconds, weights, data_parallel):
                self._heartbeat.reported = seconds
                _update(self.stats.weights, weights)
                _update(self.stats.data_parallel, data_parallel)
            case Ready():
                self._ready = message
            case Leaving():
                self._started.on_leaving()
            case Ended(reason):
                self._end(reason)

    def _on_link_end(self) -> None:
        """Finds out why the process has ended, which may take a moment."""
        if self._listener is None:
            self._end(self._exit_reason())
        elif not self._ended.is_set():
            Thread(target=lambda: self._end(self._exit_reason()), name="core-exit", daemon=True).start()

    def _exit_reason(self) -> str:
        status = self._process.exit_status()
        return f"The engine core (process {self._process.pid}) {status}, and the engine cannot go on without it."

    def _end(self, reason: str | None) -> None:
        """Handles the end of the core. Raises ``ModelError`` while the model is loaded."""
        if self._ended.is_set():
            return
        self._ended.set()
        failure = None if reason is None else EngineDeadError(reason)
        for answer in list(self._asked):
            if not answer.done():
                answer.set_exception(failure or EngineDeadError("The engine core has ended."))
        if self._listener is not None:
            self._listener.on_end(failure)
        elif reason is not None:
            raise ModelError(reason)

    @property
    def _started(self) -> CoreListener:
        assert self._listener is not None, "start comes first"
        return self._listener


class _Heartbeat:
    """When the core's process was heard last, and the seconds since progress that it ``reported`` last."""

    def __init__(self) -> None:
        self.is_sleeping = False
        self.reported = 0.0
        self._heard = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since progress, as reported, plus those for which a report is overdue."""
        silent = time.monotonic() - self._heard
        return self.reported + max(0.0, silent - 2 * STATUS_SECONDS)

    def hear(self) -> None:
        """Notes a message."""
        self._heard = time.monotonic()


class RemoteGrammar:
    """A grammar in the core's process. Implements ``SizedGrammar``."""

    __slots__ = ("__weakref__", "grammar_id", "num_bytes")

    def __init__(self, grammar_id: int) -> None:
        self.grammar_id = grammar_id
        self.num_bytes = 0

    def new_matcher(self) -> GrammarMatcher:
        """See ``Grammar``."""
        raise AssertionError("the core's process fills the bitmasks")


class RemoteGrammars:
    """Compiles grammars in the core's process, which fills their bitmasks. Implements ``GrammarBackend``. ``ask`` makes
    a message with a reply, sends it, and returns the reply. ``send`` may be called by a finalizer.
    """

    def __init__(self, ask: Ask, send: Callable[[FreeGrammar], None]) -> None:
        self._ask = ask
        self._send = send
        self._ids = count()
        self._is_loaded = False

    def load(self) -> None:
        """See ``GrammarBackend.load``."""
        if not self._is_loaded:
            _raise(self._ask(LoadTokenizer))
            self._is_loaded = True

    def compile(self, definition: str) -> RemoteGrammar:
        """See ``GrammarBackend.compile``."""
        grammar = RemoteGrammar(next(self._ids))
        _raise(self._ask(lambda reply: CompileGrammar(grammar.grammar_id, definition, reply)))
        finalize(grammar, self._send, FreeGrammar(grammar.grammar_id)).atexit = False
        return grammar


def _raise(error: RemoteError | None) -> None:
    if error is not None:
        raise error.to_exception()


def _update(target: Any, source: Any) -> None:
    """Copies the fields of ``source`` to ``target``, which others hold. Both are None, or of one dataclass."""
    if target is not None:
        for each in fields(target):
            setattr(target, each.name, getattr(source, each.name))
