"""What both journals promise: a record is what was written to it, once, by who may write."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_proto.logprobs import TokenLogprobs
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.structured import Structured, StructuredKind, choice
from quire_router.generation import Generation, Usage
from quire_router.journal.base import Delivered, Lease, Record, Told
from quire_router.journal.codec import (
    DamagedRecordError,
    decode_record,
    encode_request,
    encode_usage,
    pack_tokens,
    unpack_tokens,
)
from quire_router.journal.deliveries import FRAME, Deliveries, RowReader
from quire_router.journal.memory import MemoryJournal
from quire_router.journal.redis import RedisJournal

from tests.support.journals import Seen, canonical, is_plain, seen, tell
from tests.support.redis_server import RedisServer, redis_server

KINDS = ["memory", "redis"]
STOP = FinishReason.STOP


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def journal_of(kind: str, redis: RedisServer) -> AsyncIterator[MemoryJournal | RedisJournal]:
    journal = MemoryJournal(owner="me") if kind == "memory" else RedisJournal(redis.url, owner="me")
    try:
        yield journal
    finally:
        await journal.close()


def request(request_id: str = "r", prompt: list[int] | None = None, n: int = 1) -> Generation:
    return Generation(request_id, "m", array("i", [1, 2] if prompt is None else prompt), SamplingParams(seed=3, n=n))


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    """An id of the test's own: the tests of this module share one server."""
    return f"r{abs(hash(request.node.nodeid))}"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_is_what_was_written(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        generation = request(fresh)
        lease = journal.open(generation)
        tell(journal, lease, 0, [10, 11])
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(generation, "me", 1, [Delivered([10, 11])])
        tell(journal, lease, 2, [12])
        journal.finish(lease, FinishReason.ERROR, "The engines were lost.")
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(
            generation, "me", 1, [Delivered([10, 11, 12])], FinishReason.ERROR, "The engines were lost."
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_each_choice_has_its_own_tokens_and_its_own_end(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        generation = request(fresh, n=3)
        lease = journal.open(generation)
        assert len((await flushed(journal, fresh)).choices) == 3
        for position in range(2):
            tell(journal, lease, position, [10 + position], 0)
            tell(journal, lease, position, [30 + position], 2)
        tell(journal, lease, 2, [32], 2, FinishReason.LENGTH)
        tell(journal, lease, 0, [], 1, FinishReason.STOP)
        assert seen(await flushed(journal, fresh)) == Seen(
            generation,
            "me",
            1,
            [
                Delivered([10, 11]),
                Delivered([], FinishReason.STOP),
                Delivered([30, 31, 32], FinishReason.LENGTH),
            ],
        )


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_added_to_a_choice_that_has_ended(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        lease = journal.open(request(fresh, n=2))
        for _ in range(2):
            tell(journal, lease, 0, [5], 1, FinishReason.STOP)
        tell(journal, lease, 1, [6], 1, FinishReason.LENGTH)
        tell(journal, lease, 1, [9], 0, FinishReason.STOP)  # with a hole before it
        assert (await flushed(journal, fresh)).choices == [Delivered(), Delivered([5], FinishReason.STOP)]


async def flushed(journal: MemoryJournal | RedisJournal, request_id: str) -> Record:
    """The record, once all is written."""
    await journal.flush()
    record = await journal.read(request_id)
    assert record is not None
    return record


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_never_opened_is_unknown(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        tell(journal, Lease(fresh, "me", 1), 0, [1])
        journal.finish(Lease(fresh, "me", 1), FinishReason.STOP)
        await journal.flush()
        assert await journal.read(fresh) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_repeating_a_write_changes_nothing(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        lease = journal.open(request(fresh))
        for _ in range(2):
            tell(journal, lease, 0, [1, 2])
            tell(journal, lease, 1, [2, 3])
            await journal.flush()
        record = await journal.read(fresh)
        assert record is not None
        assert record.choices[0].token_ids == [1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lease", [Lease("", "me", 0), Lease("", "someone", 1)])
async def test_only_the_lease_may_write(kind: str, lease: Lease, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        generation = request(fresh)
        mine = journal.open(generation)
        tell(journal, mine, 0, [1])
        tell(journal, replace(lease, request_id=fresh), 1, [9])
        journal.finish(replace(lease, request_id=fresh), FinishReason.STOP)
        await journal.flush()
        assert seen(await journal.read(fresh)) == Seen(generation, "me", 1, [Delivered([1])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finished", [True, False])
async def test_another_request_of_the_same_id_changes_nothing(
    kind: str, finished: bool, redis: RedisServer, fresh: str
) -> None:
    async with journal_of(kind, redis) as journal:
        generation = request(fresh)
        lease = journal.open(generation)
        tell(journal, lease, 0, [1])
        if finished:
            journal.finish(lease, FinishReason.STOP)
        await journal.flush()
        other = journal.open(request(fresh, [7]))
        tell(journal, other, 0, [8, 9])
        journal.finish(other, FinishReason.LENGTH)
        await journal.flush()
        record = await journal.read(fresh)
        assert seen(record) == Seen(generation, "me", 1, [Delivered([1])], FinishReason.STOP if finished else None)


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_added_after_the_end(kind: str, redis: RedisServer, fresh: str) -> None:
    async with journal_of(kind, redis) as journal:
        lease = journal.open(request(fresh))
        journal.finish(lease, FinishReason.ABORT)
        tell(journal, lease, 0, [1])
        await journal.flush()
        tell(journal, lease, 0, [1])
        journal.finish(lease, FinishReason.STOP)
        await journal.flush()
        record = await journal.read(fresh)
        assert record is not None
        assert (record.choices[0].token_ids, record.finish_reason) == ([], FinishReason.ABORT)


# How a record is stored

token_ids = st.integers(0, 2**31 - 1)
grammars = st.one_of(
    st.just(Structured(StructuredKind.JSON_OBJECT)),
    st.builds(Structured, st.just(StructuredKind.REGEX), st.text(min_size=1, max_size=9)),
    st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3).map(choice),
)
sampling = st.one_of(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**31 - 1),
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.integers(1, 10**6),
        stop_token_ids=st.lists(token_ids, max_size=16).map(tuple),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 10),
        logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3).map(lambda bias: tuple(bias.items())),
        bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        n=st.integers(1, 4),
        best_of=st.sampled_from([0, 4, 5]),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        structured=st.none() | grammars,
    ),
    st.builds(SamplingParams, ignore_eos=st.booleans(), min_tokens=st.integers(0, 16)),
    st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        beam_width=st.integers(4, 6),
        length_penalty=st.floats(-10, 10),
        early_stopping=st.sampled_from([True, False, "never"]),
    ),
)
generations = st.builds(
    Generation,
    request_id=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    model=st.text(max_size=20),
    prompt_token_ids=st.lists(token_ids, max_size=50).map(partial(array, "i")),
    params=sampling,
    stop=st.lists(st.text(st.characters(), max_size=5), max_size=4).map(tuple),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    echo=st.booleans(),
    priority=st.integers(-(2**31), 2**31 - 1),
    operation=st.sampled_from(["chat", "text_completion"]),
    tenant=st.text(max_size=9),
    cache_salt=st.binary(max_size=32),
    stream=st.booleans(),
    created=st.floats(0, 2e9),
    shape=st.text(max_size=9),
    parts=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    digest=st.text(max_size=9),
    background=st.booleans(),
    session=st.text(max_size=9),
    deadline=st.none() | st.floats(0, 2e9),
)
any_tokens = st.lists(token_ids, max_size=50)
floats = st.floats(width=32, allow_nan=False)
any_logprobs = st.builds(TokenLogprobs, floats, st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple))


@st.composite
def tolds(draw: st.DrawFn, plain: bool = False) -> Told:
    """A piece of one of four choices, as an answer may have it."""
    told, reason = draw(st.lists(token_ids, max_size=4)), draw(st.none() | st.sampled_from(FinishReason))
    piece = Told(draw(st.integers(0, 3)), told, reason)
    if plain or draw(st.booleans()):
        return piece
    return replace(
        piece,
        logprobs=draw(st.lists(any_logprobs, min_size=len(told), max_size=len(told))),
        prompt_logprobs=draw(st.lists(any_logprobs, max_size=3)),
        score=None if reason is None else draw(st.none() | floats),
    )


pieces = st.lists(tolds(), max_size=8)


def possible(pieces: list[Told], choices: int) -> list[Told]:
    """The pieces without those that an answer of so many choices cannot have."""
    kept: list[Told] = []
    ended, prompted = set[int](), False
    for piece in pieces:
        if piece.index < choices and piece.index not in ended:
            kept.append(replace(piece, prompt_logprobs=[]) if prompted else piece)
            prompted = prompted or bool(piece.prompt_logprobs)
            ended |= {piece.index} if piece.finish_reason is not None else set()
    return kept


def deliver(pieces: list[Told], choices: int) -> Deliveries:
    """The row of these pieces, each of which is repeated in vain."""
    deliveries, made = Deliveries(choices), [0] * choices
    for piece in pieces:
        before = len(deliveries.values)
        assert deliveries.add(made[piece.index], piece) == len(deliveries.values) - before
        assert deliveries.add(made[piece.index], piece) == 0
        made[piece.index] += len(piece.token_ids)
    return deliveries


usages = st.builds(Usage, *[st.integers(0, 2**20)] * 3)


@given(generations, pieces, st.none() | st.sampled_from(FinishReason), st.text(st.characters()), usages)
@settings(max_examples=50, deadline=None)
def test_a_record_comes_back_exactly(
    generation: Generation, pieces: list[Told], reason: FinishReason | None, error: str, usage: Usage
) -> None:
    told = possible(pieces, generation.params.n)
    row = pack_tokens(deliver(told, generation.params.n).values)
    fields = {
        b"request": encode_request(generation),
        b"prompt": pack_tokens(generation.prompt_token_ids),
        b"owner": b"me",
        b"epoch": b"4",
        b"lease_expires": b"1000",
        b"error": error.encode("utf-8", "surrogatepass"),
        b"usage": encode_usage(usage).encode(),
    } | ({} if reason is None else {b"reason": reason.value.encode(), b"length": b"%d" % len(row)})
    for now, held in (999, reason is None), (1000, False):
        record = decode_record(fields, row, now)
        assert canonical(record.pieces) == canonical(told)
        assert replace(record, pieces=[]) == Record(generation, "me", 4, [], reason, error, usage, held)


@given(pieces, st.data())
@settings(max_examples=50, deadline=None)
def test_any_beginning_of_the_row_is_what_was_told_up_to_some_moment(pieces: list[Told], data: st.DataObject) -> None:
    told = possible(pieces, 4)
    row = deliver(told, 4).values
    whole = canonical(told)
    for end in range(len(row) + 1):
        read = canonical(RowReader(4).read(row[:end])[0])
        last = read.pop() if read else None
        assert read == whole[: len(read)]
        assert last is None or is_beginning(last, whole[len(read)])
    assert canonical(read_in_parts(row, data)) == whole


def is_beginning(piece: Told, of: Told) -> bool:
    """Whether a piece is another one, or the first of its tokens without anything more."""
    return piece == of or (is_plain(of) and piece == Told(of.index, of.token_ids[: len(piece.token_ids)]))


def read_in_parts(row: "array[int]", data: st.DataObject) -> list[Told]:
    """What a reader gets who looks now and then while the row grows."""
    reader, told, position = RowReader(4), list[Told](), 0
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(row)), max_size=4))), len(row)]:
        new, taken = reader.read(row[position : max(position, end)])
        told, position = told + new, position + taken
    assert position == len(row)
    return told


