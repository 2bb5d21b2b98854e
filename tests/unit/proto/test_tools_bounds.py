"""Parsing calls and reasoning takes linear time for any text, and holds little of it back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise, product
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.text import call_reader, harmony, reasoning, stream_scanner, tool_parser
from quire_proto.text.call_reader import MAX_CALL_CHARS
from quire_proto.text.reasoning import ReasoningParser
from quire_proto.text.stream_scanner import (
    MAX_MARKER_SPACE,
    BracketScanner,
    Content,
    Reasoning,
    TextBuffer,
    ToolCallArguments,
    ToolCallStart,
    merge_adjacent,
)
from quire_proto.text.tool_arguments import parse_call
from quire_proto.text.tool_formats import TOOL_FORMATS
from quire_proto.text.tool_parser import new_tool_parser

from tests.support.tool_models import marks_of, written

NAMES = ("get", "now")
TYPES = {"get": {"days": ("integer",)}}
FORMATS = {each.name: each for each in TOOL_FORMATS}
# One format of each notation; all of them in test_tool_parsers.
NOTATIONS = ("hermes", "llama3", "command-r7b", "kimi-k2", "qwen3-coder", "glm", "lfm2", "gemma-4", "harmony")
OPENERS = {
    **{name: partial(new_tool_parser, FORMATS[name], NAMES, TYPES) for name in NOTATIONS},
    "thinking": lambda: ReasoningParser(opened=True),
    "answering": lambda: ReasoningParser(opened=False),
}
PARSERS = pytest.mark.parametrize("open_", OPENERS.values(), ids=OPENERS)
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "</to",
    "<|py",
    "<thi",
    '{"name": "get", "arguments": {',
    '{"name":"now","parameters":{}}',
    '{"arguments": {"a": 1}, "name": "get"}',
    '{"name": "now"}',
    '{"type": "',
    '{"type":',
    '\\"',
    '"',
    "{",
    "}",
    ";",
    " ",
    "\n\n\n",
    "      ",
    "<",
    "x",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def texts_for(name):
    """Texts of the fragments above, and of the marks and calls of the format of that name, if it is one."""
    if name not in FORMATS:
        return TEXTS
    form = FORMATS[name]
    own = [*marks_of(form), written(form, [("get", {"city": "x" * 40, "days": 5})]), written(form, [("now", {})])]
    return st.lists(st.sampled_from([*own, *(each[: len(each) // 2] for each in own), *FRAGMENTS]), max_size=12).map(
        "".join
    )


CUTS = st.lists(st.integers(0, 200), max_size=8)


@contextmanager
def small_bounds() -> Iterator[None]:
    """Limits what is held back to a few characters, so that short texts reach the limits."""
    with ExitStack() as patches:
        for module in (stream_scanner, reasoning, tool_parser):
            patches.enter_context(patch.object(module, "MAX_MARKER_SPACE", 5))
        for module in (harmony, tool_parser):
            patches.enter_context(patch.object(module, "MAX_HEADER_CHARS", 40))
        for module in (call_reader, tool_parser):
            patches.enter_context(patch.object(module, "MAX_CALL_CHARS", 45))
        yield


def read(open_, text, cuts=(), *, ended=True):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader = open_()
    pieces = [piece for start, end in pairwise(bounds) for piece in reader.push(text[start:end])]
    return merge_adjacent([*pieces, *(reader.finish() if ended else [])])


@pytest.mark.parametrize("name", OPENERS)
@settings(deadline=None, max_examples=30)
@given(st.data(), CUTS, st.booleans())
def test_at_the_limits_of_the_held_back_text_the_result_does_not_depend_on_the_cuts(name, data, cuts, ended):
    text, open_ = data.draw(texts_for(name)), OPENERS[name]
    with small_bounds():
        whole = read(open_, text, ended=ended)
        assert read(open_, text, cuts, ended=ended) == whole
        assert read(open_, text, range(len(text)), ended=ended) == whole


@pytest.mark.parametrize("name", [name for name in NOTATIONS if name != "harmony"])
@settings(deadline=None, max_examples=30)
@given(st.data(), CUTS)
def test_at_the_limits_of_the_held_back_text_no_text_is_lost(name, data, cuts):
    text = data.draw(texts_for(name))
    with small_bounds():
        pieces = read(OPENERS[name], text, cuts)
    if not any(isinstance(piece, ToolCallStart) for piece in pieces):
        assert "".join(piece.text for piece in pieces) == text.removeprefix(FORMATS[name].preface)


class Work:
    """How many characters were scanned or copied."""

    characters = 0


class Counted(str):
    """Text that counts what is done with it."""

    __slots__ = ()

    def find(self, sub, start=0, end=None):
        end = len(self) if end is None else end
        at = super().find(sub, start, end)
        Work.characters += (end if at < 0 else at + len(sub)) - start
        return at

    def __getitem__(self, key):
        return counted(super().__getitem__(key))

    def __add__(self, other):
        return counted(super().__add__(other))

    def __radd__(self, other):
        return counted(other.__add__(str(self)))

    def rstrip(self, characters=None):
        return counted(super().rstrip(characters))

    def lstrip(self, characters=None):
        return counted(super().lstrip(characters))

    def strip(self, characters=None):
        return counted(super().strip(characters))

    def partition(self, mark):
        return tuple(map(counted, super().partition(mark)))

    def removeprefix(self, mark):
        return counted(super().removeprefix(mark))


def counted(text):
    Work.characters += len(text)
    return Counted(text)


class CountedPattern:
    """A compiled expression that counts what it looks at."""

    def __init__(self, pattern):
        self._pattern = pattern

    def match(self, text, start, end):
        return self._counted(self._pattern.match(text, start, end), start, end)

    def search(self, text, start, end):
        return self._counted(self._pattern.search(text, start, end), start, end)

    def _counted(self, found, start, end):
        Work.characters += (end if found is None else found.end()) - start
        return found


def counted_find(find):
    """``BracketScanner.find`` that counts what it looks at."""

    def counting(self, text, start, stop):
        end = find(self, text, start, stop)
        Work.characters += (stop if end is None else end) - start
        return end

    return counting


@contextmanager
def counting() -> Iterator[None]:
    Work.characters = 0
    take = TextBuffer.take
    with ExitStack() as patches:
        for module, name in (
            (stream_scanner, "_SPACES"),
            (tool_parser, "_KEY"),
            (tool_parser, "_NAME"),
            (call_reader, "WORD"),
        ):
            patches.enter_context(patch.object(module, name, CountedPattern(getattr(module, name))))
        patches.enter_context(patch.object(BracketScanner, "find", counted_find(BracketScanner.find)))
        patches.enter_context(patch.object(TextBuffer, "take", lambda self: counted(take(self))))
        patches.enter_context(patch.object(tool_parser, "parse_call", lambda text, names: parse_call(str(text), names)))
        yield


CALL = '<tool_call>{"name": "get", "arguments": {"a": [1, {}]}}</tool_call>'
LLAMA_CALL = '{"name": "get", "parameters": {"a": [1, {}]}};'
BEGINNINGS = ["x", '<tool_call>{"type": "', LLAMA_CALL + '{"type": "']
REPEATED = [
    " " * 64,
    "\n",
    "word ",
    "<",
    "</",
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"type":',
    '<tool_call>{"type":\\"',
    '<|python_tag|>{"type":\\"',
    '<tool_call>{"type":</tool_call>',
    '<tool_call> {"name": "get", "arguments": {',
    CALL,
    LLAMA_CALL,
    "<|python_tag|>",
    "{",
    "[{",
    '"',
    "\\",
    "; ",
    " <think> </think>",
    "</think> <think>",
    "</thin",
    '<tool_call>{"' + "y" * 509 + "<",  # a header that ends where another marker may begin
]


def work_of(open_, pieces: list[str]) -> int:
    with counting():
        reader = open_()
        for piece in pieces:
            reader.push(Counted(piece))
        reader.finish()
    return Work.characters


@PARSERS
@pytest.mark.parametrize("unit", REPEATED)
def test_parsing_takes_linear_time(open_, unit):
    """Each character is scanned or copied a bounded number of times, however many are held back and however
    they arrive.
    """
    for begin in BEGINNINGS:
        assert work_of(open_, [begin] + [unit] * 150) <= 16 * (len(begin) + 150 * len(unit)) + 64 * 150
        assert work_of(open_, [begin + unit * 600]) <= 16 * (len(begin) + 600 * len(unit)), begin


@pytest.mark.parametrize("name", NOTATIONS)
def test_parsing_the_marks_and_calls_of_a_format_takes_linear_time(name):
    form = FORMATS[name]
    call = written(form, [("get", {"city": "x", "days": 5})])
    for unit in (*marks_of(form), call, *(call[:end] for end in range(5, len(call), 12))):
        for begin in ("x", call[: len(call) // 2]):
            assert work_of(OPENERS[name], [begin, *[unit] * 60]) <= 16 * (len(begin) + 60 * len(unit)) + 64 * 60, unit


@PARSERS
@pytest.mark.parametrize("unit", [" " * 64, "word ", '<tool_call>{"type":\\"'])
def test_ten_times_as_many_deltas_cost_ten_times_as_much(open_, unit):
    tenth, all_ = (work_of(open_, ["x", *[unit] * pieces]) for pieces in (300, 3_000))
    assert all_ <= 11 * tenth


@PARSERS
def test_the_held_back_text_is_bounded_for_any_text(open_):
    """Markers, and the space beside them, are never emitted: so only units without them are counted."""
    begins = ("x", '<tool_call>{"type": "', "x<|python_tag|>{", '<tool_call>{"name": "get')
    with small_bounds():
        for begin, unit in product(begins, (" " * 7, "{", '"type":', "y", "[", "\\")):
            reader, emitted = open_(), 0
            for count, piece in enumerate([begin, *[unit] * 200]):
                emitted += sum(len(piece.text) for piece in reader.push(piece))
                assert len(begin) + count * len(unit) - emitted <= 45 + 5 + 40 + len(begin) + len(unit), (begin, unit)


def test_long_whitespace_belongs_to_the_text_around_it():
    much, most = " " * (MAX_MARKER_SPACE + 1), " " * MAX_MARKER_SPACE
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    call_parts = [ToolCallStart("now"), ToolCallArguments("{}")]
    assert read(OPENERS["hermes"], f"a{most}{call}") == [Content("a"), *call_parts]
    assert read(OPENERS["hermes"], f"a{much}{call}") == [Content(f"a{much}"), *call_parts]
    assert read(OPENERS["llama3"], much + LLAMA_CALL) == [Content(much + LLAMA_CALL)]
    assert read(OPENERS["llama3"], most + '{"name": "now", "parameters": {}}') == call_parts
    assert read(OPENERS["thinking"], f"a{much}</think>{much}b") == [Reasoning(f"a{much}"), Content("b")]
    assert read(OPENERS["answering"], f"{most}<think>a{most}</think>b") == [Reasoning("a"), Content("b")]
    assert read(OPENERS["answering"], f"{much}<think>a") == [Content(f"{much}<think>a")]


def test_a_rejected_body_is_not_read_as_a_whole_again():
    late = '<tool_call>{"arguments": {}, "name": "now"}</tool_call>'
    early = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    call_parts = [ToolCallStart("now"), ToolCallArguments("{}")]
    open_, begin = OPENERS["hermes"], '<tool_call>{"type": "'
    assert read(open_, begin + late) == [Content(begin + late)]
    assert read(open_, begin + early) == [Content(begin), *call_parts]
    assert read(open_, '<tool_call>{"type": ' + late) == [Content('<tool_call>{"type":'), *call_parts]


def test_arguments_that_cannot_be_sent_are_content():
    text = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "get"}</tool_call>'
    assert read(OPENERS["hermes"], text) == [Content(text)]


def test_a_call_of_an_unknown_tool_is_emitted_as_content_as_soon_as_that_is_certain():
    for text in ('<tool_call>{"name": "x', '<tool_call>{"city', "<tool_call>{ -", "<tool_call>x"):
        assert read(OPENERS["hermes"], text, ended=False) == [Content(text)]


def test_a_body_that_is_too_long_ends_where_another_marker_may_begin():
    text = '<tool_call>{"type": "' + "y" * (MAX_CALL_CHARS - 14) + "</toxy"
    assert read(OPENERS["hermes"], text, ended=False) == [Content(text)]
