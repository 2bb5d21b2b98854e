"""llguidance behind the engine's ``Grammar`` and ``Matcher``: a vocabulary, compiled grammars, places in them.

Knows nothing of requests. What the library can be made to do is bounded twice: by its own limits on each step, and by
the processor time that one output may use up, because the limits count what is built and not what is tried.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import thread_time
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire_engine.grammar import GrammarError
from quire_engine.structured.definition import sentence

T = TypeVar("T")

MAX_TOKEN_ID = 1 << 31

# A tenth of the library's own limit on the work of one step: an ambiguous grammar ends sooner, and no other notices.
STEP_MAX_ITEMS = 5_000
# Seconds of processor time that the outputs of a grammar may use together: at first, and for each of their tokens. JSON
# needs a tenth of it. So a grammar that is too slow to follow costs others a third of a second, however many outputs it
# is for.
BUDGET_SECONDS = 0.3
BUDGET_SECONDS_PER_TOKEN = 0.001
# Seconds after which a matcher is made anew from its tokens. What it has remembered grows with the time that it works,
# by tens of MiB a second at worst.
MATCHER_RESET_SECONDS = 0.25
# How the library warns that options of a oneOf overlap, which is documented.
ONE_OF_AS_ANY_OF = "falling back to anyOf"
# Tokens taken in between two looks at the clock.
ACCEPT_BATCH = 64
# Tokens that are tried after compiling: a grammar that is too large shows it at its beginning.
NUM_PROBE_STEPS = 4


class RejectedError(Exception):
    """The library refuses a definition; the text is its reason."""


class UnusableTokenizerError(Exception):
    """The model's tokenizer cannot be used for grammars; the text is one sentence."""


class Guidance:
    """Compiles grammars for one vocabulary. May be used from any thread."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """``tokenizer`` is the text of a ``tokenizer.json``. Raises ``UnusableTokenizerError``."""
        self._limits = LLParserLimits(step_max_items=STEP_MAX_ITEMS, verbose_errors=False)
        self._tokenizer = _tokenizer(tokenizer, vocab_size, sorted(set(eos_token_ids)))

    @classmethod
    def load(cls, path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> "Guidance":
        """For the ``tokenizer.json`` at ``path``. Raises ``UnusableTokenizerError``, and ``OSError`` where there is one
        that cannot be read now.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, ValueError) as error:
            raise UnusableTokenizerError(f"{path.name} cannot be read: {error}") from None
        return cls(text, vocab_size, eos_token_ids)

    def compile(self, definition: str) -> "CompiledGrammar":
        """The grammar of an llguidance ``definition``, its first tokens tried. Raises ``RejectedError``."""
        try:
            initial = LLMatcher(self._tokenizer, definition, log_level=0, limits=self._limits)
        except (TypeError, ValueError) as error:  # such as half of a surrogate pair
            raise RejectedError(str(error)) from None
        if initial.is_error():
            raise RejectedError(initial.get_error())
        for warning in initial.get_grammar_warnings():
            if ONE_OF_AS_ANY_OF not in warning:
                raise RejectedError(warning)
        self._probe(initial.deep_copy())
        return CompiledGrammar(initial, frozenset(self._tokenizer.eos_tokens))

    def _probe(self, matcher: LLMatcher) -> None:
        for _ in range(NUM_PROBE_STEPS):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                raise RejectedError(_reason(matcher))
            if matcher.is_stopped():
                return
            for token_id in self._tokenizer.eos_tokens:
                bits &= ~(1 << token_id)
            if not bits:
                return
            if not matcher.consume_token((bits & -bits).bit_length() - 1):
                raise RejectedError(_reason(matcher))


class TimeBudget:
    """Processor time that the outputs of one grammar have used, and what their tokens have earned. Used by one
    thread.
    """

    __slots__ = ("_spent", "_tokens")

    def __init__(self) -> None:
        self._spent = 0.0
        self._tokens = 0

    def credit(self, tokens: int) -> None:
        """So many tokens were taken in."""
        self._tokens += tokens

    def charge(self, seconds: float) -> None:
        """Raises ``GrammarError`` when the time is used up."""
        self._spent += seconds
        if self._spent > BUDGET_SECONDS + BUDGET_SECONDS_PER_TOKEN * self._tokens:
            raise GrammarError("it takes too long to follow.")


