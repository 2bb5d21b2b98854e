"""Every parameter of the API through the whole of Quire: the openai package, a router, engines and the demo model."""

import json
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from random import Random

import jsonschema
import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.service.conftest import DEMO, MODEL, Stack

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
STORY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
DRAWN = {**STORY, "temperature": 1.2, "seed": 11}


def text_of(stack: Stack, **fields: object) -> str:
    return str(stack.openai.completions.create(**fields).choices[0].text)


# Choices


def test_choices_differ_and_the_first_is_as_if_alone(stack: Stack) -> None:
    alone = text_of(stack, **DRAWN)
    texts = [choice.text for choice in stack.openai.completions.create(**DRAWN, n=4).choices]
    assert texts[0] == alone
    assert len(set(texts)) > 1


def test_streamed_choices_equal_those_of_the_whole_response(stack: Stack) -> None:
    whole = stack.openai.completions.create(**DRAWN, n=3)
    said, ends = defaultdict(str), {}
    for chunk in stack.openai.completions.create(**DRAWN, n=3, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert [said[choice.index] for choice in whole.choices] == [choice.text for choice in whole.choices]
    assert [ends[choice.index] for choice in whole.choices] == [choice.finish_reason for choice in whole.choices]


def test_the_best_of_some_is_the_most_probable_of_them(stack: Stack) -> None:
    drawn = stack.openai.completions.create(**DRAWN, n=4, logprobs=0)
    means = [sum(each.logprobs.token_logprobs) / len(each.logprobs.tokens) for each in drawn.choices]
    best = stack.openai.completions.create(**DRAWN, best_of=4)
    assert best.choices[0].text == drawn.choices[means.index(max(means))].text
    assert best.usage.completion_tokens == drawn.usage.completion_tokens


def test_a_list_of_prompts_is_answered_as_each_alone(stack: Stack) -> None:
    prompts = ["Once upon a time", "There was a fox", "The river"]
    alone = [stack.openai.completions.create(**{**STORY, "prompt": prompt}) for prompt in prompts]
    together = stack.openai.completions.create(**{**STORY, "prompt": prompts})
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert together.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in alone)


def test_beams_are_ordered_by_their_scores_and_none_is_worse_than_greedy(stack: Stack) -> None:
    settings = {**STORY, "n": 3, "extra_body": {"beam_width": 4, "length_penalty": 1.0}}
    answer = stack.openai.completions.create(**settings)
    scores = [choice.score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in answer.choices}) == 3
    vllm = stack.openai.completions.create(**{**settings, "extra_body": {"use_beam_search": True}})
    assert len(vllm.choices) == 3
    with pytest.raises(openai.BadRequestError, match="beam_width and stream"):
        stack.openai.completions.create(**settings, stream=True)


# Log-probabilities


def test_greedy_takes_the_most_probable_token_of_each_position(stack: Stack) -> None:
    shown = stack.openai.completions.create(**STORY, logprobs=3).choices[0]
    assert "".join(shown.logprobs.tokens) == shown.text
    for token, logprob, top in zip(
        shown.logprobs.tokens, shown.logprobs.token_logprobs, shown.logprobs.top_logprobs, strict=True
    ):
        assert next(iter(top)) == token
        assert top[token] == logprob == max(top.values())
    for token, offset in zip(shown.logprobs.tokens, shown.logprobs.text_offset, strict=True):
        assert shown.text[offset:].startswith(token)


