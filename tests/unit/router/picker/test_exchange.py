"""``Exchange``: what a gateway's messages mean, and what it is answered. The cases are those of the protocol's text and
of the reference implementation's own tests.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.envoy.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from quire.envoy.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from quire_proto.errors import QuireError
from quire_router.api.rest.http import HttpError
from quire_router.core.errors import bodies_full
from quire_router.picker.exchange import (
    DESTINATION,
    MAX_CHUNK_BYTES,
    MAX_HEADERS,
    MAX_MESSAGE_BYTES,
    MAX_SUBSET,
    Exchange,
    HttpRequest,
    ProtocolError,
    is_in_subset,
    read_message,
    read_subset,
)

from tests.support.ext_proc import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    Mode,
    destination,
    header_map,
    mutated,
    request_body,
    request_headers,
    response_body,
    response_headers,
    subset_metadata,
    trailers,
)

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def exchange_in(
    mode: Mode, response_mode: Mode | None = None, limit: int = 1 << 20
) -> tuple[Exchange, ProcessingRequest]:
    """An exchange, and the headers that begin it."""
    message = request_headers()
    config = ProtocolConfiguration(
        request_body_mode=mode, response_body_mode=mode if response_mode is None else response_mode
    )
    message.protocol_config.CopyFrom(config)
    return Exchange(limit), message


def begun(body: bytes = b"{}", mode: Mode = DUPLEX, response_mode: Mode | None = None) -> Exchange:
    """An exchange whose request has come."""
    exchange, headers = exchange_in(mode, response_mode)
    exchange.receive(headers)
    assert exchange.receive(request_body(body)).request is not None
    return exchange


def pieces_of(responses: Sequence[ProcessingResponse]) -> list[tuple[bytes, bool]]:
    pieces = [each.request_body.response.body_mutation.streamed_response for each in responses]
    return [(piece.body, piece.end_of_stream) for piece in pieces]


class TestTheRequest:
    def test_headers_are_answered_when_the_body_has_come(self) -> None:
        exchange, headers = exchange_in(DUPLEX)
        assert exchange.receive(headers).responses == []
        turn = exchange.receive(request_body(b'{"prompt": "hello"}'))
        assert turn.responses == []
        assert turn.request is not None
        assert turn.request.body == b'{"prompt": "hello"}'
        first, second = exchange.send_to([A])
        assert first.WhichOneof("response") == "request_headers"
        assert destination(first) == [A]
        assert mutated(first.request_headers.response.header_mutation)["content-length"] == "19"
        assert not second.request_body.response.HasField("header_mutation")
        assert pieces_of([second]) == [(b'{"prompt": "hello"}', True)]

    def test_a_gateway_that_buffers_gets_an_answer_to_the_headers_first(self) -> None:
        exchange, headers = exchange_in(BUFFERED)
        (answer,) = exchange.receive(headers).responses
        assert answer.WhichOneof("response") == "request_headers"
        assert not answer.request_headers.response.ListFields()
        assert exchange.receive(request_body(b"{}")).request is not None
        (answer,) = exchange.send_to([A])
        assert answer.WhichOneof("response") == "request_body"
        assert destination(answer) == [A]
        assert not answer.request_body.response.HasField("body_mutation")
        assert "content-length" not in mutated(answer.request_body.response.header_mutation)

    def test_a_request_without_a_body_is_complete_at_once(self) -> None:
        exchange = Exchange(100)
        turn = exchange.receive(request_headers("/v1/models", end=True))
        assert turn.request is not None
        assert turn.request.body is None
        (answer,) = exchange.send_to([A])
        assert destination(answer) == [A]

    def test_an_empty_body_goes_on_as_one(self) -> None:
        exchange = begun(b"")
        assert pieces_of(exchange.send_to([A])[1:]) == [(b"", True)]

    def test_several_endpoints_are_written_in_their_order(self) -> None:
        assert destination(begun().send_to([A, B])[0]) == [A, B]

    def test_headers_replace_those_of_the_client(self) -> None:
        (first, _) = begun().send_to([A], {"traceparent": "00-1"}, ["authorization"])
        mutation = first.request_headers.response.header_mutation
        assert mutated(mutation)["traceparent"] == "00-1"
        assert list(mutation.remove_headers) == ["authorization"]
        overwrite = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        assert {each.append_action for each in mutation.set_headers} == {overwrite}

    def test_trailers_end_a_body_and_are_passed_on_behind_it(self) -> None:
        exchange, headers = exchange_in(DUPLEX)
        exchange.receive(headers)
        assert exchange.receive(request_body(b"{}", end=False)).request is None
        assert exchange.receive(ProcessingRequest(request_trailers=trailers())).request is not None
        first, second, third = exchange.send_to([A])
        assert destination(first) == [A]
        assert pieces_of([second]) == [(b"{}", False)]
        assert third.WhichOneof("response") == "request_trailers"

    def test_trailers_behind_a_buffered_body_are_answered(self) -> None:
        exchange, headers = exchange_in(BUFFERED)
        exchange.receive(headers)
        assert exchange.receive(request_body(b"{}", end=False)).request is not None
        exchange.send_to([A])
        (answer,) = exchange.receive(ProcessingRequest(request_trailers=trailers())).responses
        assert answer.WhichOneof("response") == "request_trailers"

    def test_values_of_headers_come_in_either_field(self) -> None:
        exchange = Exchange(100)
        headers = HeaderMap(headers=[HeaderValue(key="A", value="x"), HeaderValue(key="a", raw_value=b"\xff")])
        turn = exchange.receive(ProcessingRequest(request_headers=HttpHeaders(headers=headers, end_of_stream=True)))
        assert turn.request is not None
        assert turn.request.values("a") == ["x", "\xff"]

    def test_a_gateway_that_does_not_say_its_mode_sends_pieces(self) -> None:
        exchange = Exchange(100)
        assert exchange.receive(request_headers()).responses == []
        assert exchange.receive(request_body(b"{}")).request is not None
        assert pieces_of(exchange.send_to([A])[1:]) == [(b"{}", True)]


class TestWhatIsRefused:
    def test_a_status_that_is_no_number_is_not_known(self) -> None:
        exchange, headers = exchange_in(BUFFERED)
        exchange.receive(headers)
        exchange.receive(request_body(b"{}"))
        exchange.send_to([A])
        odd = HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key=":status", raw_value="²".encode("latin-1"))]))
        exchange.receive(ProcessingRequest(response_headers=odd))
        assert exchange.status == 0

    @pytest.mark.parametrize("mode", [NONE, STREAMED, 77])  # one that Envoy may have some day
    def test_a_mode_in_which_the_body_cannot_be_read_first(self, mode: Mode) -> None:
        exchange, headers = exchange_in(mode)
        with pytest.raises(ProtocolError, match="must be FULL_DUPLEX_STREAMED or BUFFERED"):
            exchange.receive(headers)

    def test_such_a_mode_does_not_matter_to_a_request_without_a_body(self) -> None:
        exchange = Exchange(100)
        message = request_headers("/v1/models", end=True)
        message.protocol_config.CopyFrom(ProtocolConfiguration(request_body_mode=NONE))
        assert exchange.receive(message).request is not None

    def test_a_body_that_is_too_large(self) -> None:
        exchange, headers = exchange_in(DUPLEX, limit=10)
        exchange.receive(headers)
        exchange.receive(request_body(b"x" * 10, end=False))
        with pytest.raises(HttpError, match="larger than the limit of 10 bytes") as refused:
            exchange.receive(request_body(b"x"))
        assert refused.value.status == 413

    def test_headers_that_are_too_large_or_too_many(self) -> None:
        for headers in ({"a": "x" * 70_000}, {f"a{number}": "" for number in range(MAX_HEADERS + 1)}):
            with pytest.raises(HttpError) as refused:
                Exchange(100).receive(ProcessingRequest(request_headers=HttpHeaders(headers=header_map(headers))))
            assert refused.value.status == 431

    def test_a_body_for_which_there_is_no_memory(self) -> None:
        sizes: list[int] = []

        def reserve(size: int) -> None:
            sizes.append(size)
            if size > 3:
                raise bodies_full()

        exchange = Exchange(100, reserve)
        exchange.receive(request_headers())
        exchange.receive(request_body(b"ab", end=False))
        with pytest.raises(QuireError):
            exchange.receive(request_body(b"cd"))
        assert sizes == [2, 4]

    @pytest.mark.parametrize(
        "messages",
        [
            [ProcessingRequest()],
            [request_body(b"{}")],
            [request_headers(), request_headers()],
            [request_headers(), response_headers()],
            [request_headers(), request_body(b"{}"), response_headers()],
            [request_headers(), request_body(b"{}"), request_body(b"{}")],
            [request_headers(end=True), ProcessingRequest(request_trailers=HttpTrailers())],
            [ProcessingRequest(request_headers=HttpHeaders(), observability_mode=True)],
        ],
    )
    def test_messages_in_another_order(self, messages: list[ProcessingRequest]) -> None:
        exchange = Exchange(100)
        for message in messages[:-1]:
            exchange.receive(message)
        with pytest.raises(ProtocolError):
            exchange.receive(messages[-1])

    def test_a_refusal_is_a_whole_response(self) -> None:
        exchange, headers = exchange_in(DUPLEX)
        exchange.receive(headers)
        answer = exchange.refuse(429, b'{"error":{}}', [(b"retry-after", b"2")]).immediate_response
        assert (answer.status.code, answer.body) == (429, b'{"error":{}}')
        assert mutated(answer.headers) == {"retry-after": "2"}
        assert exchange.is_answered


class TestTheResponse:
    def test_its_pieces_go_back_as_they_came(self) -> None:
        exchange = begun()
        exchange.send_to([A])
        turn = exchange.receive(response_headers(200, "text/event-stream; charset=utf-8", served=B))
        assert [each.WhichOneof("response") for each in turn.responses] == ["response_headers"]
        assert (exchange.status, exchange.is_event_stream, exchange.served) == (200, True, B)
        turn = exchange.receive(response_body(b"data: {}\n\n"))
        streamed = turn.responses[0].response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b"data: {}\n\n", False)
        assert (turn.output, turn.ended) == (b"data: {}\n\n", False)
        turn = exchange.receive(response_body(b"", end=True))
        assert turn.responses[0].response_body.response.body_mutation.streamed_response.end_of_stream
        assert turn.ended

    @pytest.mark.parametrize("mode", [STREAMED, BUFFERED])
    def test_in_other_modes_each_piece_is_answered_and_nothing_sent_back(self, mode: Mode) -> None:
        exchange = begun(response_mode=mode)
        exchange.send_to([A])
        exchange.receive(response_headers())
        (answer,) = exchange.receive(response_body(b"x" * 100_000, end=True)).responses
        assert not answer.response_body.response.ListFields()

    def test_a_long_piece_goes_back_in_several(self) -> None:
        exchange = begun()
        exchange.send_to([A])
        exchange.receive(response_headers())
        turn = exchange.receive(response_body(b"x" * (MAX_CHUNK_BYTES + 1), end=True))
        pieces = [each.response_body.response.body_mutation.streamed_response for each in turn.responses]
        assert [(len(each.body), each.end_of_stream) for each in pieces] == [(MAX_CHUNK_BYTES, False), (1, True)]

    def test_headers_alone_end_it_and_so_do_trailers(self) -> None:
        exchange = begun()
        exchange.send_to([A])
        assert exchange.receive(response_headers(204, end=True)).ended
        turn = exchange.receive(ProcessingRequest(response_trailers=trailers()))
        assert turn.ended
        assert turn.responses[0].WhichOneof("response") == "response_trailers"

    def test_headers_can_be_added_to_it(self) -> None:
        exchange = begun()
        exchange.send_to([A])
        exchange.response_headers = [("x-quire-route", "a")]
        (answer,) = exchange.receive(response_headers()).responses
        assert mutated(answer.response_headers.response.header_mutation) == {"x-quire-route": "a"}


EMPTY_HEADERS = b"\x0a\x00" * 1_100_000


def framed(field: int, content: bytes) -> bytes:
    """A field of a message as it is sent."""
    size, length = len(content), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([field << 3 | 2]) + length + bytes([size]) + content


class TestMessages:
    @given(st.binary(max_size=200_000), st.booleans(), st.sampled_from(["request_body", "response_body"]))
    def test_a_body_of_any_size_is_read_as_it_was_written(self, body: bytes, end: bool, field: str) -> None:
        message = ProcessingRequest(**{field: HttpBody(body=body * 8, end_of_stream=end)})
        assert read_message(message.SerializeToString()) == message

    @pytest.mark.parametrize(
        "data",
        [
            framed(2, framed(1, EMPTY_HEADERS)),
            framed(3, framed(1, EMPTY_HEADERS)),
            framed(6, framed(1, EMPTY_HEADERS)),
            framed(8, EMPTY_HEADERS),
            framed(4, framed(1, b"x" * 2**20)) + framed(8, EMPTY_HEADERS),
            framed(8, b"") * MAX_MESSAGE_BYTES,
            framed(4, b"") + framed(15, EMPTY_HEADERS),
            framed(4, b"x" * 2**20)[:-1],
            b"\xff" * (MAX_MESSAGE_BYTES + 1),
        ],
        ids=["headers", "response", "trailers", "metadata", "behind", "fields", "unknown", "cut", "bits"],
    )
    def test_what_is_large_beside_a_body_is_refused_before_it_is_parsed(self, data: bytes) -> None:
        with pytest.raises(ProtocolError, match="besides a body"):
            read_message(data)

    @given(st.binary(max_size=100), st.integers(0, 3))
    def test_other_bytes_are_a_message_or_none(self, data: bytes, times: int) -> None:
        with suppress(ProtocolError):
            assert isinstance(read_message(data * 10**times), ProcessingRequest)


class TestSubsets:
    def test_it_is_bounded_before_it_is_taken_apart(self) -> None:
        for endpoints in ([A] * (MAX_SUBSET + 1), ",".join([A] * (MAX_SUBSET + 1))):
            metadata = subset_metadata(endpoints)
            assert metadata is not None
            with pytest.raises(ProtocolError, match="A subset has at most"):
                read_subset(metadata)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ([A, B], {A, B}),
            ([], set()),
            (f"{A},{B}", {A, B}),
            (f"  {A} ,  ,  {B}  ", {A, B}),
            ([f"{A},{B}"], {A, B}),
            (["10.0.0.1"], {"10.0.0.1"}),
        ],
    )
    def test_lists_and_texts_are_read(self, given: Sequence[str] | str, expected: set[str]) -> None:
        metadata = subset_metadata(given)
        assert metadata is not None
        assert read_subset(metadata) == expected

    def test_other_metadata_restrict_nothing(self) -> None:
        message = request_headers(end=True)
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({"other": "value"})
        message.metadata_context.filter_metadata["envoy.lb"].update({DESTINATION: A})
        turn = Exchange(100).receive(message)
        assert turn.request is not None
        assert turn.request.subset is None

    def test_it_may_come_with_the_body(self) -> None:
        exchange, headers = exchange_in(DUPLEX)
        exchange.receive(headers)
        body = request_body(b"{}")
        body.metadata_context.CopyFrom(subset_metadata([A]))
        turn = exchange.receive(body)
        assert turn.request is not None
        assert turn.request.subset == {A}

    @pytest.mark.parametrize(
        ("endpoint", "subset", "expected"),
        [
            (A, {A}, True),
            (A, {"10.0.0.1"}, True),
            (A, {"10.0.0.1:3000"}, False),
            (A, set(), False),
            ("[fd00::1]:8000", {"fd00::1"}, True),
            ("[fd00::1]:8000", {"[fd00::1]:8000"}, True),
        ],
    )
    def test_an_address_without_a_port_stands_for_all_of_its_ports(
        self, endpoint: str, subset: set[str], expected: bool
    ) -> None:
        assert is_in_subset(endpoint, frozenset(subset)) is expected


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The data in pieces, some of them empty."""
    edges = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    body=st.binary(max_size=200).map(lambda data: data * 700),
    places=st.lists(st.integers(0, 140_000), max_size=6),
    buffered=st.booleans(),
    with_trailers=st.booleans(),
)
def test_the_request_is_the_same_and_goes_on_unchanged_however_its_body_is_cut(
    body: bytes, places: list[int], buffered: bool, with_trailers: bool
) -> None:
    exchange, headers = exchange_in(BUFFERED if buffered else DUPLEX)
    turns = [exchange.receive(headers)]
    pieces = [body] if buffered else cut(body, places)
    for number, piece in enumerate(pieces):
        ends = number == len(pieces) - 1 and not with_trailers
        turns.append(exchange.receive(ProcessingRequest(request_body=HttpBody(body=piece, end_of_stream=ends))))
    if with_trailers and not buffered:
        turns.append(exchange.receive(ProcessingRequest(request_trailers=trailers())))
    requests = [turn.request for turn in turns if turn.request is not None]
    assert requests == [HttpRequest(exchange.headers, body)]
    responses = exchange.send_to([A])
    assert destination(responses[0]) == [A]
    if buffered:
        assert len(responses) == 1
        return
    sent = pieces_of([each for each in responses[1:] if each.HasField("request_body")])
    assert b"".join(data for data, _ in sent) == body
    assert [end for _, end in sent] == [False] * (len(sent) - 1) + [not with_trailers] * bool(sent)