@given(pieces, st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_a_row_that_was_cut_off_goes_on_from_its_last_whole_piece(pieces: list[Told], cut: int) -> None:
    told = possible(pieces, 4)
    row = deliver(told, 4).values
    restored, before = Deliveries.restore(row[: min(cut, len(row))], 4)
    assert restored.values == row[: len(restored.values)]
    made = [0] * 4
    for piece in told:  # what was told before changes nothing, and the rest is as if nothing had happened
        restored.add(made[piece.index], piece)
        made[piece.index] += len(piece.token_ids)
    assert canonical(RowReader(4).read(restored.values)[0]) == canonical(told)
    assert canonical(before) == canonical(RowReader(4).read(row[: min(cut, len(row))])[0])


@given(st.lists(any_tokens, max_size=5), st.none() | st.sampled_from(FinishReason))
def test_a_single_choice_costs_only_its_tokens_and_its_end(parts: list[list[int]], reason: FinishReason | None) -> None:
    row = deliver([*(Told(0, part) for part in parts), Told(0, [], reason)], 1).values.tolist()
    tokens = [token_id for part in parts for token_id in part]
    assert row[: len(tokens)] == tokens
    assert [value < 0 for value in row[len(tokens) :]] == [True] * (reason is not None)


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-12, 12), max_size=40), st.booleans())
def test_any_values_are_pieces_or_refused(values: list[int], framed: bool) -> None:
    row = [FRAME, len(values), *values] if framed else values
    with suppress(ValueError):
        pieces, taken = RowReader(2).read(row)
        assert taken <= len(row)
        assert all(piece.index in (0, 1) and min(piece.token_ids, default=0) >= 0 for piece in pieces)


