"""Implements the engine's ``Grammar`` and ``GrammarMatcher`` with llguidance. ``Guidance`` compiles definitions for a
vocabulary, ``to_llguidance`` translates each kind of ``Structured`` into such a definition, and ``to_lark`` rewrites
EBNF. Errors of the library become sentences for a client.

The library's work is limited twice: by its own limits on each step, and by a limit on the processor time of all outputs
of a grammar. The second is needed because the library's limits count what it builds, not what it tries.

Definitions that the library would ignore or misread are rejected here: its settings inside a schema, a number of
properties that repeated names could reach, a backslash at the end.

Grammars in EBNF may be in the dialects of llama.cpp (GBNF), XGrammar and SGLang. llguidance's converter translates them
to Lark's notation. Constructs that the converter or the compiler behind it would misread are first rewritten in simpler
terms: escapes, characters with a meaning in regular expressions, the point, and alternatives on separate lines. Time
and depth of the conversion are not limited, so it runs only in the sandbox, which may die of it.

The library is imported with the first grammar, so that engines without grammars start faster.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, TypeVar

from quire_proto.errors import QuireError, invalid
from quire_proto.structured_output import Structured, StructuredKind

from quire_engine.core.step import GrammarError
from quire_engine.structured_output.json_grammar import json_grammar
from quire_engine.structured_output.repetitions import check_lark, check_regex

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


T = TypeVar("T")
MAX_TOKEN_ID = 1 << 31
# 10 % of the library's own limit on the work of one step: an ambiguous grammar ends sooner, and no other is affected.
STEP_MAX_ITEMS = 5_000
# Seconds of processor time that all outputs of a grammar may use together: initially, and for each of their tokens.
# JSON needs 10 % of it. A grammar that is too slow therefore costs other requests 0.3 s, however many outputs follow
# it.
BUDGET_SECONDS = 0.3
BUDGET_SECONDS_PER_TOKEN = 0.001
# Seconds of processor time after which a matcher is rebuilt from its tokens. Its memory grows while it works, by tens
# of MiB per second at worst.
MATCHER_RESET_SECONDS = 0.25
# Tokens that are accepted between two readings of the clock.
ACCEPT_BATCH = 64
# Tokens that are tried after compiling: a grammar that is too large fails at its start.
NUM_PROBE_STEPS = 4
MAX_REASON = 200
EBNF, JSON, LARK = "ebnf:", "json:", "lark:"
"""Prefixes of definitions that the sandbox still has to ``prepare``: EBNF, a schema, and Lark's notation with schemas
inside.
"""
_SUBJECTS = {
    StructuredKind.JSON_OBJECT: "json_object",
    StructuredKind.JSON_SCHEMA: "The JSON schema",
    StructuredKind.REGEX: "The regular expression",
    StructuredKind.CHOICE: "The choice",
    StructuredKind.GRAMMAR: "The grammar",
}
_SCHEMAS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(%json)\s*')
_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
_LOCATION = re.compile(r"^at (\d+)\(\d+\): ")
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_TOKENS = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<negated>\^?)(?P<set>(?:\\.|[^\]\\])*)\]|#[^\n]*'
    r"|(?P<line>\n)(?:\s|#[^\n]*)*+(?P<bar>\|?)|(?P<any>\.)",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ASCII = 0x7F
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


class RejectedError(Exception):
    """The library rejects a definition; the text is its reason."""


class UnusableTokenizerError(Exception):
    """The model's tokenizer cannot be used for grammars; the text is one sentence."""


