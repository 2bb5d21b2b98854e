"""Forms are read as they arrive, however they are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import QuireError
from quire_router.api.rest.multipart import Field, MultipartParser

TYPE = "multipart/form-data; boundary=b0"


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = b"".join(
        b"--b0\r\nContent-Disposition: form-data; " + h.encode() + b"\r\n\r\n" + d + b"\r\n" for h, d in fields
    )
    return parts + b"--b0--\r\n"


def parsed(pieces: list[bytes]) -> list[tuple[Field, bytes]]:
    parser, found = MultipartParser(TYPE), list[tuple[Field, bytes]]()
    for piece in pieces:
        for each in parser.feed(piece):
            if isinstance(each, Field):
                found.append((each, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + each)
    assert parser.ended
    return found


@given(
    st.lists(st.one_of(st.binary(), st.sampled_from([b"\r\n", b"\r\n--b", b"--b0", b"\r\n\r\n"])), max_size=6),
    st.integers(1, 20),
)
def test_a_file_is_the_same_however_its_form_is_cut(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    if b"\r\n--b0" in b"\r\n" + data:
        return
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="a.jsonl"', data))
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    assert parsed(cut) == [(Field("purpose", None), b"batch"), (Field("file", "a.jsonl"), data)]


@pytest.mark.parametrize(
    ("header", "name"), [('name="file"; filename="a\\"b"', 'a"b'), ('filename="x%22y"; name="file"', 'x"y')]
)
def test_names_are_read_as_clients_quote_them(header: str, name: str) -> None:
    assert parsed([form((header, b"x"))]) == [(Field("file", name), b"x")]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b""),
        ("multipart/form-data", b""),
        (TYPE, b"--b0\r\nContent-Type: text/plain\r\n\r\nx\r\n--b0--"),
        (TYPE, b"--b0\r\nContent-Disposition: form-data; x=" + b"y" * 10_000),
        (TYPE, form(*[('name="a"', b"x")] * 33)),
    ],
)
def test_what_is_no_form_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(QuireError, match="This is not a form"):
        list(MultipartParser(content_type).feed(body))
