"""What a request may say: fields that are known, fields that must be neutral, and how values are read."""

import json
from array import array
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.model_text import ModelText
from quire_router.api.fields import MAX_PROMPT_TOKENS
from quire_router.api.identity import ANYONE
from quire_router.api.schemas import ChatRequest, CompletionRequest
from quire_router.api.validate import Validator

from tests.support.api_stage import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Limits, chat, completion
from tests.support.model_folders import CHAT_TEMPLATE, byte_level

TEXT = ModelText(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))
VALIDATOR = Validator({MODEL: TEXT}, lambda _: Limits())
USER = {"role": "user", "content": "hello"}
NEUTRAL_IN_BOTH = {
    "n": [None, 1],
    "presence_penalty": [None, 0, 0.0],
    "frequency_penalty": [None, 0, 0.0],
    "logit_bias": [None, {}],
    "service_tier": [None, "auto", "default"],
    "user": [None, "someone"],
    "metadata": [None, {}, {"a": "b"}, {f"{i:064d}": "v" * 512 for i in range(16)}],
    "store": [None, True, False],
    "seed": [None, 0],
    "stop": [None, []],
    "stream": [None, False],
    "stream_options": [None, {}, {"include_usage": None}, {"include_obfuscation": False}],
}
NEUTRAL_IN_CHAT = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True],
    "functions": [None, []],
    "function_call": [None, "none"],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "response_format": [None, {"type": "text"}],
    "modalities": [None, ["text"]],
    "audio": [None],
    "prediction": [None],
    "reasoning_effort": [None, "none"],
    "verbosity": [None, "medium"],
    "web_search_options": [None],
}
NEUTRAL_IN_COMPLETIONS = {"best_of": [None, 1], "echo": [None, False], "logprobs": [None], "suffix": [None, ""]}
REFUSED_IN_BOTH = {
    "n": [2, 0, True, "1", 1e9],
    "presence_penalty": [0.5, False],
    "frequency_penalty": [-1],
    "logit_bias": [{"1": 5}],
    "service_tier": ["flex"],
    "temperature": ["1", True, [], float("nan"), 2.1, -1],
    "top_p": [0, "x", 1.1],
    "top_k": [-1, 1.5, 2**31, True],
    "seed": [-1, 2**64, 10**400, 0.5],
    "max_tokens": [0, -1, 1.0, True, 10**300],
    "stop": [7, [7], {}, [""], "", ["x"] * 17, "x" * 257],
    "stop_token_ids": [[True], ["1"], 5, [-1], [VOCAB_SIZE], [0] * 17, [10**30]],
    "stream": ["true", 1],
    "ignore_eos": ["yes", 0],
    "user": [7, "x" * 513],
    "metadata": ["x", {"a": 1}, {"a": None}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}],
    "guided_json": [{}],
    "prompt_embeds": [""],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"tokenize": False}],
    "cache_salt": ["x"],
    "__class__": [1],
}
REFUSED_IN_CHAT = {
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required", {"type": "function"}],
    "logprobs": [True],
    "top_logprobs": [3],
    "response_format": [{"type": "json_object"}],
    "modalities": [["text", "audio"]],
    "reasoning_effort": ["high"],
    "prompt": ["hello"],
    "messages": [None, [], {}, "hello", [None], ["x"]],
}
REFUSED_IN_COMPLETIONS = {
    "best_of": [2],
    "echo": [True],
    "logprobs": [0, 5],
    "suffix": ["x"],
    "messages": [[USER]],
    "prompt": [None, 7, {}, [], [[]], ["a", "b"], [[1], [2]], ["a", 1], [1, "a"], [True], [1.0], [[["x"]]], [None]],
}


def cases(*tables):
    return [(name, value) for table in tables for name, values in table.items() for value in values]


def parsed(fields):
    schema = ChatRequest if "messages" in fields and fields.get("prompt") is None else CompletionRequest
    return schema.from_json(json.dumps(fields).encode())


def generation_of(fields):
    return VALIDATOR.generation(parsed(fields), "id", ANYONE)


def refusal_of(schema, fields) -> QuireError:
    with pytest.raises(QuireError) as refusal:
        VALIDATOR.generation(schema.from_json(json.dumps(fields).encode()), "id", ANYONE)
    assert refusal.value.code == ErrorCode.INVALID
    assert len(refusal.value.message) < 300
    return refusal.value


@pytest.mark.parametrize(("name", "value"), cases(NEUTRAL_IN_BOTH, NEUTRAL_IN_CHAT))
def test_a_field_that_changes_nothing_is_accepted_in_chats(name, value):
    assert generation_of(chat(**{name: value})).prompt_token_ids == generation_of(chat()).prompt_token_ids


@pytest.mark.parametrize(("name", "value"), cases(NEUTRAL_IN_BOTH, NEUTRAL_IN_COMPLETIONS))
def test_a_field_that_changes_nothing_is_accepted_in_completions(name, value):
    assert generation_of(completion(**{name: value})).params.max_tokens == 16


@pytest.mark.parametrize(("name", "value"), cases(REFUSED_IN_BOTH, REFUSED_IN_CHAT), ids=lambda value: str(value)[:30])
def test_other_values_and_unknown_fields_are_refused_by_name_in_chats(name, value):
    assert refusal_of(ChatRequest, chat() | {name: value}).param.partition("[")[0] == name