class Guidance:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """``tokenizer`` is the text of a ``tokenizer.json``. Raises ``UnusableTokenizerError``."""
        from llguidance import LLParserLimits

        self._limits = LLParserLimits(step_max_items=STEP_MAX_ITEMS, verbose_errors=False)
        self._tokenizer = _make_tokenizer(tokenizer, vocab_size, sorted(set(eos_token_ids)))

    @classmethod
    def load(cls, path: Path, vocab_size: int, eos_token_ids: Collection[int]) -> "Guidance":
        """Reads the ``tokenizer.json`` at ``path``. Raises ``UnusableTokenizerError`` if it is missing or not UTF-8,
        and ``OSError`` if it exists but cannot be read now.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, ValueError) as error:
            raise UnusableTokenizerError(f"{path.name} cannot be read: {error}") from None
        return cls(text, vocab_size, eos_token_ids)

    def compile(self, definition: str) -> "CompiledGrammar":
        """Compiles an llguidance ``definition`` and tries its first tokens. Raises ``RejectedError``."""
        from llguidance import LLMatcher

        try:
            initial = LLMatcher(self._tokenizer, prepare(definition), log_level=0, limits=self._limits)
        except (TypeError, ValueError) as error:  # such as half of a surrogate pair
            raise RejectedError(str(error)) from None
        if initial.is_error():
            raise RejectedError(initial.get_error())
        for warning in initial.get_grammar_warnings():
            raise RejectedError(warning)
        self._probe(initial.deep_copy())
        return CompiledGrammar(initial, frozenset(self._tokenizer.eos_tokens))

    def _probe(self, matcher: "LLMatcher") -> None:
        for _ in range(NUM_PROBE_STEPS):
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                raise RejectedError(_error_message(matcher))
            if matcher.is_stopped():
                return
            for token_id in self._tokenizer.eos_tokens:
                bits &= ~(1 << token_id)
            if not bits:
                return
            if not matcher.consume_token((bits & -bits).bit_length() - 1):
                raise RejectedError(_error_message(matcher))


def _make_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    from llguidance import LLTokenizer

    if not text.lstrip().startswith("{"):  # the library takes any other text for the name of a model
        raise UnusableTokenizerError("The tokenizer is not a JSON object.")
    if not eos_token_ids:
        raise UnusableTokenizerError("The model has no end-of-sequence token, so that no grammar could end.")
    try:
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError:  # the tokenizer may have tokens that the model lacks; bitmasks are then cut
            return LLTokenizer(text, eos_token=eos_token_ids)
    except ValueError as error:
        raise UnusableTokenizerError(f"The tokenizer cannot be used: {error}") from None


class TimeBudget:
    """The processor time that the outputs of one grammar have used and may use. Use it from one thread."""

    __slots__ = ("_spent", "_tokens")

    def __init__(self) -> None:
        self._spent = 0.0
        self._tokens = 0

    def credit(self, tokens: int) -> None:
        """Adds the time for ``tokens`` accepted tokens to the budget."""
        self._tokens += tokens

    def charge(self, seconds: float) -> None:
        """Charges used time. Raises ``GrammarError`` when the budget is used up."""
        self._spent += seconds
        if self._spent > BUDGET_SECONDS + BUDGET_SECONDS_PER_TOKEN * self._tokens:
            raise GrammarError("it takes too long to follow.")


class CompiledGrammar:
    """A ``Grammar``. ``num_bytes`` is its size in memory, as measured in the sandbox."""

    __slots__ = ("__weakref__", "_budget", "_ends", "_initial", "num_bytes")

    def __init__(self, initial: "LLMatcher", ends: frozenset[int]) -> None:
        self.num_bytes = 0
        self._initial = initial
        self._ends = ends
        self._budget = TimeBudget()

    def new_matcher(self) -> "GuidanceMatcher":
        """See ``Grammar.new_matcher``."""
        return GuidanceMatcher(self._initial, self._ends, self._budget)


class GuidanceMatcher:
    """A ``GrammarMatcher``: the state of one output in a grammar."""

    __slots__ = ("_budget", "_ends", "_initial", "_matcher", "_matcher_age", "_max_matcher_age", "_token_ids")

    def __init__(self, initial: "LLMatcher", ends: frozenset[int], budget: TimeBudget) -> None:
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
        self._fill(mask)

    def fill_bitmask_after(self, draft_token_ids: Sequence[int], mask: memoryview) -> None:
        """See ``GrammarMatcher.fill_bitmask_after``."""
        drafts = list(draft_token_ids)
        self._budget.credit(len(drafts))
        if self._matcher.is_stopped() or self._charged(lambda: self._matcher.validate_tokens(drafts)) < len(drafts):
            return
        try:
            if self._charged(lambda: self._matcher.consume_tokens(drafts)) and not self._matcher.is_stopped():
                self._fill(mask)
        finally:
            if self._matcher.is_error() or not self._matcher.rollback(len(drafts)):
                self._reset_matcher()

    def _fill(self, mask: memoryview) -> None:
        bits = self._charged(self._matcher.compute_bitmask)
        if self._matcher.is_error():  # the bitmask does not show errors: it then allows the end of the output
            raise GrammarError(_error_message(self._matcher))
        words = mask.cast("B")
        bits = bits[: len(words)]
        words[: len(bits)] = bits

    def _accept_batch(self, batch: list[int]) -> None:
        self._token_ids += batch
        self._budget.credit(len(batch))
        if not self._charged(lambda: self._consume(batch)):
            raise GrammarError(_error_message(self._matcher))

    def _charged(self, work: Callable[[], T]) -> T:
        begin = thread_time()
        result = work()
        seconds = thread_time() - begin
        self._matcher_age += seconds
        self._budget.charge(seconds)
        return result

    def _consume(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if self._matcher.is_stopped():  # the library rejects the end token if nothing else can follow
                accepted = token_id in self._ends and not self._matcher.is_error()
            else:
                accepted = 0 <= token_id < MAX_TOKEN_ID and self._matcher.consume_token(token_id)
            if not accepted:
                return False
        return True

    def _reset_matcher(self) -> None:
        """Rebuilds the matcher from its tokens, which frees its caches. Rare enough to take at most 20 % of the
        time.
        """
        begin = thread_time()
        self._matcher = self._initial.deep_copy()
        if not self._consume(self._token_ids):
            raise GrammarError(_error_message(self._matcher))
        self._matcher_age, self._max_matcher_age = 0.0, max(MATCHER_RESET_SECONDS, 4 * (thread_time() - begin))


def _error_message(matcher: "LLMatcher") -> str:
    error = matcher.get_error() or "the output does not match it"
    return first_sentence("nothing can follow" if error.startswith("NoExtension") else error)


def import_llguidance() -> None:
    """Imports all of the library. Raises ``OSError`` if its files cannot be opened."""
    import llguidance.gbnf_to_lark  # noqa: F401


def to_llguidance(structured: Structured) -> str:
    """Returns the llguidance definition of ``structured``, possibly with a prefix for ``prepare``. Raises
    ``QuireError`` INVALID.
    """
    try:
        return _define(structured)
    except ValueError as error:  # such as half of a surrogate pair, or too many brackets
        raise rejection(structured, str(error)) from None


def _define(structured: Structured) -> str:
    from llguidance import LLMatcher

    match structured.kind:
        case StructuredKind.JSON_OBJECT:
            return JSON + '{"type": "object"}'
        case StructuredKind.JSON_SCHEMA:
            _check_schema(structured)
            return JSON + structured.text
        case StructuredKind.REGEX:
            _check_regex(structured)
            return LLMatcher.grammar_from_regex(structured.text)
        case StructuredKind.CHOICE:
            options = " | ".join(json.dumps(option) for option in structured.options)
            return lark(f"start: OPTION\nOPTION: {options}")
        case StructuredKind.GRAMMAR:
            return (EBNF if is_ebnf(structured.text) else LARK) + structured.text


def _check_regex(structured: Structured) -> None:
    trailing = len(structured.text) - len(structured.text.rstrip("\\"))
    if trailing % 2:
        raise rejection(structured, "it ends with a backslash that escapes nothing")
    check_regex(structured.text)


def _check_schema(structured: Structured) -> None:
    """Raises ``QuireError`` unless the text is a schema."""
    try:
        schema = json.loads(structured.text, parse_constant=_reject_constant)
    except ValueError as error:
        raise rejection(structured, f"it is not JSON: {error}") from None
    except RecursionError:
        raise rejection(structured, "it is nested too deeply") from None
    if schema is not True and not isinstance(schema, dict):
        raise rejection(structured, "it is not a JSON object")
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise rejection(structured, "x-guidance is not supported")


def prepare(definition: str) -> str:
    """Converts a definition of ``to_llguidance`` for the library: writes schemas and EBNF in Lark's notation. Raises
    ``RejectedError``.
    """
    try:
        if definition.startswith(JSON):
            return lark(_schema_grammar(definition.removeprefix(JSON)))
        if definition.startswith(EBNF):
            text = to_lark(definition.removeprefix(EBNF))
            check_lark(text)
            return lark(text)
        return with_schemas(definition.removeprefix(LARK)) if definition.startswith(LARK) else definition
    except (ValueError, OverflowError) as error:
        raise RejectedError(str(error)) from None


def _schema_grammar(text: str) -> str:
    try:
        return json_grammar(json.loads(text, parse_constant=_reject_constant))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lark(text: str, others: Mapping[str, str] = {}) -> str:
    """Returns the definition of a grammar in Lark's notation, and of ``others`` that it refers to by name."""
    # Wrapped, because the library would read a text that begins with a brace as its own format.
    named = [{"name": name, "lark_grammar": each} for name, each in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]})


