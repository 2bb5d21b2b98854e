"""Guessed tokens change nothing of what a real model draws: not one token, and with ``--deterministic`` not one bit of
a log-probability, sampled or greedy, under grammars, penalties, bans, stops and memory pressure, on one rank and on
two.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from quire_engine.config import EngineArgs
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.speculation import Speculator
from quire_engine.core.step import Grammar
from quire_engine.core.step_time_model import StepTimeEstimator, StepWork
from quire_engine.executor.torch_executor import TorchExecutor
from quire_proto.sampling import SamplingParams
from quire_proto.structured_output import Structured, StructuredKind

from tests.model.engine import Run, load, run
from tests.model.models import SmallModels
from tests.support.grammars import MODEL, encode, grammar_of
from tests.support.guessing import Reminder
from tests.support.rank_threads import ranks_are_threads
from tests.support.variants import one_in

TOKENS = 40
SCHEMA = '{"type": "array", "items": {"enum": ["fox", "owl"]}, "minItems": 2, "maxItems": 6}'
STRUCTURED = (
    Structured(StructuredKind.JSON_SCHEMA, SCHEMA),
    Structured(StructuredKind.REGEX, "[a-z]{3,9}( [a-z]+){4,9}"),
)
# What each request asks for beside its seed.
STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.0, "logprobs": 0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 1},
    "banned": {"bad_words": ((5, 6), (9,)), "min_tokens": 20, "stop_token_ids": tuple(range(260, 276))},
    "stopped": {"stop_token_ids": tuple(range(260, 276)), "temperature": 1.0},
    "biased": {"logit_bias": ((7, 3.0), (8, -100.0)), "n": 2},
    "json": {"structured": STRUCTURED[0]},
    "regex": {"structured": STRUCTURED[1], "frequency_penalty": 0.5, "temperature": 1.2},
}
POOLS = {"room": (300, 0), "recompute": (40, 0), "swap": (40, 300)}


class CheapRows(StepTimeEstimator):
    """Steps that last the same however many tokens they draw."""

    def observe(self, work: StepWork, seconds: float, ended: float = 0.0) -> None:
        super().observe(work, 1.0 + 1e-3 * work.sequences, ended)


Guesses = Callable[[Scheduler], None]


@cache
def executor_of(pools: str, size: int = 1) -> TorchExecutor:
    return load(MODEL, *POOLS[pools], "bfloat16", deterministic=True, tensor_parallel_size=size)


def jobs() -> tuple[list[list[int]], list[SamplingParams], list[Grammar | None]]:
    """Two requests of each style, whose prompts repeat themselves."""
    prompts, params, grammars = [], [], []
    for number, style in enumerate([*STYLES, *STYLES]):
        prompts.append(encode("The fox saw the owl. " * (1 + number % 5) + "The owl and the fox"))
        params.append(SamplingParams(**{"max_tokens": TOKENS, "seed": number, **STYLES[style]}))
        structured = params[-1].structured
        grammars.append(None if structured is None else grammar_of(structured))
    return prompts, params, grammars


def outputs(executor: TorchExecutor, guesses: Guesses = lambda _: None, **settings: Any) -> Run:
    prompts, params, grammars = jobs()
    return run(executor, prompts, params, grammars=grammars, guesses=guesses, **settings)


def reminded(drawn: Run, seed: int, executor: TorchExecutor) -> Guesses:
    """Guesses most of what was drawn before, and sometimes nonsense."""
    choices = [[choice.token_ids for choice in choices] for choices in drawn.choices]

    def install(scheduler: Scheduler) -> None:
        vocab_size = executor.config.vocab_size
        scheduler._batch_scheduler.speculator = Reminder(random.Random(seed), choices, vocab_size)

    return install


@pytest.mark.parametrize(("pools", "prefix_caching"), list(one_in(2, list(POOLS), (True, False))))
def test_drafts_change_nothing(pools: str, prefix_caching: bool) -> None:
    executor = executor_of(pools)
    expected = outputs(executor, prefix_caching=prefix_caching)
    for seed in range(2):
        made = outputs(executor, reminded(expected, seed, executor), prefix_caching=prefix_caching)
        assert made.choices == expected.choices
        assert made.statistics.num_accepted_tokens > 20
        assert made.statistics.num_accepted_tokens < made.statistics.num_draft_tokens


def test_two_ranks_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    executor = load(MODEL, *POOLS["room"], "float32", tensor_parallel_size=2)
    try:
        expected = outputs(executor)
        made = outputs(executor, reminded(expected, 3, executor))
    finally:
        executor.close()
    tokens = [[choice.token_ids for choice in choices] for choices in expected.choices]
    assert [[choice.token_ids for choice in choices] for choices in made.choices] == tokens
    assert made.statistics.num_accepted_tokens > 20


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("model_name", ["llama3", "qwen2", "mixtral", "qwen3"])
def test_looked_up_drafts_change_nothing(small_models: SmallModels, model_name: str, method: str) -> None:
    def always(scheduler: Scheduler) -> None:
        update = {"speculative_method": method, "prompt_lookup_min": 1, "num_speculative_tokens": 5}
        config = scheduler.config.model_copy(update=update)
        speculator = scheduler._batch_scheduler.speculator = Speculator(config, executor.rates)
        speculator.times = CheapRows(executor.rates, 0, warm=0)

    executor = load(small_models.folder(model_name), 200, 0, deterministic=True)
    prompts = small_models.prompts[:6]
    params = [SamplingParams(temperature=number % 2, seed=number, max_tokens=48) for number in range(len(prompts))]
    expected = run(executor, prompts, params)
    made = run(executor, prompts, params, guesses=always)
    assert made.choices == expected.choices
    assert made.statistics.num_draft_tokens > 20


def test_a_failed_draft_fails_no_request() -> None:
    """The grammar's end comes before the guesses do."""
    prompts, params = [encode("The")], [SamplingParams(temperature=0, max_tokens=TOKENS, structured=STRUCTURED[0])]
    executor, grammars = executor_of("room"), [grammar_of(STRUCTURED[0])]
    expected = run(executor, prompts, params, grammars=grammars)
    made = run(executor, prompts, params, grammars=grammars, guesses=reminded(expected, 5, executor))
    assert made.choices == expected.choices


def test_the_flag_is_the_schedulers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        EngineArgs(model=tmp_path, async_scheduling=True, speculative_method="ngram")
    with pytest.raises(ValueError, match="above --prompt-lookup-max"):
        EngineArgs(model=tmp_path, prompt_lookup_min=5, prompt_lookup_max=4)
