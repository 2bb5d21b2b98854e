"""``quire bench serve`` against servers whose schedule is known: exact figures, and failures that are counted."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire_cli.bench import serve
from quire_cli.bench.client import HttpClient, ServerError
from quire_cli.bench.config import ServeBenchConfig
from quire_cli.bench.dataset import SampleRequest
from quire_cli.bench.load import Load, Run, run_load
from quire_cli.bench.metrics import compute_result
from quire_cli.bench.report import format_result
from quire_proto.cli import read_settings

from tests.support.sse_server import END, HEAD, Answer, Peer, chunk, response, serving, stream, token, usage
from tests.support.waiting import until


class Clock:
    """A clock that stands still until it is set, and says when it was read."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self._read = asyncio.Event()

    def __call__(self) -> float:
        self._read.set()
        return self.seconds

    async def wait_read(self) -> None:
        self._read.clear()
        await self._read.wait()


def config(url: str = "http://127.0.0.1:1", **settings: object) -> ServeBenchConfig:
    return ServeBenchConfig(base_url=url, model="m", num_prompts=3, **settings)  # type: ignore[arg-type]


def requests(count: int) -> list[SampleRequest]:
    return [SampleRequest(b'{"max_tokens": 4}', 7, 4) for _ in range(count)]


async def run(answer: Answer, count: int = 3, load: Load | None = None, **options: Any) -> tuple[Run, Any]:
    async with serving(answer) as server:
        client = HttpClient(server.url, {}, **options)
        try:
            found = await run_load(client, "/v1/completions", requests(count), load or Load(), np.random.default_rng(0))
            return found, server
        finally:
            client.close()


def steady(clock: Clock, first: float, gap: float, tokens: int) -> Answer:
    """The first token after ``first`` seconds of the clock, another after each ``gap``: the clock goes on when the
    client has read what there was.
    """

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        await send(peer, HEAD)
        for index in range(tokens):
            clock.seconds += gap if index else first
            await send(peer, chunk(token(finish_reason="length" if index == tokens - 1 else None)))
        await send(peer, chunk(usage(7, tokens)) + chunk(b"data: [DONE]\n\n") + END)

    async def send(peer: Peer, data: bytes) -> None:
        peer.writer.write(data)
        await clock.wait_read()

    return answer


async def test_a_steady_server_gives_exact_figures() -> None:
    clock = Clock()
    found, _ = await run(steady(clock, 0.5, 0.125, 9), 4, Load(max_concurrency=1), now=clock)
    result = compute_result(config(goodput=["ttft:500", "tpot:125", "e2el:1499"]), Load(), found, lambda text: None)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 36)
    for name, milliseconds in {"ttft": 500.0, "tpot": 125.0, "itl": 125.0, "e2el": 1500.0}.items():
        assert {result[f"{part}_{name}_ms"] for part in ("mean", "median", "p50", "p90", "p99")} == {milliseconds}
        assert result[f"std_{name}_ms"] == 0
    assert result["duration"] == 6.0
    assert result["output_throughput"] == 6.0
    assert result["total_token_throughput"] == (36 + 28) / 6.0
    assert result["request_goodput"] == 0, "each took 1500 ms, one more than the objective"
    assert result["max_concurrent_requests"] <= 2
    assert [round(time, 9) for time in result["queue_times"]] == [0.0, 1.5, 3.0, 4.5]
    assert result["warnings"] == []


async def test_a_run_of_less_than_two_seconds_has_no_peak() -> None:
    for requests, is_shown in ((1, False), (2, True)):
        clock = Clock()
        found, _ = await run(steady(clock, 0.5, 0.125, 9), requests, Load(max_concurrency=1), now=clock)
        result = compute_result(config(), Load(), found, lambda text: None)
        assert result["duration"] == 1.5 * requests
        assert ("Peak output token throughput" in format_result(config(), Load(), result)) == is_shown


