"""The incremental detokeniser and stop strings, against decoding everything at once."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire_proto.text.detokenizer import REPLACEMENT, Detokenizer, StopMatcher
from quire_proto.text.tokenizer import ModelTokenizer

from tests.support.model_folders import byte_level, sentencepiece_like

BYTE_LEVEL = ModelTokenizer(byte_level(), None)
SENTENCEPIECE = ModelTokenizer(sentencepiece_like(), None)
TEXTS = st.text(max_size=40) | st.text("helo wrdu", max_size=40) | st.text("é€😀你 a", max_size=12)
IDS = st.lists(st.integers(0, byte_level().get_vocab_size() + 5), max_size=40)
CUTS = st.lists(st.integers(1, 6), max_size=60)


def pieces_of(items, cuts):
    """``items`` cut into pieces of the lengths in ``cuts``, the rest one by one."""
    at = 0
    for length in [*cuts, *[1] * len(items)]:
        if at < len(items):
            yield items[at : at + length]
            at += length


def streamed(text: ModelTokenizer, prompt, output, cuts=(), stop=(), **rules):
    """The text of ``output`` as it comes out piece by piece."""
    stream = text.new_output_stream(list(prompt), tuple(stop), **rules)
    out = "".join(stream.push(piece) for piece in pieces_of(output, cuts))
    return out if stream.stopped else out + stream.finish()


def byte_level_ids(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(IDS, CUTS)
def test_any_split_of_the_tokens_gives_the_text_of_decoding_them_at_once(ids, cuts):
    prompt = byte_level_ids("how are")

    assert streamed(BYTE_LEVEL, prompt, ids, cuts) == byte_level().decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(st.binary(max_size=24), st.data())
def test_a_prompt_that_ends_anywhere_even_inside_a_character_is_continued_exactly(raw, data):
    ids = [byte_level().token_to_id(letter) for letter in (byte_letters()[byte] for byte in raw)]
    cut = data.draw(st.integers(0, len(ids)))
    whole_before = raw[:cut].decode(errors="replace").rstrip(REPLACEMENT)

    emitted = streamed(BYTE_LEVEL, ids[:cut], ids[cut:], data.draw(CUTS))

    full = raw.decode(errors="replace")
    assert full.endswith(emitted)
    if REPLACEMENT not in full:
        assert emitted == (full[len(whole_before) :] if cut < len(raw) else "")


def byte_letters() -> dict[int, str]:
    """The letter that byte-level tokenizers write for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(rest)}


@settings(deadline=None)
@given(TEXTS, st.data())
@example("hello world", None)
def test_a_sentencepiece_output_keeps_the_space_between_prompt_and_output(text, data):
    ids = sentencepiece_like().encode(text).ids
    cut, cuts = (1, []) if data is None else (data.draw(st.integers(0, len(ids))), data.draw(CUTS))
    before, whole = sentencepiece_like().decode(ids[:cut]), sentencepiece_like().decode(ids)

    emitted = streamed(SENTENCEPIECE, ids[:cut], ids[cut:], cuts)

    if REPLACEMENT not in before:
        assert before + emitted == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, sentencepiece_like().get_vocab_size() - 1), max_size=40), CUTS)
def test_any_sentencepiece_tokens_give_text_and_none_is_held_back_for_ever(ids, cuts):
    stream = SENTENCEPIECE.new_output_stream([1], ())
    for piece in pieces_of(ids, cuts):
        stream.push(piece)

    assert len(stream.finish().encode()) <= 3 * 12


def test_a_character_is_emitted_only_when_it_is_complete():
    stream = BYTE_LEVEL.new_output_stream(byte_level_ids("x"), ())
    letters = byte_letters()
    ids = [byte_level().token_to_id(letters[byte]) for byte in "a😀b".encode()]

    assert [stream.push([token]) for token in ids] == ["a", "", "", "", "😀", "b"]


@settings(deadline=None)
@given(IDS)
def test_a_push_never_ends_inside_a_character_that_the_next_tokens_complete(ids):
    stream = BYTE_LEVEL.new_output_stream([], ())
    emitted = ""
    for token_id in ids:
        emitted += stream.push([token_id])
        whole = byte_level().decode(ids, skip_special_tokens=True)
        assert whole.startswith(emitted)


def test_special_and_unknown_tokens_have_no_text_and_do_not_cost_the_next_word_its_space():
    hello, world = sentencepiece_like().encode("hello").ids, sentencepiece_like().encode("world").ids
    unknown = sentencepiece_like().get_vocab_size() + 7

    assert streamed(SENTENCEPIECE, hello, [2, unknown, *world, 2]) == " world"


def test_an_added_token_that_is_not_special_is_text():
    assert streamed(BYTE_LEVEL, [], byte_level_ids("<think>why")) == "<think>why"


@settings(deadline=None)
@given(IDS, CUTS)
@example([0, 1, 2, 0], [])
def test_special_tokens_are_text_where_they_are_not_skipped(ids, cuts):
    prompt = byte_level_ids("how are")

    emitted = streamed(BYTE_LEVEL, prompt, ids, cuts, skip_special_tokens=False)

    assert emitted == byte_level().decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(TEXTS, st.lists(st.sampled_from([0, 1, 2]), max_size=3), st.data())
