"""Servers whose answers cannot be: the attempt there is lost, so that another server goes on, and nothing else happens
than what is meant for answers that cannot be used.
"""

from collections.abc import Callable
from math import inf, isfinite, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.sampling import SamplingParams
from quire_router.engines.attempt import EngineLost, StreamEnd
from quire_router.engines.external.http_client import BadAnswer, ServerError
from quire_router.engines.external.openai_server import OpenAIServer
from quire_router.engines.external.server_kind import ServerKind, split_choices
from quire_router.engines.external.sglang_server import SglangServer
from quire_router.engines.external.vllm_server import VllmServer

from tests.support.http_engines import SglangEngine, VllmEngine, demo_tokenizer
from tests.support.vllm_contract import choice_of
from tests.unit.router.engines.external.test_client import connected, read, submit

LOGPROBS = SamplingParams(temperature=0, logprobs=2, max_tokens=6)
TEXT = SamplingParams(temperature=0, max_tokens=6)
Json = dict[str, Any]


def vllm_event(**changed: Any) -> Json:
    logprobs = {"token_logprobs": [-0.2, -0.3], "top_logprobs": [{"token_id:5": -0.2}, {"token_id:6": -0.3}]}
    choice = {"index": 0, "text": "x", "token_ids": [5, 6], "finish_reason": None, "logprobs": logprobs}
    return {"choices": [choice | changed]}


def sglang_event(**changed: Any) -> Json:
    info = {
        "completion_tokens": 2,
        "finish_reason": None,
        "cached_tokens": 3,
        "output_token_logprobs": [[-0.2, 5, None], [-0.3, 6, None]],
        "output_top_logprobs": [[[-0.2, 5, None]], [[-0.3, 6, None]]],
    }
    return {"output_ids": changed.pop("output_ids", [5, 6]), "meta_info": info | changed}


def openai_server() -> OpenAIServer:
    server = OpenAIServer()
    server._tokenizer = demo_tokenizer()
    return server


def top(*tokens: float) -> list[Json]:
    return [{f"token_id:{5 + number}": value for number, value in enumerate(tokens)}] * 2


@pytest.mark.parametrize(
    ("server", "event", "wrong"),
    [
        (VllmServer, vllm_event(token_ids=[5, -1]), "vocabulary"),
        (VllmServer, vllm_event(token_ids=[5, 1024]), "vocabulary"),
        (VllmServer, vllm_event(token_ids=[5, True]), "vocabulary"),
        (VllmServer, vllm_event(logprobs={"token_logprobs": [-0.2, nan], "top_logprobs": top(-1)}), "not a number"),
        (VllmServer, vllm_event(logprobs={"token_logprobs": [-0.2, -inf], "top_logprobs": top(-1)}), "not a number"),
        (VllmServer, vllm_event(logprobs={"token_logprobs": [-0.2, -1], "top_logprobs": top(inf)}), "not a number"),
        (
            VllmServer,
            vllm_event(logprobs={"token_logprobs": [0, 0], "top_logprobs": [{"token_id:-1": -1.0}] * 2}),
            "vocab",
        ),
        (SglangServer, sglang_event(output_ids=[5, 1024]), "vocabulary"),
        (SglangServer, sglang_event(output_ids=list(range(5, 12)), completion_tokens=7), "log-prob"),
        (SglangServer, sglang_event(output_top_logprobs=[[[-0.2, inf, None]], []]), "vocabulary"),
        (SglangServer, sglang_event(output_token_logprobs=[[-0.2, 5, None], [None, 6, None]]), "lacks"),
    ],
)
def test_what_no_server_may_answer_is_a_bad_answer(server: type[ServerKind], event: Json, wrong: str) -> None:
    (choice,) = split_choices(submit(logprobs=2, max_tokens=6), "m", vocab_size=1024)
    with pytest.raises(BadAnswer, match=wrong):
        server().reader(choice).read(event)


