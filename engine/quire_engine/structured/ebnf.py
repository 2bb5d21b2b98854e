"""Grammars in EBNF, in the dialects of llama.cpp (GBNF), XGrammar and SGLang, as grammars in Lark's notation.

The work is llguidance's converter. What that reads in another way, or would write so that its own compiler reads it in
another way, is first rewritten in plainer words: escapes, characters that mean something in a regular expression, the
point, and alternatives on lines of their own. Its time and depth are not bounded: only for a process that may die of
it.
"""

import re
import sys

from llguidance.gbnf_to_lark import gbnf_to_lark

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_WORDS = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"|\[(?P<negated>\^?)(?P<set>(?:\\.|[^\]\\])*)\]|#[^\n]*'
    r"|(?P<line>\n)(?:\s|#[^\n]*)*+(?P<bar>\|?)|(?P<any>\.)",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)|(.)", re.DOTALL)
_ASCII = 0x7F
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


def is_ebnf(text: str) -> bool:
    """Whether a grammar has a rule as EBNF writes it, which no Lark grammar has."""
    return "::=" in text and _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """The grammar in Lark's notation; its first rule is ``root``. Raises ``ValueError`` for what is no EBNF."""
    try:
        return gbnf_to_lark(_WORDS.sub(_plainer, text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # what the converter raises
        raise ValueError(str(error)) from error


def _plainer(found: re.Match[str]) -> str:
    if found["text"] is not None:
        return f'"{"".join(map(_in_text, map(_character, _CHARACTER.finditer(found["text"]))))}"'
    if found["set"] is not None:
        return f"[{found['negated']}{_set(found['set'])}]"
    if found["line"] is not None:
        return found["bar"] or "\n"
    return r'([^\n] | "\n")' if found["any"] else ""


def _character(found: re.Match[str]) -> str:
    """The character that is meant by one, or by an escape."""
    code = found[1] or found[2] or found[3]
    if code:
        return chr(min(int(code, 16), sys.maxunicode + 1))  # beyond it is a ValueError
    if found[5]:
        return found[5]
    if found[4].isalnum() and found[4] not in _ESCAPES:
        raise ValueError(f"\\{found[4]} is no escape")
    return _ESCAPES.get(found[4], found[4])


def _in_text(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() or ord(character) > _ASCII else f"\\x{ord(character):02x}"


def _set(text: str) -> str:
    """The inside of a set of characters, with nothing in it that a regular expression could take for an operator."""
    found = list(_CHARACTER.finditer(text))
    parts, place = list[str](), 0
    while place < len(found):
        is_range = place + 2 < len(found) and found[place + 1][0] == "-"
        ends = found[place : place + 3 : 2] if is_range else found[place : place + 1]
        parts.append("-".join(_in_set(_character(end)) for end in ends))
        place += 3 if is_range else 1
    return "".join(parts)


def _in_set(character: str) -> str:
    return character if character.isalnum() or ord(character) > _ASCII else f"\\x{ord(character):02x}"
