"""Shadows: what is compared, what each of them comes to, and that nobody else notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from quire_proto.errors import QuireError
from quire_proto.priority import BEST_EFFORT
from quire_proto.sampling import FinishReason, SamplingParams
from quire_proto.telemetry import Metric
from quire_router.admission.model_targets import ModelTarget, ModelTargets, ShadowTarget, TargetGroup
from quire_router.admission.queue import AdmissionQueue
from quire_router.core.generation import GenerationRequest
from quire_router.discovery.combined import StaticDiscovery
from quire_router.engines.attempt import Output
from quire_router.engines.pool import EnginePool
from quire_router.engines.settings import ConnectionSettings
from quire_router.journal.memory import MemoryJournal
from quire_router.requests.choice import create_choices
from quire_router.requests.dispatch import Dispatcher
from quire_router.requests.runner import RequestRunner
from quire_router.requests.shadow import ShadowRunner, TokenComparison

from tests.support.byte_tokenizer import TOKENIZER, tokens
from tests.support.runner_harness import QUICK, FirstIdle, collect, delta_text
from tests.support.scripted_engine import LENGTH, STOP, ScriptedEngine, output
from tests.support.tool_models import THINKING_TEMPLATE, tokenizer_with
from tests.support.waiting import until

REQUEST = GenerationRequest(
    "r", "m", tokens("hello"), SamplingParams(temperature=0.5, seed=7, max_tokens=50), served_name="chat"
)
texts = st.lists(st.sampled_from("ab"), max_size=4)
reasons = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


# What is compared


def compared(answer: list[str], reason: FinishReason, shadow: list[str], end: FinishReason, shadow_first: bool) -> Any:
    """An answer and its shadow, token by token, one of them before the other."""
    (choice,) = create_choices(replace(REQUEST, params=SamplingParams(max_tokens=50)), TOKENIZER, 1)
    comparison = TokenComparison([choice])

    def play_answer() -> None:
        for letter in answer:
            choice.process(Output(tokens(letter), len(choice.token_ids)))
        choice.process(Output([], len(choice.token_ids), reason))
        comparison.end_answer()

    def play_shadow() -> None:
        for letter in shadow:
            comparison.add(0, tokens(letter))
        comparison.add(0, [], end)

    for play in (play_shadow, play_answer) if shadow_first else (play_answer, play_shadow):
        play()
    return comparison


@given(texts, reasons, texts, reasons, st.booleans())
def test_a_shadow_is_equal_if_its_tokens_and_its_end_are_whichever_comes_first(
    answer: list[str], reason: FinishReason, shadow: list[str], end: FinishReason, shadow_first: bool
) -> None:
    comparison = compared(answer, reason, shadow, end, shadow_first)
    assert comparison.needs_no_more
    assert comparison.is_different == ((answer, reason) != (shadow, end))
    same = next((n for n, pair in enumerate(zip(answer, shadow, strict=False)) if len(set(pair)) > 1), None)
    same = min(len(answer), len(shadow)) if same is None else same
    if answer:
        assert comparison.equal_share == same / len(answer)


@pytest.mark.parametrize("operation", ["text_completion", "chat"])
def test_what_is_behind_a_stop_string_does_not_count(operation: str) -> None:
    tokenizer = tokenizer_with(THINKING_TEMPLATE)
    (choice,) = create_choices(replace(REQUEST, stop=("END",), operation=operation), tokenizer, 1)
    comparison = TokenComparison([choice])
    comparison.add(0, tokenizer.encode_plain("one ENDLESS"))
    choice.process(Output(tokenizer.encode_plain("one END"), 0))
    comparison.end_answer()
    assert comparison.needs_no_more
    assert not comparison.is_different
    assert comparison.equal_share == 1


def test_a_first_token_that_differs_decides() -> None:
    (choice,) = create_choices(REQUEST, TOKENIZER, 1)
    comparison = TokenComparison([choice])
    choice.process(Output(tokens("abc"), 0))
    comparison.add(0, tokens("ab"))
    assert not comparison.needs_no_more
    comparison.add(0, tokens("x"))
    assert comparison.needs_no_more
    assert comparison.is_different


# How they run


@dataclass
class Stage:
    """A router with an engine of the model and one of its shadow, ``m`` and ``s``."""

    runner: RequestRunner
    shadows: ShadowRunner
    journal: MemoryJournal
    pool: EnginePool
    queue: AdmissionQueue
    engine: ScriptedEngine
    shadow: ScriptedEngine
    counted: dict[str, float]

    async def begun(self, request: GenerationRequest = REQUEST) -> asyncio.Task[Any]:
        """The answer to a request that its engine has."""
        task = asyncio.create_task(collect(self.runner.run(request)))
        await self.engine.submit()
        return task

    def results(self) -> dict[str, float]:
        """What was counted since the stage began."""
        now = results()
        return {name: now[name] - self.counted[name] for name in now if now[name] != self.counted[name]}


def results() -> dict[str, float]:
    labels = {"model": "chat", "target": "s"}
    names = "equal", "different", "failed", "dropped"
    found = [REGISTRY.get_sample_value(f"{Metric.SHADOWS}_total", {**labels, "result": name}) for name in names]
    return {name: value or 0.0 for name, value in zip(names, found, strict=True)}


@asynccontextmanager
async def open_stage(percent: float = 100, max_shadows: int = 4) -> AsyncIterator[Stage]:
    engines = [ScriptedEngine(models=[name], best_effort=True, max_num_seqs=8) for name in ("m", "s")]
    addresses = [await engine.start() for engine in engines]
    pool = EnginePool(StaticDiscovery(addresses), ["m", "s"], ConnectionSettings(grace=30, **QUICK))
    await pool.start()
    queue, placer, journal = AdmissionQueue(["m", "s"], pool), FirstIdle(pool.table), MemoryJournal()
    pool.on_capacity = queue.notify_capacity
    targets = ModelTargets({"chat": TargetGroup((ModelTarget("m"),), ShadowTarget("s", percent))})
    shadows = ShadowRunner(pool, placer, queue, targets, max_shadows)  # type: ignore[arg-type]
    dispatcher = Dispatcher(pool, placer, queue, policy="first_idle", hold_timeout=10)  # type: ignore[arg-type]
    runner = RequestRunner(
        pool,
        placer,
        dispatcher,
        journal,
        {"m": TOKENIZER, "s": TOKENIZER},
        shadows=shadows,  # type: ignore[arg-type]
    )
    try:
        await until(lambda: pool.ready("m") == pool.ready("s") == 1)
        yield Stage(runner, shadows, journal, pool, queue, *engines, results())
    finally:
        await shadows.close()
        await pool.close()
        for engine in engines:
            await engine.stop()


async def test_a_shadow_gets_the_same_request_behind_all_others_and_is_compared_and_forgotten() -> None:
    async with open_stage() as stage:
        task = await stage.begun()
        submit = await stage.shadow.submit()
        stage.shadow.send(output(submit.request_id, tokens("ab"), 0, STOP))
        stage.engine.send(output("r", tokens("ab"), 0, STOP))
        assert delta_text(await task) == "ab"
        await until(lambda: stage.results() == {"equal": 1})
        assert list(submit.prompt_token_ids) == tokens("hello")
        assert (submit.sampling.seed, submit.sampling.temperature) == (7, 0.5)
        assert (submit.priority, submit.shadow) == (BEST_EFFORT, True)
        assert await stage.journal.read(submit.request_id) is None
        assert [row.requests for row in await stage.journal.usage(0, 2**40)] == [1]
        await until(lambda: not len(stage.shadows))
        assert stage.pool.table.requests.sum() == 0


async def test_a_shadow_ends_with_its_first_token_that_differs_and_the_answer_is_untouched() -> None:
    async with open_stage() as stage:
        task = await stage.begun()
        submit = await stage.shadow.submit()
        stage.engine.send(output("r", tokens("ab"), 0))
        (state,) = stage.runner.in_progress()
        await until(lambda: len(state.choices[0].token_ids) == 2)
        stage.shadow.send(output(submit.request_id, tokens("ax"), 0))
        assert (await stage.shadow.cancel()).request_id == submit.request_id
        assert stage.results() == {}
        stage.engine.send(output("r", tokens("cd"), 2, LENGTH))
        assert delta_text(await task) == "abcd"
        await until(lambda: stage.results() == {"different": 1})


async def test_a_client_that_leaves_ends_the_shadow_too() -> None:
    async with open_stage() as stage:
        task = await stage.begun()
        submit = await stage.shadow.submit()
        task.cancel()
        assert (await stage.shadow.cancel()).request_id == submit.request_id
        await until(lambda: stage.results() == {"dropped": 1})


@pytest.mark.parametrize("how", ["lost", "refused"])
async def test_a_shadow_that_fails_is_not_tried_again(how: str) -> None:
    async with open_stage() as stage:
        task = await stage.begun()
        submit = await stage.shadow.submit()
        if how == "lost":
            stage.shadow.restart_as(2)
            stage.shadow.break_stream()
        else:
            stage.shadow.send(output(submit.request_id, [], 0, 4))
        await until(lambda: stage.results() == {"failed": 1})
        stage.engine.send(output("r", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        assert stage.results() == {"failed": 1}
        assert stage.shadow.commands.empty() or not stage.shadow.commands.get_nowait().HasField("submit")


async def test_no_more_shadows_run_than_may_and_none_where_something_waits() -> None:
    async with open_stage(max_shadows=1) as stage:
        first = await stage.begun()
        await stage.shadow.submit()
        second = await stage.begun(replace(REQUEST, request_id="second"))
        assert stage.results() == {"dropped": 1}
        for task in (first, second):
            task.cancel()


async def test_what_waits_for_the_shadows_engines_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stage() as stage:
        monkeypatch.setattr(stage.queue, "waiting_of_all_classes", lambda model: int(model == "s"))
        task = await stage.begun()
        assert stage.results() == {"dropped": 1}
        task.cancel()


@pytest.mark.parametrize(
    "unlike",
    [
        {"served_name": ""},
        {"served_name": "other"},
        {"priority": BEST_EFFORT},
        {"params": SamplingParams(n=1, best_of=2)},
    ],
    ids=str,
)
async def test_what_cannot_be_compared_has_no_shadow(unlike: dict[str, Any]) -> None:
    async with open_stage() as stage:
        task = await stage.begun(replace(REQUEST, **unlike))
        assert len(stage.shadows) == 0
        assert stage.results() == {}
        task.cancel()


async def test_a_share_of_nothing_shadows_nothing() -> None:
    async with open_stage(percent=0) as stage:
        task = await stage.begun()
        assert len(stage.shadows) == 0
        task.cancel()


async def test_a_router_that_leaves_ends_its_shadows_at_once() -> None:
    async with open_stage() as stage:
        task = await stage.begun()
        submit = await stage.shadow.submit()
        leaving = asyncio.create_task(stage.runner.drain(10))
        assert (await stage.shadow.cancel()).request_id == submit.request_id
        stage.engine.send(output("r", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        await leaving
        assert stage.results() == {"dropped": 1}
        with pytest.raises(QuireError):
            await collect(stage.runner.run(replace(REQUEST, request_id="later")))


async def test_a_shadow_that_cannot_begin_costs_the_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stage() as stage:
        monkeypatch.setattr(stage.pool, "with_best_effort_capacity", None)
        task = await stage.begun()
        stage.engine.send(output("r", tokens("a"), 0, STOP))
        assert delta_text(await task) == "a"
        assert stage.results() == {"failed": 1}
