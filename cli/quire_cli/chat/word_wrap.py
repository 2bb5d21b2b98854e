"""``WordWrap``: breaks lines between words, in a text that comes in pieces and is shown at once."""

import re
from unicodedata import combining, east_asian_width

from quire_proto.terminal import PLAIN

_FENCE = "```"
_STYLE = re.compile(r"(\x1b\[[0-9;]*m)")
_RESETS = ("[0m", ";00m")  # the ends of sequences that take styles away, ours and those of pygments


class WordWrap:
    """Lines have at most ``width`` cells: one less than the terminal's, whose cursor does not move on from its last
    column. A word that no longer fits is taken back and begins the next line. Code between fences is left alone. Escape
    sequences that set a style take no cells.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._column = 0
        self._word = ""  # the end of what was written, which cannot be parted
        self._line = ""  # of the text, which may be several of the terminal
        self._is_code = False
        self._style = self._style_of_word = ""  # escape sequences, now and where the word began

    @property
    def column(self) -> int:
        """Cells of the current line that are in use."""
        return self._column

    def feed(self, text: str) -> str:
        """Returns what to write for the next piece: the text, with line breaks and movements of the cursor."""
        out = ""
        for part in _STYLE.split(text):
            if part.startswith("\x1b"):
                self._style = "" if part.endswith(_RESETS) else self._style + part
                self._word += part
                out += part
                continue
            for character in part:
                out = self._add(out, character)
        return out

    def _begin_word(self) -> None:
        self._word, self._style_of_word = "", self._style

    def _add(self, out: str, character: str) -> str:
        if character == "\n":
            if self._line.lstrip().startswith(_FENCE):
                self._is_code = not self._is_code
            self._column, self._line = 0, ""
            self._begin_word()
            return out + character
        self._line += character
        if self._is_code or self._line.lstrip().startswith(_FENCE):
            return out + character
        size = cells(character)
        if self._column + size > self._width:
            if character == " ":
                self._column = 0
                self._begin_word()
                return out + "\n"
            out = self._break(out)
        self._column += size
        # Between wide characters, of scripts without spaces, a line may break anywhere.
        if character == " " or size > 1:
            self._begin_word()
        else:
            self._word += character
        return out + character

    def _break(self, out: str) -> str:
        """Moves the word to the next line, or parts it where it fills a whole one."""
        length = sum(map(cells, _STYLE.sub("", self._word)))
        if length >= self._column:
            self._column = 0
            self._begin_word()
            return out + "\n"
        self._column = length
        if out.endswith(self._word):
            return f"{out[: len(out) - len(self._word)]}\n{self._word}"
        again = self._word if self._style == self._style_of_word else f"{PLAIN}{self._style_of_word}{self._word}"
        return f"{out}\x1b[{length}D\x1b[K\n{again}"


def cells(character: str) -> int:
    """Returns how many columns of a terminal a character takes."""
    if combining(character) or not character.isprintable():
        return 0
    return 2 if east_asian_width(character) in "WF" else 1
