"""The judge of the chaos run: whatever was not as it should be is counted, under its name."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from quire_proto.errors import ErrorCode

from tests.chaos.answer import Answer
from tests.chaos.failure import Failure, UntypedError, of_rest
from tests.chaos.faults import REDIS, ROUTER
from tests.chaos.report import FOUND, Report
from tests.chaos.run import CALM, Plan, disturb
from tests.chaos.stack import Absence
from tests.chaos.workload import BACKGROUND, CROSSING, STREAM, Request

UNKNOWN = Failure(ErrorCode.NOT_FOUND, "request_id", "There is no such request.")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
REQUEST = Request(STREAM, "sampled", "/v1/completions", {"max_tokens": 2})
LISTED = replace(REQUEST, body={"max_tokens": 2, "prompt": ["a", "b"]})
REDIS_EMPTY, REDIS_KEPT = Absence(REDIS, 10.0, 20.0, empty=True), Absence(REDIS, 10.0, 20.0)
ROUTER_GONE = Absence(ROUTER, 15.0, 25.0)


def logprobs(*tokens: str, logprob: float = -0.5, top: float = -0.25, offset: int = 0) -> dict[str, Any]:
    """As a completion writes them."""
    return {
        "tokens": list(tokens),
        "token_logprobs": [logprob for _ in tokens],
        "top_logprobs": [{"a": top} for _ in tokens],
        "text_offset": [offset for _ in tokens],
    }


def answer(text: str = "one two", *, tokens: dict[str, Any] | None = None, end: str = "length") -> Answer:
    answer = Answer()
    answer.take({"choices": [{"index": 0, "text": text, "logprobs": tokens or logprobs("one", " two")}]})
    answer.take({"choices": [{"index": 0, "text": "", "finish_reason": end}]})
    answer.take({"choices": [], "usage": USAGE})
    return answer


def called(name: str = "get", arguments: str = '{"a": 1}', call_id: str = "call-1") -> Answer:
    answer = Answer()
    call = {"index": 0, "id": call_id, "function": {"name": name, "arguments": arguments}}
    answer.take({"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": [call]}}]})
    answer.take({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    answer.take({"choices": [], "usage": USAGE})
    return answer


def counted(
    got: Answer, absences: list[Absence] | None = None, request: Request = REQUEST, wanted: Answer | None = None
) -> dict[str, int]:
    report = Report()
    report.compare(request, wanted or answer(), got, absences or [])
    assert report.clean is not any(report.counts[name] for name in FOUND)
    return {name: report.counts[name] for name in (*FOUND, "forgotten", "unwritten") if report.counts[name]}


def failed(
    failure: Failure = UNKNOWN,
    *,
    away: tuple[float, float] | None = None,
    known: bool = False,
    at: float = 14.0,
    sent: float = 1.0,
) -> Answer:
    aways = [] if away is None else [away]
    return Answer(failure=failure, away=aways, known_after_all=known, failed_at=at, sent=[sent])


def test_the_same_output_in_other_chunks_is_right() -> None:
    got = Answer(resumed=3)
    for text, tokens in (("on", ()), ("e t", ("one",)), ("wo", (" two",))):
        got.take({"choices": [{"index": 0, "text": text, "logprobs": logprobs(*tokens)}]})
    got.take({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    got.take({"choices": [], "usage": USAGE})
    assert counted(got) == {}


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (answer("one"), "lost"),
        (answer("one two two"), "repeated"),
        (answer("one tow"), "changed"),
        (answer(end="stop"), "changed"),
        (answer(tokens=logprobs("one")), "lost"),
        (answer(tokens=logprobs("one", " two", " two")), "repeated"),
        (answer(tokens=logprobs(" two", "one")), "changed"),
        (answer(tokens=logprobs("one", " two", logprob=-0.6)), "changed"),
        (answer(tokens=logprobs("one", " two", top=-0.2)), "changed"),
        (answer(tokens=logprobs("one", " two", offset=1)), "changed"),
        (Answer(hung=True), "hung"),
        (Answer(untyped="500"), "untyped"),
        (failed(Failure(ErrorCode.INTERNAL, "", "It failed.")), "errors"),
    ],
)
def test_every_deviation_has_a_verdict(got: Answer, verdict: str) -> None:
    assert counted(got) == {verdict: 1}


def test_an_answer_that_runs_on_after_its_end_is_one_unless_redis_was_away_meanwhile() -> None:
    got = answer()
    got.unended.append((20.5, 20.6, "/v1/requests/a is running at router 1"))
    assert counted(got) == {"unended": 1}
    assert counted(got, [REDIS_KEPT]) == {"unended": 1}
    assert counted(got, [Absence(REDIS, 10.0, 20.55)]) == {}


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (called(call_id="call-2"), None),
        (called(arguments='{"a": '), "lost"),
        (called(arguments='{"a": 1}{"a": 1}'), "repeated"),
        (called(name="set"), "changed"),
        (called(call_id=""), "malformed"),
    ],
)
def test_a_call_is_compared_too(got: Answer, verdict: str | None) -> None:
    assert counted(got, wanted=called()) == ({} if verdict is None else {verdict: 1})


async def test_what_a_fault_waits_for_in_vain_is_counted_and_the_next_fault_comes() -> None:
    async def in_vain(*_: Any) -> None:
        async with asyncio.timeout(0.0):
            await asyncio.sleep(1)

    async def in_vain_too(*_: Any) -> None:
        raise AssertionError("it does not end")

    report, told = Report(), list[str]()
    report.compare(REQUEST, answer(), answer(), [])
    stack: Any = None
    await disturb(stack, [in_vain, in_vain_too], Plan(CALM, rest=0.0), random.Random(0), report, told.append)
    assert report.counts["unmet"] == 2
    assert not report.clean
    assert "in_vain_too: AssertionError('it does not end')" in str(report)


def test_a_connection_that_broke_counts_only_where_none_may() -> None:
    got = answer()
    got.broke = 1
    assert counted(got) == {}
    report = Report(abrupt=False)
    report.compare(REQUEST, answer(), got, [])
    report.compare(REQUEST, answer(), answer(), [])
    assert report.counts["cut"] == 1
    assert not report.clean


def test_a_score_and_a_choice_are_compared_too() -> None:
    scored, less = answer(), answer()
    scored.choices[0].score = 0.5
    less.choices[1].text = "more"
    assert counted(scored) == {"changed": 1}
    assert counted(less) == {"repeated": 1}


@pytest.mark.parametrize(
    "again",
    [
        {"choices": [], "usage": USAGE},
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [{"index": 0, "text": " three"}]},
    ],
)
def test_what_comes_again_after_an_end_is_repeated(again: dict[str, Any]) -> None:
    got = answer()
    got.take(again)
    assert counted(got) == {"repeated": 1}


def test_a_role_and_a_call_begin_once() -> None:
    got = called()
    got.take({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    assert counted(got, wanted=called()) == {"repeated": 1}
    got = called()
    call = {"index": 0, "id": "call-1", "function": {"name": "get", "arguments": ""}}
    got.take({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})
    assert counted(got, wanted=called()) == {"repeated": 1}


def test_a_usage_that_is_missing_is_lost_and_one_that_is_another_is_changed() -> None:
    never, other = answer(), answer()
    never.usage, other.usage = None, (3, 3)
    assert counted(never) == {"lost": 1}
    assert counted(other) == {"changed": 1}


@pytest.mark.parametrize(
    "places",
    [
        ["1", "1"],
        ["2", "1"],
        ["1", "2.-"],
        ["1e"],
        ["1u"],
        ["3"],
        ["x"],
        [""],
        ["-"],
    ],
)
def test_a_place_that_is_no_place_or_none_after_the_last_is_malformed(places: list[str]) -> None:
    got = Answer()
    got.take({"choices": [{"index": 0, "text": "one two", "logprobs": logprobs("one")}]})
    for event_id in places:
        got.reach(event_id)
    assert got.malformed


@pytest.mark.parametrize(
    ("end", "place", "right"),
    [("stop", "1eu", True), ("stop", "2eu", True), ("stop", "0eu", False), ("length", "1eu", False)],
)
def test_the_token_that_ended_an_output_is_shown_and_does_not_count(end: str, place: str, right: bool) -> None:
    got = answer(end=end)
    got.reach(place)
    assert (got.malformed == []) == right


def test_places_of_a_stream_are_right() -> None:
    got = Answer()
    got.take({"choices": [{"index": 0, "text": "one"}]})
    got.reach("1.-")
    got.take({"choices": [{"index": 1, "text": "one", "finish_reason": "stop"}]})
    got.reach("1.2e")
    got.take({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    got.reach("1e.2e")
    got.take({"choices": [], "usage": USAGE})
    got.reach("1e.2eu")
    assert got.malformed == []


def test_one_answer_has_one_id_and_no_other_has_it() -> None:
    got, report = answer(), Report()
    got.name(id="a", object="text_completion")
    got.name(id="a")
    assert got.malformed == []
    for _ in range(2):
        report.compare(REQUEST, answer(), got, [])
    assert report.counts["malformed"] == 1
    got.name(id="b")
    assert counted(got) == {"malformed": 1}


def test_a_missing_choice_is_lost_whatever_the_usage() -> None:
    wanted, got = answer(), answer()
    wanted.choices[1].text, wanted.usage = "more", (3, 4)
    assert counted(got, wanted=wanted) == {"lost": 1}


def test_what_crosses_the_apis_is_compared_without_tokens_alone() -> None:
    crossing = replace(REQUEST, way=CROSSING)
    assert counted(answer(tokens=logprobs("one")), request=crossing) == {}
    assert counted(answer("one tow"), request=crossing) == {"changed": 1}


def test_an_error_excuses_nothing_that_came_before_it() -> None:
    right, wrong = failed(away=(5.0, 12.0)), failed(away=(5.0, 12.0))
    right.take({"choices": [{"index": 0, "text": "one"}]})
    wrong.take({"choices": [{"index": 0, "text": "two"}]})
    assert counted(right, [REDIS_EMPTY]) == {"forgotten": 1}
    assert counted(wrong, [REDIS_EMPTY]) == {"changed": 1}
    less = failed(away=(5.0, 12.0))
    less.take({"choices": [{"index": 0, "text": "one", "finish_reason": "length"}]})
    assert counted(less, [REDIS_EMPTY]) == {"lost": 1}


def _broken(answer: Answer) -> None:
    answer.broke = 1


def _nameless(answer: Answer) -> None:
    answer.choices[0].end = ""


def _used(answer: Answer) -> None:
    answer.usage = 3, 1


def _short(answer: Answer) -> None:
    del answer.choices[0].tokens[1]


def _aborted(answer: Answer) -> None:
    answer.choices[0].end = "abort"


def _another(answer: Answer) -> None:
    answer.choices[1].end = "length"


def _failed(answer: Answer) -> None:
    answer.failure = UNKNOWN


@pytest.mark.parametrize("harm", [_broken, _nameless, _used, _short, _aborted, _another, _failed])
def test_an_undisturbed_answer_is_whole(harm: Callable[[Answer], None]) -> None:
    report, wanted = Report(), answer()
    report.begin(REQUEST, wanted)
    assert report.counts["disturbed"] == 0
    harm(wanted)
    report.begin(REQUEST, wanted)
    assert report.counts["disturbed"] == 1
    assert not report.clean


def test_only_records_that_redis_lost_without_an_owner_count_as_forgotten() -> None:
    background = replace(REQUEST, way=BACKGROUND)
    assert counted(failed(away=(5.0, 12.0)), [REDIS_EMPTY]) == {"forgotten": 1}
    assert counted(failed(at=18.0), [REDIS_EMPTY, ROUTER_GONE], background) == {"forgotten": 1}
    assert counted(failed(away=(5.0, 9.0)), [REDIS_EMPTY, ROUTER_GONE]) == {"errors": 1}
    assert counted(failed(away=(5.0, 12.0)), [ROUTER_GONE]) == {"errors": 1}
    back = failed(away=(5.0, 9.0))
    assert counted(back, [Absence(REDIS, 4.0, 12.0), REDIS_EMPTY]) == {"forgotten": 1}
    assert counted(back, [Absence(REDIS, 4.0, 9.5), REDIS_EMPTY]) == {"errors": 1}


def test_a_record_that_redis_kept_is_forgotten_only_if_no_router_could_read_it() -> None:
    got = failed(away=(5.0, 18.0), at=18.0)
    assert counted(got, [REDIS_KEPT]) == {"errors": 1}
    assert counted(got, [REDIS_KEPT, ROUTER_GONE]) == {"forgotten": 1}
    assert counted(got, [REDIS_KEPT, Absence(ROUTER, 21.0, 25.0)]) == {"errors": 1}


def test_faults_before_a_request_or_after_its_error_excuse_nothing() -> None:
    background = replace(REQUEST, way=BACKGROUND)
    assert counted(failed(away=(5.0, float("inf")), at=9.0), [REDIS_EMPTY]) == {"errors": 1}
    assert counted(failed(at=30.0, sent=26.0), [REDIS_EMPTY, ROUTER_GONE], background) == {"errors": 1}


def test_a_request_found_later_was_not_forgotten_unless_a_router_was_stopped() -> None:
    got = failed(away=(5.0, 12.0), known=True)
    assert counted(got, [REDIS_EMPTY, ROUTER_GONE]) == {"errors": 1}
    got.failed_at = 16.0
    assert counted(got, [REDIS_EMPTY, ROUTER_GONE]) == {"forgotten": 1}


def test_only_requests_that_do_not_wait_for_their_record_count_as_unwritten() -> None:
    killed = [Absence(ROUTER, 2.0, 9.0)]
    assert counted(failed(), killed, replace(REQUEST, keyed=False)) == {"unwritten": 1}
    assert counted(failed(), killed) == {"errors": 1}
    assert counted(failed(known=True), killed, LISTED) == {"errors": 1}
    late, before = failed(sent=3.0), [Absence(ROUTER, 12.0, 19.0)]
    assert counted(late, killed, replace(REQUEST, keyed=False)) == {"errors": 1}
    assert counted(failed(), before, replace(REQUEST, keyed=False)) == {"errors": 1}


@pytest.mark.parametrize(
    "failure",
    [
        Failure(ErrorCode.INTERNAL, "", "It failed (9c404b, NOT_FOUND)."),
        Failure(ErrorCode.NOT_FOUND, "model", "There is no model '404'."),
        Failure(ErrorCode.FORBIDDEN, "request_id", "404"),
    ],
)
def test_only_an_unknown_request_can_be_forgotten(failure: Failure) -> None:
    assert counted(failed(failure, away=(5.0, 12.0)), [REDIS_EMPTY]) == {"errors": 1}


def error(**fields: Any) -> dict[str, Any]:
    known = {"message": "Why.", "type": "not_found_error", "param": "request_id", "code": "not_found"}
    return {**known, "request_id": "9c404b", **fields}


def test_a_typed_error_is_read() -> None:
    assert of_rest(error(), 404) == replace(UNKNOWN, message="Why.")
    busy = of_rest(error(type="rate_limit_error", code="max_concurrent", param=None), 429)
    assert busy.passes
    assert not of_rest(error(), 404).passes


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (error(), 500),
        (error(code="internal"), 404),
        (error(type="server_error"), 404),
        (error(type="server_error", code="queue_full"), 500),
        (error(message=""), 404),
        (error(request_id=None), 404),
        (error(type="other"), 404),
        (error(type="invalid_request_error"), 404),
        ({}, 404),
        ("not found", 404),
        (None, 404),
    ],
)
def test_an_untyped_error_is_recognised(body: Any, status: int) -> None:
    with pytest.raises(UntypedError):
        of_rest(body, status)


def test_the_longest_pause_of_each_stream_is_shown() -> None:
    report = Report()
    for pause in (0.1, 3.0, 0.2):
        got = answer()
        got.pause = pause
        report.compare(REQUEST, answer(), got, [])
    assert "pauses p50 0.2 s, p99 3.0 s, most 3.0 s" in str(report)


def test_a_run_of_nothing_is_not_clean_and_what_is_left_is_counted() -> None:
    nothing, report = Report(), Report()
    assert not nothing.clean
    report.compare(REQUEST, answer(), answer(), [])
    report.close([])
    assert counted(answer()) == {}
    report.close(["a record is held"])
    assert report.counts["left"] == 1
    assert not report.clean
    assert "a record is held" in str(report)
