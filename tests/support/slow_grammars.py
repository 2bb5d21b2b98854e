"""Grammars whose compilation a test releases."""

from collections import Counter
from threading import Event, Lock

from quire_engine.core.step import GrammarMatcher
from quire_engine.structured_output.compiler import CompileOutcome, GrammarCompiler
from quire_proto.errors import invalid
from quire_proto.structured_output import Structured, StructuredKind

WAITING = 10.0


class EmptyGrammar:
    """Tells what it was made from."""

    def __init__(self, structured: Structured, num_bytes: int) -> None:
        self.structured = structured
        self.num_bytes = num_bytes

    def new_matcher(self) -> GrammarMatcher:
        raise NotImplementedError


class SlowSource:
    """Compiles one grammar after another only after ``release``; a text that begins with ``bad`` is refused, one that
    begins with ``broken`` fails.
    """

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.closed = False
        self.num_bytes = 0
        self._gate = Event()
        self._lock = Lock()

    def compile(self, structured: Structured) -> EmptyGrammar:
        assert self._gate.wait(WAITING), "nobody released the grammars"
        with self._lock:
            self.compiled[structured.text] += 1
        if structured.text.startswith("bad"):
            raise invalid(structured.param, "It is bad.")
        if structured.text.startswith("broken"):
            raise RuntimeError("a failure inside")
        return EmptyGrammar(structured, self.num_bytes)

    def release(self) -> None:
        self._gate.set()

    def hold(self) -> None:
        self._gate.clear()

    def close(self) -> None:
        self.closed = True
        self.release()


class Watched:
    """A compiler, its source, and what became of each grammar."""

    def __init__(self) -> None:
        self.source = SlowSource()
        self.outcomes: list[CompileOutcome] = []
        self.compiler = GrammarCompiler(self.source, lambda outcome, _: self.outcomes.append(outcome))


def regex(text: str) -> Structured:
    return Structured(StructuredKind.REGEX, text)