async def test_a_closed_loop_runs_no_more_at_once_than_it_may_and_uses_connections_again() -> None:
    _, server = await run(stream(token(), usage(7, 1)), 12, Load(max_concurrency=3))
    assert len(server.bodies) == 12
    assert server.most_running <= 3
    assert server.connections <= 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    everyone, waiting = asyncio.Event(), 0

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 5:
            everyone.set()
        await everyone.wait()
        await stream(token(), usage(7, 1))(peer, body)

    found, server = await run(answer, 5, Load(rate=500))
    assert server.most_running == 5
    assert all(output.success for output in found.outputs)


async def test_latencies_from_the_intended_time_show_what_a_full_client_omits() -> None:
    """One request at once against an arrival of all within a moment: from sending each takes as long as it takes, from
    its time the last one takes as long as all.
    """
    clock = Clock()
    load = Load(rate=1e6, max_concurrency=1)
    found, _ = await run(steady(clock, 0.5, 0.125, 5), 4, load, now=clock)
    result = compute_result(config(), load, found, lambda text: None)
    assert result["mean_e2el_ms"] == pytest.approx(1000)
    assert result["mean_e2el_including_client_queue_ms"] == pytest.approx(2500, abs=0.1)
    assert result["mean_ttft_including_client_queue_ms"] == pytest.approx(2000, abs=0.1)
    assert any("--max-concurrency held requests back" in text for text in result["warnings"])


async def test_a_client_that_sends_late_says_so() -> None:
    seconds = iter(range(10_000))
    found, _ = await run(stream(token(), usage(7, 1)), 3, Load(rate=100), now=lambda: float(next(seconds)))
    result = compute_result(config(), Load(rate=100), found, lambda text: None)
    assert result["client_p99_lag_ms"] > 500
    assert any("could not keep up" in text for text in result["warnings"])


async def cut(peer: Peer, body: dict[str, Any]) -> None:
    await peer.send(HEAD + chunk(token()))
    peer.writer.close()


async def gone(peer: Peer, body: dict[str, Any]) -> None:
    peer.writer.close()


async def hang(peer: Peer, body: dict[str, Any]) -> None:
    await peer.send(HEAD + chunk(token()))
    await peer.hang()


async def unintelligible(peer: Peer, body: dict[str, Any]) -> None:
    await peer.send(b"not HTTP at all\r\n\r\n")
    await peer.hang()


async def without_length(peer: Peer, body: dict[str, Any]) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + token() + usage(7, 1) + b"data: [DONE]\n\n")
    peer.writer.close()


def refuse(peer: Peer, body: dict[str, Any]) -> Any:
    return peer.send(response(429, {"error": {"message": "Full."}}, "Retry-After: 3"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (refuse, "HTTP 429 (Retry-After: 3): Full."),
        (cut, "The connection was closed within the answer."),
        (gone, "The connection was closed before an answer."),
        (hang, "No complete answer within 0.2 s (--request-timeout)."),
        (unintelligible, "The answer is not HTTP: "),
        (stream(b"data: {\n\n"), "An event is not a JSON object"),
        (stream(token(), done=False), "The stream ended without a finish_reason or [DONE]."),
    ],
)
async def test_every_failure_is_counted_with_its_text(answer: Answer, error: str) -> None:
    found, _ = await run(answer, 3, timeout=0.2)
    result = compute_result(config(), Load(), found, lambda text: None)
    assert (result["completed"], result["failed"]) == (0, 3)
    [(text, count)] = result["failures"].items()
    assert count == 3
    assert text.startswith(error)
    assert result["warnings"][0].startswith("3 requests failed")


async def main_of(answer: Answer, *flags: str) -> tuple[int, str]:
    """Status and standard error of the command as a process."""
    async with serving(answer) as server:
        words = [
            "--base-url",
            server.url,
            "--model",
            "m",
            "--random-input-len",
            "5",
            "--random-output-len",
            "1",
            *flags,
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quire_cli.main", "bench", "serve", *words, stdout=DEVNULL, stderr=PIPE
        )
        _, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, told.decode()