class CompiledGrammar:
    """A grammar, ready to be matched. ``num_bytes`` is what it takes, as far as that was measured."""

    __slots__ = ("__weakref__", "_budget", "_ends", "_initial", "num_bytes")

    def __init__(self, initial: LLMatcher, ends: frozenset[int]) -> None:
        self.num_bytes = 0
        self._initial = initial
        self._ends = ends
        self._budget = TimeBudget()

    def new_matcher(self) -> "GuidanceMatcher":
        """See ``Grammar.new_matcher``."""
        return GuidanceMatcher(self._initial, self._ends, self._budget)


class GuidanceMatcher:
    """One output's place in a grammar. See ``Matcher``."""

    __slots__ = ("_budget", "_ends", "_initial", "_matcher", "_matcher_age", "_max_matcher_age", "_token_ids")

    def __init__(self, initial: LLMatcher, ends: frozenset[int], budget: TimeBudget) -> None:
        self._initial = initial
        self._ends = ends
        self._budget = budget
        self._matcher = initial.deep_copy()
        self._token_ids: list[int] = []
        self._matcher_age = 0.0
        self._max_matcher_age = MATCHER_RESET_SECONDS

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """See ``GrammarMatcher.accept_tokens``."""
        for start in range(0, len(token_ids), ACCEPT_BATCH):
            self._accept_batch(list(token_ids[start : start + ACCEPT_BATCH]))

    def fill_bitmask(self, mask: memoryview) -> None:
        """See ``GrammarMatcher.fill_bitmask``."""
        if self._matcher_age > self._max_matcher_age:
            self._reset_matcher()
        bits = self._metered(self._matcher.compute_bitmask)
        if self._matcher.is_error():  # the bits do not show it: they then allow the end of the output
            raise GrammarError(_reason(self._matcher))
        words = mask.cast("B")
        bits = bits[: len(words)]
        words[: len(bits)] = bits

    def _accept_batch(self, batch: list[int]) -> None:
        self._token_ids += batch
        self._budget.credit(len(batch))
        if not self._metered(lambda: self._consume(batch)):
            raise GrammarError(_reason(self._matcher))

    def _metered(self, work: Callable[[], T]) -> T:
        begin = thread_time()
        result = work()
        seconds = thread_time() - begin
        self._matcher_age += seconds
        self._budget.charge(seconds)
        return result

    def _consume(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self._matcher.is_stopped():  # the library takes no end where it knows that there is nothing else
                taken = token_id in self._ends and not self._matcher.is_error()
            else:
                taken = 0 <= token_id < MAX_TOKEN_ID and self._matcher.consume_token(token_id)
            if not taken:
                return False
        return True

    def _reset_matcher(self) -> None:
        """Forgets what the matcher remembers beside its place; seldom enough to take a fifth of the time at most."""
        begin = thread_time()
        self._matcher = self._initial.deep_copy()
        if not self._consume(self._token_ids):
            raise GrammarError(_reason(self._matcher))
        self._matcher_age, self._max_matcher_age = 0.0, max(MATCHER_RESET_SECONDS, 4 * (thread_time() - begin))


def _tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    if not text.lstrip().startswith("{"):  # anything else would be taken for the name of a model
        raise UnusableTokenizerError("The tokenizer is no JSON object.")
    if not eos_token_ids:
        raise UnusableTokenizerError("The model has no end-of-sequence token, so that no grammar could end.")
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError:  # it may have tokens that the model lacks; the masks are then cut
            return LLTokenizer(text, eos_token=eos_token_ids)
    except ValueError as error:
        raise UnusableTokenizerError(f"The tokenizer cannot be used: {error}") from None


def _reason(matcher: LLMatcher) -> str:
    error = matcher.get_error() or "the output does not match it"
    return sentence("nothing can follow" if error.startswith("NoExtension") else error)