def with_schemas(text: str) -> str:
    """Returns the definition of a grammar in Lark's notation, with its schemas as separate grammars. Raises
    ``RejectedError`` with the line of a schema that cannot be used.
    """
    parts, grammars, at = list[str](), dict[str, str](), 0
    for found in _SCHEMAS.finditer(text):
        if found[1] is None or found.start() < at:
            continue
        try:
            _, end = _DECODER.raw_decode(text, found.end())
            grammar = _schema_grammar(text[found.end() : end])
        except (ValueError, OverflowError, RecursionError) as error:
            line = text.count("\n", 0, found.start()) + 1
            raise RejectedError(f"at {line}(1): {error or 'it is nested too deeply'}") from None
        name = f"json_{len(grammars)}"
        grammars[name] = grammar
        parts += [text[at : found.start()], f"@{name}", "\n" * text.count("\n", found.start(), end)]
        at = end
    whole = "".join([*parts, text[at:]])
    check_lark(whole)
    return lark(whole, grammars)


def rejection(structured: Structured, reason: str) -> QuireError:
    """Returns ``QuireError`` INVALID, with the parameter at fault, the library's ``reason`` in one sentence of limited
    length, and its location.
    """
    return invalid(structured.param, f"{_SUBJECTS[structured.kind]} cannot be used{_describe(structured, reason)}")