async def test_a_run_with_refused_requests_ends_with_a_sentence_and_status_1() -> None:
    asked = 0

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        nonlocal asked
        asked += 1
        await (refuse if asked % 2 else stream(token(), usage(5, 1)))(peer, body)

    status, told = await main_of(answer, "--num-prompts", "6", "--backend", "vllm")
    assert status == 1
    assert told.splitlines()[-1] == (
        "error: 3 of 6 requests failed: 3 times HTTP 429 (Retry-After: 3): Full; --max-concurrency sends fewer at "
        "once, and the router's --max-queued-requests lets more wait."
    )


async def test_a_run_without_failures_ends_with_status_0() -> None:
    status, told = await main_of(stream(token(), usage(5, 1)), "--num-prompts", "70")
    assert (status, told) == (0, "All requests at once, at most 64 running: 70 requests\n")


def test_failures_of_other_kinds_are_named_without_that_advice() -> None:
    results = [{"completed": 4, "failures": {"A.": 5, "B": 2}}, {"completed": 0, "failures": {"C": 2, "A.": 1, "D": 1}}]
    assert serve.describe_failures(results) == (
        "11 of 15 requests failed: 6 times A, 2 times B, 2 times C, 1 times something else."
    )
    assert serve.describe_failures([{"completed": 4, "failures": {}}]) == ""


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        ([], 64),
        (["--request-rate", "inf"], None),
        (["--request-rate", "2,4"], None),
        (["--max-concurrency", "7"], 7),
        (["--request-rate", "inf", "--max-concurrency", "7"], 7),
    ],
)
def test_only_without_a_rate_and_a_concurrency_there_is_a_default_for_what_runs_at_once(
    flags: list[str], most: int | None
) -> None:
    assert read_settings(ServeBenchConfig, flags).concurrency == most


