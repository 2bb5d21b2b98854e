"""The token log: any prefix of it is what was sent up to some moment."""

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

from tests.support.journals import canonical, is_plain
from tests.support.record_strategies import any_tokens, deliver, deltas, possible


@given(deltas, st.data())
@settings(max_examples=30, deadline=None)
def test_any_prefix_of_the_log_is_what_was_sent_up_to_some_moment(
    deltas: list[RecordedDelta], data: st.DataObject
) -> None:
    sent = possible(deltas, 4)
    log = deliver(sent, 4).values
    whole = canonical(sent)
    for end in range(len(log) + 1):
        read = canonical(TokenLogReader(4).read(log[:end])[0])
        last = read.pop() if read else None
        assert read == whole[: len(read)]
        assert last is None or is_beginning(last, whole[len(read)])
    assert canonical(read_in_parts(log, data)) == whole


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**31 - 1), st.integers(-1, 1), st.booleans()), max_size=30)
)
def test_a_token_is_appended_as_a_delta_of_one_token_is(
    appended: list[tuple[int, int, int, bool]],
) -> None:
    """Also one that came before, one behind a gap, and one after its choice's end."""
    one, other, lengths = TokenLog(3), TokenLog(3), [0] * 3
    for index, token_id, shift, ends in appended:
        position = max(0, lengths[index] + shift)
        delta = RecordedDelta(index, [token_id])
        assert one.append_token(index, position, token_id) == other.append(position, delta)
        if ends:
            end = RecordedDelta(index, [], FinishReason.STOP)
            assert one.append(lengths[index], end) == other.append(lengths[index], end)
        assert one.values == other.values
        assert one.num_tokens == other.num_tokens
        lengths[index] = len(
            [1 for delta in TokenLogReader(3).read(one.values)[0] if delta.index == index for _ in delta.token_ids]
        )


def is_beginning(delta: RecordedDelta, of: RecordedDelta) -> bool:
    """Whether a piece is another one, or the first of its tokens without anything more."""
    return delta == of or (is_plain(of) and delta == RecordedDelta(of.index, of.token_ids[: len(delta.token_ids)]))


def read_in_parts(log: "array[int]", data: st.DataObject) -> list[RecordedDelta]:
    """What a reader gets who looks now and then while the row grows."""
    reader, sent, position = TokenLogReader(4), list[RecordedDelta](), 0
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4))), len(log)]:
        new, taken = reader.read(log[position : max(position, end)])
        sent, position = sent + new, position + taken
    assert position == len(log)
    return sent


@given(deltas, st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_a_log_that_was_cut_off_continues_from_its_last_complete_delta(deltas: list[RecordedDelta], cut: int) -> None:
    sent = possible(deltas, 4)
    log = deliver(sent, 4).values
    reader = TokenLogReader(4, tokens_only=True)
    before, taken = reader.read(log[: min(cut, len(log))])
    restored = TokenLog.restore(log[:taken], reader)
    assert restored.values == log[: len(restored.values)]
    made = [0] * 4
    for delta in sent:  # what was sent before changes nothing, and the rest is as if nothing had happened
        restored.append(made[delta.index], delta)
        made[delta.index] += len(delta.token_ids)
    assert canonical(TokenLogReader(4).read(restored.values)[0]) == canonical(sent)
    whole, _ = TokenLogReader(4).read(log[: min(cut, len(log))])
    assert before == [RecordedDelta(delta.index, delta.token_ids, delta.finish_reason) for delta in whole]


@given(st.lists(any_tokens, max_size=5), st.none() | st.sampled_from(FinishReason))
def test_a_single_choice_costs_only_its_tokens_and_its_end(parts: list[list[int]], reason: FinishReason | None) -> None:
    log = deliver([*(RecordedDelta(0, part) for part in parts), RecordedDelta(0, [], reason)], 1).values.tolist()
    tokens = [token_id for part in parts for token_id in part]
    assert log[: len(tokens)] == tokens
    assert [value < 0 for value in log[len(tokens) :]] == [True] * (reason is not None)


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-12, 12), max_size=40), st.booleans())
def test_any_values_are_deltas_or_refused(values: list[int], framed: bool) -> None:
    log = array("i", [FRAME_MARKER, len(values), *values] if framed else values)
    with suppress(ValueError):
        deltas, taken = TokenLogReader(2).read(log)
        assert taken <= len(log)
        assert all(delta.index in (0, 1) and min(delta.token_ids, default=0) >= 0 for delta in deltas)


@given(any_tokens)
@settings(deadline=None)
def test_tokens_take_four_bytes_and_come_back(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed).tolist() == token_ids
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
