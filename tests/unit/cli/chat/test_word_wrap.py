"""Lines break between words, however the text is cut into pieces."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from quire_cli.chat.word_wrap import WordWrap, cells
from quire_proto.terminal import BOLD, DIM, PLAIN

STYLED = st.lists(st.text("abc ", min_size=1, max_size=6) | st.sampled_from([BOLD, DIM, PLAIN]), max_size=40)
WORDS = st.lists(st.text("abcxyz", min_size=1, max_size=9) | st.sampled_from(["語語", "\n", "é"]), max_size=40)


class Screen:
    """What a terminal shows: rows of characters, each of which knows its cells and has a style."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[str, str]]] = [[]]
        self._style = ""

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[(?:\d+D|K|[\d;]*m)|.|\n", text):
            if part == "\n":
                self.rows.append([])
            elif part == "\x1b[K":
                continue  # what was taken back is at the end
            elif part.endswith("m") and part.startswith("\x1b"):
                self._style = "" if part == PLAIN else self._style + part
            elif part.startswith("\x1b"):
                back = int(part[2:-1])
                while back > 0:
                    back -= cells(self.rows[-1].pop()[0])
            else:
                self.rows[-1].append((part, self._style))

    @property
    def lines(self) -> list[str]:
        return ["".join(character for character, _ in row) for row in self.rows]

    @property
    def styled(self) -> list[tuple[str, str]]:
        return [each for row in self.rows for each in row if each[0] != " "]


@given(words=WORDS, cuts=st.lists(st.integers(0, 200), max_size=20), width=st.integers(9, 30))
def test_no_line_is_too_long_no_word_is_parted_and_nothing_is_lost(
    words: list[str], cuts: list[int], width: int
) -> None:
    text, screen, wrap = " ".join(words), Screen(), WordWrap(width)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for begin, end in pairwise(places):
        screen.write(wrap.feed(text[begin:end]))
    assert all(sum(map(cells, line)) <= width for line in screen.lines)
    shown = " ".join(screen.lines).split()
    assert "".join(shown) == "".join(text.split())
    assert [word for word in shown if word.isascii()] == [word for word in text.split() if word.isascii()]


@given(words=STYLED, cuts=st.lists(st.integers(0, 200), max_size=20), width=st.integers(9, 30))
def test_what_moves_to_the_next_line_keeps_its_colors(words: list[str], cuts: list[int], width: int) -> None:
    text, screen, whole, wrap = "".join(words), Screen(), Screen(), WordWrap(width)
    ends = [match.end() for match in re.finditer(r"\x1b\[\d+m|.", text)]  # an escape sequence comes in one piece
    places = sorted({0, len(text), *(ends[cut % len(ends)] for cut in cuts if ends)})
    for begin, end in pairwise(places):
        screen.write(wrap.feed(text[begin:end]))
    whole.write(text)
    assert screen.styled == whole.styled
    assert all(sum(map(cells, line)) <= width for line in screen.lines)


def test_a_word_longer_than_a_line_is_parted() -> None:
    assert WordWrap(4).feed("abcdefgh") == "abcd\nefgh"


def test_a_word_that_was_shown_moves_to_the_next_line() -> None:
    wrap = WordWrap(8)
    assert wrap.feed("once upo") == "once upo"
    assert wrap.feed("n") == "\x1b[3D\x1b[K\nupon"


def test_code_is_left_alone() -> None:
    code = "```py\nprint(1, 2, 3, 4)\n```\n"
    assert WordWrap(8).feed(code) == code
    assert WordWrap(8).feed(f"{code}once upon") == f"{code}once \nupon"
