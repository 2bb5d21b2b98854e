"""What is sent to vLLM, and how its answers are read: both as a real server has answered them, and the stand-in too."""

from dataclasses import replace
from time import process_time

import pytest
from aiohttp import web
from quire.v1 import engine_pb2
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams, StopToken, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind, choice
from quire_router.engines.attempt import EngineLost, Output
from quire_router.engines.external.http_client import BadAnswer, HttpClient, ServerError
from quire_router.engines.external.server_kind import read_load
from quire_router.engines.external.vllm_server import VllmServer
from quire_router.engines.settings import KnownModel

from tests.support.http_engines import VllmEngine, serving
from tests.support.vllm_contract import CASES, EOS, ask, ask_about, choice_of, recorded, shapes

RECORDED = recorded()


def outputs(name: str) -> list[Output]:
    """What the adapter makes of the recorded events of a case."""
    reader = VllmServer().reader(choice_of(CASES[name]))
    events = RECORDED["answers"][name]["events"]
    return [output for event in events if (output := reader.read(event)) is not None]


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_what_was_recorded(name: str) -> None:
    assert VllmServer().body(choice_of(CASES[name])) == RECORDED["answers"][name]["request"]


@pytest.mark.parametrize("name", CASES)
async def test_the_stand_in_answers_as_a_real_server(name: str) -> None:
    engine = VllmEngine("demo")
    async with serving(engine):
        answer = await ask(engine.url, VllmServer().body(choice_of(CASES[name])))
    real = RECORDED["answers"][name]
    assert answer["status"] == real["status"]
    assert shapes(answer) - shapes(real) <= {(".events[].choices[].stop_reason", "number")}
    assert shapes(real) == shapes(answer) | {each for each in shapes(real) if each[0].endswith("stop_reason")}


async def test_the_stand_in_says_what_a_real_server_says_of_itself() -> None:
    engine = VllmEngine("demo")
    async with serving(engine):
        about = await ask_about(engine.url)
    real = RECORDED["about"]
    assert shapes({**about, "/metrics": []}) == shapes({**real, "/metrics": []})
    names = {line.partition("{")[0] for line in real["/metrics"]}
    assert {line.partition("{")[0] for line in about["/metrics"]} <= names


def test_tokens_are_read_with_their_positions_behind_what_was_delivered() -> None:
    first, second = outputs("greedy")
    assert (first.token_ids, first.position, first.finish_reason) == ([289], 1, None)
    assert (second.token_ids, second.position, second.finish_reason) == ([345], 2, FinishReason.LENGTH)


def test_the_token_that_ends_an_output_is_none_of_it() -> None:
    (end,) = outputs("end of sequence")
    assert (end.token_ids, end.position, end.finish_reason, end.stop_token) == ([], 1, FinishReason.STOP, None)
    (stop,) = outputs("stop token")
    assert (stop.token_ids, stop.finish_reason) == ([], FinishReason.STOP)


def test_a_stop_token_has_its_log_probability_where_they_were_asked_for() -> None:
    (stop,) = outputs("stop token with log-probabilities")
    assert stop.stop_token == StopToken(289, TokenLogprobs(pytest.approx(-0.0001721, rel=1e-3)))
    assert stop.logprobs == []


def test_log_probabilities_are_of_the_token_and_of_as_many_others_as_were_asked_for() -> None:
    first, _ = outputs("log-probabilities")
    (found,) = first.logprobs
    assert found.top[0][0] == 289
    assert len(found.top) == 2
    assert found.top[0][1] == found.logprob


def test_a_token_that_is_not_among_the_most_probable_adds_none_to_them() -> None:
    params = SamplingParams(logprobs=1, max_tokens=3)
    event = {
        "choices": [
            {
                "token_ids": [7],
                "finish_reason": None,
                "logprobs": {"token_logprobs": [-3.0], "top_logprobs": [{"token_id:7": -3.0, "token_id:8": -0.1}]},
            }
        ]
    }
    output = VllmServer().reader(choice_of(params)).read(event)
    assert output is not None
    assert output.logprobs == [TokenLogprobs(-3.0, ((8, -0.1),))]