def test_sentencepiece_special_tokens_are_text_at_any_place_and_in_any_split(text, specials, data):
    ids = sentencepiece_like().encode(text).ids
    for special in specials:
        ids.insert(data.draw(st.integers(0, len(ids))), special)
    cut, cuts = data.draw(st.integers(0, len(ids))), data.draw(CUTS)
    before, whole = (sentencepiece_like().decode(part, skip_special_tokens=False) for part in (ids[:cut], ids))

    emitted = streamed(SENTENCEPIECE, ids[:cut], ids[cut:], cuts, skip_special_tokens=False)

    if REPLACEMENT not in before + whole:
        assert before + emitted == whole


@settings(deadline=None)
@given(st.lists(st.sampled_from([0x80, 0xE2, 0xF0, 0x9F]), min_size=100, max_size=200))
def test_endless_broken_bytes_do_not_make_a_token_expensive(raw):
    longest = 0

    def decode(token_ids):
        nonlocal longest
        longest = max(longest, len(token_ids))
        return bytes(token_ids).decode(errors="replace")

    stream = Detokenizer(decode, [])
    emitted = "".join(stream.push(byte) for byte in raw) + stream.finish()

    assert emitted == bytes(raw).decode(errors="replace")
    assert longest <= 9


# Stop strings

ALPHABET = "ab c"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


def ended(text: str, stops: list[str]) -> int | None:
    """Where the stop string that is complete first ends."""
    return next((end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))), None)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; the longest of those that end there."""
    end = ended(text, stops)
    if end is None:
        return text, False
    return text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))], True


@settings(deadline=None)
@given(st.text(ALPHABET, max_size=30), STOPS, CUTS)
@example("aab", ["ab", "aac"], [1, 1, 1])
def test_stop_strings_are_found_in_any_split_as_in_the_whole_text(text, stops, cuts):
    matcher = StopMatcher(stops)
    emitted = "".join(matcher.push(piece) for piece in pieces_of(text, cuts))
    emitted += "" if matcher.stopped else matcher.finish()

    assert (emitted, matcher.stopped) == naive(text, stops)


@settings(deadline=None)
@given(st.text(ALPHABET, max_size=30), STOPS, CUTS)
@example("aab", ["ab", "aac"], [1, 1, 1])
def test_an_included_stop_string_ends_the_text_and_nothing_is_held_back(text, stops, cuts):
    matcher = StopMatcher(stops, include=True)
    pushed = emitted = ""
    for piece in pieces_of(text, cuts):
        if matcher.stopped:
            break
        pushed, emitted = pushed + piece, emitted + matcher.push(piece)
        assert matcher.stopped or emitted == pushed

    before, stopped = naive(text, stops)
    assert matcher.stopped == stopped
    assert (matcher.found in stops and emitted.endswith(matcher.found)) if stopped else matcher.found is None
    assert emitted == (text[: ended(text, stops)] if stopped else text)
    assert emitted.startswith(before)


@settings(deadline=None)
@given(st.text(ALPHABET, max_size=30), STOPS, CUTS)
def test_no_more_text_is_held_back_than_a_stop_string_could_need(text, stops, cuts):
    matcher = StopMatcher(stops)
    pushed = emitted = ""
    for piece in pieces_of(text, cuts):
        pushed, emitted = pushed + piece, emitted + matcher.push(piece)
        if matcher.stopped:
            return
        held = pushed[len(emitted) :]
        assert pushed.startswith(emitted)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_after_a_stop_there_is_no_more_text():
    matcher = StopMatcher(["END"])

    assert [matcher.push(piece) for piece in ["one E", "N", "D two", " three"]] == ["one ", "", "", ""]


@settings(deadline=None)
@given(
    st.text("hel wo", max_size=30), st.lists(st.text("hel wo", min_size=1, max_size=4), min_size=1, max_size=3), CUTS
)
def test_a_stop_counts_the_tokens_up_to_the_one_that_completed_it(text, stops, cuts):
    ids = byte_level_ids(text)
    stream = BYTE_LEVEL.new_output_stream(byte_level_ids("x"), tuple(stops))
    for piece in pieces_of(ids, cuts):
        stream.push(piece)

    needed = [n for n in range(len(ids) + 1) if naive(byte_level().decode(ids[:n]), stops)[1]]
    assert stream.stopped == bool(needed)
    assert stream.num_tokens == (needed[0] if needed else len(ids))


@pytest.mark.parametrize("stop", ["é", "naïve c", "😀"])
def test_stop_strings_beyond_ascii_are_found_across_tokens(stop):
    text = "the naïve café 😀 goes on"

    assert streamed(BYTE_LEVEL, [], byte_level_ids(text), (), [stop]) == text.partition(stop)[0]
    included = streamed(BYTE_LEVEL, [], byte_level_ids(text), (), [stop], include_stop=True)
    assert included == "".join(text.partition(stop)[:2])


@settings(deadline=None)
@given(TEXTS, st.text("helo wrdué€", min_size=1, max_size=3), st.booleans(), CUTS)
def test_a_stop_string_is_only_ever_at_the_end_however_the_tokens_are_cut(text, stop, include, cuts):
    ids = byte_level_ids(text)
    at_once = streamed(BYTE_LEVEL, [], ids, [len(ids)], [stop], include_stop=include)

    assert streamed(BYTE_LEVEL, [], ids, cuts, [stop], include_stop=include) == at_once
    before, found, _ = text.partition(stop)
    assert at_once == before + (found if include else "")
