"""Traces become arrivals: at the right times, with the right lengths, and sharing what the traced prompts shared."""

from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_engine.simulation.trace import Arrival, TraceError, read_trace

from tests.support.traces import public_trace, write_azure, write_mooncake

VOCAB_SIZE = 300
AZURE = [(0.0, 10, 3), (0.5, 2000, 1), (0.5, 7, 900), (61.25, 1, 2)]


def lengths(arrivals: list[Arrival]) -> list[tuple[int, int]]:
    return [(arrival.num_prompt, arrival.num_output) for arrival in arrivals]


def test_azure_rows_keep_their_times_lengths_and_order(tmp_path: Path) -> None:
    arrivals = read_trace(write_azure(tmp_path / "a.csv", AZURE))
    assert [arrival.time for arrival in arrivals] == pytest.approx([0, 0.5, 0.5, 61.25])
    assert lengths(arrivals) == [(10, 3), (2000, 1), (7, 900), (1, 2)]
    assert [len(arrival.prompt(VOCAB_SIZE)) for arrival in arrivals] == [10, 2000, 7, 1]


def test_times_with_a_time_zone_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:01+00:00,7,8\n"
    )
    assert [arrival.time for arrival in read_trace(path)] == pytest.approx([0, 0.99007])


def test_a_rate_makes_everything_so_many_times_faster(tmp_path: Path) -> None:
    arrivals = read_trace(write_azure(tmp_path / "a.csv", AZURE), rate=2.5)
    assert [arrival.time for arrival in arrivals] == pytest.approx([0, 0.2, 0.2, 24.5])


def test_start_and_limit_choose_rows_and_the_first_of_them_comes_at_0(tmp_path: Path) -> None:
    arrivals = read_trace(write_azure(tmp_path / "a.csv", AZURE), start=1, limit=2)
    assert lengths(arrivals) == [(2000, 1), (7, 900)]
    assert arrivals[0].time == 0


def test_a_row_has_the_same_prompt_and_the_same_place_in_its_bucket_whichever_rows_are_read(tmp_path: Path) -> None:
    rows = [(3000 * index, 600, 5, [index, index + 1]) for index in range(20)]
    path = write_mooncake(tmp_path / "m.jsonl", rows)
    whole, part = read_trace(path), read_trace(path, start=7, limit=5)
    assert [arrival.prefix_ids for arrival in part] == [arrival.prefix_ids for arrival in whole[7:12]]
    assert [arrival.time for arrival in part] == pytest.approx([one.time - whole[7].time for one in whole[7:12]])


def test_mooncake_rows_are_spread_inside_of_their_buckets_by_the_seed(tmp_path: Path) -> None:
    path = write_mooncake(tmp_path / "m.jsonl", [(0, 8, 1, [0])] * 100 + [(3000, 9, 1, [1])] * 100)
    arrivals, again, other = (read_trace(path, seed=seed) for seed in (0, 0, 1))
    times = [arrival.time for arrival in arrivals]
    assert arrivals == again != other
    assert times == sorted(times)
    assert lengths(arrivals[:100]) == [(8, 1)] * 100, "a row left its bucket"
    assert times[99] < 3 <= times[100] + 0.2 <= 3.4
    assert len(set(times)) == 200


blocks = st.lists(st.integers(0, VOCAB_SIZE**2 - 1), min_size=1, max_size=5)


@given(blocks, blocks, st.integers(0, 4), st.data())
def test_prompts_share_exactly_the_blocks_that_have_equal_names(
    one: list[int], two: list[int], shared: int, data: st.DataObject
) -> None:
    two = one[:shared] + two
    prompts, size = [], 6
    for ids in (one, two):
        length = data.draw(st.integers(size * (len(ids) - 1) + 2, size * len(ids)))
        prompts.append(Arrival(0, length, 1, tuple(ids), size).prompt(VOCAB_SIZE))
    assert all(0 <= token_id < VOCAB_SIZE for prompt in prompts for token_id in prompt)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False)))
    names = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    whole = min(size * names, *map(len, prompts))
    assert whole <= common <= whole + 1, "two names may share one digit"


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    arrivals = read_trace(write_azure(tmp_path / "a.csv", [(0.0, 40, 1)] * 500))
    assert len({tuple(arrival.prompt(VOCAB_SIZE)[:2]) for arrival in arrivals}) == 500


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", r"a\.csv, line 2: .*yesterday"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,1,2\n2023-11-16 18:00:00,1\n",
            r"a\.csv, line 3: ",
        ),
        ("a.csv", "time,in,out\n1,2,3\n", "line 1: .*TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a.csv", '{"timestamp": 0}\n', r"ends in \.jsonl"),
        ("a.csv", "", "line 1: .*TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("m.jsonl", "", "no request"),
        ("m.jsonl", "{}\n", r"m\.jsonl, line 1: .*no timestamp, input_length, output_length, hash_ids"),
        ("m.jsonl", "[]\n", "line 1: a line is a JSON object"),
        ("m.jsonl", "3\n", "line 1: a line is a JSON object"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [3]}\n', "513 tokens"),
        ("m.jsonl", '{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [3]}\n', "finite"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1e10, "hash_ids": [3]}\n', "at most"),
        ("m.jsonl", "\x00\n", "line 1: .*not JSON"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line_and_what_is_expected_there(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        read_trace(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\xff", b"a," + b"1" * 200_000, None])
def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.csv"):
        read_trace(path)


@pytest.mark.parametrize(("name", "rows"), [("azure-conv-2023.csv", 19_366), ("mooncake-conversation.jsonl", 12_031)])
def test_the_public_traces_are_read_whole(name: str, rows: int) -> None:
    arrivals = read_trace(public_trace(name))
    assert len(arrivals) == rows
    assert arrivals[0].time == 0
    assert 3300 < arrivals[-1].time < 3700
