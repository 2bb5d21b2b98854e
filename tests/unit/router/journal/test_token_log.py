"""The row of what was told: any beginning of it is what was told up to some moment."""

from array import array
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.sampling import FinishReason
from quire_router.journal.base import RecordedDelta
from quire_router.journal.codec import (
    pack_tokens,
    unpack_tokens,
)
from quire_router.journal.token_log import FRAME_MARKER, TokenLog, TokenLogReader

from tests.support.any_records import any_tokens, deliver, pieces, possible
from tests.support.journals import canonical, is_plain


@given(pieces, st.data())
@settings(max_examples=50, deadline=None)
def test_any_beginning_of_the_row_is_what_was_told_up_to_some_moment(
    pieces: list[RecordedDelta], data: st.DataObject
) -> None:
    told = possible(pieces, 4)
    row = deliver(told, 4).values
    whole = canonical(told)
    for end in range(len(row) + 1):
        read = canonical(TokenLogReader(4).read(row[:end])[0])
        last = read.pop() if read else None
        assert read == whole[: len(read)]
        assert last is None or is_beginning(last, whole[len(read)])
    assert canonical(read_in_parts(row, data)) == whole


def is_beginning(piece: RecordedDelta, of: RecordedDelta) -> bool:
    """Whether a piece is another one, or the first of its tokens without anything more."""
    return piece == of or (is_plain(of) and piece == RecordedDelta(of.index, of.token_ids[: len(piece.token_ids)]))


def read_in_parts(row: "array[int]", data: st.DataObject) -> list[RecordedDelta]:
    """What a reader gets who looks now and then while the row grows."""
    reader, told, position = TokenLogReader(4), list[RecordedDelta](), 0
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=4))), len(row)]:
        new, taken = reader.read(row[position : max(position, end)])
        told, position = told + new, position + taken
    assert position == len(row)
    return told


@given(pieces, st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_a_row_that_was_cut_off_goes_on_from_its_last_whole_piece(pieces: list[RecordedDelta], cut: int) -> None:
    told = possible(pieces, 4)
    row = deliver(told, 4).values
    reader = TokenLogReader(4, tokens_only=True)
    before, taken = reader.read(row[: min(cut, len(row))])
    restored = TokenLog.restore(row[:taken], reader)
    assert restored.values == row[: len(restored.values)]
    made = [0] * 4
    for piece in told:  # what was told before changes nothing, and the rest is as if nothing had happened
        restored.append(made[piece.index], piece)
        made[piece.index] += len(piece.token_ids)
    assert canonical(TokenLogReader(4).read(restored.values)[0]) == canonical(told)
    whole, _ = TokenLogReader(4).read(row[: min(cut, len(row))])
    assert before == [RecordedDelta(piece.index, piece.token_ids, piece.finish_reason) for piece in whole]


@given(st.lists(any_tokens, max_size=5), st.none() | st.sampled_from(FinishReason))
def test_a_single_choice_costs_only_its_tokens_and_its_end(parts: list[list[int]], reason: FinishReason | None) -> None:
    row = deliver([*(RecordedDelta(0, part) for part in parts), RecordedDelta(0, [], reason)], 1).values.tolist()
    tokens = [token_id for part in parts for token_id in part]
    assert row[: len(tokens)] == tokens
    assert [value < 0 for value in row[len(tokens) :]] == [True] * (reason is not None)


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-12, 12), max_size=40), st.booleans())
def test_any_values_are_pieces_or_refused(values: list[int], framed: bool) -> None:
    row = array("i", [FRAME_MARKER, len(values), *values] if framed else values)
    with suppress(ValueError):
        pieces, taken = TokenLogReader(2).read(row)
        assert taken <= len(row)
        assert all(piece.index in (0, 1) and min(piece.token_ids, default=0) >= 0 for piece in pieces)


@given(any_tokens)
@settings(deadline=None)
def test_tokens_take_four_bytes_and_come_back(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed).tolist() == token_ids
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