def test_more_tokens_than_were_asked_for_are_a_bad_answer_in_whatever_pieces_they_come() -> None:
    reader = VllmServer().reader(choice_of(SamplingParams(temperature=0, max_tokens=4)))  # one is delivered
    assert reader.read(vllm_event())
    with pytest.raises(BadAnswer, match="more tokens"):
        reader.read(vllm_event())


def test_tokens_that_a_grammar_forbids_are_not_among_the_most_probable() -> None:
    """SGLang's JSON has null for minus infinity."""
    event = sglang_event(output_top_logprobs=[[[-0.2, 5, None], [None, 7, None]], [[-0.3, 6, None], [None, 5, None]]])
    output = SglangServer().reader(choice_of(LOGPROBS)).read(event)
    assert output is not None
    assert [each.top for each in output.logprobs] == [((5, -0.2),), ((6, -0.3),)]


@pytest.mark.parametrize("cached", [None, "many", [1], nan, -5, inf])
def test_a_number_of_cached_tokens_that_is_none_counts_as_unknown(cached: Any) -> None:
    output = SglangServer().reader(choice_of(TEXT)).read(sglang_event(cached_tokens=cached))
    assert output is not None
    assert output.cached_tokens == 0


@pytest.mark.parametrize("text", [{"a": 1}, ["a"], 5, "\ud800"])
def test_what_is_no_text_is_a_bad_answer(text: Any) -> None:
    with pytest.raises(BadAnswer):
        openai_server().reader(choice_of(TEXT)).read({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


_ODD = st.sampled_from(
    [None, True, 0, -1, 5, 10**30, 2**31, 1.5, nan, inf, -inf, "", "x", "length", "\ud800", [], {}, [1], [[-0.5, 5]]],
) | st.sampled_from(
    [{"token_id:x": 1}, {"type": "length"}, {"type": "stop", "matched": 5}, {"type": "abort", "status_code": True}]
)


@st.composite
def _mutated(draw: st.DrawFn, value: Any) -> Any:
    """A value in which some parts are others, are missing, or are there twice."""
    if draw(st.integers(0, 9)) == 0:
        return draw(_ODD)
    if isinstance(value, dict):
        return {key: draw(_mutated(each)) for key, each in value.items() if draw(st.integers(0, 19))}
    if isinstance(value, list):
        return [draw(_mutated(each)) for each in value] * draw(st.sampled_from([1, 1, 1, 2, 0]))
    return value


CASES: list[tuple[Callable[[], ServerKind], Json, SamplingParams]] = [
    (VllmServer, vllm_event(), LOGPROBS),
    (SglangServer, sglang_event(), LOGPROBS),
    (openai_server, {"choices": [{"index": 0, "text": " the fox", "finish_reason": None}]}, TEXT),
]


@pytest.mark.parametrize(("server", "event", "params"), CASES)
@given(data=st.data())
def test_no_event_raises_anything_else_and_what_is_read_can_be(
    server: Callable[[], ServerKind], event: Json, params: SamplingParams, data: st.DataObject
) -> None:
    reader = server().reader(choice_of(params))
    for _ in range(3):
        try:
            output = reader.read(data.draw(_mutated(event)))
        except (BadAnswer, ServerError, EngineLost):
            return
        if output is not None:
            assert all(type(each) is int and each >= 0 for each in (*output.token_ids, output.cached_tokens))
            assert all(isfinite(each.logprob) and all(isfinite(top) for _, top in each.top) for each in output.logprobs)
        assert reader.left >= 0


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
async def test_a_server_that_answers_what_cannot_be_has_lost_the_request(kind: Any) -> None:
    class Lying(kind):  # type: ignore[misc]
        def event(self, body: Any, written: list[int], reason: str | None, matched: int | None) -> Json:
            return dict(super().event(body, [*written[:-1], 99_999], reason, matched))

    async with connected(Lying()) as client:
        stream = client.submit(submit())
        with pytest.raises(EngineLost, match="none of the vocabulary"):
            await read(stream)
        assert stream.end is StreamEnd.LOST
        assert client.ready
