"""The process of an engine core: loads the model, runs a ``CoreThread``, and ends with the server that started it.

Started as ``python -m quire_engine.core_client.core_main LINK PARENT``, with the descriptor of an open socket and the
process id of the server. vLLM's ``EngineCoreProc`` does the same.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from threading import Lock, Thread, Timer
from typing import Any

from quire_proto.logs import set_up_logging

from quire_engine.config import EngineConfig
from quire_engine.core.engine_core import EngineCoreOutputs
from quire_engine.core.executor import ExecutorError
from quire_engine.core.startup import StartupTimer, print_progress
from quire_engine.core_client.client import CoreRunner, CoreStats, LoadedCore
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
from quire_engine.core_client.loading import load_core
from quire_engine.errors import ModelError
from quire_engine.executor.child_process import kill_with_parent
from quire_engine.executor.rank_processes import describe_error
from quire_engine.structured_output.compiler import NUM_THREADS
from quire_engine.structured_output.guidance import GrammarBackend, SizedGrammar

log = logging.getLogger(__name__)

LAST_MESSAGE_SECONDS = 2.0


def main() -> None:
    """Runs the core until the server closes the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    link, parent = map(int, sys.argv[1:])
    kill_with_parent(parent)
    EngineCoreProc(socket.socket(fileno=link)).run()


class EngineCoreProc:
    """The core's end of ``link``. Handles messages on the main thread. The core has a thread of its own, and compiling
    grammars and reading adapters have others.
    """

    def __init__(self, link: socket.socket) -> None:
        self._grammars: dict[int, SizedGrammar] = {}
        codecs = make_codecs(Codec(not_sent, self._grammars.__getitem__), self._codec_of_replies)
        self._link = Link(link, codecs, FromCore, ToCore)
        self._sending = Lock()
        self._pool = ThreadPoolExecutor(NUM_THREADS + 1, "calls")

    def run(self) -> None:
        """Loads the model and runs its core until the link ends."""
        messages = self._messages()
        start = next(messages)
        assert isinstance(start, Start), "it comes first"
        config = EngineConfig.model_validate(start.config)
        set_up_logging(config.log_level.upper(), config.log_format)
        print_progress()
        startup = StartupTimer(start.started)
        try:
            core = load_core(config, startup, self._exit_on_loss)
        except ModelError as error:
            self._send(Ended(str(error)))
            return
        startup.end()
        with closing(core.runner):
            self._send(Ready(core.description.SerializeToString(), startup.phases, core.runner.stats))
            Thread(target=self._report, args=(core.runner,), name="status", daemon=True).start()
            sender = _Sender(self._send, core.runner.stats, is_traced=start.is_traced)
            for message in messages:
                if isinstance(message, Run):
                    sender.is_running = True
                    core.runner.start(sender)
                    _forward_signals(sender)
                else:
                    self._handle(core, message)
            if sender.is_running:  # the server was killed: end as it did, without a word to other nodes
                os._exit(1)

    def _messages(self) -> Iterator[ToCore]:
        with suppress(ConnectionError):  # the server was killed before it had read everything
            while (messages := self._link.receive()) is not None:
                yield from messages

    def _handle(self, core: LoadedCore, message: ToCore) -> None:
        backend = core.grammars.backend
        match message:
            case CheckLoRA(lora, reply):
                self._pool.submit(_answer, reply, partial(core.runner.check_lora, lora))
            case LoadTokenizer(reply):
                self._pool.submit(_answer, reply, backend.load)
            case CompileGrammar(grammar_id, definition, reply):
                self._pool.submit(_answer, reply, partial(self._compile, backend, grammar_id, definition))
            case FreeGrammar(grammar_id):
                del self._grammars[grammar_id]
            case Leave():
                core.runner.leave()
            case Start() | Run():
                raise AssertionError("it comes once")
            case _:
                core.runner.send(message)

    def _compile(self, backend: GrammarBackend, grammar_id: int, definition: str) -> None:
        self._grammars[grammar_id] = backend.compile(definition)

    def _codec_of_replies(self, arguments: Sequence[Codec]) -> Codec:
        """Returns the codec of a message's ``reply``: a function that sends its values with the number of the call."""

        def make(call_id: int) -> Callable[..., None]:
            def reply(*values: Any) -> None:
                encoded = [codec.encode(value) for codec, value in zip(arguments, values, strict=True)]
                self._send(Reply(call_id, encoded))

            return reply

        return Codec(not_sent, make)

    def _send(self, message: FromCore) -> None:
        """Sends a message. Waits while the server reads nothing. Thread-safe."""
        data = self._link.to_bytes(message)
        with self._sending, suppress(OSError):  # the server is gone, and this process ends
            self._link.socket.sendall(data)

    def _report(self, core: CoreRunner) -> None:
        while True:
            time.sleep(STATUS_SECONDS)
            self._send(Status(core.seconds_since_progress, core.stats.weights, core.stats.data_parallel))

    def _exit_on_loss(self, sentence: str) -> None:
        """Ends this process because a rank is lost: a step that waits for it cannot return."""
        watchdog = Timer(LAST_MESSAGE_SECONDS, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
        self._send(Ended(sentence))
        logging.shutdown()
        os._exit(1)


class _Sender:
    """Sends what the core publishes. Implements ``CoreListener``. Without ``is_traced`` it leaves out the names of a
    step's requests, which only spans need. ``is_running`` is set while the core runs.
    """

    def __init__(self, send: Callable[[FromCore], None], stats: CoreStats, *, is_traced: bool) -> None:
        self._send = send
        self._stats = stats
        self._is_traced = is_traced
        self.is_running = False

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """See ``CoreListener.on_outputs``."""
        if not self._is_traced:
            outputs.trace.request_ids = []
        self._send(Published(outputs, self._stats.scheduler))

    def on_leaving(self) -> None:
        """See ``CoreListener.on_leaving``."""
        self._send(Leaving())

    def on_end(self, failure: BaseException | None) -> None:
        """See ``CoreListener.on_end``. The text of an ``ExecutorError`` may be a sentence that says what is lost."""
        self.is_running = False
        reason = None if failure is None else str(failure)
        if failure is not None and not (isinstance(failure, ExecutorError) and str(failure).endswith(".")):
            log.error("the engine core has failed", exc_info=failure)
            reason = f"The engine core has failed: {describe_error(failure)}."
        self._send(Ended(reason))


def _forward_signals(sender: _Sender) -> None:
    """Lets the server drain the engine and end it, as a signal to the server does. A node that is stopping sends one to
    the process of rank 0. The handler may interrupt a ``send``, so that it needs a thread of its own.
    """
    signal.signal(signal.SIGTERM, lambda *_: Thread(target=sender.on_leaving, daemon=True).start())


def _answer(reply: Callable[[Any], None], call: Callable[[], object]) -> None:
    """Replies with the result of a call, or with its error."""
    try:
        result = call()
    except Exception as error:
        answer = RemoteError.of(error)
        if not answer.kind:
            log.exception("a call of the server has failed")
        reply(answer)
    else:
        reply(result)


if __name__ == "__main__":
    main()