@pytest.mark.parametrize(
    ("backend", "path"),
    [("vllm", "/v1/completions"), ("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_the_backends_are_those_of_vllm(backend: str, path: str) -> None:
    assert config(backend=backend, tokenizer="x").path == path


async def test_failures_do_not_take_the_others_with_them() -> None:
    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        kinds = [stream(token(), usage(7, 1)), refuse, cut]
        await kinds[body["max_tokens"]](peer, body)

    async with serving(answer) as server:
        client = HttpClient(server.url, {})
        wanted = [SampleRequest(json.dumps({"max_tokens": index % 3}).encode(), 7, 1) for index in range(9)]
        found = await run_load(client, "/v1/completions", wanted, Load(max_concurrency=2), np.random.default_rng(0))
    assert [output.success for output in found.outputs] == [True, False, False] * 3


async def test_the_end_of_the_connection_ends_a_body_without_length_or_chunks() -> None:
    found, server = await run(without_length, 2, Load(max_concurrency=1))
    assert [output.error for output in found.outputs] == ["", ""]
    assert server.connections == 2


async def test_a_server_that_is_not_there_fails_each_request() -> None:
    client = HttpClient("http://127.0.0.1:1", {})
    found = await run_load(client, "/v1/completions", requests(2), Load(), np.random.default_rng(0))
    assert [output.error for output in found.outputs] == ["ConnectionRefusedError: Connection refused"] * 2
    with pytest.raises(ServerError, match=r"no server answers at http://127\.0\.0\.1:1; quire serve MODEL starts one"):
        await client.get("/v1/models")


@pytest.mark.parametrize(("count_tokens", "tokens", "how"), [(lambda text: None, 2, "events"), (len, 4, "tokenizer")])
async def test_tokens_are_counted_where_the_server_does_not_say(
    count_tokens: Callable[[str], int | None], tokens: int, how: str
) -> None:
    found, _ = await run(stream(token(), token()), 1)
    result = compute_result(config(), Load(), found, count_tokens)
    assert result["total_output_tokens"] == tokens
    assert any(f"counted by {how}" in text for text in result["warnings"])


async def test_events_of_several_tokens_give_a_warning() -> None:
    found, _ = await run(stream(token(), token(), usage(7, 8)), 1)
    result = compute_result(config(), Load(), found, lambda text: None)
    assert result["tokens_per_event"] == 4
    assert any("4.00 tokens" in text for text in result["warnings"])


async def test_the_command_measures_each_rate_and_writes_the_keys_of_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(stream(token(), token(), usage(9, 2))) as server:
        settings = config(
            server.url,
            request_rate="200,inf",
            random_input_len=5,
            random_output_len=2,
            num_warmups=2,
            goodput=["ttft:10000"],
            save_result=True,
            result_dir=tmp_path,
            result_filename="figures.json",
            metadata=["machine=small"],
            api_key="secret",
            temperature=0,
            plot=tmp_path / "plot.svg",
        )
        results = await serve.measure(settings)
    serve._report_all(settings, results)
    assert [result["request_rate"] for result in results] == [200.0, "inf"]
    assert len(server.bodies) == 2 + 2 * 3
    assert {header["authorization"] for header in server.headers} == {"Bearer secret"}
    assert {body["temperature"] for body in server.bodies} == {0}
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 8, "no run finds the prompts of another cached"
    written = [json.loads(line) for line in (tmp_path / "figures.json").read_text().splitlines()]
    assert [len(each) for each in written] == [len(written[0])] * 2 or "ttft_including" in str(written[0])
    assert set(written[0]) >= VLLM_KEYS
    assert "secret" not in (tmp_path / "figures.json").read_text()
    assert written[0]["machine"] == "small"
    assert (tmp_path / "plot.svg").read_text().count("</svg>") == 1
    table = capsys.readouterr().out
    assert table.count("Serving Benchmark Result") == 2
    assert "Request goodput (req/s):" in table
    assert "rate" in table.splitlines()[-3]


# Of a run of ``vllm bench serve --save-result --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99``.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "latencies"),
    *("queue_times", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(
        f"{part}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for part in ("mean", "median", "std", "p50", "p90", "p99")
    ),
}


def two_then_silence() -> Answer:
    """Answers two requests, and keeps the others waiting."""
    asked = 0

    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        nonlocal asked
        asked += 1
        if asked > 2:
            await asyncio.Event().wait()
        await stream(token(), usage(7, 1))(peer, body)

    return answer


async def test_a_run_that_is_interrupted_has_the_answers_until_then() -> None:
    seen: list[tuple[int, int]] = []
    async with serving(two_then_silence()) as server:
        client = HttpClient(server.url, {})
        asked, rng = requests(5), np.random.default_rng(0)
        watched = lambda ended, sent, _seconds: seen.append((ended, sent))  # noqa: E731
        running = asyncio.create_task(run_load(client, "/v1/completions", asked, Load(), rng, watch=watched))
        await until(lambda: (2, 5) in seen)
        running.cancel()
        found = await running
        client.close()
    assert found.interrupted
    assert [output.success for output in found.outputs] == [True, True]


async def test_a_run_that_is_interrupted_before_any_answer_has_none() -> None:
    async def answer(peer: Peer, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with serving(answer) as server:
        client = HttpClient(server.url, {})
        running = asyncio.create_task(
            run_load(client, "/v1/completions", requests(2), Load(), np.random.default_rng(0))
        )
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        client.close()


async def test_ctrl_c_prints_the_figures_until_then() -> None:
    async with serving(two_then_silence()) as server:
        words = ["--base-url", server.url, "--model", "m", "--num-prompts", "5", "--backend", "vllm"]
        words += ["--random-input-len", "1", "--random-output-len", "1", "--ready-check-timeout-sec", "0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire_cli.main",
            "bench",
            "serve",
            *words,
            "--num-warmups",
            "0",
            stdout=PIPE,
            stderr=PIPE,
        )
        await until(lambda: len(server.bodies) == 5)
        await asyncio.sleep(0.3)  # for the two answers to be read
        process.send_signal(signal.SIGINT)
        shown, told = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "Successful requests" in shown.decode()
    assert "error: interrupted: these are the figures of 2 of 5 requests\n" in told.decode()
