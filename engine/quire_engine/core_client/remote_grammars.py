"""``RemoteGrammars``: compiles grammars in the core's process, where their bitmasks are filled."""

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import finalize

from quire_engine.core.step import GrammarMatcher
from quire_engine.core_client.core_messages import CompileGrammar, FreeGrammar, LoadTokenizer, RemoteError, ToCore

Ask = Callable[[Callable[[Callable[[Any], None]], ToCore]], Any]


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
    """A ``GrammarBackend``. ``ask`` makes a message with a reply, sends it, and returns the reply. ``send`` may be
    called by a finalizer.
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
