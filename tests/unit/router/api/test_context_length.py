"""A prompt that is too long is refused in the words that agents and gateways look for, whichever way it came."""

import re
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1.inference_pb2_grpc import InferenceStub
from quire_proto.context_length import (
    CONTEXT_LENGTH_EXCEEDED,
    check_length,
    check_pooled_length,
    from_server,
    in_words_of_messages,
)
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.pooling import Task

from tests.support.both_apis import as_proto
from tests.support.scripted_api import MAX_MODEL_LEN, MODEL, Limits, ask, chat, completion, open_stage


@dataclass(frozen=True)
class Detector:
    """What one client searches an error for, without regard to case: any of ``patterns`` in the whole body's text, or
    in the message alone.
    """

    patterns: tuple[str, ...]
    in_body: bool = True

    def finds(self, message: str, body: str) -> bool:
        text = body if self.in_body else message
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.patterns)


# Those of several patterns that an answer of OpenAI's or Anthropic's API matches in earnest.
OF_OPENAI = {
    "litellm 1.110.2, ExceptionCheckers": Detector(("this model's maximum context length is",)),
    "langchain-openai 1.7.4, _handle_openai_bad_request": Detector(("context_length_exceeded",)),
    "crewai 1.15.30, CONTEXT_LIMIT_ERRORS": Detector(("maximum context length",)),
    "opencode, OVERFLOW_PATTERNS of provider/error.ts (2026)": Detector(
        (r"maximum context length is \d+ tokens",), in_body=False
    ),
    "pi-ai, OVERFLOW_PATTERNS of utils/overflow.ts (2026)": Detector(
        (r"maximum context length is \d+ tokens",), in_body=False
    ),
    "vLLM's and OpenAI's sentence": Detector(
        (
            r"^This model's maximum context length is \d+ tokens\. However, you requested (at least )?\d+ tokens "
            r"\(\d+ in the (messages|prompt), (at least )?\d+ in the completion\)\. Please reduce the length of the ",
            r"^This model's maximum context length is \d+ tokens\. However, your (messages|(input )?prompt) "
            r"resulted in (at least )?\d+ tokens\. Please reduce the length of the ",
        ),
        in_body=False,
    ),
}
OF_ANTHROPIC = {
    "litellm 1.110.2, anthropic": Detector(("prompt is too long",)),
    "langchain-anthropic 1.7.10, _handle_anthropic_bad_request": Detector(("prompt is too long",), in_body=False),
    "crewai 1.15.30, CONTEXT_LIMIT_ERRORS": Detector(("context_length_exceeded",)),
    "opencode, OVERFLOW_PATTERNS of provider/error.ts (2026)": Detector(("prompt is too long",), in_body=False),
    "Claude Code's numbers": Detector((r"^prompt is too long: \d+ tokens > \d+ maximum$",), in_body=False),
}
LONG = "hello " * MAX_MODEL_LEN
MUCH_TOO_LONG = "a long story " * 4000
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
REQUESTS = [
    ("/v1/chat/completions", {**chat(LONG), "model": MODEL}, "messages"),
    ("/v1/chat/completions", chat(MUCH_TOO_LONG), "messages"),
    ("/v1/chat/completions", chat(max_tokens=64), "max_tokens"),
    ("/v1/chat/completions", chat(max_completion_tokens=64), "max_completion_tokens"),
    ("/v1/chat/completions", chat(LONG, max_completion_tokens=5), "messages"),
    ("/v1/completions", completion(LONG), "prompt"),
    ("/v1/completions", completion([1] * MAX_MODEL_LEN), "prompt"),
    ("/v1/completions", completion([1] * 60, max_tokens=5), "max_tokens"),
    ("/v1/completions", completion(["a", LONG]), "prompt[1]"),
    ("/v1/completions", completion(MUCH_TOO_LONG), "prompt"),
    ("/v1/responses", {"model": MODEL, "input": LONG}, "input"),
    ("/v1/responses", {"model": MODEL, "input": LONG, "max_output_tokens": 60}, "input"),
    ("/v1/messages", {**chat(LONG), "max_tokens": 5}, "messages"),
    ("/v1/messages", {**chat([{"type": "text", "text": MUCH_TOO_LONG}]), "max_tokens": 5}, "messages"),
]
POOLED = [
    ("/v1/embeddings", {"model": MODEL, "input": LONG}, "input"),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", MUCH_TOO_LONG]}, "input[1]"),
    ("/v1/embeddings", {"model": MODEL, "input": [[1] * 65, [2]]}, "input[0]"),
    ("/rerank", {"model": MODEL, "query": "a", "documents": ["b", LONG]}, "documents[1]"),
    ("/rerank", {"model": MODEL, "query": MUCH_TOO_LONG, "documents": ["b", "a"]}, "query"),
    ("/score", {"model": MODEL, "text_1": ["a", LONG], "text_2": ["a", "b"]}, "text_1[1]"),
    ("/score", {"model": MODEL, "text_1": "a", "text_2": LONG}, "text_2"),
]


