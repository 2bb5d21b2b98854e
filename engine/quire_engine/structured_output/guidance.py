"""Where grammars are compiled for the steps. ``ModelGuidance`` does it in this process, with the model's tokenizer. A
server whose core runs in a process of its own has them compiled there.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Protocol

from quire_engine.core.step import Grammar
from quire_engine.structured_output.llguidance import Guidance, UnusableTokenizerError

log = logging.getLogger(__name__)


class SizedGrammar(Grammar, Protocol):
    """A compiled grammar. ``num_bytes`` is its size in memory."""

    num_bytes: int


class GrammarBackend(Protocol):
    """Compiles definitions that the sandbox has tried. Thread-safe."""

    def load(self) -> None:
        """Reads the model's tokenizer, the first time. Raises ``UnusableTokenizerError``, or ``OSError`` if it cannot
        be read now.
        """
        ...

    def compile(self, definition: str) -> SizedGrammar:
        """Compiles a definition, with ``num_bytes`` 0. Raises ``RejectedError``, and like ``load``."""
        ...


class ModelGuidance:
    """A ``GrammarBackend`` in this process. ``path`` is the model's ``tokenizer.json``."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._guidance: Guidance | UnusableTokenizerError | None = None
        self._lock = Lock()

    def load(self) -> None:
        """See ``GrammarBackend.load``."""
        self._load()

    def compile(self, definition: str) -> SizedGrammar:
        """See ``GrammarBackend.compile``."""
        return self._load().compile(definition)

    def _load(self) -> Guidance:
        with self._lock:
            if self._guidance is None:
                self._guidance = self._read()
        if isinstance(self._guidance, Guidance):
            return self._guidance
        raise UnusableTokenizerError(*self._guidance.args)

    def _read(self) -> Guidance | UnusableTokenizerError:
        try:
            return Guidance.load(self._path, self._vocab_size, self._eos_token_ids)
        except UnusableTokenizerError as error:
            log.warning("structured output is not available with this model: %s", error)
            return error
