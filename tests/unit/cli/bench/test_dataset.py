"""The requests of a run: their lengths, texts and times, what they share, and files that cannot be used."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_cli.bench.config import ServeBenchConfig, join_values
from quire_cli.bench.dataset import DatasetError, RequestFactory, SampleRequest
from quire_cli.bench.load import Load
from quire_proto.cli import read_settings
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in which two words may join to a third, so that texts are not read as they were made."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def make(count: int, seed: int = 0, **settings: Any) -> list[SampleRequest]:
    return RequestFactory(ServeBenchConfig(**settings), "m").make(count, seed)


def bodies(requests: list[SampleRequest]) -> Iterator[dict[str, Any]]:
    return (json.loads(request.body) for request in requests)


@given(
    st.integers(1, 40), st.integers(1, 20), st.floats(0, 0.9), st.integers(0, 8), st.integers(0, 5), st.integers(4, 900)
)
def test_random_requests_have_the_lengths_and_the_prefix_that_were_asked_for(
    size: int, output: int, ratio: float, prefix: int, seed: int, limit: int
) -> None:
    settings = {"random_input_len": size, "random_output_len": output, "random_range_ratio": str(ratio)}
    made = make(8, seed, random_prefix_len=prefix, vocab_size=max(8, limit), **settings)
    asked = list(bodies(made))
    beginnings = {tuple(body["prompt"][:prefix]) for body in asked}
    assert len(beginnings) == 1
    for request, body in zip(made, asked, strict=True):
        assert body["model"] == "m"
        assert body["ignore_eos"]
        assert body["stream_options"] == {"include_usage": True}
        assert len(body["prompt"]) == request.prompt_len
        assert size * (1 - ratio) - 1 <= request.prompt_len - prefix <= max(1, size * (1 + ratio) + 1)
        assert max(1, output * (1 - ratio) - 1) <= body["max_tokens"] == request.output_len <= output * (1 + ratio) + 1
        assert all(3 <= token < max(8, limit) for token in body["prompt"])


def test_a_seed_decides_the_prompts() -> None:
    settings = {"random_input_len": 64, "random_range_ratio": '{"input": 0.5, "output": 0}'}
    assert make(4, 1, **settings) == make(4, 1, **settings)
    assert not {request.body for request in make(4, 1, **settings)} & {
        request.body for request in make(4, 2, **settings)
    }


def test_ids_are_those_of_the_tokenizer_but_special_ones(folder: Path) -> None:
    made = make(50, tokenizer=folder, random_input_len=100)
    assert {token for body in bodies(made) for token in body["prompt"]} <= set(range(3, WORDS))


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_texts_have_as_many_tokens_as_asked_for(folder: Path, backend: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made = make(5, tokenizer=folder, backend=backend, prompts="text", random_input_len=30, random_output_len=9)
    for body in bodies(made):
        chat = backend == "openai-chat"
        text = body["messages"][0]["content"] if chat else body["prompt"]
        assert len(tokenizer.encode(text).ids) == 30
        assert body["max_completion_tokens" if chat else "max_tokens"] == 9


def test_settings_of_the_sampler_and_further_fields_are_sent() -> None:
    [body] = bodies(make(1, temperature=1, top_p=0.95, top_k=5, min_p=0.1, extra_body='{"x": [1]}', ignore_eos=False))
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"], body["x"]) == (1, 0.95, 5, 0.1, [1])
    assert "ignore_eos" not in body


def conversations(path: Path, *lengths: tuple[int, int]) -> Path:
    entries = [
        {"conversations": [{"value": " ".join([f"w{index + 3}"] * first)}, {"value": " ".join(["w9"] * second)}]}
        for index, (first, second) in enumerate(lengths)
    ]
    path.write_text(json.dumps([*entries, {"conversations": [{"value": "alone"}]}, {}]))
    return path


def test_conversations_are_neither_too_short_nor_too_long_and_repeat_where_there_are_too_few(
    folder: Path, tmp_path: Path
) -> None:
    path = conversations(tmp_path / "share.json", (5, 6), (3, 9), (9, 3), (7, 8), (1025, 9), (1000, 1100))
    settings = {"dataset_name": "sharegpt", "dataset_path": path, "tokenizer": folder}
    made = make(5, **settings, disable_shuffle=True)
    assert [(each.prompt_len, each.output_len) for each in made] == [(5, 6), (7, 8), (5, 6), (7, 8), (5, 6)]
    assert [len(body["prompt"]) for body in bodies(made)] == [5, 7, 5, 7, 5]
    assert not any("ignore_eos" in body for body in bodies(made))
    given = make(3, **settings, disable_shuffle=True, sharegpt_output_len=2)
    assert [(each.prompt_len, each.output_len) for each in given] == [(5, 2), (9, 2), (7, 2)]


def test_conversations_can_be_sent_without_a_tokenizer(tmp_path: Path) -> None:
    path = conversations(tmp_path / "share.json", (2, 2), (3, 3))
    settings = {"dataset_name": "sharegpt", "dataset_path": path, "prompts": "text", "output_len": 4}
    assert [body["max_tokens"] for body in bodies(make(2, **settings))] == [4, 4]


def trace(path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"dataset_name": "timed_trace", "dataset_path": path}


def test_a_traces_prompts_share_what_its_hash_ids_share_and_come_at_its_times(tmp_path: Path) -> None:
    settings = trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 10, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 1500, "input_length": 12, "output_length": 4, "hash_ids": [5, 6, 8]},
        {"timestamp": 4000, "input_length": 6, "output_length": 5},
    )
    made = make(9, **settings, timed_trace_chunk_hash_size=4, timed_trace_sec_multiplier=0.001)
    first, second, third = (body["prompt"] for body in bodies(made))
    assert [each.time for each in made] == [0.0, 0.5, 3.0]
    assert [(each.prompt_len, each.output_len) for each in made] == [(10, 3), (12, 4), (6, 5)]
    assert (len(first), len(second), len(third)) == (10, 12, 6)
    assert first[:8] == second[:8]
    assert first[8:10] != second[8:10]
    assert Load(self_timed=True).arrival_times(made, np.random.default_rng(0)) == [0.0, 0.5, 3.0]
    assert make(9, seed=1, **settings)[0].body != make(9, seed=2, **settings)[0].body


def azure(path: Path, *rows: str) -> dict[str, Any]:
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return {"dataset_name": "timed_trace", "dataset_path": path}


def test_a_trace_in_csv_has_dates_for_times(tmp_path: Path) -> None:
    """The form that Azure publishes, seven digits of a second included."""
    rows = ("2023-11-16 23:59:59.5000000,374,44", "2023-11-17 00:00:00.7500001,0,109", "2023-11-17 00:00:03,9,0")
    settings = azure(tmp_path / "trace.csv", *rows)
    made = make(9, **settings)
    assert [(each.time, each.prompt_len, each.output_len) for each in made] == [
        (0, 374, 44),
        (1.25, 1, 109),
        (3.5, 9, 1),
    ]
    assert [each.time for each in make(2, **settings, timed_trace_sec_multiplier=2)] == [0, 2.5]


@pytest.mark.parametrize("row", ["2023-11-16 25:00:00,1,1", "2023-11-16,x,1", "2023-11-16", "2020-01-01,1,1"])
def test_a_row_of_a_csv_that_is_none_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises(DatasetError, match="row 1"):
        make(5, **azure(tmp_path / "trace.csv", "2023-11-16 18:15:46.6805900,374,44", row))


@given(st.integers(1, 30), st.floats(0, 10), st.integers(0, 5))
def test_jitter_spreads_times_that_are_rounded_and_keeps_them_in_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, jitter: float, seed: int
) -> None:
    rows = [{"timestamp": 3 * (row // 8), "input_length": 1 + row, "output_length": 1} for row in range(count)]
    settings = trace(tmp_path_factory.getbasetemp() / "jitter.jsonl", *rows)
    made = make(count, seed, **settings, timed_trace_jitter_sec=jitter)
    assert [each.time for each in made] == sorted(each.time for each in made)
    for each in made:
        rounded = rows[each.prompt_len - 1]["timestamp"]
        assert rounded <= each.time <= rounded + jitter
    assert made == make(count, seed, **settings, timed_trace_jitter_sec=jitter)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"timestamp": 1, "input_length": 2}', "row 1: not a row of a timed trace"),
        ('{"timestamp": -5, "input_length": 2, "output_length": 2}', "before the first"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 2}', "before the first"),
        ("[]", "row 1"),
        ("nothing", "row 1"),
    ],
)
def test_a_row_that_is_none_is_named(tmp_path: Path, row: str, reason: str) -> None:
    settings = trace(tmp_path / "trace.jsonl", {"timestamp": 0, "input_length": 2, "output_length": 2})
    with settings["dataset_path"].open("a") as file:
        file.write(row)
    with pytest.raises(DatasetError, match=reason):
        make(5, **settings)


@pytest.mark.parametrize("content", ["{", '{"a": 1}', "[1]", "[]"])
def test_a_file_without_conversations_is_refused(tmp_path: Path, folder: Path, content: str) -> None:
    path = tmp_path / "share.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=r"ShareGPT|no request"):
        make(1, dataset_name="sharegpt", dataset_path=path, tokenizer=folder)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        make(1, dataset_name="sharegpt", dataset_path=tmp_path / "none.json", tokenizer=folder)
    with pytest.raises(DatasetError, match="not a tokenizer"):
        make(1, tokenizer=tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(DatasetError, match=r"did you mean .*/model\?"):
        make(1, tokenizer=tmp_path / "modle")


@given(st.integers(1, 60), st.floats(0.1, 1000), st.floats(0.05, 50), st.integers(0, 9))
def test_arrivals_are_in_order_and_as_many_a_second_as_asked_for(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    requests = [SampleRequest(b"", 1, 1)] * count
    times = Load(rate, burstiness).arrival_times(requests, np.random.default_rng(seed))
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """The squared coefficient of variation of a gamma distribution is one over its shape."""
    requests = [SampleRequest(b"", 1, 1)] * 20_000
    for shape in (0.25, 1.0, 4.0):
        gaps = np.diff(Load(10, shape).arrival_times(requests, np.random.default_rng(0)))
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / shape, rel=0.1)
    assert np.diff(Load(10, float("inf")).arrival_times(requests[:5], np.random.default_rng(0))) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dataset-name", "sharegpt"], "--dataset-path is needed"),
        (["--dataset-path", "x"], "--dataset-path is needed"),
        (["--backend", "openai-chat"], "--tokenizer FOLDER is needed"),
        (["--backend", "openai-chat", "--prompts", "ids", "--tokenizer", "x"], "chat completions take text only"),
        (["--dataset-name", "sharegpt", "--dataset-path", "x"], "--tokenizer FOLDER is needed"),
        (["--self-timed"], "only a timed_trace has times"),
        (["--dataset-name", "timed_trace", "--dataset-path", "x", "--request-rate", "2"], "--no-self-timed"),
        (["--request-rate", "0"], "above 0"),
        (["--request-rate", "fast"], "--request-rate"),
        (["--goodput", "ttft"], "is not KEY:VALUE"),
        (["--goodput", "itl:5"], "itl is not one of"),
        (["--goodput", "ttft:nan"], "0 or more milliseconds"),
        (["--percentile-metrics", "ttft,x"], "x is not one of"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--random-range-ratio", "1"], "below 1"),
        (["--random-range-ratio", "wide"], "is not a number"),
        (["--extra-body", "{"], "is not JSON"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read_settings(ServeBenchConfig, join_values(arguments))
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert reason in told
    assert told.count("\n") == 1


def test_flags_take_several_values_as_those_of_vllm_do() -> None:
    arguments = [
        "--goodput",
        "ttft:500",
        "tpot:50",
        "--header",
        "A=b,c",
        "D=e=f",
        "--request-rate",
        "1,2,inf",
        "--metric-percentiles",
        "99",
    ]
    config = read_settings(ServeBenchConfig, join_values(arguments))
    assert config.goodput == {"ttft": 500, "tpot": 50}
    assert config.header == {"A": "b,c", "D": "e=f"}
    assert config.request_rate == [1, 2, float("inf")]
    assert config.metric_percentiles == [99]


def test_variables_set_what_flags_set_and_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BENCH_GOODPUT", "ttft:1 e2el:2")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    config = ServeBenchConfig()
    assert config.goodput == {"ttft": 1, "e2el": 2}
    assert config.headers == {"Authorization": "Bearer secret"}
    assert ServeBenchConfig(base_url="127.0.0.1:9/v1/").url == "http://127.0.0.1:9"
    assert "other" not in repr(ServeBenchConfig(api_key="other"))  # type: ignore[arg-type]
