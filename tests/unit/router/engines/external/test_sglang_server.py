"""What is sent to SGLang, and how its answers are read, whether its events have all tokens or the new ones."""

import json
from typing import Any

import pytest
from quire_proto.errors import ErrorCode
from quire_proto.sampling import FinishReason, SamplingParams, TokenLogprobs
from quire_proto.structured_output import Structured, StructuredKind, choice
from quire_router.engines.attempt import EngineLost, Output
from quire_router.engines.external.http_client import BadAnswer, HttpClient, ServerError
from quire_router.engines.external.sglang_server import SglangServer
from quire_router.engines.settings import KnownModel

from tests.support.http_engines import SglangEngine, continuation, serving
from tests.support.vllm_contract import PROMPT, choice_of

GREEDY = SamplingParams(temperature=0, max_tokens=5)


async def outputs(params: SamplingParams, *, incremental: bool) -> list[Output]:
    """What the adapter makes of the stand-in's answer."""
    engine, server, read = SglangEngine(incremental=incremental), SglangServer(), list[Output]()
    async with serving(engine):
        http = HttpClient(engine.url)
        reader = server.reader(choice_of(params))
        async for event in http.stream(server.path, json.dumps(server.body(choice_of(params))).encode(), {}):
            output = reader.read(event)
            read += [] if output is None else [output]
        await http.close()
    assert reader.ended
    return read


@pytest.mark.parametrize("incremental", [False, True])
async def test_each_token_is_read_once(incremental: bool) -> None:
    read = await outputs(GREEDY, incremental=incremental)
    assert [token for output in read for token in output.token_ids] == continuation(PROMPT, 4)
    assert [output.position for output in read] == [1, 2, 3, 4]
    assert [output.finish_reason for output in read] == [None, None, None, FinishReason.LENGTH]
    assert read[0].cached_tokens == 3


@pytest.mark.parametrize("incremental", [False, True])
async def test_log_probabilities_belong_to_their_tokens(incremental: bool) -> None:
    read = await outputs(SamplingParams(temperature=0, logprobs=2, max_tokens=5), incremental=incremental)
    assert [output.logprobs for output in read] == [[TokenLogprobs(-0.25, ((10, -0.25), (11, -1.25)))]] * 4
    (first, *_) = await outputs(SamplingParams(temperature=0, logprobs=0, max_tokens=5), incremental=incremental)
    assert first.logprobs == [TokenLogprobs(-0.25)]


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_token_that_ends_an_output_is_none_of_it(incremental: bool) -> None:
    first, stop, *_ = continuation(PROMPT, 4)
    params = SamplingParams(temperature=0, stop_token_ids=(stop,), max_tokens=5)
    read = await outputs(params, incremental=incremental)
    assert [token for output in read for token in output.token_ids] == [first]
    assert read[-1].finish_reason is FinishReason.STOP


def test_several_tokens_in_one_event_are_one_output() -> None:
    reader = SglangServer().reader(choice_of(GREEDY))
    info = {"completion_tokens": 3, "finish_reason": None}
    output = reader.read({"output_ids": [4, 5, 6], "meta_info": info})
    assert output is not None
    assert (output.token_ids, output.position) == ([4, 5, 6], 1)
    assert reader.read({"output_ids": [4, 5, 6], "meta_info": info}) is None


def test_a_stop_token_that_is_left_out_takes_no_other_away() -> None:
    info = {"completion_tokens": 2, "finish_reason": {"type": "stop", "matched": 9}}
    output = SglangServer().reader(choice_of(GREEDY)).read({"output_ids": [4, 5], "meta_info": info})
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ([4, 5], FinishReason.STOP)


def test_an_aborted_request_is_lost_and_a_wrong_one_is_refused() -> None:
    event = {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {"type": "abort"}}}
    with pytest.raises(EngineLost):
        SglangServer().reader(choice_of(GREEDY)).read(event)
    finish = {"type": "abort", "message": "too long", "status_code": 400}
    event = {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": finish}}
    with pytest.raises(ServerError, match="too long"):
        SglangServer().reader(choice_of(GREEDY)).read(event)


def test_a_server_that_is_full_or_fails_says_so_with_the_end() -> None:
    for status in (503, 500):
        finish = {"type": "abort", "message": "The request queue is full.", "status_code": status}
        event = {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": finish}}
        with pytest.raises(ServerError, match="queue is full") as raised:
            SglangServer().reader(choice_of(GREEDY)).read(event)
        assert raised.value.status == status


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"meta_info": {"completion_tokens": 1, "finish_reason": None}},
        {"output_ids": [4], "meta_info": {"completion_tokens": 2, "finish_reason": None}},
        {"output_ids": [4], "meta_info": {"completion_tokens": "1", "finish_reason": None}},
    ],
)
def test_an_event_without_what_it_should_have_is_no_output(event: dict[str, object]) -> None:
    with pytest.raises(BadAnswer):
        SglangServer().reader(choice_of(GREEDY)).read(event)


def test_parameters_are_named_as_sglang_names_them() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=0, seed=2**64 - 1, max_tokens=9, min_tokens=3, logit_bias=((4, 1.0),)
    )
    body = SglangServer().body(choice_of(params))
    sampling = body["sampling_params"]
    assert (sampling["top_k"], sampling["sampling_seed"]) == (-1, 2**31 - 1)
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (8, 2)
    assert sampling["logit_bias"] == {"4": 1.0}
    assert body["rid"].startswith("recorded-0-")
    assert (body["input_ids"], body["extra_key"]) == (list(PROMPT), "c2FsdA==")


@pytest.mark.parametrize(
    ("structured", "sent"),
    [
        (Structured(StructuredKind.JSON_OBJECT), {"json_schema": json.dumps({"type": "object"})}),
        (Structured(StructuredKind.JSON_SCHEMA, "{}"), {"json_schema": "{}"}),
        (Structured(StructuredKind.REGEX, "a+"), {"regex": "a+"}),
        (choice(["a.", "b"]), {"regex": r"(a\.)|(b)"}),
    ],
)
def test_structured_outputs_are_passed_on(structured: Structured, sent: dict[str, str]) -> None:
    sampling = SglangServer().body(choice_of(SamplingParams(structured=structured)))["sampling_params"]
    assert sampling.items() >= sent.items()


def test_grammars_in_another_notation_are_refused() -> None:
    params = SamplingParams(structured=Structured(StructuredKind.GRAMMAR, 'start: "a"'))
    error = SglangServer().unsupported(params, resumed=False)
    assert error is not None
    assert (error.code, error.param) == (ErrorCode.INVALID, "grammar")


@pytest.mark.parametrize("path", ["/get_server_info", "/server_info"])
async def test_a_server_describes_itself_and_its_load(path: str) -> None:
    class Named(SglangEngine):
        def answers(self) -> dict[str, Any]:
            answers = super().answers()
            return {**answers, path: answers.pop("/get_server_info")}

    engine, server = Named(), SglangServer()
    engine.waiting = 2
    engine.more_metrics = [f'sglang:num_queue_reqs{{model_name="m",priority="{each}"}} 1.0' for each in (0, 5)]
    async with serving(engine):
        http = HttpClient(engine.url)
        description, load = await server.describe(http, {"m": KnownModel()}), await server.load(http)
        await http.close()
    assert (description.max_model_len, description.max_num_seqs, description.blocks_total) == (2048, 48, 400)
    assert (load.waiting, load.blocks_free) == (2, 200)
