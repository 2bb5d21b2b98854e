"""``AsyncLLM`` over an executor whose right outputs are known: requests beside each other, and their ends."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from random import Random
from threading import Event
from time import sleep
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quire_engine import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from quire_engine.core.block_pool import KVCacheConfig
from quire_engine.core.executor import CopyError
from quire_engine.core.step import SchedulerOutput
from quire_engine.llm import offline_engine
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import choice_seed

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.offline import BLOCK_SIZE, EOS, OfflineAsync, OfflineExecutor
from tests.support.paged_executor import expected_output

LONG = SamplingParams(seed=1, max_tokens=200, ignore_eos=True)


@pytest.fixture
async def offline(tmp_path: Path) -> AsyncIterator[OfflineAsync]:
    offline = OfflineAsync(tmp_path, max_num_seqs=4, max_num_batched_tokens=32)
    yield offline
    await asyncio.to_thread(offline.llm.close)


def expected(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    seed = choice_seed(params.seed, index)
    return expected_output(prompt, seed, params.max_tokens, frozenset() if params.ignore_eos else frozenset({EOS}))


async def all_of(offline: OfflineAsync, prompt: object, params: SamplingParams, **more: object) -> list[RequestOutput]:
    return [output async for output in offline.llm.generate(prompt, params, **more)]


def slow(offline: OfflineAsync) -> None:
    """Each step takes a while, so that what happens between two of them does."""
    offline.executor.before = lambda scheduler_output: sleep(0.003)


async def idle(offline: OfflineAsync) -> None:
    async with asyncio.timeout(20):
        while offline.scheduler.has_work:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    offline.assert_idle()


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(3, 49), min_size=1, max_size=20), st.integers(0, 2**60), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


@given(REQUESTS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_requests_beside_each_other_get_their_own_outputs_which_only_grow(tmp_path_factory, requests):
    async def run() -> None:
        offline = OfflineAsync(tmp_path_factory.mktemp("async"), max_num_seqs=4, max_num_batched_tokens=32)
        async with offline.llm:
            params = [SamplingParams(seed=seed, max_tokens=12, n=n) for _, seed, n in requests]
            calls = [all_of(offline, prompt, each) for (prompt, _, _), each in zip(requests, params, strict=True)]
            for (prompt, _, n), wanted, outputs in zip(requests, params, await asyncio.gather(*calls), strict=True):
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
                for index in range(n):
                    tokens = expected(prompt, wanted, index)
                    said = [output.outputs[index] for output in outputs]
                    assert said[-1].token_ids == tokens
                    assert said[-1].text == byte_level().decode(tokens)
                    assert said[-1].finish_reason == ("length" if len(tokens) == 12 else "stop")
                    for before, after in pairwise(said):
                        assert after.token_ids[: len(before.token_ids)] == before.token_ids
                        assert after.text.startswith(before.text)
                        assert before.finish_reason in (None, after.finish_reason)
            await idle(offline)

    asyncio.run(run())


async def test_a_stop_string_ends_an_output(offline: OfflineAsync) -> None:
    whole = byte_level().decode(expected([5, 6], LONG)[:20])
    stop = whole.strip()[-2:]
    outputs = await all_of(offline, [5, 6], SamplingParams(seed=1, max_tokens=200, ignore_eos=True, stop=stop))

    (choice,) = outputs[-1].outputs
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", stop, whole.partition(stop)[0])
    await idle(offline)


async def test_of_best_of_only_the_last_output_is_told(offline: OfflineAsync) -> None:
    (output,) = await all_of(offline, [5, 6], SamplingParams(seed=1, max_tokens=9, n=2, best_of=4))
    assert output.finished
    assert len(output.outputs) == 2


@given(REQUESTS)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_deltas_together_are_the_outputs(tmp_path_factory, requests):
    offline = OfflineAsync(tmp_path_factory.mktemp("offline"), max_num_seqs=4, max_num_batched_tokens=32)

    async def check(prompt: list[int], seed: int, n: int) -> None:
        more = {"seed": seed, "n": n, "max_tokens": 12, "stop": ["e", "a5"], "logprobs": 1, "prompt_logprobs": 1}
        *_, whole = await all_of(offline, prompt, SamplingParams(**more))
        deltas = await all_of(offline, prompt, SamplingParams(**more, output_kind=RequestOutputKind.DELTA))
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        parts = [each for delta in deltas for each in delta.outputs]
        assert all(each.token_ids or each.text or each.finish_reason for each in parts)
        assert [*chain.from_iterable(delta.prompt_logprobs or [] for delta in deltas)] == whole.prompt_logprobs
        for output in whole.outputs:
            of_it = [each for each in parts if each.index == output.index]
            assert "".join(each.text for each in of_it) == output.text
            assert [*chain.from_iterable(each.token_ids for each in of_it)] == output.token_ids
            assert [*chain.from_iterable(each.logprobs for each in of_it)] == output.logprobs
            assert [each.finish_reason for each in of_it] == [None] * (len(of_it) - 1) + [output.finish_reason]
            assert of_it[-1].cumulative_logprob == output.cumulative_logprob

    async def all_at_once() -> None:
        await asyncio.gather(*(check(*request) for request in requests))

    with closing(offline.llm):
        asyncio.run(all_at_once())


async def test_of_final_only_there_is_one_output(offline: OfflineAsync) -> None:
    (output,) = await all_of(offline, [5, 6], replace(LONG, n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.finished
    assert [each.token_ids for each in output.outputs] == [expected([5, 6], LONG, index) for index in range(2)]


async def test_it_is_made_and_ended_as_vllms(tmp_path: Path) -> None:
    executor = OfflineExecutor(KVCacheConfig(BLOCK_SIZE, 400, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline_engine, "load_executor", lambda config: executor)
        llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=write_model_folder(tmp_path), max_num_seqs=4))
    assert llm._core.scheduler.config.max_num_seqs == 4
    *_, output = [each async for each in llm.generate([5, 6], LONG, "a")]
    assert output.outputs[0].token_ids == expected([5, 6], LONG)
    llm.shutdown()
    assert executor.closed
    with pytest.raises(QuireError):
        await anext(llm.generate([5, 6], LONG, "b"))


async def test_a_conversation_is_answered(offline: OfflineAsync) -> None:
    outputs = [each async for each in offline.llm.chat([{"role": "user", "content": "Hello"}], LONG)]
    assert "Hello" in outputs[-1].prompt
    assert len(outputs[-1].outputs[0].token_ids) == 200


async def test_who_leaves_aborts_his_request_and_no_other(offline: OfflineAsync) -> None:
    slow(offline)
    other = asyncio.create_task(all_of(offline, [9], LONG))
    stream = offline.llm.generate([5, 6], LONG)
    await anext(stream)
    await stream.aclose()
    cancelled = asyncio.create_task(all_of(offline, [7], LONG))
    await asyncio.sleep(0.01)
    cancelled.cancel()

    assert (await other)[-1].outputs[0].token_ids == expected([9], LONG)
    await idle(offline)


async def test_an_aborted_request_ends_with_what_it_had(offline: OfflineAsync) -> None:
    slow(offline)
    stream = offline.llm.generate([5, 6], LONG, "mine")
    first = await anext(stream)
    await offline.llm.abort(["mine", "unknown"])
    last = [each async for each in stream][-1]

    assert (last.request_id, last.finished, last.outputs[0].finish_reason) == ("mine", True, "abort")
    assert len(first.outputs[0].token_ids) <= len(last.outputs[0].token_ids) < 200
    await idle(offline)


async def test_a_request_with_the_id_of_one_that_was_left_gets_its_own_outputs(offline: OfflineAsync) -> None:
    slow(offline)
    for number in range(10):
        stream = offline.llm.generate([5, 6], LONG, "mine")
        await anext(stream)
        await stream.aclose()
        last = (await all_of(offline, [number + 7], LONG, request_id="mine"))[-1]
        assert (last.request_id, last.outputs[0].token_ids) == ("mine", expected([number + 7], LONG))
    await idle(offline)


async def test_an_id_is_of_one_request_at_a_time(offline: OfflineAsync) -> None:
    slow(offline)
    stream = offline.llm.generate([5, 6], LONG, "mine")
    await anext(stream)
    with pytest.raises(QuireError, match="A request mine is running") as refusal:
        await all_of(offline, [5, 6], LONG, request_id="mine")
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, "request_id")
    await stream.aclose()
    assert (await all_of(offline, [5, 6], LONG, request_id="mine"))[-1].finished


@pytest.mark.parametrize(("prompt", "param"), [([10**6], "prompt"), ([3] * 300, "prompt"), ([], "prompt")])
async def test_what_is_wrong_with_a_request_is_said_before_it_runs(offline, prompt, param) -> None:
    with pytest.raises(QuireError) as refusal:
        await all_of(offline, prompt, SamplingParams())
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


async def test_too_many_requests_are_refused_and_the_others_run(tmp_path: Path) -> None:
    offline = OfflineAsync(tmp_path, max_num_seqs=1, max_waiting=1)
    async with offline.llm:
        results = await asyncio.gather(*(all_of(offline, [5], LONG) for _ in range(6)), return_exceptions=True)
        refused = [each for each in results if isinstance(each, QuireError)]
        assert 0 < len(refused) < 6
        assert {each.code for each in refused} == {ErrorCode.OVERLOADED}
        await idle(offline)


async def test_a_request_that_fails_raises_and_the_others_are_right(offline: OfflineAsync) -> None:
    def fail(scheduler_output: SchedulerOutput) -> None:
        if any(new.token_ids[0] == 13 for new in scheduler_output.new):
            raise RuntimeError("this one")

    offline.executor.before = fail
    right, failed = await asyncio.gather(
        all_of(offline, [3], LONG), all_of(offline, [13], LONG), return_exceptions=True
    )

    assert right[-1].outputs[0].token_ids == expected([3], LONG)
    assert isinstance(failed, QuireError)
    assert failed.code is ErrorCode.INTERNAL


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_the_engine_fails_every_request_does_and_those_that_come(offline: OfflineAsync) -> None:
    def fail(scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.step > 20:
            raise CopyError("out of order")

    offline.executor.before = fail
    results = await asyncio.gather(*(all_of(offline, [each], LONG) for each in (3, 4)), return_exceptions=True)
    with pytest.raises(QuireError) as later:
        await all_of(offline, [3], LONG)
    assert {(each.code, each.message) for each in [*results, later.value]} == {(ErrorCode.INTERNAL, "out of order")}


async def test_closing_ends_what_runs_and_refuses_what_comes(offline: OfflineAsync) -> None:
    slow(offline)
    stream = offline.llm.generate([5, 6], SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    await asyncio.to_thread(offline.llm.close)
    offline.llm.close()

    assert offline.executor.closed
    with pytest.raises(QuireError, match="closed"):
        _ = [each async for each in stream]
    with pytest.raises(QuireError, match="closed"):
        await all_of(offline, [3], LONG)


@contextmanager
def held(offline: OfflineAsync, monkeypatch: pytest.MonkeyPatch, name: str = "from_prompt") -> Iterator[Event]:
    """What prepares requests waits until the yielded event is set, which it is at the end."""
    requests, event = offline.llm._engine.requests, Event()
    work = getattr(requests, name)

    def wait(*args: object, **more: object) -> object:
        event.wait(20)
        return work(*args, **more)

    monkeypatch.setattr(requests, name, wait)
    yield event
    event.set()


async def test_closing_fails_what_is_being_prepared_and_what_waits_for_that(offline, monkeypatch) -> None:
    with held(offline, monkeypatch):
        tasks = [asyncio.create_task(all_of(offline, [each], LONG)) for each in (3, 4, 5)]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(asyncio.to_thread(offline.llm.close))
        results = await asyncio.gather(*tasks, return_exceptions=True)
    await closing
    assert [(type(each), getattr(each, "code", None)) for each in results] == [(QuireError, ErrorCode.UNAVAILABLE)] * 3


async def test_a_request_can_be_aborted_while_its_prompt_is_prepared(offline, monkeypatch) -> None:
    with held(offline, monkeypatch) as event:
        task = asyncio.create_task(all_of(offline, [5, 6], LONG, request_id="mine"))
        await asyncio.sleep(0.01)
        await offline.llm.abort("mine")
        event.set()
        (last,) = await task
    assert (last.request_id, last.finished, last.outputs[0].finish_reason) == ("mine", True, "abort")
    assert (last.prompt_token_ids, last.outputs[0].token_ids) == ([5, 6], [])
    assert offline.executor.steps == 0
    await idle(offline)


async def test_an_id_is_taken_as_soon_as_it_is_given(offline, monkeypatch) -> None:
    with held(offline, monkeypatch) as event:
        task = asyncio.create_task(all_of(offline, [5, 6], LONG, request_id="mine"))
        await asyncio.sleep(0.01)
        with pytest.raises(QuireError, match="A request mine is running"):
            await asyncio.wait_for(all_of(offline, [7], LONG, request_id="mine"), 5)
        event.set()
        assert (await task)[-1].outputs[0].token_ids == expected([5, 6], LONG)
    assert (await all_of(offline, [7], LONG, request_id="mine"))[-1].finished


async def test_who_leaves_while_his_prompt_is_prepared_leaves_nothing(offline, monkeypatch) -> None:
    with held(offline, monkeypatch) as event:
        task = asyncio.create_task(all_of(offline, [5, 6], LONG, request_id="mine"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        event.set()
        assert (await all_of(offline, [7], LONG, request_id="mine"))[-1].outputs[0].token_ids == expected([7], LONG)
    assert not offline.llm._named
    assert not offline.llm._streams
    await idle(offline)


async def test_a_grammar_or_an_adapter_that_takes_long_is_in_nobodys_way(tmp_path, monkeypatch) -> None:
    """Seeds are those of the calls' order all the same."""
    offline = OfflineAsync(tmp_path, seed=7)
    requests, compiling, reading = offline.llm._engine.requests, Future[object](), Future[LoRARequest]()
    bounded = SimpleNamespace(result=lambda: compiling.result(20))
    monkeypatch.setattr(requests._grammars, "submit", lambda structured: bounded)
    monkeypatch.setattr(requests, "_check_lora", lambda lora: reading.result(20))
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    seeds, unseeded = Random(7), SamplingParams(max_tokens=20, ignore_eos=True)
    async with offline.llm:
        slow_ones = [
            asyncio.create_task(all_of(offline, [5], structured, request_id="grammar")),
            asyncio.create_task(all_of(offline, [6], unseeded, lora_request=LoRARequest("a", 1, "a"))),
            asyncio.create_task(all_of(offline, [6], unseeded, lora_request=LoRARequest("a", 1, "a"))),
        ]
        drawn = [seeds.getrandbits(64) for _ in range(3)]
        for prompt in ([7], [8, 9]):
            drawn.append(seeds.getrandbits(64))
            outputs = await asyncio.wait_for(all_of(offline, prompt, unseeded), 10)
            assert outputs[-1].outputs[0].token_ids == expected_output(prompt, choice_seed(drawn[-1], 0), 20)
        assert not any(task.done() for task in slow_ones)
        await offline.llm.abort("grammar")
        (aborted,) = await asyncio.wait_for(slow_ones[0], 10)
        assert (aborted.outputs[0].finish_reason, aborted.outputs[0].token_ids) == ("abort", [])
        reading.set_result(LoRARequest("a", 1, "/a", b"digest"))
        for task, seed in zip(slow_ones[1:], drawn[1:3], strict=True):
            assert (await task)[-1].outputs[0].token_ids == expected_output([6], choice_seed(seed, 0), 20)
        compiling.set_exception(QuireError(ErrorCode.INVALID, "no grammar"))
        with pytest.raises(QuireError, match="no grammar"):
            await all_of(offline, [5], structured)
        await idle(offline)


def test_requests_of_a_loop_that_was_closed_are_in_nobodys_way(tmp_path: Path) -> None:
    offline = OfflineAsync(tmp_path)
    stream = offline.llm.generate([5], LONG, "mine")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()

    async def again() -> None:
        last = (await all_of(offline, [6], LONG, request_id="mine"))[-1]
        assert last.outputs[0].token_ids == expected([6], LONG)
        await idle(offline)

    asyncio.run(again())
    offline.llm.close()


def test_one_event_loop_after_the_other_may_use_it(tmp_path: Path) -> None:
    offline = OfflineAsync(tmp_path)
    for _ in range(2):
        assert asyncio.run(all_of(offline, [5], LONG))[-1].outputs[0].token_ids == expected([5], LONG)

    async def leave() -> None:
        await anext(offline.llm.generate([5], LONG))

    asyncio.run(leave())
    asyncio.run(idle(offline))
    offline.llm.close()