@pytest.fixture
async def stage():
    async with open_stage(template=TEMPLATE, max_body_bytes=1_000_000) as stage:
        yield stage


def check(answer, detectors: dict[str, Detector]) -> None:
    message, body = str(answer.error["message"]), answer.body.decode()
    assert answer.status == 400
    assert {name for name, detector in detectors.items() if not detector.finds(message, body)} == set()


@pytest.mark.parametrize(("path", "body", "param"), REQUESTS)
async def test_every_client_finds_out_that_the_prompt_is_too_long_and_which_field_holds_it(path, body, param, stage):
    answer = await ask(stage.port, "POST", path, body)

    of_messages = path == "/v1/messages"
    check(answer, OF_ANTHROPIC if of_messages else OF_OPENAI)
    details = answer.error["details"] if of_messages else answer.error
    assert details["error_code" if of_messages else "code"] == CONTEXT_LENGTH_EXCEEDED
    assert details["param"] == param


@pytest.mark.parametrize(("path", "body", "param"), POOLED)
async def test_every_client_finds_out_which_input_is_too_long(path, body, param, stage):
    stage.fleet.model_limits = Limits(supported_tasks=(Task.EMBED,), pooled_size=2)
    answer = await ask(stage.port, "POST", path, body)

    check(answer, OF_OPENAI)
    assert (answer.error["code"], answer.error["param"]) == (CONTEXT_LENGTH_EXCEEDED, param)


@pytest.mark.parametrize("request_body", [chat(LONG), completion(LONG), chat(max_tokens=64)])
async def test_grpc_has_the_same_words_and_the_code(request_body, stage):
    async with stage.channel() as channel:
        stub = InferenceStub(channel)
        call = (stub.Chat if "messages" in request_body else stub.Generate)(as_proto(request_body))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [answer async for answer in call]

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["quire-reason"] == CONTEXT_LENGTH_EXCEEDED
    assert "maximum context length is 64 tokens" in refused.value.details()


async def test_a_limit_that_nobody_sent_is_neither_named_nor_in_the_way(stage):
    whole = await ask(stage.port, "POST", "/v1/completions", completion([1] * (MAX_MODEL_LEN - 1)))
    full = await ask(stage.port, "POST", "/v1/completions", completion([1] * MAX_MODEL_LEN))

    assert whole.status == 200
    assert stage.runner.generations[-1].params.max_tokens == 1
    assert "you requested at least 65 tokens (64 in the prompt, at least 1 in the completion)" in full.error["message"]


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 4000), st.sampled_from([None, "max_tokens"]))
def test_the_words_of_both_vendors_hold_the_same_numbers_and_more_tokens_than_are_allowed(prompt, most, limit, output):
    most = most if output else 1
    if prompt + most <= limit:
        check_length(prompt, most, limit, output=output)
        return
    with pytest.raises(QuireError) as refused:
        check_length(prompt, most, limit, output=output)
    message = refused.value.message
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", in_words_of_messages(message))
    assert found is not None
    assert (int(found[1]) > limit, int(found[2])) == (True, limit)
    assert int(found[1]) in (prompt, prompt + 1, prompt + most)
    assert output is not None or "completion" not in message or "at least 1" in message


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the "
            "messages, 100 in the completion). Please reduce the length of the messages or completion.",
            (5000, 4096),
        ),
        ("The input (7000 tokens) is longer than the model's context length (4096 tokens).", (7000, 4096)),
        (
            "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of "
            "5000 tokens: 4000 tokens from the input messages and 1000 tokens for the completion.",
            (5000, 4096),
        ),
        ("the request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it", (9000, 8192)),
        ("Requested token count exceeds the model's maximum context length.", None),
        ("The decoder prompt (length 5000) is longer than the maximum model length of 4096.", None),
    ],
)
def test_the_errors_of_other_servers_keep_the_code_and_become_the_same_words(message, numbers):
    error = from_server(message)

    assert error is not None
    assert (error.code, error.reason) == (ErrorCode.INVALID, CONTEXT_LENGTH_EXCEEDED)
    assert OF_OPENAI["litellm 1.110.2, ExceptionCheckers"].finds(error.message, error.message)
    assert "prompt is too long" in in_words_of_messages(error.message)
    if numbers is not None:
        assert in_words_of_messages(error.message) == f"prompt is too long: {numbers[0]} tokens > {numbers[1]} maximum"


@pytest.mark.parametrize("message", ["temperature is 3 but must be between 0 and 2.", "out-of-vocab", "", "64 tokens"])
def test_other_errors_of_servers_are_not_taken_for_it(message):
    assert from_server(message) is None


def test_a_pooled_prompt_has_no_completion():
    words = r"your input prompt resulted in 9 tokens\. Please reduce the length of the input prompt\."
    with pytest.raises(QuireError, match=words):
        check_pooled_length(9, 8)
