"""The story of a request with several choices, with log-probabilities, and of those that are told only at the end."""

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import Delta, GenerationRequest, Usage

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import delta_text, open_runner, started
from tests.support.scripted_engine import ABORT, LENGTH, STOP, logprobs, output


def request(n: int = 2, *, stop: tuple[str, ...] = (), **params: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"seed": 7, "max_tokens": 50, "n": n, **params})
    return GenerationRequest("r", "m", tokens("hello"), sampling, stop)


def last(deltas: list[Delta], index: int) -> Delta:
    return [delta for delta in deltas if delta.index == index][-1]


async def test_each_choice_ends_with_its_finish_reason_and_the_last_delta_has_the_usage() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(3)))
        place.engine.send(*(output("r", tokens("ab"), 0, index=index, cached_tokens=3) for index in range(3)))
        await place.delivered("ab", "ab", "ab")
        place.engine.send(output("r", tokens("c"), 2, LENGTH, index=2), output("r", tokens("x"), 2, index=0))
        place.engine.send(output("r", [], 3, STOP, index=0), output("r", tokens("yz"), 2, STOP, index=1))
        deltas = await task
        await place.left_nothing("r", FinishReason.LENGTH, "abx", "abyz", "abc")
        record = await place.journal.read("r")
    assert [delta_text(deltas, index) for index in range(3)] == ["abx", "abyz", "abc"]
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [last(deltas, index).finish_reason for index in range(3)] == reasons
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(5, 10, 3)]
    assert deltas[-1].usage
    assert record is not None
    assert [choice.finish_reason for choice in record.choices] == reasons


async def test_a_stop_string_ends_its_choice_alone() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(stop=("END",))))
        place.engine.send(output("r", tokens("one END two"), 0, index=1), output("r", tokens("E"), 0, index=0))
        assert list((await place.engine.cancel()).indexes) == [1]
        place.engine.send(output("r", tokens("x"), 11, ABORT, index=1), output("r", tokens("x"), 1, STOP, index=0))
        deltas = await task
        await place.left_nothing("r", FinishReason.STOP, "Ex", "one END")
        assert place.engine.commands.empty()
    assert [delta_text(deltas, index) for index in range(2)] == ["Ex", "one "]
    assert last(deltas, 1).finish_reason is FinishReason.STOP
    assert deltas[-1].usage == Usage(5, len("Ex") + len("one END"))


async def test_the_last_stop_string_ends_the_request() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(stop=("!",))))
        place.engine.send(output("r", tokens("a!"), 0, index=0), output("r", tokens("b!"), 0, index=1))
        deltas = await task
        assert [delta_text(deltas, index) for index in range(2)] == ["a", "b"]
        assert not (await place.engine.cancel()).indexes
        await place.left_nothing("r", FinishReason.STOP, "a!", "b!")


async def test_the_stop_string_and_special_tokens_are_kept_where_requested() -> None:
    async with open_runner() as place:
        generation = replace(request(1, stop=("END",)), include_stop=True, skip_special_tokens=False)
        task, _ = await started(place, place.lifecycle.run(generation))
        place.engine.send(output("r", tokens("one END two"), 0))
        assert delta_text(await task) == "one END"


async def test_another_engine_resumes_each_choice_at_its_own_position() -> None:
    async with open_runner(2, grace=0.05) as place:
        generation = replace(request(4, stop=("END",)), priority=3)
        task, first = await started(place, place.lifecycle.run(generation))
        assert (first.priority, list(first.delivered)) == (3, [])
        place.engine.send(
            output("r", tokens("a"), 0, STOP, index=0),
            output("r", tokens("bE"), 0, index=1),
            output("r", tokens("cEND"), 0, index=2),
        )
        await place.delivered("a", "bE", "cEND", "")
        await place.engine.stop()
        second = await place.engines[1].submit()
        assert (second.sampling, second.priority) == (first.sampling, 3)
        assert not second.output_token_ids
        assert [(each.index, list(each.token_ids), each.finished) for each in second.delivered] == [
            (0, tokens("a"), True),
            (1, tokens("bE"), False),
            (2, tokens("cEND"), True),
        ]
        place.engines[1].send(
            output(second.request_id, tokens("x"), 2, LENGTH, index=1),
            output(second.request_id, tokens("d"), 0, STOP, index=3),
        )
        deltas = await task
        await place.left_nothing("r", FinishReason.LENGTH, "a", "bEx", "cEND", "d")
    assert [delta_text(deltas, index) for index in range(4)] == ["a", "bEx", "c", "d"]


