"""The story of a request, told over real streams by scripted engines: what its client sees, and that every way out
leaves nothing behind.
"""

import asyncio
import sys
from dataclasses import replace
from time import monotonic, time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY
from quire.v1 import types_pb2
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import FinishReason, SamplingParams
from quire_router.core.generation import GenerationRequest, Usage
from quire_router.discovery.base import Endpoint
from quire_router.requests.dispatch import queued_request
from quire_router.requests.state import MAX_MOVES

from tests.support.byte_tokenizer import tokens
from tests.support.runner_harness import QUICK, collect, delta_text, open_runner, started
from tests.support.scripted_engine import ABORT, ERROR, LENGTH, STOP, output


def request(request_id: str = "r", *, stop: tuple[str, ...] = (), max_tokens: int = 50) -> GenerationRequest:
    params = SamplingParams(temperature=0.5, seed=7, max_tokens=max_tokens)
    return GenerationRequest(request_id, "m", tokens("hello"), params, stop, cache_salt=b"salt")


# What the client sees


async def test_a_request_streams_deltas_and_ends_with_its_usage() -> None:
    async with open_runner() as place:
        task, submit = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("He"), 0, cached_tokens=3))
        place.engine.send(output("r", tokens("y!"), 2, STOP))
        deltas = await task
        await place.left_nothing("r", FinishReason.STOP, "Hey!")
    assert delta_text(deltas) == "Hey!"
    assert [token for delta in deltas for token in delta.token_ids] == tokens("Hey!")
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].usage == Usage(5, 4, 3)
    assert all(delta.finish_reason is None and delta.usage is None for delta in deltas[:-1])
    assert list(submit.prompt_token_ids) == tokens("hello")
    assert (submit.sampling.seed, submit.sampling.max_tokens, submit.cache_salt) == (7, 50, b"salt")


async def test_an_incomplete_character_is_held_back() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        smile = tokens("☺")
        place.engine.send(output("r", smile[:2], 0))
        place.engine.send(output("r", [*smile[2:], *tokens(".")], 2, LENGTH))
        deltas = await task
    assert delta_text(deltas) == "☺."
    assert deltas[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_the_answer_before_it_and_cancels_on_the_engine() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(stop=("END",))))
        place.engine.send(output("r", tokens("one EN"), 0))
        place.engine.send(output("r", tokens("D two"), 6))
        deltas = await task
        assert (await place.engine.cancel()).request_id == "r"
        await place.left_nothing("r", FinishReason.STOP, "one END")
    assert delta_text(deltas) == "one "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].usage == Usage(5, len("one END"))


async def test_an_incomplete_stop_string_is_sent_at_the_end() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request(stop=("END",))))
        place.engine.send(output("r", tokens("one EN"), 0, LENGTH))
        assert delta_text(await task) == "one EN"
        await place.left_nothing("r", FinishReason.LENGTH, "one EN")


async def test_an_engines_error_is_passed_to_the_client() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        error = types_pb2.Error(code=types_pb2.ERROR_CODE_OVERLOADED, message="The engine's queue is full.")
        place.engine.send(output("r", [], 1, ERROR, error))
        with pytest.raises(QuireError, match="queue is full") as caught:
            await task
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after
        await place.left_nothing("r", FinishReason.ERROR, "a")


async def test_an_id_in_use_is_an_internal_error() -> None:
    async with open_runner() as place:
        first, _ = await started(place, place.lifecycle.run(request()))
        with pytest.raises(QuireError) as ours:
            await collect(place.lifecycle.run(request()))
        assert ours.value.code is ErrorCode.INTERNAL
        error = types_pb2.Error(code=types_pb2.ERROR_CODE_CONFLICT, message="In use.", param="request_id")
        place.engine.send(output("r", [], 0, ERROR, error))
        with pytest.raises(QuireError) as theirs:
            await first
        assert theirs.value.code is ErrorCode.INTERNAL
        await place.left_nothing("r", FinishReason.ERROR, "")


async def test_an_internal_failure_is_reported_without_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_runner() as place:
        monkeypatch.setattr(place.fleet, "rows", lambda model: 1 / 0)
        with pytest.raises(QuireError) as caught:
            await collect(place.lifecycle.run(request()))
        assert caught.value.code is ErrorCode.INTERNAL
        assert "division" not in caught.value.message
        monkeypatch.undo()
        await place.left_nothing("r", FinishReason.ERROR, "")