def test_a_record_of_a_former_version_can_be_read() -> None:
    former = json.loads(encode_request(request()))
    for name in ("include_stop", "skip_special_tokens", "echo", "priority", "shape", "parts", "digest", "background"):
        del former[name]
    for name in ("n", "best_of", "logprobs", "structured", "min_p"):
        del former["params"][name]
    fields = {b"request": json.dumps(former).encode(), b"prompt": pack_tokens([1, 2]), b"owner": b"me", b"epoch": b"1"}
    expected = Record(replace(request(), created=former["created"]), "me", 1, [Told(0, [5, 6]), Told(0, [], STOP)])
    assert decode_record(fields, pack_tokens([5, 6, -2])) == expected


@given(generations, pieces)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_record_comes_back_exactly_from_redis(redis: RedisServer, generation: Generation, pieces: list[Told]) -> None:
    async def run() -> None:
        unique = replace(generation, request_id=uuid4().hex)
        told = possible(pieces, unique.params.n)
        async with journal_of("redis", redis) as journal:
            lease = journal.open(unique)
            made = [0] * 4
            for piece in told:
                journal.append(lease, made[piece.index], piece)
                made[piece.index] += len(piece.token_ids)
            record = await flushed(journal, unique.request_id)
            assert canonical(record.pieces) == canonical(told)
            assert replace(record, pieces=[]) == Record(unique, "me", 1, [], held=True)

    asyncio.run(run())