async def test_choices_that_lack_only_their_finish_reason_need_no_other_engine() -> None:
    async with open_runner(hold_timeout=0.01) as place:
        task, _ = await started(place, place.lifecycle.run(request(max_tokens=2)))
        place.engine.send(output("r", tokens("ab"), 0, index=0), output("r", tokens("c"), 0, index=1))
        place.engine.send(output("r", [], 2, ABORT, index=0), output("r", [], 1, ABORT, index=1))
        again = await place.engine.submit()
        assert [(each.index, each.finished) for each in again.delivered] == [(0, True), (1, False)]
        place.engine.send(output(again.request_id, tokens("d"), 1, LENGTH, index=1))
        deltas = await task
        assert [last(deltas, index).finish_reason for index in range(2)] == [FinishReason.LENGTH] * 2
        await place.left_nothing("r", FinishReason.LENGTH, "ab", "cd")


async def test_cancelling_ends_the_choices_that_had_not_ended() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(3)))
        place.engine.send(output("r", tokens("a"), 0, STOP, index=1), output("r", tokens("b"), 0, index=2))
        await place.delivered("", "a", "b")
        assert await place.lifecycle.cancel("r")
        deltas = await task
        reasons = [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
        assert [last(deltas, index).finish_reason for index in range(3)] == reasons
        assert not (await place.engine.cancel()).indexes
        await place.left_nothing("r", FinishReason.ABORT, "", "a", "b")


# Log-probabilities


async def test_log_probabilities_end_with_the_token_that_completes_a_stop_string() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(1, stop=("b",), logprobs=0)))
        place.engine.send(output("r", tokens("abc"), 0, logprobs=logprobs(-1, -2, -3)))
        (delta,) = await task
    assert delta.token_ids == tokens("ab")
    assert [each.logprob for each in delta.logprobs] == [-1, -2]


async def test_prompt_log_probabilities_are_sent_once_and_requested_until_they_arrive() -> None:
    async with open_runner() as place:
        task, first = await started(place, place.lifecycle.run(request(prompt_logprobs=2)))
        place.engine.send(output("r", prompt_logprobs=logprobs(-1, -2), prompt_position=1))
        place.engine.send(output("r", [], 0, ABORT, index=0), output("r", [], 0, ABORT, index=1))
        second = await place.engine.submit()
        assert second.sampling == first.sampling
        whole = logprobs(-1, -2, -3, -4)
        place.engine.send(output(second.request_id, tokens("a"), 0, index=1, prompt_logprobs=whole, prompt_position=1))
        await place.delivered("", "a")
        place.engine.send(*(output(second.request_id, [], index, ABORT, index=index) for index in range(2)))
        third = await place.engine.submit()
        assert not third.sampling.HasField("prompt_logprobs")
        place.engine.send(output(third.request_id, tokens("b"), 1, STOP, index=1))
        place.engine.send(output(third.request_id, tokens("c"), 0, STOP, index=0))
        deltas = await task
    assert [[each.logprob for each in delta.prompt_logprobs] for delta in deltas] == [[-1, -2, -3, -4], [], []]


# Told together


async def test_best_of_choices_are_sent_when_all_have_ended_best_first_and_ties_in_order() -> None:
    async with open_runner() as place:
        task, submit = await started(place, place.lifecycle.run(request(2, best_of=4)))
        assert (submit.sampling.n, submit.sampling.best_of) == (2, 4)
        place.engine.send(output("r", tokens("worst"), 0, STOP, index=0, logprobs=logprobs(*[-3.0] * 5)))
        place.engine.send(output("r", tokens("equal"), 0, STOP, index=3, logprobs=logprobs(*[-1.0] * 5)))
        place.engine.send(output("r", [], 0, STOP, index=2))
        place.engine.send(output("r", tokens("sa"), 0, index=1, logprobs=logprobs(-0.5, -1.5)))
        await place.heard()
        await place.delivered("", "")
        assert not task.done()
        place.engine.send(output("r", tokens("me"), 2, LENGTH, index=1, logprobs=logprobs(-1.5, -0.5)))
        deltas = await task
        await place.left_nothing("r", FinishReason.LENGTH, "same", "equal")
    assert [(delta.index, delta.text) for delta in deltas] == [(0, "same"), (1, "equal")]
    assert [delta.finish_reason for delta in deltas] == [FinishReason.LENGTH, FinishReason.STOP]
    assert not any(delta.logprobs for delta in deltas)
    assert [delta.usage for delta in deltas] == [None, Usage(5, len("worst" + "same" + "equal"))]