# Ways out


async def test_cancel_ends_the_stream_with_abort_after_its_tokens_so_far() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(request())
        first = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("a"), 0))
        await first
        assert await place.lifecycle.cancel("r")
        deltas = await collect(answer)
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert deltas[-1].usage == Usage(5, 1)
        assert (await place.engine.cancel()).request_id == "r"
        assert not await place.lifecycle.cancel("r")
        await place.left_nothing("r", FinishReason.ABORT, "a")


async def test_closing_before_the_first_delta_was_requested_does_nothing() -> None:
    async with open_runner() as place:
        await place.lifecycle.run(request()).aclose()
        assert await place.journal.read("r") is None
        assert place.lifecycle.in_flight == 0


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_closing_after_any_delta_cancels_at_once(pieces: int) -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(request())
        reading = asyncio.create_task(anext(answer))
        await place.engine.submit()
        for position in range(pieces):
            place.engine.send(output("r", tokens("x"), position))
            await reading
            if position + 1 < pieces:
                reading = asyncio.create_task(anext(answer))
        await answer.aclose()
        await place.left_nothing("r", FinishReason.ABORT, "x" * pieces)
        assert (await place.engine.cancel()).request_id == "r"


async def test_cancelling_a_task_that_waits_for_a_delta_cancels_on_the_engine() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await place.left_nothing("r", FinishReason.ABORT, "")
        assert (await place.engine.cancel()).request_id == "r"


async def test_a_client_that_disconnects_after_the_last_delta_cancels_nothing() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(request())
        reading = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("a"), 0, STOP))
        assert (await reading).finish_reason is FinishReason.STOP
        assert place.fleet.table.requests.sum() == 0
        await answer.aclose()
        await place.left_nothing("r", FinishReason.STOP, "a")


async def test_a_client_that_does_not_read_gets_an_error_and_frees_the_engine() -> None:
    async with open_runner() as place:
        answer = place.lifecycle.run(request())
        reading = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("a"), 0))
        await reading
        place.engine.send(output("r", tokens("b"), 1))
        assert (await place.engine.cancel()).request_id == "r"
        with pytest.raises(QuireError) as caught:
            await anext(answer)
        assert caught.value.code is ErrorCode.OVERLOADED
        await place.left_nothing("r", FinishReason.ERROR, "a")


async def test_a_request_that_takes_too_long_ends_with_its_deadline() -> None:
    async with open_runner(request_timeout=0.05) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        with pytest.raises(QuireError) as caught:
            await task
        assert caught.value.code is ErrorCode.DEADLINE
        assert (await place.engine.cancel()).request_id == "r"
        await place.left_nothing("r", FinishReason.ERROR, "")


