"""The same words mean the same over REST and gRPC, whether they are understood or refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quire.v1 import inference_pb2 as pb
from quire_proto.errors import QuireError
from quire_proto.sampling import SamplingParams
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.auth import Identity
from quire_router.api.rpc import messages
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.validation import Validator
from quire_router.core.generation import GenerationRequest

from tests.support.both_apis import as_proto
from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.scripted_api import MODEL, VOCAB_SIZE, Limits, chat, completion

TOKENIZER = ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))
VALIDATOR = Validator({MODEL: TOKENIZER}, lambda _: Limits(), allow_priority=True)
CALLER = Identity("tenant", b"salt")
IDS = st.integers(-1, VOCAB_SIZE)
WORDS = st.text("abc é😀", max_size=9)


def numbers(least: float, most: float) -> st.SearchStrategy[float]:
    """In range, on its edges, or just outside; such as both APIs can write."""
    return st.floats(least - 1, most + 1, width=32) | st.sampled_from([least, most, 0.0, 1.0])


def counts(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most + 1) | st.sampled_from([0, 1, most, 2**32 - 1])


FIELDS = {
    "temperature": numbers(0, 2),
    "top_p": numbers(0, 1),
    "top_k": st.integers(0, 2**32 - 1),
    "min_p": numbers(0, 1),
    "presence_penalty": numbers(-2, 2),
    "frequency_penalty": numbers(-2, 2),
    "repetition_penalty": numbers(0, 10),
    "logit_bias": st.dictionaries(IDS.map(str), numbers(-100, 100), max_size=4),
    "bad_words": st.lists(WORDS, max_size=3) | st.lists(st.lists(IDS, max_size=4), max_size=3),
    "seed": st.integers(0, 2**64 - 1),
    "n": counts(64),
    "best_of": counts(64),
    "beam_width": st.sampled_from([0, 0, 0, 1, 2, 33]),
    "length_penalty": numbers(-10, 10),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "max_tokens": counts(40),
    "min_tokens": counts(9),
    "stop": st.lists(WORDS, max_size=17),
    "stop_token_ids": st.lists(IDS, max_size=17),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": counts(20),
    "skip_special_tokens": st.booleans(),
    "priority": st.integers(-(2**31), 2**31 - 1),
    "structured_outputs": st.one_of(
        st.just({}),
        st.fixed_dictionaries({"json_object": st.booleans()}),
        st.fixed_dictionaries({"json": st.sampled_from(['{"type": "object"}', "{}", "[", ""])}),
        st.fixed_dictionaries({"regex": WORDS}),
        st.fixed_dictionaries({"choice": st.lists(WORDS, max_size=3)}),
        st.fixed_dictionaries({"grammar": WORDS}),
    ),
}
IN_COMPLETIONS = {"echo": st.booleans(), "logprobs": counts(20)}
IN_CHATS = {"logprobs": st.just(True), "top_logprobs": counts(20)}


def verdict(read) -> GenerationRequest | tuple[object, ...]:
    try:
        (generation,) = VALIDATOR.generations(read(), "id", CALLER)
    except QuireError as error:
        return error.code, error.param, error.message
    return generation


def both_verdicts(fields):
    """What REST makes of a request, and what gRPC makes of it."""
    request = as_proto(fields)
    received = type(request).FromString(request.SerializeToString())
    schema, read = (CompletionRequest, messages.completion_request)
    if isinstance(request, pb.ChatRequest):
        schema, read = (ChatRequest, messages.chat_request)
    body = json.dumps(fields).encode()
    return verdict(lambda: schema.from_json(body)), verdict(lambda: read(received))


def assert_alike(fields) -> None:
    over_rest, over_grpc = both_verdicts(fields)
    if isinstance(over_rest, GenerationRequest) and isinstance(over_grpc, GenerationRequest):
        seed = fields.get("seed", 0)
        over_rest, over_grpc = (
            replace(each, created=0, stream=False, params=replace(each.params, seed=seed))
            for each in (over_rest, over_grpc)
        )
    assert over_rest == over_grpc


@settings(deadline=None, max_examples=75)
@given(st.fixed_dictionaries({}, optional=FIELDS | IN_COMPLETIONS), st.sampled_from(["hello", "", [1, 2], [-1], []]))
@example({"repetition_penalty": 0.0}, "hello")
def test_a_completion_is_the_same_in_both(fields, prompt):
    assert_alike(completion(prompt) | fields)


@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries({}, optional=FIELDS), st.none() | st.fixed_dictionaries(IN_CHATS))
def test_a_chat_is_the_same_in_both(fields, shown):
    assert_alike(chat() | fields | (shown or {}))


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(FIELDS | IN_COMPLETIONS)), st.data())
def test_one_field_alone_is_the_same_in_both(name, data):
    assert_alike(completion() | {name: data.draw((FIELDS | IN_COMPLETIONS)[name])})


IN_RANGE = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 3,
    "min_p": 0.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": 2.5, "3": -1.0},
    "bad_words": ["world", [4, 5]],
    "seed": 7,
    "n": 2,
    "best_of": 3,
    "length_penalty": 0.5,
    "early_stopping": "never",
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "logprobs": 4,
    "prompt_logprobs": 3,
    "skip_special_tokens": False,
    "priority": -3,
    "echo": True,
}


def test_every_parameter_arrives_over_both():
    over_rest, over_grpc = both_verdicts(completion(**IN_RANGE))

    assert isinstance(over_grpc, GenerationRequest)
    assert over_rest.params == over_grpc.params
    defaults = SamplingParams()
    untold = {name for name in SamplingParams.__slots__ if getattr(over_grpc.params, name) == getattr(defaults, name)}
    assert untold == {"beam_width", "structured"}  # these exclude others of the list
    assert (over_grpc.include_stop, over_grpc.skip_special_tokens) == (True, False)
    assert (over_grpc.echo, over_grpc.priority, over_grpc.stop) == (True, -3, ("a", "b"))


@pytest.mark.parametrize("kind", ["json_object", "json", "regex", "choice", "grammar"])
def test_every_kind_of_structured_output_arrives_over_both(kind):
    value = {"json_object": True, "json": '{"type": "object"}', "choice": ["a", "é"]}.get(kind, "a+")
    over_rest, over_grpc = both_verdicts(chat(structured_outputs={kind: value}))

    assert isinstance(over_grpc, GenerationRequest)
    assert over_rest.params.structured == over_grpc.params.structured is not None


def test_an_early_stopping_of_another_version_is_refused():
    request = as_proto(completion())
    request.sampling.early_stopping = 99
    assert verdict(lambda: messages.completion_request(request))[1] == "early_stopping"