@given(any_tokens)
@settings(deadline=None)
def test_tokens_take_four_bytes_and_come_back(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed).tolist() == token_ids
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {b"epoch": b"x"},
        {b"request": b"[]"},
        {b"prompt": b"123"},
        {b"reason": b"bored"},
        {b"usage": b"x 1 2"},
        {b"usage": b"1 2 3 4"},
        {b"lease_expires": b"soon"},
        {b"length": b"4"},
    ],
)
def test_a_damaged_record_is_recognised(broken: dict[bytes, bytes]) -> None:
    whole = {b"request": encode_request(request()), b"prompt": b"", b"owner": b"me", b"epoch": b"1"}
    with pytest.raises(DamagedRecordError):
        decode_record({**whole, **broken} if broken else {}, b"")


DAMAGED_ROWS = {
    "half a token": b"123",
    "a choice that is not there": pack_tokens([-100]),
    "a token after the end": pack_tokens([1, -2, 3]),
    "a frame of another choice": pack_tokens([FRAME, 6, 1, 0, 0, 0, 0, 0]),
    "a frame that ends for no reason": pack_tokens([FRAME, 6, 0, 9, 0, 0, 0, 0]),
    "a frame with more in it": pack_tokens([FRAME, 7, 0, 0, 0, 0, 0, 0, 0]),
    "a frame with less in it": pack_tokens([FRAME, 5, 0, 0, 0, 0, 0]),
    "a frame of a negative length": pack_tokens([FRAME, -1]),
}