def test_an_output_that_vllm_aborts_is_lost_and_not_ended() -> None:
    event = {"choices": [{"token_ids": [], "finish_reason": "abort", "logprobs": None}]}
    with pytest.raises(EngineLost, match="abort"):
        VllmServer().reader(choice_of(CASES["greedy"])).read(event)


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": [{}]},
        {"choices": [{"token_ids": None, "finish_reason": None, "logprobs": None}]},
        {"choices": [{"token_ids": 3, "finish_reason": None, "logprobs": None}]},
        {"choices": [{"token_ids": ["3"], "finish_reason": None, "logprobs": None}]},
        {"choices": [{"token_ids": [3.0], "finish_reason": None, "logprobs": None}]},
        {"choices": [{"token_ids": [True], "finish_reason": None, "logprobs": None}]},
        {"choices": 3},
    ],
)
def test_an_event_without_what_it_should_have_is_no_output(event: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        VllmServer().reader(choice_of(CASES["greedy"])).read(event)


def test_log_probabilities_that_are_missing_are_noticed() -> None:
    event = {"choices": [{"token_ids": [5, 6], "finish_reason": None, "logprobs": None}]}
    with pytest.raises(BadAnswer):
        VllmServer().reader(choice_of(CASES["log-probabilities"])).read(event)


def test_a_choice_that_goes_on_gets_what_is_left_of_its_tokens() -> None:
    body = VllmServer().body(choice_of(SamplingParams(max_tokens=10, min_tokens=4)))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([20, 1001, 342], 9, 3)


def test_seeds_are_what_vllm_takes() -> None:
    assert 0 <= VllmServer().body(choice_of(SamplingParams(seed=2**64 - 1)))["seed"] < 2**63


def test_a_choice_that_goes_on_draws_with_other_random_numbers_than_it_began_with() -> None:
    """vLLM's begin anew with each request: the same ones again would be those that its beginning was drawn with."""
    begun, *later = (replace(choice_of(SamplingParams(seed=7)), delivered=count) for count in range(100))
    seeds = [VllmServer().body(choice)["seed"] for choice in (begun, *later)]
    assert seeds[0] == 7
    assert len({*seeds}) == 100


@pytest.mark.parametrize(
    ("structured", "sent"),
    [
        (Structured(StructuredKind.JSON_OBJECT), {"json_object": True}),
        (Structured(StructuredKind.JSON_SCHEMA, "{}"), {"json": "{}"}),
        (Structured(StructuredKind.REGEX, "a+"), {"regex": "a+"}),
        (Structured(StructuredKind.GRAMMAR, 'start: "a"'), {"grammar": 'start: "a"'}),
        (choice(["a", "b"]), {"choice": ["a", "b"]}),
    ],
)
def test_structured_outputs_are_passed_on(structured: Structured, sent: dict[str, object]) -> None:
    assert VllmServer().body(choice_of(SamplingParams(structured=structured)))["structured_outputs"] == sent


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(beam_width=2), "beam_width"),
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs"),
        (SamplingParams(bad_words=((3,),)), "bad_words"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_with_the_name_of_the_parameter(params: SamplingParams, param: str) -> None:
    error = VllmServer().unsupported(params, resumed=False)
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID, param)
    assert "vLLM" in error.message


def test_a_structured_output_does_not_go_on_in_the_middle() -> None:
    params = SamplingParams(structured=choice(["a"]))
    assert VllmServer().unsupported(params, resumed=False) is None
    error = VllmServer().unsupported(params, resumed=True)
    assert error is not None
    assert error.code is ErrorCode.UNAVAILABLE


async def described(engine: VllmEngine, server: VllmServer) -> engine_pb2.DescribeResponse:
    http = HttpClient(engine.url)
    try:
        return await server.describe(http, {"m": KnownModel()})
    finally:
        await http.close()


async def test_a_server_describes_itself() -> None:
    engine, server = VllmEngine(), VllmServer()
    async with serving(engine):
        description = await described(engine, server)
    assert list(description.served_model_names) == ["m"]
    assert (description.max_model_len, description.block_size, description.blocks_total) == (2048, 16, 400)
    assert description.model_revision == "vllm:/models/m"
    assert description.prefix_caching