def _describe(structured: Structured, reason: str) -> str:
    """Returns the library's ``reason``, after the line of the grammar that it is about, if known."""
    message, line = first_sentence(reason), _LOCATION.match(reason)
    if structured.kind is StructuredKind.GRAMMAR and line is not None:
        return f", line {line[1]}: {message}"
    return f": {message}"


def first_sentence(reason: str) -> str:
    """Returns the line of the library's message that describes the error, at most ``MAX_REASON`` characters, as a
    sentence.
    """
    lines = [line for line in map(str.strip, reason.splitlines()) if line] or ["no reason was given"]
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    printable = "".join(character if character.isprintable() else " " for character in _LOCATION.sub("", message))
    return (printable if len(printable) <= MAX_REASON else f"{printable[:MAX_REASON]}…").rstrip(".") + "."


def is_ebnf(text: str) -> bool:
    """Whether a grammar has a rule in EBNF's notation, which is not valid in Lark."""
    return "::=" in text and _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Returns the grammar in Lark's notation. Its first rule is ``root``. Raises ``ValueError`` for invalid EBNF."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_TOKENS.sub(_rewrite, text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # whatever the converter raises
        raise ValueError(str(error)) from error


def _rewrite(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return f'"{"".join(map(_escape_in_string, map(_character, _CHARACTER.finditer(found["text"]))))}"'
    if found["set"] is not None:
        return f"[{found['negated']}{_character_class(found['set'])}]"
    if found["line"] is not None:
        return found["bar"] or "\n"
    return r'([^\n] | "\n")' if found["any"] else ""


def _character(found: re.Match[str]) -> str:
    """Returns the character that a match of ``_CHARACTER`` stands for: itself or an escape."""
    code = found[1] or found[2] or found[3]
    if code:
        return chr(min(int(code, 16), sys.maxunicode + 1))  # beyond it is a ValueError
    if found[5]:
        return found[5]
    if found[4].isalnum() and found[4] not in _ESCAPES:
        raise ValueError(f"\\{found[4]} is not an escape")
    return _ESCAPES.get(found[4], found[4])


def _escape_in_string(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() or ord(character) > _ASCII else f"\\x{ord(character):02x}"


def _character_class(text: str) -> str:
    """Returns the inside of a character class, without characters that a regular expression could read as operators."""
    found = list(_CHARACTER.finditer(text))
    parts, index = list[str](), 0
    while index < len(found):
        is_range = index + 2 < len(found) and found[index + 1][0] == "-"
        ends = found[index : index + 3 : 2] if is_range else found[index : index + 1]
        parts.append("-".join(_escape_in_class(_character(end)) for end in ends))
        index += 3 if is_range else 1
    return "".join(parts)


def _escape_in_class(character: str) -> str:
    return character if character.isalnum() or ord(character) > _ASCII else f"\\x{ord(character):02x}"
