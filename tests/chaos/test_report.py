"""The judge of the chaos run: whatever was not as it should be is counted, under its name."""

import pytest

from tests.chaos.answer import Answer
from tests.chaos.faults import REDIS, ROUTER
from tests.chaos.report import FOUND, Report
from tests.chaos.stack import Absence
from tests.chaos.workload import BACKGROUND, STREAM, Request

NOT_FOUND = "404 not_found: "


def answer(text: str = "one two") -> Answer:
    answer = Answer()
    answer.take({"choices": [{"index": 0, "text": text}]})
    answer.take({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    answer.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    return answer


def counted(got: Answer, absences: list[Absence] | None = None, way: str = STREAM) -> dict[str, int]:
    report = Report()
    report.compare(Request(way, "sampled", "/", {}), answer(), got, absences or [])
    assert report.clean is not any(report.counts[name] for name in FOUND)
    return {name: report.counts[name] for name in (*FOUND, "forgotten") if report.counts[name]}


def failed(error: str, *, away: tuple[float, float] | None = None, known: bool = False, at: float = 14.0) -> Answer:
    return Answer(error=error, away=[] if away is None else [away], known_after_all=known, failed_at=at)


def test_the_same_answer_in_other_pieces_is_right() -> None:
    got = Answer(resumed=3)
    for text in ("on", "e t", "wo"):
        got.take({"choices": [{"index": 0, "text": text}]})
    got.take({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    got.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    assert counted(got) == {}


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        (answer("one"), "lost"),
        (answer("one two two"), "repeated"),
        (answer("one tow"), "changed"),
        (Answer(hung=True), "hung"),
        (Answer(untyped="500"), "untyped"),
        (failed("500 internal: "), "errors"),
    ],
)
def test_what_is_wrong_has_a_name(got: Answer, verdict: str) -> None:
    assert counted(got) == {verdict: 1}


def test_an_end_or_a_usage_that_comes_twice_is_repeated_and_one_that_is_missing_is_lost() -> None:
    twice, never = answer(), answer()
    twice.take({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    never.usage = None
    assert counted(twice) == {"repeated": 1}
    assert counted(never) == {"lost": 1}


def test_only_what_redis_lost_while_nobody_held_it_is_forgotten() -> None:
    redis, router = Absence(REDIS, 10.0, 20.0), Absence(ROUTER, 15.0, 25.0)
    assert counted(failed(NOT_FOUND, away=(5.0, 12.0)), [redis]) == {"forgotten": 1}
    assert counted(failed(NOT_FOUND), [redis, router], BACKGROUND) == {"forgotten": 1}
    assert counted(failed(NOT_FOUND, away=(5.0, 9.0)), [redis, router]) == {"errors": 1}
    assert counted(failed(NOT_FOUND, away=(5.0, 12.0)), [router]) == {"errors": 1}
    assert counted(failed(NOT_FOUND, away=(5.0, 12.0), known=True), [redis, router]) == {"errors": 1}
    assert counted(failed(NOT_FOUND, away=(5.0, 12.0), known=True, at=16.0), [redis, router]) == {"forgotten": 1}
    assert counted(failed("500 internal: ", away=(5.0, 12.0)), [redis]) == {"errors": 1}
