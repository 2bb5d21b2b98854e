"""The grammars of one model: said in the library's words, tried out, then compiled for the model's vocabulary."""

import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from queue import LifoQueue
from threading import Lock

from quire_proto.errors import ErrorCode, QuireError, invalid
from quire_proto.structured import Structured

from quire_engine.structured.definition import refusal, to_llguidance
from quire_engine.structured.guidance import CompiledGrammar, Guidance, RejectedError, UnusableTokenizerError
from quire_engine.structured.trial import GrammarSandbox, SandboxLostError

log = logging.getLogger(__name__)

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