@pytest.mark.parametrize("row", DAMAGED_ROWS.values(), ids=DAMAGED_ROWS)
def test_damaged_deliveries_are_recognised(row: bytes) -> None:
    whole = {b"request": encode_request(request()), b"prompt": b"", b"owner": b"me", b"epoch": b"1"}
    with pytest.raises(DamagedRecordError):
        decode_record(whole, row)


# Only in memory


async def test_finished_records_are_forgotten_after_the_retention_time() -> None:
    now = [0.0]
    journal = MemoryJournal(retention=10, clock=lambda: now[0])
    journal.finish(journal.open(request("done")), FinishReason.STOP)
    journal.open(request("running"))
    now[0] = 9.9
    assert await journal.read("done") is not None
    now[0] = 10.0
    assert await journal.read("done") is None
    assert await journal.read("running") is not None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30))
@settings(deadline=None)
def test_memory_is_bounded_in_tokens_and_only_the_oldest_finished_records_make_room(
    script: list[tuple[int, int, bool]],
) -> None:
    """Each request of ``script`` has a prompt, then an output, and then it may finish."""

    async def run() -> None:
        most = 20
        journal = MemoryJournal(max_tokens=most)
        running: dict[str, int] = {}
        finished: dict[str, int] = {}
        for number, (prompt, output, finishes) in enumerate(script):
            name = str(number)
            lease = journal.open(request(name, [1] * prompt))
            finished = newest(finished, most - sum(running.values()) - prompt)
            if sum(running.values()) + prompt <= most:
                running[name] = prompt + output
            tell(journal, lease, 0, [1] * output)
            finished = newest(finished, most - sum(running.values()))
            if finishes and name in running:
                journal.finish(lease, FinishReason.STOP)
                finished = newest(finished | {name: running.pop(name)}, most - sum(running.values()))
            for each in map(str, range(number + 1)):
                assert (await journal.read(each) is not None) == (each in running or each in finished)

    asyncio.run(run())


def newest(finished: dict[str, int], room: int) -> dict[str, int]:
    """The last entries that have room together."""
    kept = dict(finished)
    while kept and sum(kept.values()) > room:
        del kept[next(iter(kept))]
    return kept


async def test_a_running_record_is_kept_whole_however_long_it_grows() -> None:
    journal = MemoryJournal(max_tokens=10)
    lease = journal.open(request("long"))
    for position in range(0, 100, 10):
        tell(journal, lease, position, list(range(position, position + 10)))
    journal.open(request("new"))
    record = await journal.read("long")
    assert record is not None
    assert record.choices[0].token_ids == list(range(100))
    assert await journal.read("new") is None


async def test_memory_is_bounded_and_finished_records_make_room_first() -> None:
    journal = MemoryJournal(max_records=2)
    journal.open(request("running"))
    journal.finish(journal.open(request("done")), FinishReason.STOP)
    journal.open(request("new"))
    assert await journal.read("done") is None
    tell(journal, journal.open(request("too many")), 0, [1])
    assert await journal.read("too many") is None
    assert await journal.read("running") is not None
    assert await journal.read("new") is not None