@pytest.mark.parametrize(("version", "takes"), [("0.10.1", False), ("0.10.2", True), ("0.9", False), ("dev", True)])
async def test_versions_that_cannot_answer_with_token_ids_are_not_used(version: str, takes: bool) -> None:
    class Other(VllmEngine):
        async def _version(self, _: web.Request) -> web.Response:
            return web.json_response({"version": version})

    engine = Other()
    async with serving(engine):
        if takes:
            assert (await described(engine, VllmServer())).version == version
        else:
            with pytest.raises(BadAnswer, match=r"0\.10\.2"):
                await described(engine, VllmServer())


async def test_versions_that_ignore_structured_outputs_do_not_get_them() -> None:
    class Old(VllmEngine):
        async def _version(self, _: web.Request) -> web.Response:
            return web.json_response({"version": "0.10.2"})

    engine, server = Old(), VllmServer()
    async with serving(engine):
        await described(engine, server)
    assert server.unsupported(SamplingParams(structured=choice(["a"])), resumed=False) is not None


async def test_load_is_read_from_the_metrics_and_an_unhealthy_server_has_none() -> None:
    engine, server = VllmEngine(), VllmServer()
    engine.waiting = 3
    async with serving(engine):
        await described(engine, server)
        http = HttpClient(engine.url)
        load = await server.load(http)
        engine.healthy = False
        with pytest.raises(ServerError):
            await server.load(http)
        await http.close()
    assert (load.running, load.waiting, load.blocks_total, load.blocks_free) == (0, 3, 400, 300)


async def test_the_metrics_of_a_real_server_are_understood() -> None:
    class Recorded(VllmEngine):
        async def _metrics(self, _: web.Request) -> web.Response:
            return web.Response(text="\n".join(RECORDED["about"]["/metrics"]) + "\n")

    engine, server = Recorded(), VllmServer()
    async with serving(engine):
        description = await described(engine, server)
        http = HttpClient(engine.url)
        load = await server.load(http)
        await http.close()
    assert (description.block_size, description.prefix_caching) == (128, True)
    assert description.blocks_total > 1000
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, description.blocks_total)


async def test_several_engines_of_one_server_are_one() -> None:
    """As with ``--data-parallel-size``: each has series of its own."""

    class Parallel(VllmEngine):
        async def _metrics(self, request: web.Request) -> web.Response:
            text = (await super()._metrics(request)).text or ""
            second = "\n".join(line for line in text.replace('engine="0"', 'engine="1"').splitlines() if line[0] != "#")
            return web.Response(text=text + second.replace("0.25", "0.75") + "\n")

    engine, server = Parallel(), VllmServer()
    engine.waiting = 2
    async with serving(engine):
        assert (await described(engine, server)).blocks_total == 800
        http = HttpClient(engine.url)
        load = await server.load(http)
        await http.close()
    assert (load.waiting, load.blocks_free) == (4, 400)


@pytest.mark.parametrize("text", ["vllm:num_requests_running{", "vllm:num_requests_running{} x\n"])
async def test_metrics_that_cannot_be_parsed_are_no_load(text: str) -> None:
    class Odd(VllmEngine):
        async def _metrics(self, _: web.Request) -> web.Response:
            return web.Response(text=text)

    engine = Odd()
    async with serving(engine):
        http = HttpClient(engine.url)
        with pytest.raises(BadAnswer, match="metrics"):
            await VllmServer().load(http)
        await http.close()


def test_the_end_of_sequence_of_the_demo_model_is_what_the_recording_has() -> None:
    assert RECORDED["answers"]["end of sequence"]["events"][0]["choices"][0]["token_ids"] == [EOS]


def test_metrics_with_more_samples_than_any_server_has_are_not_parsed() -> None:
    """The parser takes some 20 µs for a sample, and a server is asked every second."""
    samples = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(100_000))
    begun = process_time()
    with pytest.raises(BadAnswer, match="more than 4096 samples"):
        read_load(samples, {"vllm:num_requests_running": "running", "usage": "usage", "waiting": "waiting"}, 1)
    assert process_time() - begun < 2
