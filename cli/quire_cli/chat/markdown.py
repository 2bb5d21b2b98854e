"""``Markdown``: an answer's Markdown in the colors of a terminal, while it comes.

Line by line, so that what was shown never has to be taken back: headings, emphasis, inline code, bullets, quotes and
code blocks. Other marks, such as tables and links, stay as they are.
"""

import re
from collections.abc import Callable

from quire_proto.terminal import BOLD, CYAN, DIM, PLAIN

HEADING, CODE, ITALIC = CYAN, "\x1b[36m", "\x1b[3m"
MAX_SPAN = 200  # characters that wait for the end of an emphasis
MAX_CONTEXT = 200  # lines of a block of code that are read again, as a string may have begun there
# What may still become the mark of a block, at the beginning of a line; then the marks themselves.
_MAY_BE_MARK = re.compile(r"[ \t]*(?:#{1,6}|[-*_+]+|>|`+|~+)?")
_HEADING = re.compile(r" {0,3}#{1,6} ")
_BULLET = re.compile(r"([ \t]*)[-*+] ")
_QUOTE = re.compile(r" {0,3}>")
_RULE = re.compile(r" {0,3}([-*_])\1{2,}")
_FENCE = re.compile(r"[ \t]*(`{3,}(?!.*`)|~{3,})")
_SPECIAL = re.compile(r"[`*_\\]")
_SPAN = re.compile(  # without "__" for bold: names such as __init__ are more frequent
    r"(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|(?P<mark>\*{1,3}|_)(?![\s*_])(?P<text>.+?)(?<![\s*_])(?P=mark)(?![*_])"
)
_ESCAPED = re.compile(r"\\([`*_#])")
_EMPHASIS = {1: ITALIC, 2: BOLD, 3: BOLD + ITALIC}
Highlight = Callable[[str], str]


class Markdown:
    """Takes an answer in pieces. ``feed`` returns what can be shown by now, and ``end`` the rest."""

    def __init__(self) -> None:
        self._held = ""  # of the current line, until it is known what it is
        self._begins = True  # whether that is the beginning of a line
        self._style = ""  # of the current line
        self._previous = ""  # the last character of the line that was shown
        self._fence = ""  # of the block of code that has begun
        self._highlight: Highlight | None = None
        self._code: list[str] = []

    def feed(self, text: str) -> str:
        """Returns the next piece with colors."""
        *lines, rest = text.split("\n")
        out = "".join(f"{self._feed(line)}{self._end_line()}\n" for line in lines)
        return out + self._feed(rest)

    def end(self) -> str:
        """Returns what was held back at the end of an answer."""
        return self._end_line()

    def _feed(self, text: str) -> str:
        self._held += text
        if self._fence:
            return ""  # code is shown by lines
        out = ""
        if self._begins:
            if _MAY_BE_MARK.fullmatch(self._held) or _FENCE.match(self._held):
                return ""
            out = self._begin_line()
        return out + self._spans(is_whole=False)

    def _begin_line(self) -> str:
        """Reads the mark of a block."""
        self._begins, line = False, self._held
        if found := _HEADING.match(line):
            self._held, self._style = line[found.end() :], HEADING
            return HEADING
        if found := _BULLET.match(line):
            self._held = line[found.end() :]
            return f"{found[1]}• "
        if found := _QUOTE.match(line):
            self._held = line[found.end() :]
            return f"{DIM}│{PLAIN}"
        return ""

    def _end_line(self) -> str:
        line, out = self._held, ""
        if self._fence:
            out = self._end_code_line(line)
        elif self._begins and (found := _FENCE.match(line)):
            self._fence, self._code = found[1], []
            self._highlight = _highlighter(line[found.end() :].strip().partition(" ")[0])
            out = _styled(line, DIM)
        elif self._begins and _RULE.fullmatch(line):
            out = _styled("─" * 20, DIM)
        else:
            out = self._begin_line() if self._begins else ""
            out += self._spans(is_whole=True) + (PLAIN if self._style else "")
        self._held = self._style = self._previous = ""
        self._begins = True
        return out

    def _end_code_line(self, line: str) -> str:
        if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
            self._fence = ""
            return _styled(line, DIM)
        self._code.append(line)
        if self._highlight is None or not line.strip():
            return line
        return self._highlight("\n".join(self._code[-MAX_CONTEXT:])).rpartition("\n")[2]

    def _spans(self, *, is_whole: bool) -> str:
        """Shows the held part of a line, up to an emphasis that has begun and may end in a later piece."""
        out = ""
        while self._held:
            special = _SPECIAL.search(self._held)
            start = len(self._held) if special is None else special.start()
            if start:
                out += self._show(start)
                continue
            may_begin = self._held[0] != "_" or not re.match(r"[\w/]", self._previous)
            may_begin = may_begin and (self._held[0] != "*" or not self._previous.isalnum())
            found = _SPAN.match(self._held) if may_begin else None
            if found and (is_whole or found.end() < len(self._held)):  # the mark may be a longer one
                out += self._show_span(found)
            elif not is_whole and self._may_become_span(may_begin=may_begin):
                return out
            elif _ESCAPED.match(self._held):
                self._held = self._held[1:]
                out += self._show(1)
            else:
                run = re.match(r"`+|\*+|_+|\\", self._held)
                out += self._show(run.end() if run else 1)
        return out

    def _may_become_span(self, *, may_begin: bool) -> bool:
        """Whether what is held begins with a mark that is not complete, or whose end may still come."""
        marks = re.match(r"`+|\*+|_+|\\", self._held)
        assert marks is not None
        if marks.end() == len(self._held):
            return True
        opens = marks[0] != "\\" and (marks[0][0] == "`" or not self._held[marks.end()].isspace())
        return may_begin and opens and len(self._held) < MAX_SPAN

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._previous = shown[-1]
        return shown

    def _show_span(self, found: re.Match[str]) -> str:
        self._show(found.end())
        if found["ticks"]:
            return _styled(found["code"], CODE) + self._style
        inner = Markdown()
        inner._held, inner._begins = found["text"], False
        inner._style = self._style + _EMPHASIS[len(found["mark"])]
        return f"{_EMPHASIS[len(found['mark'])]}{inner._spans(is_whole=True)}{PLAIN}{self._style}"


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{PLAIN}" if text else ""


def _highlighter(language: str) -> Highlight | None:
    """Returns what colors code of this language; None if it is not known."""
    if not language:
        return None
    # They take as long to import as the whole command, and most answers have no code.
    from pygments import highlight
    from pygments.formatters.terminal import TerminalFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None
    formatter = TerminalFormatter(bg="dark")
    return lambda code: highlight(code, lexer, formatter)
