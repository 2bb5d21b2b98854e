"""Structured output through the REST API: of the form that was asked for, or refused by name; nobody else notices."""

import json
import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai import BadRequestError, RateLimitError
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from tests.service.conftest import DEMO, MODEL, SMALL_POOLS, Stack
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.grammars import encode, schemas
from tests.support.processes import Engine
from tests.support.redis_server import redis_server

QUESTION = [{"role": "user", "content": "Tell me a story about a hedgehog."}]
BATCH = 30
GENERATED = settings(deadline=None, database=None, phases=[Phase.generate], max_examples=2)
# So that a small model, which would rather tell a story, comes to the end of a text: of strings before all else.
ENDINGS = {str(token_id): bias for mark, bias in {'"': 45, "]": 25, "}": 25}.items() for token_id in encode(mark)}


def ask(stack: Stack, **fields: Any) -> ChatCompletion:
    fields = {"max_tokens": 200, "temperature": 1.0, **fields}
    return stack.openai.chat.completions.create(model=MODEL, messages=QUESTION, **fields)


def json_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@given(asked=st.lists(schemas(), min_size=BATCH, max_size=BATCH, unique_by=repr))
@GENERATED
def test_json_of_random_schemas_is_valid_under_them(stack: Stack, asked: list[dict[str, Any]]) -> None:
    def answer(schema: dict[str, Any]) -> Choice:
        return ask(stack, response_format=json_of(schema), logit_bias=ENDINGS).choices[0]

    with ThreadPoolExecutor(16) as pool:
        answers = zip(asked, pool.map(answer, asked), strict=True)
        ended = [(schema, choice) for schema, choice in answers if choice.finish_reason == "stop"]
    assert len(ended) > 0.8 * len(asked)
    for schema, choice in ended:
        Draft202012Validator(schema).validate(json.loads(choice.message.content or ""))


def test_each_of_several_choices_is_a_json_object_of_its_own(stack: Stack) -> None:
    shape = {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False}
    answer = ask(stack, n=4, seed=7, response_format=json_of(shape))
    texts = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[A-Z][a-z]{2,8} is [0-9]{1,3}\."}, r"[A-Z][a-z]{2,8} is [0-9]{1,3}\."),
        ({"choice": ["a hedgehog", "a fox", "nobody"]}, "a hedgehog|a fox|nobody"),
        ({"grammar": 'start: WORD (", " WORD){1,3}\nWORD: /[a-z]{1,9}/'}, "[a-z]{1,9}(, [a-z]{1,9}){1,3}"),
    ],
)
def test_regex_choice_and_grammar_hold(stack: Stack, asked: dict[str, Any], pattern: str) -> None:
    answers = [ask(stack, seed=seed, extra_body={"structured_outputs": asked}) for seed in range(5)]
    texts = [answer.choices[0].message.content or "" for answer in answers]
    assert all(re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"ebnf": 'root ::= city " is " city\ncity ::= "Rome"\n  | "Oslo"'}, "(Rome|Oslo) is (Rome|Oslo)"),
        ({"guided_grammar": "root ::= [a-c]{2,4}"}, "[a-c]{2,4}"),
        ({"guided_regex": "[0-9]{3}", "guided_decoding_backend": "xgrammar"}, "[0-9]{3}"),
    ],
)
def test_other_servers_spellings_mean_the_same_here(stack: Stack, asked: dict[str, Any], pattern: str) -> None:
    answers = [ask(stack, seed=seed, extra_body=asked) for seed in range(3)]
    texts = [answer.choices[0].message.content or "" for answer in answers]
    assert all(re.fullmatch(pattern, text) for text in texts), texts


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": json_of({"not": {"type": "null"}})}, "not"),
        ({"response_format": json_of({"type": "string", "pattern": "(?=a)b"})}, "look-around"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "unclosed group"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: missing"}}}, "missing"),
        ({"extra_body": {"structured_outputs": {"regex": "a*b*" * 15000}}}, "too much time or memory"),
    ],
)
def test_an_unusable_grammar_is_a_bad_request(stack: Stack, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as refused:
        ask(stack, **fields)
    assert refused.value.param


def test_a_grammar_that_dies_in_mid_stream_ends_its_request_alone(stack: Stack) -> None:
    dying = {"structured_outputs": {"grammar": 'start: "abcdefghijkl" x\nx: x "c"'}}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, stack, extra_body={"ignore_eos": True}, max_tokens=100)
        with pytest.raises(BadRequestError, match="grammar"):
            ask(stack, extra_body=dying)
        assert other.result(60).choices[0].finish_reason == "length"


# Shortages


def settled_descriptors(pid: int) -> set[int]:
    """The numbers that a process has open, once none has come or gone for a while."""
    seen: list[set[int]] = []
    while len(seen) < 10 or seen[-10:] != [seen[-1]] * 10:
        assert len(seen) < 1000, "its descriptors come and go"
        seen.append({int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()})
        sleep(0.05)
    return seen[-1]


@contextmanager
def no_descriptors(*engines: Engine) -> Iterator[None]:
    """These engines can open nothing: neither a file nor a pipe. What they have open stays so."""
    kept = {engine.popen.pid: resource.prlimit(engine.popen.pid, resource.RLIMIT_NOFILE) for engine in engines}
    try:
        for pid, (_, hard) in kept.items():
            taken = settled_descriptors(pid)
            free = next(number for number in range(hard) if number not in taken)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))
        yield
    finally:
        for pid, limits in kept.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def untried(tmp_path: Path) -> Iterator[Stack]:
    """Engines that have compiled no grammar yet."""
    with redis_server() as redis:
        engines = [ForkedEngine(DEMO, tmp_path, *SMALL_POOLS) for _ in range(2)]
        router = ForkedRouter(DEMO, [engine.address for engine in engines], tmp_path, "--redis-url", redis.url)
        try:
            for process in (*engines, router):
                process.wait_ready()
            yield Stack(redis, engines, router)
        finally:
            for process in (router, *engines):
                process.stop()


def test_an_engine_without_descriptors_refuses_grammars_only_for_as_long(untried: Stack) -> None:
    """Its refusal is neither the client's fault nor kept, not even under the request's key; other engines are asked."""
    fields = {"extra_body": {"structured_outputs": {"regex": "[a-z]{3}"}}, "extra_headers": {"Idempotency-Key": "one"}}
    with no_descriptors(*untried.engines):
        with pytest.raises(RateLimitError) as refused:
            ask(untried, **fields)
        assert refused.value.response.headers["retry-after"]
        assert ask(untried, frequency_penalty=0.5, presence_penalty=0.5, max_tokens=4).choices[0].finish_reason
        repeated = ask(untried, extra_body={"repetition_penalty": 1.2}, max_tokens=4)
        assert repeated.choices[0].finish_reason == "length"

    with no_descriptors(untried.engines[0]):
        for seed in range(4):  # at either engine first
            answer = ask(untried, seed=seed, extra_body={"structured_outputs": {"regex": f"[a-z]{{{seed + 1}}}"}})
            assert re.fullmatch("[a-z]+", answer.choices[0].message.content or "")
    assert re.fullmatch("[a-z]{3}", ask(untried, **fields).choices[0].message.content or "")
    for process in (*untried.engines, untried.router):
        assert "Traceback" not in process.text
