"""What a recorded stream says: events wherever it was cut, tokens and times, and every way in which it may be wrong."""

import json
from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_cli.bench.stream import Recording, read_events, read_output

from tests.support.sse_server import DONE, event, token, usage


def recorded(*pieces: tuple[float, bytes], status: int = 200, failure: str = "", retry_after: str = "") -> Recording:
    return Recording(
        intended=9.0,
        began=9.5,
        start=10.0,
        status=status,
        retry_after=retry_after,
        times=array("d", (time for time, _ in pieces)),
        pieces=[piece for _, piece in pieces],
        failure=failure,
    )


EVENTS = st.lists(st.binary(min_size=1, max_size=12).filter(lambda data: not set(data) & set(b"\r\n")), max_size=6)


@given(EVENTS, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 200), max_size=12))
def test_events_are_the_same_however_the_bytes_were_cut_and_come_when_they_are_complete(
    events: list[bytes], newline: bytes, cuts: list[int]
) -> None:
    ends, body = [], b": a comment" + newline * 2
    for data in events:
        body += b"id: 7" + newline + b"data: " + data + newline * 2
        ends.append(len(body))
    edges = sorted({0, len(body), *(min(cut, len(body)) for cut in cuts)})
    pieces = [(float(end), body[begin:end]) for begin, end in pairwise(edges)]
    found = list(read_events(recorded(*pieces)))
    assert [data for _, data in found] == events
    assert [time for time, _ in found] == [min(edge for edge in edges if edge >= end) for end in ends]


def test_the_data_of_an_event_may_have_several_lines() -> None:
    assert list(read_events(recorded((1.0, b"data: a\ndata:b\n\n")))) == [(1.0, b"a\nb")]


def test_a_completion_is_timed_by_its_events() -> None:
    output = read_output(
        recorded(
            (10.5, token(" a")),
            (10.75, token(" b")),
            (11.75, token("", "length") + usage(5, 3)),
            (12.0, DONE),
        ),
        prompt_len=4,
    )
    assert output.success
    assert (output.ttft, output.itl, output.latency) == (0.5, [0.25, 1.0], 1.75)
    assert (output.prompt_len, output.output_tokens, output.num_events) == (5, 3, 3)
    assert (output.client_queue_time, output.lag, output.generated_text) == (1.0, 0.5, " a b")


def test_events_that_were_read_together_have_no_time_between_them() -> None:
    output = read_output(recorded((10.5, token() + token()), (11.0, token() + DONE)), 4)
    assert output.itl == [0.0, 0.5]


def test_a_chats_role_and_finish_reason_alone_are_no_tokens() -> None:
    def delta(finish_reason: str | None = None, **fields: object) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})

    output = read_output(
        recorded(
            (10.25, delta(role="assistant", content="")),
            (11.0, delta(reasoning_content="so")),
            (11.5, delta(content="")),  # a token without a text yet
            (11.75, delta(content="yes")),
            (12.0, delta(tool_calls=[{"index": 0}])),
            (13.0, delta("stop")),
            (13.0, DONE),
        ),
        4,
    )
    assert (output.ttft, output.itl, output.latency) == (1.0, [0.5, 0.25, 0.25], 2.0)
    assert output.generated_text == "soyes"


def test_a_finish_reason_ends_a_stream_without_done() -> None:
    assert read_output(recorded((11.0, token("a", "stop"))), 4).success


REFUSED = json.dumps({"error": {"message": "Too many requests."}}).encode()


@pytest.mark.parametrize(
    ("recording", "error"),
    [
        (recorded((11.0, token())), "The stream ended without a finish_reason or [DONE]."),
        (recorded((11.0, DONE)), "The stream ended without a token."),
        (recorded(), "The stream ended without a finish_reason or [DONE]."),
        (recorded((11.0, b"data: {\n\n")), "An event is not a JSON object: b'{'."),
        (recorded((11.0, b"data: [1]\n\n")), "An event is not a JSON object: b'[1]'."),
        (
            recorded((11.0, token()), (12.0, event({"error": {"message": "Lost."}}))),
            "The server ended the stream: Lost.",
        ),
        (recorded((11.0, event({"error": "Lost."}))), "The server ended the stream: Lost."),
        (recorded((11.0, REFUSED), status=429, retry_after="2"), "HTTP 429 (Retry-After: 2): Too many requests."),
        (recorded((11.0, b"<html>"), status=502), "HTTP 502: <html>"),
        (recorded(status=500), "HTTP 500"),
        (recorded((11.0, token()), failure="Cut."), "Cut."),
        (recorded((11.0, token() + b"data: {"), failure="Cut."), "Cut."),
        (recorded(status=0, failure="Refused."), "Refused."),
    ],
)
def test_whatever_is_wrong_is_the_requests_error(recording: Recording, error: str) -> None:
    output = read_output(recording, 4)
    assert not output.success
    assert output.error == error