@pytest.mark.parametrize(
    ("name", "value"), cases(REFUSED_IN_BOTH, REFUSED_IN_COMPLETIONS), ids=lambda value: str(value)[:30]
)
def test_other_values_and_unknown_fields_are_refused_by_name_in_completions(name, value):
    assert refusal_of(CompletionRequest, completion() | {name: value}).param.partition("[")[0] == name


def test_what_is_not_supported_yet_is_told_so():
    assert "not supported" in refusal_of(ChatRequest, chat(tools=[{}])).message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]},
            "messages[0].content",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "user", "content": "x", "prefix": True}, "messages[0].prefix"),
    ],
)
def test_a_message_is_refused_at_the_place_of_the_fault(message, param):
    assert refusal_of(ChatRequest, chat() | {"messages": [message]}).param == param


def test_text_parts_belong_together():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]

    assert generation_of(chat(parts)).prompt_token_ids == generation_of(chat("hello")).prompt_token_ids


def test_the_developer_speaks_as_the_system():
    as_developer, as_system = (
        generation_of(chat() | {"messages": [{"role": role, "content": "be brief"}, USER]})
        for role in ("developer", "system")
    )

    assert as_developer.prompt_token_ids == as_system.prompt_token_ids


def test_an_answer_of_ours_can_be_sent_back_as_a_message():
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None}

    assert generation_of(chat() | {"messages": [USER, answer, USER]})


@pytest.mark.parametrize("prompt", ["hello", ["hello"]])
def test_a_text_prompt_may_stand_alone_in_a_list(prompt):
    assert list(generation_of(completion(prompt)).prompt_token_ids) == TEXT.encode("hello")


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_token_prompt_may_stand_alone_in_a_list(prompt):
    assert list(generation_of(completion(prompt)).prompt_token_ids) == [1, 2, 3]


@pytest.mark.parametrize("fields", [chat(), completion(), completion([1, 2, 3])], ids=["chat", "text", "tokens"])
def test_a_prompt_is_kept_at_four_bytes_a_token(fields):
    prompt = generation_of(fields).prompt_token_ids

    assert isinstance(prompt, array)
    assert prompt.itemsize == 4


@pytest.mark.parametrize("prompt", [[1] * (MAX_PROMPT_TOKENS + 1), [[1] * (MAX_PROMPT_TOKENS + 1)]])
def test_a_prompt_of_too_many_tokens_for_any_model_is_refused_with_the_limit(prompt):
    refusal = refusal_of(CompletionRequest, completion(prompt))

    assert (refusal.param, str(MAX_PROMPT_TOKENS) in refusal.message) == ("prompt", True)


def test_a_prompt_that_is_too_long_is_refused_for_its_length_before_its_tokens_are_looked_at():
    assert "limit is" in refusal_of(CompletionRequest, completion([VOCAB_SIZE] * (MAX_MODEL_LEN + 1))).message
    assert "vocabulary" in refusal_of(CompletionRequest, completion([VOCAB_SIZE])).message


def test_a_completion_has_16_tokens_unless_it_says_otherwise():
    assert generation_of(completion()).params.max_tokens == 16
    assert generation_of(completion(max_tokens=5)).params.max_tokens == 5


def test_a_chat_has_the_rest_of_the_models_length_unless_it_says_otherwise():
    generation = generation_of(chat())

    assert generation.params.max_tokens == MAX_MODEL_LEN - len(generation.prompt_token_ids)
    assert generation_of(chat(max_tokens=5)).params.max_tokens == 5
    assert generation_of(chat(max_completion_tokens=6)).params.max_tokens == 6
    assert generation_of(chat(max_completion_tokens=6, max_tokens=6)).params.max_tokens == 6
    assert refusal_of(ChatRequest, chat(max_completion_tokens=6, max_tokens=7)).param == "max_tokens"


def test_a_seed_is_chosen_when_none_is_given():
    seeds = {generation_of(chat()).params.seed for _ in range(4)}

    assert len(seeds) == 4
    assert generation_of(chat(seed=2**64 - 1)).params.seed == 2**64 - 1


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(0, 2**31 - 1),
            "seed": st.integers(0, 2**64 - 1),
            "max_tokens": st.integers(1, MAX_MODEL_LEN - 10),
            "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=16),
            "ignore_eos": st.booleans(),
        },
    )
)
def test_every_value_in_range_arrives_as_it_was_sent(fields):
    params = generation_of(completion([1, 2], **fields)).params

    expected = {"max_tokens": 16, "seed": params.seed} | fields
    expected["stop_token_ids"] = tuple(expected.get("stop_token_ids", ()))
    assert params == SamplingParams(**expected)


@settings(deadline=None)
@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_body_whatever_it_holds_is_anything_but_refused(body):
    for schema in (ChatRequest, CompletionRequest):
        with pytest.raises(QuireError) as refusal:
            schema.from_json(body)
        assert refusal.value.code == ErrorCode.INVALID


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields.keys())), JSON_VALUES, max_size=3))
def test_strange_values_in_known_fields_are_refused_or_understood_but_never_break_anything(fields):
    body = json.dumps(chat() | fields).encode()
    with suppress(QuireError):
        generation = VALIDATOR.generation(ChatRequest.from_json(body), "id", ANYONE)
        assert len(generation.prompt_token_ids) + generation.params.max_tokens <= MAX_MODEL_LEN
