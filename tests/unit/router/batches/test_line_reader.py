"""Lines of a batch are the same however its file is cut, and are read off the event loop within bounds."""

import json
import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_router.batches import batch as batch_module
from quire_router.batches.batch import Line, LineError, LineReader

from tests.support.batch_stage import CHAT, batch_stage, jsonl, line

LINES = [jsonl([line("a")]).strip(), jsonl([line("é")]).strip(), b"{", b"[]", b"", b"  ", b"\r", b"x" * 300]
LINES += [jsonl([line("long", "x" * 300)]).strip(), b" " * 9_000, jsonl([line("longer", "x" * 9_000)]).strip()]


def lines_of(pieces: list[bytes], most: int = 250) -> list[object]:
    """What a reader makes of the pieces of a file."""
    reader, found = LineReader(CHAT, most), list[Line | LineError]()
    for piece in pieces:
        found += reader.feed(piece)
    found += [] if reader.error is not None else reader.end()
    return [each if isinstance(each, Line) else each.error for each in [*found, *filter(None, [reader.error])]]


@given(lines=st.lists(st.sampled_from(LINES), max_size=8), ended=st.booleans(), cuts=st.lists(st.integers(0, 999)))
def test_lines_are_the_same_however_the_file_is_cut(lines: list[bytes], ended: bool, cuts: list[int]) -> None:
    file = b"\n".join(lines) + b"\n" * ended
    places = sorted({0, len(file), *(cut for cut in cuts if cut < len(file))})
    pieces = [file[begin:end] for begin, end in pairwise(places)]
    assert lines_of(pieces) == lines_of([file])
    full = [each for each in lines if each.strip()]
    assert len(lines_of([file])) == len(full)


@pytest.mark.parametrize("excess", [b"[" * 20_000, b"[" + b"1," * 400_000 + b"1]", b'{"a":' * 20_000])
def test_a_line_with_more_values_than_a_request_may_have_is_not_parsed(
    excess: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module.json, "loads", lambda _: pytest.fail("it was parsed"))
    (error,) = lines_of([excess + b"\n"], 2**20)
    assert isinstance(error, dict)
    assert (error["code"], error["line"]) == ("invalid_request", 1)
    assert error["message"].startswith("This line holds more than")


@given(
    st.text(min_size=1, max_size=60),
    st.permutations(["custom_id", "method", "url", "body"]),
    st.sampled_from(["x" * 9_000, [[0]] * 20_000]),
    st.booleans(),
)
def test_a_line_beyond_the_bounds_of_a_body_fails_alone_by_its_name(
    name: str, order: list[str], content: object, ascii_only: bool
) -> None:
    fields = line(name) | {"body": {"custom_id": "no", "x": content}}
    text = json.dumps({key: fields[key] for key in order}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    most = 2**20 if isinstance(content, list) else 8_000
    (found,) = lines_of([text[:5_000], text[5_000:], b"\n"], most)
    assert isinstance(found, Line)
    assert (found.number, found.custom_id, found.text) == (0, name, b"")
    with pytest.raises(QuireError, match="This line h") as refused:
        found.body()
    assert refused.value.code is ErrorCode.INVALID


async def test_a_file_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[bool] = set()
    read_line = batch_module.read_line

    def spy(*arguments: Any) -> Line:
        threads.add(threading.current_thread() is threading.main_thread())
        return read_line(*arguments)

    monkeypatch.setattr(batch_module, "read_line", spy)
    content = jsonl([line(f"line {number}", "x" * 9_000) for number in range(3)])
    async with batch_stage() as stage:
        api = stage.openai()
        file = await api.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await api.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while batch.status not in ("completed", "failed"):
            batch = await api.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.total) == ("completed", 3)
    assert threads == {False}