async def test_candidates_resume_at_their_positions_when_their_engine_is_lost() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(1, best_of=2, logprobs=0)))
        place.engine.send(output("r", tokens("a"), 0, index=1, logprobs=logprobs(-1)))
        place.engine.send(output("r", tokens("b"), 0, STOP, index=0, logprobs=logprobs(-4)))
        place.engine.send(output("r", [], 1, ABORT, index=1))
        again = await place.engine.submit()
        assert [(each.index, list(each.token_ids), each.finished) for each in again.delivered] == [
            (0, tokens("b"), True),
            (1, tokens("a"), False),
        ]
        place.engine.send(output(again.request_id, tokens("c"), 1, STOP, index=1, logprobs=logprobs(-2)))
        (delta,) = await task
    assert (delta.text, [each.logprob for each in delta.logprobs]) == ("ac", [-1, -2])


async def test_cancelling_best_of_gives_the_best_so_far_as_aborted() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(2, best_of=3)))
        place.engine.send(output("r", tokens("a"), 0, STOP, index=1, logprobs=logprobs(-1)))
        place.engine.send(output("r", tokens("b"), 0, index=2, logprobs=logprobs(-0.5)))
        await place.heard()
        assert await place.lifecycle.cancel("r")
        deltas = await task
        assert [(delta.text, delta.finish_reason) for delta in deltas] == [
            ("b", FinishReason.ABORT),
            ("a", FinishReason.ABORT),
        ]
        await place.left_nothing("r", FinishReason.ABORT, "b", "a")


async def test_cancelling_a_beam_search_gives_only_the_outputs_received_so_far() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(2, beam_width=3)))
        place.engine.send(output("r", tokens("a"), 0, STOP, index=0, score=-1.0))
        await place.heard()
        assert await place.lifecycle.cancel("r")
        assert [(delta.text, delta.finish_reason) for delta in await task] == [
            ("a", FinishReason.ABORT),
            ("", FinishReason.ABORT),
        ]
        await place.left_nothing("r", FinishReason.ABORT, "a", "")


async def test_a_beam_search_restarts_on_another_engine_and_is_sent_with_its_scores() -> None:
    async with open_runner() as place:
        task, first = await started(place, place.lifecycle.run(request(2, beam_width=3)))
        place.engine.send(output("r", tokens("former"), 0, STOP, index=0, score=-1.0))
        place.engine.send(output("r", [], 0, ABORT, index=1))
        second = await place.engine.submit()
        assert (second.sampling, list(second.delivered)) == (first.sampling, [])
        place.engine.send(output(second.request_id, tokens("late"), 0, STOP, index=1, score=-2.5))
        place.engine.send(output(second.request_id, tokens("later"), 0, LENGTH, index=0, score=-1.5))
        deltas = await task
        await place.left_nothing("r", FinishReason.LENGTH, "later", "late")
    assert [(delta.index, delta.text, delta.score) for delta in deltas] == [(0, "later", -1.5), (1, "late", -2.5)]
    assert deltas[-1].usage == Usage(5, len("later" + "late"))


# Traces and metrics


async def test_a_span_has_every_finish_reason_and_a_metric_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("quire_router.requests.dispatch.tracer", provider.get_tracer("test"))

    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"model": "m", **labels}) or 0

    def counts() -> list[float]:
        ended = [value("quire_requests_total", operation="chat", finish_reason=each) for each in ("stop", "length")]
        times = [value(f"quire_{each}_seconds_count") for each in ("time_to_first_token", "inter_token_latency")]
        return [*ended, value("quire_generation_tokens_total"), *times]

    async with open_runner() as place:
        before = counts()
        task, _ = await started(place, place.lifecycle.run(request(2)))
        place.engine.send(output("r", tokens("abc"), 0, LENGTH, index=1), output("r", tokens("d"), 0, index=0))
        await place.delivered("d", "abc")
        place.engine.send(output("r", tokens("ef"), 1, STOP, index=0))
        await task
        assert [after - former for after, former in zip(counts(), before, strict=True)] == [0, 1, 6, 1, 1]
    (attempt,) = [span for span in exporter.get_finished_spans() if span.name == "chat m"]
    attributes = dict(attempt.attributes or {})
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert attributes["gen_ai.usage.output_tokens"] == 6
