"""Stop strings of answers that have reasoning and tool calls in them, against cutting what the whole answer says."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.text.answer_stream import AnswerStream, RawAnswerStream, new_answer_parser
from quire_proto.text.detokenizer import StopMatcher
from quire_proto.text.stream_scanner import Content, OutputPart, Reasoning, merge_adjacent
from quire_proto.text.tokenizer import ModelTokenizer
from quire_proto.text.tool_formats import HARMONY, TOOL_FORMATS, ToolFormat

from tests.support.tool_models import family_template, tokenizer_with, with_marks, written
from tests.unit.proto.test_detokenizer import CUTS, pieces_of

FAMILIES = {each.name: each for each in TOOL_FORMATS}
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}"
WORDS = st.lists(st.sampled_from(["Rome", "get", "city", "a", "b", " ", "\n", "<", "é", "END", "}"]), max_size=5)
SAID = WORDS.map("".join)
STOPS = st.lists(
    SAID.filter(bool).map(lambda text: text[:6]) | st.text("abRome END\n", min_size=1, max_size=3), max_size=3
)


@cache
def model(name: str) -> ModelTokenizer:
    """A model that reasons and calls tools in this format, each mark a token of its own."""
    signs = "{# analysis #}" if FAMILIES[name] is HARMONY else "{# </think> #}"
    return tokenizer_with(family_template(FAMILIES[name]) + signs, with_marks(special=True))


def text_of(form: ToolFormat, reasoning: str, before: str, values: list[str], after: str) -> str:
    calls = written(form, [("get", {"city": value}) for value in values])
    if form is HARMONY:
        thought = ANALYSIS.format(reasoning) if reasoning else ""
        return thought + FINAL.format(before) + (f"<|end|><|start|>assistant{calls}" if values else "")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + before + calls + after


def parser_of(tokenizer: ModelTokenizer):
    return new_answer_parser(tokenizer, [], splits_reasoning=True, tools=("get",))


def cut(parts: list[OutputPart], stops: list[str], *, include: bool) -> tuple[list[OutputPart], str | None]:
    """The parts up to the first character of a piece of content that completes a stop string, and that string."""
    kept: list[OutputPart] = []
    for part in parts:
        text = part.text if isinstance(part, Content) else ""
        for end in range(1, len(text) + 1):
            found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
            if found is not None:
                rest = text[:end] if include else text[: end - len(found)]
                return [*kept, Content(rest)] if rest else kept, found
        kept.append(part)
    return kept, None


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    parts = draw(SAID), draw(SAID), draw(st.lists(SAID, max_size=2)), draw(SAID)
    return name, text_of(FAMILIES[name], *parts)


@given(answers(), STOPS, st.booleans(), CUTS)
def test_an_answer_is_cut_at_the_first_stop_string_of_its_content_however_it_arrives(answer, stops, include, cuts):
    name, text = answer
    tokenizer = model(name)
    token_ids = tokenizer.encode_plain(text)
    whole = parser_of(tokenizer)
    matcher = StopMatcher(stops, include=include)
    stream = AnswerStream(tokenizer.new_output_stream([], (), keep_markers=True), parser_of(tokenizer), matcher)

    parts: list[OutputPart] = []
    for piece in pieces_of(token_ids, cuts):
        parts += stream.push(piece)
    parts += [] if stream.stopped else stream.finish()

    expected = cut(merge_adjacent([*whole.push(text), *whole.finish()]), stops, include=include)
    assert (merge_adjacent(parts), stream.stop_string) == expected


@given(answers(), STOPS, st.booleans(), CUTS)
def test_an_answer_with_its_marks_is_cut_where_its_content_is(answer, stops, include, cuts):
    name, text = answer
    tokenizer = model(name)
    token_ids = tokenizer.encode_plain(text)
    matcher = StopMatcher(stops, include=include)
    marked = tokenizer.new_output_stream([], (), keep_markers=True)
    answer_stream = AnswerStream(tokenizer.new_output_stream([], (), keep_markers=True), parser_of(tokenizer), matcher)
    stream = RawAnswerStream(marked, answer_stream, matcher, include_stop=include)

    out = "".join(stream.push(piece) for piece in pieces_of(token_ids, cuts))
    out += "" if stream.stopped else stream.finish()

    assert text.startswith(out)
    if stream.stop_string is None:
        assert out == text
    elif include:
        assert out.endswith(stream.stop_string)
    else:
        assert text[len(out) :].startswith(stream.stop_string)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("stop", ["thinking", "Rome", '"', "}", "get", "city", "<"])
def test_stop_strings_do_not_count_in_reasoning_and_in_calls(name: str, stop: str) -> None:
    tokenizer = model(name)
    text = text_of(FAMILIES[name], "I am thinking of Rome <", "", ["Rome", "Oslo"], "")
    stream = AnswerStream(
        tokenizer.new_output_stream([], (), keep_markers=True), parser_of(tokenizer), StopMatcher([stop])
    )
    parts = [*stream.push(tokenizer.encode_plain(text)), *stream.finish()]
    assert stream.stop_string is None
    assert isinstance(parts[0], Reasoning)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=2), st.data())
def test_a_stop_string_counts_if_it_ends_behind_the_first_tokens(text, stops, data):
    tokenizer = model("hermes")
    token_ids = [token for letter in text for token in tokenizer.encode_plain(letter)]
    least = data.draw(st.integers(0, len(token_ids)))
    stream = tokenizer.new_output_stream([], stops, min_tokens=least)
    out = "".join(stream.push(piece) for piece in pieces_of(token_ids, data.draw(CUTS)))
    out += "" if stream.stopped else stream.finish()

    for end in range(least + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            assert out == text[: end - max(map(len, found))]
            assert stream.num_tokens == end
            return
    assert (out, stream.stopped) == (text, False)
