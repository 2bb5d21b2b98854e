"""The openai package talks to a router as it does to OpenAI."""

import signal
from itertools import permutations

import openai
import pytest

from tests.service.conftest import MODEL, Stack
from tests.support.processes import eventually

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def test_a_streamed_chat_equals_the_whole_one(stack: Stack) -> None:
    whole = stack.openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    chunks = list(
        stack.openai.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert "7" in text, "the answer is not sensible"
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_a_streamed_completion_equals_the_whole_one(stack: Stack) -> None:
    settings = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = stack.openai.completions.create(**settings)
    pieces = [chunk.choices[0].text for chunk in stack.openai.completions.create(**settings, stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    assert len([piece for piece in pieces if piece]) > 5, "the text did not come piece by piece"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24


def test_a_seed_repeats_the_answer_on_any_engine(stack: Stack) -> None:
    settings = {"model": MODEL, "prompt": "Once upon", "max_tokens": 32, "temperature": 1.5, "seed": 7}
    texts = {stack.openai.completions.create(**settings).choices[0].text for _ in range(6)}
    assert len(texts) == 1
    other = stack.openai.completions.create(**{**settings, "seed": 8}).choices[0].text
    assert other not in texts


def test_a_stop_string_ends_the_answer_before_it(stack: Stack) -> None:
    settings = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
    whole = stack.openai.completions.create(**settings).choices[0].text
    stop = whole[10:13]
    cut = stack.openai.completions.create(**settings, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_the_model_is_listed(stack: Stack) -> None:
    assert [model.id for model in stack.openai.models.list()] == [MODEL]
    assert stack.openai.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_openai_packages_own(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError):
        stack.openai.completions.create(model="unknown", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        stack.openai.completions.create(model=MODEL, prompt="x", max_tokens=5000)


def test_either_engine_answers_while_the_other_does_not(stack: Stack) -> None:
    def both_are_ready() -> bool:
        return stack.router.metric("quire_engines_ready") == 2

    for one, other in permutations(stack.engines):
        eventually(both_are_ready)
        before = one.metric("quire_engine_generation_tokens_total")
        other.signal(signal.SIGSTOP)
        try:
            stack.openai.completions.create(model=MODEL, prompt="Once", max_tokens=4)
        finally:
            other.signal(signal.SIGCONT)
        assert one.metric("quire_engine_generation_tokens_total") > before
    eventually(both_are_ready)


def test_a_repeated_prompt_is_found_in_the_prefix_cache(stack: Stack) -> None:
    prompt = "Once upon a time there was a fox. " * 8
    for _ in range(4):
        usage = stack.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= 16
