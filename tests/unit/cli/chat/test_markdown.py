"""An answer's Markdown in the colors of a terminal, however the answer is cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_cli.chat.markdown import CODE, HEADING, ITALIC, MAX_SPAN, Markdown
from quire_proto.terminal import BOLD, DIM, PLAIN

from tests.support.terminals import plain

MARKS = ["*", "**", "_", "`", "```", "```python\n", "\\", "#", "# ", "- ", "> ", "\n", " ", "~~~", "1. ", "|"]
TEXTS = st.lists(st.sampled_from(MARKS) | st.text("abc1é語", min_size=1, max_size=5), max_size=30).map("".join)
MARK_CHARACTERS = set("*_`#>-\\~│•─ \n")


def shown(text: str) -> str:
    view = Markdown()
    return view.feed(text) + view.end()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Two *words*\nthen", f"{HEADING}Two {ITALIC}words{PLAIN}{HEADING}{PLAIN}\nthen"),
        ("a **bold** b", f"a {BOLD}bold{PLAIN} b"),
        ("**all `of` it**", f"{BOLD}all {CODE}of{PLAIN}{BOLD} it{PLAIN}"),
        ("***both***", f"{BOLD}{ITALIC}both{PLAIN}"),
        ("``a ` b``", f"{CODE}a ` b{PLAIN}"),
        ("- one\n  * two\n+ three", "• one\n  • two\n• three"),
        ("> said", f"{DIM}│{PLAIN} said"),
        ("---\n", f"{DIM}{'─' * 20}{PLAIN}\n"),
        (r"\*not\*", "*not*"),
    ],
)
def test_marks_become_colors(text: str, expected: str) -> None:
    assert shown(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "5*3=15, a * b, 2 ** 3",
        "snake_case_name and __init__",
        "https://a.example/_b_",
        "**never closed",
        "`never closed",
        "#hashtag",
        "1. first",
        "| a | b |\n|---|---|",
        "f(*args, **options)",
        "C:\\folder",
    ],
)
def test_what_is_no_mark_stays(text: str) -> None:
    assert shown(text) == text


def test_code_is_colored_by_its_language_and_keeps_its_text() -> None:
    code = 'x = 1  # two\n\n"""a text\nof *two* lines"""\n'
    out = shown(f"```python\n{code}```\nafter **it**")
    assert plain(out) == f"```python\n{code}```\nafter it"
    first, string = out.split("\n")[1], out.split("\n")[4]
    assert first.count("\x1b") == 4  # a number and a comment
    assert string.startswith("\x1b[33mof *two* lines")  # still the color of a string


@pytest.mark.parametrize("fence", ["```", "```no-such-language", "~~~"])
def test_code_of_an_unknown_language_is_left_alone(fence: str) -> None:
    assert plain(shown(f"{fence}\nx = **1**\n# y\n{fence[:3]}\n")) == f"{fence}\nx = **1**\n# y\n{fence[:3]}\n"


@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=20))
def test_pieces_make_no_difference_and_nothing_but_marks_is_lost(text: str, cuts: list[int]) -> None:
    view = Markdown()
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    out = "".join(view.feed(text[begin:end]) for begin, end in pairwise(places)) + view.end()
    assert out == shown(text)
    kept = [character for character in plain(out) if character not in MARK_CHARACTERS]
    assert kept == [character for character in text if character not in MARK_CHARACTERS]


@given(text=TEXTS)
def test_what_is_shown_is_not_held_back_for_long(text: str) -> None:
    view = Markdown()
    text = text.replace("`", "").replace("~", "")  # code is shown by lines
    out = view.feed(f"x{text}{'a' * (MAX_SPAN + 1)}")
    assert plain(out).endswith("a")