@pytest.mark.parametrize("step", [-4_000, 4_000])
async def test_a_wall_clock_that_is_set_changes_no_requests_time(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with time left goes on, and one whose time is up ends: while it waits, and at an engine."""
    for name, module in list(sys.modules.items()):
        if name.startswith("quire_router.") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", lambda: time() + step)

    async def assert_ends(request_id: str) -> None:
        with pytest.raises(QuireError) as caught:
            await collect(place.lifecycle.run(replace(request(request_id), deadline=time() + 0.2)))
        assert caught.value.code is ErrorCode.DEADLINE

    async with open_runner(ready=0) as place:
        lasting = replace(request("lasting"), deadline=time() + 60)
        assert queued_request(lasting).deadline == pytest.approx(monotonic() + 60, abs=30)
        task = asyncio.create_task(collect(place.lifecycle.run(lasting)))
        await assert_ends("waiting")
        assert not task.done()
        await place.engine.start()
        await place.engine.submit()
        await assert_ends("running")
        place.engine.send(output("lasting", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"


# No engine


async def test_a_request_without_an_engine_is_held_until_one_is_ready() -> None:
    async with open_runner(ready=0) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        await asyncio.sleep(0.05)
        await place.engine.start()
        await place.engine.submit()
        place.engine.send(output("r", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        await place.left_nothing("r", FinishReason.STOP, "a")


async def test_a_request_is_not_held_for_ever() -> None:
    async with open_runner(ready=0, hold_timeout=0.02) as place:
        with pytest.raises(QuireError) as caught:
            await collect(place.lifecycle.run(request()))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert caught.value.retry_after
        await place.left_nothing("r", FinishReason.ERROR, "")


@pytest.mark.parametrize("way", ["cancel", "task", "drain", "deadline"])
async def test_a_held_request_can_be_ended(way: str) -> None:
    async with open_runner(ready=0, request_timeout=0.1 if way == "deadline" else None) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        await asyncio.sleep(0.01)
        if way == "cancel":
            assert await place.lifecycle.cancel("r")
            assert (await task)[-1].finish_reason is FinishReason.ABORT
        elif way == "task":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            if way == "drain":
                await place.lifecycle.drain(0)
            with pytest.raises(QuireError) as caught:
                await task
            assert caught.value.code is (ErrorCode.UNAVAILABLE if way == "drain" else ErrorCode.DEADLINE)
        ended = FinishReason.ABORT if way in ("cancel", "task") else FinishReason.ERROR
        await place.left_nothing("r", ended, "")


# Recovery


async def test_when_an_engine_dies_the_client_sees_only_a_pause() -> None:
    async with open_runner(2, grace=0.05) as place:
        task, first = await started(place, place.lifecycle.run(request(stop=("END",))))
        place.engine.send(output("r", tokens("one E"), 0, cached_tokens=2))
        await place.delivered("one E")
        await place.engine.stop()
        second = await place.engines[1].submit()
        assert list(second.prompt_token_ids) == tokens("hello")
        assert list(second.output_token_ids) == tokens("one E")
        assert second.sampling == first.sampling
        assert second.request_id != "r"
        assert len(second.request_id) <= 64
        place.engines[1].send(output(second.request_id, tokens("ND"), 5, cached_tokens=5))
        deltas = await task
        await place.left_nothing("r", FinishReason.STOP, "one END")
    assert delta_text(deltas) == "one "
    assert deltas[-1].usage == Usage(5, 7, 2)


async def test_a_request_can_resume_on_the_restarted_engine() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("ab"), 0))
        await place.delivered("ab")
        place.engine.restart_as(generation=2)
        place.engine.break_stream()
        again = await place.engine.submit()
        place.engine.send(output(again.request_id, tokens("c"), 2, STOP))
        assert delta_text(await task) == "abc"
        await place.left_nothing("r", FinishReason.STOP, "abc")


async def test_a_stream_that_reconnects_in_time_resumes_without_another_attempt() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        place.engine.break_stream()
        place.engine.send(output("r", tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
        while not place.engine.commands.empty():
            assert not place.engine.commands.get_nowait().HasField("submit")


async def test_after_the_last_attempt_the_client_gets_an_error() -> None:
    async with open_runner(max_attempts=2) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0, ABORT))
        again = await place.engine.submit()
        place.engine.send(output(again.request_id, tokens("b"), 1, ABORT))
        again = await place.engine.submit()  # engines that are lost after a token are not counted together
        place.engine.send(output(again.request_id, [], 2, ABORT))
        with pytest.raises(QuireError) as caught:
            await task
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert caught.value.retry_after
        await place.left_nothing("r", FinishReason.ERROR, "ab")


async def test_a_draining_engine_is_not_tried_again() -> None:
    async with open_runner(2) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", [], 0, ERROR, types_pb2.Error(code=types_pb2.ERROR_CODE_UNAVAILABLE)))
        second = await place.engines[1].submit()
        place.engines[1].send(output(second.request_id, tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"


FULL = types_pb2.Error(code=types_pb2.ERROR_CODE_OVERLOADED, message="The engine's queue is full.")


async def test_a_request_reaches_the_engine_with_capacity_however_many_are_full() -> None:
    async with open_runner(4, max_attempts=1) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        for engine in place.engines[:3]:
            engine.send(output((await engine.submit()).request_id, [], 0, ERROR, FULL))
        last = await place.engines[3].submit()
        place.engines[3].send(output(last.request_id, tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        await place.left_nothing("r", FinishReason.STOP, "a")


async def test_when_every_engine_is_full_the_client_gets_a_retry_time() -> None:
    async with open_runner(2) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        for engine in place.engines:
            engine.send(output((await engine.submit()).request_id, [], 0, ERROR, FULL))
        with pytest.raises(QuireError) as caught:
            await task
        error = caught.value
        assert (error.code, error.reason, error.retry_after) == (ErrorCode.OVERLOADED, "engines_full", 1.0)
        for engine in place.engines:
            assert engine.commands.empty()
        await place.left_nothing("r", FinishReason.ERROR, "")


async def test_a_request_leaves_a_silent_engine_for_another() -> None:
    impatient = {**QUICK, "silence": 0.2, "stall": 3600}
    async with open_runner(2, link=impatient, max_attempts=1) as place:  # which is no engine lost
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engine.send(output("r", tokens("a"), 0))
        await place.delivered("a")
        place.engine.freeze()
        second = await place.engines[1].submit()
        place.engines[1].send(output(second.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
        assert (await place.engine.cancel()).request_id == "r"
        await place.ready(1)
        place.engine.thaw()
        place.engine.send()
        await place.ready(2)


async def test_a_request_does_not_leave_a_silent_engine_for_an_idle_one_that_is_not_there_either() -> None:
    impatient = {**QUICK, "silence": 0.6, "stall": 3600}
    async with open_runner(3, link=impatient) as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        place.engines[1].freeze()  # as the first one, which says nothing
        third = await place.engines[2].submit()
        place.engines[2].send(output(third.request_id, tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        assert place.engines[1].commands.empty()


async def test_requests_stay_where_they_are_while_every_engine_is_silent() -> None:
    impatient = {**QUICK, "silence": 0.2, "stall": 3600}
    async with open_runner(2, link=impatient) as place:
        tasks = [asyncio.create_task(collect(place.lifecycle.run(request(name)))) for name in "ab"]
        for engine in place.engines:
            await engine.submit()
        await place.ready(0)  # the router, or its network, may be the cause
        await asyncio.sleep(0.3)
        assert all(engine.commands.empty() for engine in place.engines)
        submitted = asyncio.create_task(place.engines[1].submit())
        while not submitted.done():
            place.engines[1].send()
            await asyncio.sleep(0.01)
        moved = await submitted
        place.engines[1].send(output("b", tokens("b"), 0))
        place.engines[1].send(output(moved.request_id, tokens("a"), 0, STOP), output("b", [], 1, STOP))
        assert [delta_text(await task) for task in tasks] == ["a", "b"]


async def test_a_request_that_left_silent_engines_waits_for_the_next_one() -> None:
    impatient = {**QUICK, "silence": 0.2, "stall": 3600}
    async with open_runner(MAX_MOVES + 2, link=impatient, max_attempts=1) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        for engine in place.engines[:MAX_MOVES]:
            await engine.submit()
            engine.freeze()
        last = await place.engines[MAX_MOVES].submit()
        await place.ready(1)
        await asyncio.sleep(0.3)
        assert place.engines[-1].commands.empty()
        place.engines[MAX_MOVES].send(output(last.request_id, tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"


async def test_an_output_whose_finish_alone_was_lost_needs_no_other_engine() -> None:
    async with open_runner(hold_timeout=0.01) as place:
        task, _ = await started(place, place.lifecycle.run(request(max_tokens=2)))
        place.engine.send(output("r", tokens("ab"), 0))
        place.engine.send(output("r", [], 2, ABORT))
        deltas = await task
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        await place.left_nothing("r", FinishReason.LENGTH, "ab")


async def test_a_cancelled_request_is_not_tried_again() -> None:
    async with open_runner(grace=0.05) as place:
        answer = place.lifecycle.run(request())
        reading = asyncio.create_task(anext(answer))
        await place.engine.submit()
        place.engine.send(output("r", tokens("a"), 0))
        await reading
        await place.engine.stop()
        await place.ready(0)
        await asyncio.sleep(0.1)
        await place.lifecycle.cancel("r")
        assert (await collect(answer))[-1].finish_reason is FinishReason.ABORT
        await place.left_nothing("r", FinishReason.ABORT, "a")


# The end of the router


async def test_draining_finishes_running_requests_and_admits_no_new_ones() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        draining = asyncio.create_task(place.lifecycle.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(QuireError) as caught:
            await collect(place.lifecycle.run(request("late")))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        place.engine.send(output("r", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        await asyncio.wait_for(draining, 10)
        await place.left_nothing("r", FinishReason.STOP, "a")


async def test_draining_ends_requests_that_take_too_long() -> None:
    async with open_runner() as place:
        task, _ = await started(place, place.lifecycle.run(request()))
        await place.lifecycle.drain(0.01)
        with pytest.raises(QuireError) as caught:
            await task
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert (await place.engine.cancel()).request_id == "r"
        await place.left_nothing("r", FinishReason.ERROR, "")


# Traces and metrics


async def test_each_attempt_is_a_span_and_so_is_the_wait_for_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("quire_router.requests.dispatch.tracer", provider.get_tracer("test"))
    async with open_runner(ready=0) as place:
        with provider.get_tracer("test").start_as_current_span("POST") as server:
            answer = place.lifecycle.run(request())
        task = asyncio.create_task(collect(answer))
        await asyncio.sleep(0.02)
        await place.engine.start()
        first = await place.engine.submit()
        place.fleet._registry.update([Endpoint(place.engine.address, zone="eu-1a")])
        place.engine.send(output("r", tokens("a"), 0, ABORT))
        second = await place.engine.submit()
        place.engine.send(output(second.request_id, tokens("b"), 1, STOP))
        await task
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [
        "POST", "quire.queue", "quire.route", "chat m", "quire.route", "chat m",
    ]  # fmt: skip
    assert {span.parent.span_id for span in spans if span.parent} == {server.get_span_context().span_id}
    attempts = [span for span in spans if span.name == "chat m"]
    for submit, span in zip([first, second], attempts, strict=True):
        assert submit.traceparent.split("-")[2] == f"{span.context.span_id:016x}"
    attributes = [dict(span.attributes or {}) for span in attempts]
    assert [each["quire.attempt"] for each in attributes] == [1, 2]
    assert attributes[0]["error.type"] == "engine_lost"
    assert "error.type" not in attributes[1]
    assert [each.get("cloud.availability_zone") for each in attributes] == [None, "eu-1a"]
    assert attributes[1]["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes[1]["gen_ai.usage.output_tokens"] == 2


async def test_failed_attempts_are_counted() -> None:
    def counted() -> list[float]:
        name = "quire_attempts_lost_total"
        return [REGISTRY.get_sample_value(name, {"reason": reason}) or 0 for reason in ("engine_full", "engine_lost")]

    full, lost = counted()
    async with open_runner(2) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        first, second = place.engines
        first.send(output((await first.submit()).request_id, [], 0, ERROR, FULL))
        again = await second.submit()
        assert counted() == [full + 1, lost]
        second.send(output(again.request_id, tokens("a"), 0, ABORT))
        last = await second.submit()
        second.send(output(last.request_id, tokens("b"), 1, STOP))
        assert delta_text(await task) == "ab"
    assert counted() == [full + 1, lost + 1]


async def test_requests_and_tokens_are_counted() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, {"model": "m", **labels}) or 0

    def ended(reason: str) -> float:
        return value("quire_requests_total", operation="chat", finish_reason=reason)

    async with open_runner() as place:
        before = value("quire_generation_tokens_total"), ended("stop"), ended("abort")
        task, _ = await started(place, place.lifecycle.run(request()))
        assert value("quire_in_flight_requests") == 1
        place.engine.send(output("r", tokens("abc"), 0, STOP))
        await task
        assert value("quire_in_flight_requests") == 0
        assert value("quire_generation_tokens_total") == before[0] + 3
        assert (ended("stop"), ended("abort")) == (before[1] + 1, before[2])


async def test_a_request_goes_last_to_the_engines_that_have_lost_it() -> None:
    """An engine that fails at once looks idle again at once."""
    async with open_runner(3, max_attempts=5) as place:
        task = asyncio.create_task(collect(place.lifecycle.run(request())))
        for number in (0, 1, 2, 0):
            lost = await asyncio.wait_for(place.engines[number].submit(), 10)
            place.engines[number].send(output(lost.request_id, [], 0, ABORT))
        last = await asyncio.wait_for(place.engines[0].submit(), 10)
        place.engines[0].send(output(last.request_id, tokens("c"), 0, STOP))
        assert delta_text(await task) == "c"