def test_streamed_log_probabilities_equal_those_of_the_whole_chat(stack: Stack) -> None:
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = stack.openai.chat.completions.create(**settings).choices[0]
    streamed = [
        each
        for chunk in stack.openai.chat.completions.create(**settings, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content
    ]
    assert streamed == whole.logprobs.content
    assert whole.finish_reason == "stop"
    assert streamed.pop().token == "<|im_end|>"  # it is none of the text
    assert b"".join(bytes(each.bytes) for each in streamed).decode() == whole.message.content


def test_an_echoed_prompt_is_scored_as_it_is_when_it_is_generated(stack: Stack) -> None:
    made = stack.openai.completions.create(**STORY, logprobs=0, echo=True).choices[0]
    assert made.text == str(STORY["prompt"]) + text_of(stack, **STORY)
    assert made.logprobs.token_logprobs[0] is None
    again = stack.openai.completions.create(
        **{**STORY, "prompt": made.text, "max_tokens": 1}, logprobs=0, echo=True
    ).choices[0]
    count = len(made.logprobs.tokens)
    assert again.logprobs.tokens[:count] == made.logprobs.tokens
    assert again.logprobs.token_logprobs[1:count] == pytest.approx(made.logprobs.token_logprobs[1:], abs=0.1)


@pytest.mark.parametrize("prompt", ["The answer is 12.", "7 + 5 = 12."])
def test_a_model_that_stops_at_once_says_how_probable_its_end_was(stack: Stack, prompt: str) -> None:
    request = {**STORY, "prompt": prompt, "logprobs": 1, "echo": True}
    scored = stack.openai.completions.create(**request, n=2)
    chunks = list(stack.openai.completions.create(**request, stream=True))
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    token_ids = AutoTokenizer.from_pretrained(DEMO)(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        rows = model(token_ids).logits[0].log_softmax(-1)
    followed_by = [*token_ids[0, 1:].tolist(), model.generation_config.eos_token_id]
    exact = [float(row[token_id]) for row, token_id in zip(rows, followed_by, strict=True)]
    expected = pytest.approx(exact, rel=0.05, abs=0.05)  # of float32; these engines compute in bfloat16

    assert scored.usage.completion_tokens == 0
    for choice in scored.choices:
        assert (choice.text, choice.finish_reason) == (prompt, "stop")
        assert choice.logprobs.tokens[-1] == "<|im_end|>"
        assert choice.logprobs.text_offset[-1] == len(prompt)
        assert choice.logprobs.token_logprobs[1:] == expected
    pieces = [choice.logprobs.token_logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [each for piece in pieces for each in piece][1:] == expected


def test_a_prompts_log_probabilities_have_vllms_shape(stack: Stack) -> None:
    answer = stack.openai.completions.create(**STORY, extra_body={"prompt_logprobs": 2})
    listed = answer.choices[0].prompt_logprobs
    assert listed[0] is None
    assert len(listed) == answer.usage.prompt_tokens
    for entries in listed[1:]:
        assert sorted(entry["rank"] for entry in entries.values() if entry["rank"]) == [1, 2]


# How tokens are drawn


def ids_of(stack: Stack, text: str) -> dict[str, int]:
    """The ids of a text's tokens by their names, but of the first."""
    settings = {**STORY, "prompt": text, "max_tokens": 1}
    listed = stack.openai.completions.create(**settings, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    return {entry["decoded_token"]: int(key) for entries in listed[1:] for key, entry in entries.items()}


def test_a_token_can_be_forbidden_or_forced(stack: Stack) -> None:
    shown = stack.openai.completions.create(**STORY, logprobs=0).choices[0]
    first, token_id = (
        shown.logprobs.tokens[0],
        ids_of(stack, f"{STORY['prompt']}{shown.text}")[shown.logprobs.tokens[0]],
    )
    tokens = {
        bias: stack.openai.completions.create(**STORY, logit_bias={str(token_id): bias}, logprobs=0).choices[0].logprobs
        for bias in (100, -100)
    }
    assert set(tokens[100].tokens) == {first}
    assert first not in tokens[-100].tokens


def test_a_bad_word_does_not_occur(stack: Stack) -> None:
    text = text_of(stack, **STORY)
    word = re.findall(r"[a-z]{3,}", text)[0]
    assert word not in re.findall(r"[a-z]+", text_of(stack, **STORY, extra_body={"bad_words": [word]}))


def test_a_repetition_penalty_makes_for_more_different_words(stack: Stack) -> None:
    settings = {**STORY, "max_tokens": 80}
    plain = text_of(stack, **settings).split()
    varied = text_of(stack, **settings, extra_body={"repetition_penalty": 2.0}).split()
    assert len(set(varied)) / len(varied) > len(set(plain)) / len(plain)


@pytest.mark.parametrize("rule", [{"top_k": 1}, {"min_p": 1.0}])
def test_only_the_most_probable_token_is_left_where_nothing_else_is_allowed(
    stack: Stack, rule: dict[str, float]
) -> None:
    assert text_of(stack, **DRAWN, extra_body=rule) == text_of(stack, **STORY)


# Where outputs end


def test_a_stop_string_can_stay_in_the_text(stack: Stack) -> None:
    whole = text_of(stack, **STORY)
    stop = whole[10:13]
    kept = text_of(stack, **STORY, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept == whole[: whole.index(stop) + len(stop)]


def test_an_answer_does_not_end_before_its_least_length(stack: Stack) -> None:
    settings = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    short = stack.openai.chat.completions.create(**settings)
    least = short.usage.completion_tokens + 5
    longer = stack.openai.chat.completions.create(**settings, extra_body={"min_tokens": least})
    assert short.choices[0].finish_reason == "stop"
    assert longer.usage.completion_tokens >= least


# Structured output


class Person(BaseModel):
    """What a client may want to read."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)
    tags: list[bool] = Field(max_length=3)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_parse_helper_reads_a_model_of_pydantic(stack: Stack, temperature: float) -> None:
    answer = stack.openai.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Person, temperature=temperature, max_tokens=300, n=2, seed=5
    )
    assert all(isinstance(choice.message.parsed, Person) for choice in answer.choices)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"~2..4'}}, "ab{2,4}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ],
)
def test_a_structured_output_obeys_its_constraint(stack: Stack, asked: dict[str, object], pattern: str) -> None:
    settings = {**STORY, "max_tokens": 120, "temperature": 1, "seed": 3}
    for choice in stack.openai.completions.create(**settings, n=3, extra_body=asked).choices:
        assert re.fullmatch(pattern, choice.text.strip(), re.DOTALL)


def schema_of(random: Random, depth: int = 2) -> dict[str, object]:
    """A schema whose values all end by themselves."""
    leaves = [
        {"type": "string", "maxLength": random.randint(0, 8)},
        {"enum": random.sample([None, 1, "é", "two words", True, 2.5], 3)},
        {"type": "integer", "minimum": 0, "maximum": random.randint(0, 99)},
        {"type": "boolean"},
        {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"},
    ]
    if depth == 0 or random.random() < 0.5:
        return random.choice(leaves)
    if random.random() < 0.5:
        return {"type": "array", "items": schema_of(random, depth - 1), "maxItems": 2}
    return object_of(random, depth)


def object_of(random: Random, depth: int = 2) -> dict[str, object]:
    names = random.sample(["a", "name", "two words", "ü"], random.randint(1, 3))
    properties = {name: schema_of(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("number", [30, pytest.param(1_000, marks=pytest.mark.soak)])
def test_json_of_random_schemas_is_valid(stack: Stack, number: int) -> None:
    def answer(seed: int) -> tuple[dict[str, object], str]:
        schema = object_of(Random(seed))
        asked = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
        choice = stack.openai.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format=asked, max_tokens=500, temperature=1, seed=seed
        ).choices[0]
        assert choice.finish_reason == "stop"
        return schema, choice.message.content

    with ThreadPoolExecutor(16) as threads:
        for schema, text in threads.map(answer, range(number)):
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wrong", [{"guided_regex": "("}, {"guided_grammar": "start: missing"}])
def test_an_uncompilable_grammar_is_refused_for_streams_too(stack: Stack, stream: bool, wrong: dict[str, str]) -> None:
    with pytest.raises(openai.BadRequestError):
        stack.openai.completions.create(**STORY, stream=stream, extra_body=wrong)
    assert text_of(stack, **STORY), "the service is not well afterwards"
