"""What a request may say: fields that are known, fields that must be neutral, and how values are read."""

import json
import re
from array import array
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams
from quire_proto.text.chat_template import ChatTemplate
from quire_proto.text.tokenizer import ModelTokenizer, encode_bad_words
from quire_router.api.auth import ANONYMOUS
from quire_router.api.request_limits import MAX_OUTPUTS, MAX_VALUES, check_response_size
from quire_router.api.schemas.base import MAX_PROMPT_TOKENS, StrictModel
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.validation import Validator, check_stream
from quire_router.core.generation import GenerationRequest
from tokenizers import Tokenizer, processors

from tests.support.model_folders import CHAT_TEMPLATE, byte_level
from tests.support.scripted_api import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Limits, chat, completion

TOKENIZER = ModelTokenizer(byte_level(), ChatTemplate(CHAT_TEMPLATE, {}, "the test"))
VALIDATOR = Validator({MODEL: TOKENIZER}, lambda _: Limits())
USER = {"role": "user", "content": "hello"}
NEUTRAL_IN_BOTH = {
    "n": [None, 1],
    "presence_penalty": [None, 0, 0.0],
    "frequency_penalty": [None, 0, 0.0],
    "logit_bias": [None, {}],
    "bad_words": [None, []],
    "best_of": [None, 1],
    "use_beam_search": [None, False],
    "beam_width": [None, 0],
    "length_penalty": [None, 1],
    "early_stopping": [None, False],
    "min_tokens": [None, 0],
    "include_stop_str_in_output": [None, False],
    "skip_special_tokens": [None, True],
    "spaces_between_special_tokens": [None, True],
    "prompt_logprobs": [None],
    "priority": [None, 0],
    "top_k": [None, 0, -1],
    "min_p": [None, 0],
    "repetition_penalty": [None, 1],
    "response_format": [None, {"type": "text"}, {"type": "text", "json_schema": None}],
    "structured_outputs": [None, {}, {"json": None}, {"json_object": False}],
    "guided_json": [None],
    "guided_decoding_backend": [None, "outlines"],
    "regex": [None],
    "ebnf": [None],
    "service_tier": [None, "auto", "default", "flex"],
    "verbosity": [None, "medium", "low"],
    "prediction": [None, {"type": "content", "content": "x"}],
    "prompt_cache_retention": [None, "24h"],
    "repeat_penalty": [None, 1, 1.0],
    "num_predict": [None, -1],
    "mirostat": [None, 0],
    "do_sample": [None, True],
    "options": [None, {}],
    "num_ctx": [4096],
    "keep_alive": ["5m"],
    "cache_salt": ["x"],
    "__class__": [1],
    "user": [None, "someone"],
    "metadata": [None, {}, {"a": "b"}, {f"{i:064d}": "v" * 512 for i in range(16)}],
    "store": [None, True, False],
    "seed": [None, 0],
    "stop": [None, []],
    "stream": [None, False],
    "stream_options": [None, {}, {"include_usage": None}, {"include_obfuscation": False}, {"more": 1}],
}
NEUTRAL_IN_CHAT = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "parallel_tool_calls": [None, True],
    "functions": [None, []],
    "function_call": [None, "none"],
    "logprobs": [None, False],
    "top_logprobs": [None, 0],
    "echo": [None, False],
    "modalities": [None, ["text"]],
    "audio": [None],
    "reasoning_effort": [None, "none", "high"],
    "chat_template_kwargs": [None, {}, {"tokenize": False}],
    "web_search_options": [None],
}
NEUTRAL_IN_COMPLETIONS = {
    "echo": [None, False],
    "logprobs": [None],
    "suffix": [None, ""],
    "add_special_tokens": [True],
    "top_logprobs": [0],
    "reasoning_effort": ["high"],
}
SCHEMA = {"name": "x", "schema": {}}
REFUSED_IN_BOTH = {
    "n": [0, 129, -1, True, "1", 1e9],
    "best_of": [0, 129, -1, True, "2"],
    "use_beam_search": [True, "yes", 1],  # with one beam
    "beam_width": [1, 33, -2, True],
    "length_penalty": [11, -11, "1", True],
    "early_stopping": ["always", 0, 1, []],
    "presence_penalty": [2.1, -2.1, False, "0"],
    "frequency_penalty": [2.1, -2.1, float("inf")],
    "repetition_penalty": [0, -1, 10.1, True, float("nan")],
    "min_p": [-0.1, 1.1, "0", True],
    "logit_bias": [
        [],
        "x",
        {"x": 1},
        {"1": "x"},
        {"1": True},
        {"1": None},
        {"1": 101},
        {"1": -101},
        {"-1": 0},
        {"01": 0},
        {" 1": 0},
        {"1.0": 0},
        {str(VOCAB_SIZE): 0},
        {"9" * 400: 0},
        {"1": 10**400},
        {str(i): 0 for i in range(1025)},
        {"1": [1]},
    ],
    "bad_words": [
        "x",
        {},
        [7],
        [""],
        ["  "],
        [None],
        ["x" * 257],
        ["x"] * 33,
        [[]],
        [[VOCAB_SIZE]],
        [[-1]],
        [["x"]],
        [[1] * 33],
        [[1]] * 65,
        ["ab cd " * 40],
    ],
    "min_tokens": [-1, 17, True, "1"],
    "prompt_logprobs": [-1, 21, True, "1"],
    "include_stop_str_in_output": ["yes", 0],
    "skip_special_tokens": ["yes", 0],
    "spaces_between_special_tokens": [False],
    "truncate_prompt_tokens": [5],
    "allowed_token_ids": [[1]],
    "priority": [1, -1, "0", True, 10**30],
    "response_format": [
        "json",
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "text", "json_schema": SCHEMA},
        {"type": "json_object", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {}},
        {"type": "json_schema", "json_schema": {"type": "object", "properties": {}}},
        {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x y", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "x" * 65536}}},
        {"type": "structural_tag"},
        {"type": "json_schema", "schema": {}},
        {"type": "text", "schema": {}},
        {"type": "json_object", "schema": "{}"},
    ],
    "structured_outputs": [
        "x",
        [],
        {"json": "x"},
        {"json": "[]"},
        {"json": 5},
        {"json": '{"a": 1e400}'},
        {"regex": ""},
        {"regex": 5},
        {"regex": "x" * 65537},
        {"choice": []},
        {"choice": "ab"},
        {"choice": [""]},
        {"choice": ["x"] * 1025},
        {"choice": [5]},
        {"grammar": ""},
        {"json_object": 1},
        {"structural_tag": "x"},
        {"jsn": {}},
        {"disable_any_whitespace": True},
        {"whitespace_pattern": " "},
        {"regex": "a", "grammar": "b"},
        {"json": "{" * 100_000},
        {"json": '{"a":' * 100_000},
    ],
    "guided_json": ["", "x", 5, [], "null", '{"a": NaN}'],
    "guided_regex": ["", 5],
    "guided_choice": [[], [""], "ab", ["x"] * 1025],
    "guided_grammar": ["", {}],
    "guided_decoding_backend": [5],
    "guided_whitespace_pattern": [" "],
    "regex": ["", 5],
    "ebnf": ["", 5],
    "repeat_penalty": [1.1, True, "1", []],
    "num_predict": ["7"],
    "mirostat": [1, 2, False],
    "do_sample": [False, 1],
    "options": [{"temperature": 0}],
    "logits_processors": [["x"]],
    "return_token_ids": [1, "x"],
    "return_tokens": [True, 0],
    "temperature": ["1", True, [], float("nan"), 2.1, -1],
    "top_p": [-0.1, "x", 1.1],
    "top_k": [-2, 1.5, 2**31, True],
    "seed": [-(2**63) - 1, 2**64, 10**400, 0.5],
    "max_tokens": [0, -1, 1.5, True, 10**300],
    "stop": [7, [7], {}, [""], "", ["x"] * 17, "x" * 257],
    "stop_token_ids": [[True], ["1"], 5, [-1], [VOCAB_SIZE], [0] * 17, [10**30]],
    "stream": ["true", 1],
    "ignore_eos": ["yes", 0],
    "user": [7, "x" * 513],
    "metadata": ["x", {"a": 1}, {"a": None}, {"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "v" for i in range(17)}],
    "prompt_embeds": [""],
    "chat_template": ["{{ 1 }}"],
}
REFUSED_IN_CHAT = {
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required", {"type": "function"}],
    "logprobs": [1, "true", 0],
    "top_logprobs": [3, -1, 21, True],
    "echo": [True],
    "modalities": [["text", "audio"]],
    "reasoning_effort": [5, "", "x" * 33, "very high"],
    "chat_template_kwargs": ["x", {"messages": []}, {"add_generation_prompt": False}],
    "web_search_options": [{}],
    "prompt": ["hello"],
    "messages": [None, [], {}, "hello", [None], ["x"]],
}
REFUSED_IN_COMPLETIONS = {
    "echo": ["yes", 1],
    "logprobs": [-1, 21, True, "5"],
    "top_logprobs": [5],
    "tools": [[{}]],
    "suffix": ["x"],
    "add_special_tokens": [False],
    "messages": [[USER]],
    "prompt": [7, {}, [], [[]], ["a", [1]], ["a", 1], [1, "a"], [True], [1.5], [[["x"]]], [None], ["x"] * 129],
}


def cases(*tables):
    return [(name, values) for table in tables for name, values in table.items()]


def parsed(fields):
    schema = ChatRequest if "messages" in fields and fields.get("prompt") is None else CompletionRequest
    return schema.from_json(json.dumps(fields).encode())


def validated(request):
    request, _ = VALIDATOR.drop_ignored(request, MODEL)
    return VALIDATOR.generations(request, "id", ANONYMOUS)


def generation_of(fields):
    (generation,) = validated(parsed(fields))
    return generation


def refusal_of(schema, fields) -> QuireError:
    with pytest.raises(QuireError) as refusal:
        validated(schema.from_json(json.dumps(fields).encode()))
    assert refusal.value.code == ErrorCode.INVALID
    assert len(refusal.value.message) < 300
    return refusal.value


@pytest.mark.parametrize(("name", "values"), cases(NEUTRAL_IN_BOTH, NEUTRAL_IN_CHAT))
def test_a_field_that_changes_nothing_is_accepted_in_chats(name, values):
    for value in values:
        assert generation_of(chat(**{name: value})).prompt_token_ids == generation_of(chat()).prompt_token_ids, value


@pytest.mark.parametrize(("name", "values"), cases(NEUTRAL_IN_BOTH, NEUTRAL_IN_COMPLETIONS))
def test_a_field_that_changes_nothing_is_accepted_in_completions(name, values):
    for value in values:
        assert generation_of(completion(**{name: value})).params.max_tokens == 16, value


@pytest.mark.parametrize(("name", "values"), cases(REFUSED_IN_BOTH, REFUSED_IN_CHAT))
def test_other_values_are_refused_by_name_in_chats(name, values):
    for value in values:
        refusal = refusal_of(ChatRequest, chat(max_tokens=16) | {name: value})
        assert re.split(r"[.[]", refusal.param)[0] == name, value


@pytest.mark.parametrize(("name", "values"), cases(REFUSED_IN_BOTH, REFUSED_IN_COMPLETIONS))
def test_other_values_are_refused_by_name_in_completions(name, values):
    for value in values:
        refusal = refusal_of(CompletionRequest, completion() | {name: value})
        assert re.split(r"[.[]", refusal.param)[0] == name, value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": [{}]}, "functions is not supported here: use tools."),
        ({"repeat_penalty": 1.1}, "repeat_penalty is not supported here: use repetition_penalty."),
        (
            {"mirostat_mode": 2},
            "mirostat_mode is not supported here: use temperature, top_p, top_k or min_p.",
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            "response_format.schema and the type json_object go together.",
        ),
    ],
)
def test_unsupported_fields_that_change_the_output_are_refused_with_an_alternative(fields, message):
    assert refusal_of(ChatRequest, chat(**fields)).message == message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
        ({"role": "function", "content": "x", "name": "get"}, "messages[0].name"),
        ({"role": "assistant", "function_call": {"name": "a b"}}, "messages[0].function_call.name"),
        ({"role": "assistant", "function_call": 7}, "messages[0].function_call"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 7}]}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]},
            "messages[0].content",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
    ],
)
def test_a_message_is_refused_at_the_place_of_the_fault(message, param):
    assert refusal_of(ChatRequest, chat() | {"messages": [message]}).param == param


def test_text_parts_belong_together():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]

    assert generation_of(chat(parts)).prompt_token_ids == generation_of(chat("hello")).prompt_token_ids


def test_the_developer_role_becomes_the_system_role():
    as_developer, as_system = (
        generation_of(chat() | {"messages": [{"role": role, "content": "be brief"}, USER]})
        for role in ("developer", "system")
    )

    assert as_developer.prompt_token_ids == as_system.prompt_token_ids


def test_a_response_message_can_be_sent_back_as_a_message():
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    answer |= {"function_call": None, "tool_calls": None}

    assert generation_of(chat() | {"messages": [USER, answer, USER]})


@pytest.mark.parametrize("prompt", ["hello", ["hello"]])
def test_a_text_prompt_may_stand_alone_in_a_list(prompt):
    assert list(generation_of(completion(prompt)).prompt_token_ids) == TOKENIZER.encode("hello")


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_a_token_prompt_may_stand_alone_in_a_list(prompt):
    assert list(generation_of(completion(prompt)).prompt_token_ids) == [1, 2, 3]


@pytest.mark.parametrize("fields", [chat(), completion(), completion([1, 2, 3])], ids=["chat", "text", "tokens"])
def test_a_prompt_is_kept_at_four_bytes_a_token(fields):
    prompt = generation_of(fields).prompt_token_ids

    assert isinstance(prompt, array)
    assert prompt.itemsize == 4


def test_names_in_logit_bias_that_are_no_tokens_are_all_named_within_bounds():
    for names, shown in (
        (["bad1", "2", "bad2"], "not 'bad1', 'bad2'."),
        (["x" * 99, *"abcdef"], f"not '{'x' * 32}', 'a', 'b', 'c' and 3 more."),
    ):
        with pytest.raises(QuireError, match=re.escape(shown)) as refused:
            ChatRequest.from_json(json.dumps(chat(logit_bias=dict.fromkeys(names, 1))).encode())
        assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("prompt", [[1] * (MAX_PROMPT_TOKENS + 1), [[1] * (MAX_PROMPT_TOKENS + 1)]])
def test_a_prompt_of_too_many_tokens_for_any_model_is_refused_with_the_limit(prompt):
    refusal = refusal_of(CompletionRequest, completion(prompt))

    assert (refusal.param, str(MAX_PROMPT_TOKENS) in refusal.message) == ("prompt", True)


def test_a_prompt_that_is_too_long_is_refused_for_its_length_before_its_tokens_are_looked_at():
    assert (
        "maximum context length is"
        in refusal_of(CompletionRequest, completion([VOCAB_SIZE] * (MAX_MODEL_LEN + 1))).message
    )
    assert "vocabulary" in refusal_of(CompletionRequest, completion([VOCAB_SIZE])).message


def test_max_tokens_of_a_completion_defaults_to_16():
    assert generation_of(completion()).params.max_tokens == 16
    assert generation_of(completion(max_tokens=5)).params.max_tokens == 5


def test_max_tokens_of_a_chat_defaults_to_the_rest_of_the_models_length():
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


IDS = st.integers(0, VOCAB_SIZE - 1)
IN_RANGE = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "logit_bias": st.dictionaries(IDS, st.floats(-100, 100), max_size=9),
    "bad_words": st.lists(st.lists(IDS, min_size=1, max_size=32), max_size=9),
    "seed": st.integers(0, 2**64 - 1),
    "max_tokens": st.integers(9, MAX_MODEL_LEN - 10),
    "min_tokens": st.integers(0, 9),
    "stop_token_ids": st.lists(IDS, max_size=16),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 20),
    "best_of": st.integers(20, 64),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.sampled_from([True, False, "never"]),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=IN_RANGE))
def test_every_value_in_range_arrives_as_it_was_sent(fields):
    params = generation_of(completion([1, 2], **fields)).params

    expected = {"max_tokens": 16, "seed": params.seed} | fields
    expected["stop_token_ids"] = tuple(expected.get("stop_token_ids", ()))
    expected["logit_bias"] = tuple(sorted(expected.get("logit_bias", {}).items()))
    expected["bad_words"] = tuple(map(tuple, expected.get("bad_words", ())))
    assert params == SamplingParams(**expected)


@pytest.mark.parametrize(
    "flags", [{}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"echo": True}]
)
def test_parameters_for_the_router_arrive_beside_the_sampling_parameters(flags):
    generation = generation_of(completion(**flags))

    assert generation.include_stop == flags.get("include_stop_str_in_output", False)
    assert generation.skip_special_tokens == flags.get("skip_special_tokens", True)
    assert generation.echo == flags.get("echo", False)


def test_bad_words_are_what_the_tokenizer_writes_at_the_beginning_and_after_a_space():
    words = generation_of(completion(bad_words=["world", [4, 5]])).params.bad_words

    assert words == (*encode_bad_words(["world"], TOKENIZER), (4, 5))
    assert len(words) > 2, "there is only one way to write it"


def test_a_chat_shows_log_probabilities_where_they_are_switched_on():
    assert generation_of(chat(logprobs=True)).params.logprobs == 0
    assert generation_of(chat(logprobs=True, top_logprobs=7)).params.logprobs == 7
    assert generation_of(chat(logprobs=False)).params.logprobs is None
    assert refusal_of(ChatRequest, chat(top_logprobs=7)).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs"),
    [
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 5}, 5),
        ({"echo": False, "prompt_logprobs": 5}, 5),
    ],
)
def test_an_echoed_prompt_with_logprobs_requests_its_prompt_logprobs(fields, prompt_logprobs):
    assert generation_of(completion(**fields)).params.prompt_logprobs == prompt_logprobs


# Beam search


@pytest.mark.parametrize(
    ("fields", "width", "n"),
    [
        ({"beam_width": 4}, 4, 1),
        ({"beam_width": 4, "n": 2}, 4, 2),
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "n": 2, "best_of": 5}, 5, 2),
        ({"use_beam_search": True, "best_of": 5}, 5, 1),
        ({"use_beam_search": True, "beam_width": 4, "n": 2}, 4, 2),
        ({"use_beam_search": True, "n": 2, "temperature": 0}, 2, 2),
    ],
)
def test_beam_width_has_quires_name_or_vllms(fields, width, n):
    for request in (completion(**fields), chat(**fields)):
        params = generation_of(request).params
        assert (params.beam_width, params.n, params.best_of) == (width, n, 0)


EXCLUDED = [
    ({"beam_width": 2, "temperature": 0.5}, "beam_width", "temperature"),
    ({"beam_width": 2, "top_p": 0.5}, "beam_width", "top_p"),
    ({"beam_width": 2, "top_k": 5}, "beam_width", "top_k"),
    ({"beam_width": 2, "min_p": 0.5}, "beam_width", "min_p"),
    ({"beam_width": 2, "best_of": 2}, "beam_width", "best_of"),
    ({"beam_width": 2, "logprobs": 1}, "beam_width", "logprobs"),
    ({"beam_width": 2, "stop": "x"}, "beam_width", "stop"),
    ({"beam_width": 2, "guided_regex": "a"}, "beam_width", "regex"),
    ({"beam_width": 2, "use_beam_search": False}, "beam_width", "use_beam_search"),
    ({"beam_width": 2, "n": 3}, "n", "beam_width"),
    ({"n": 3, "best_of": 2}, "best_of", "n"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "regex", "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 1}, "regex", "min_tokens"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_json": {}}, "structured_outputs.regex", "guided_json"),
]


@pytest.mark.parametrize(("fields", "param", "other"), EXCLUDED)
def test_parameters_that_exclude_each_other_are_named_together(fields, param, other):
    refusal = refusal_of(CompletionRequest, completion(**fields))

    assert refusal.param == param
    assert other in refusal.message
    assert fields.keys() != {param}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_choices_that_are_known_only_at_the_end_cannot_be_streamed(fields, param):
    for build in (completion, chat):
        check_stream(parsed(build(**fields)))
        with pytest.raises(QuireError, match=f"{param} and stream exclude each other") as refusal:
            check_stream(parsed(build(stream=True, **fields)))
        assert refusal.value.param == param
        check_stream(parsed(build(stream=True, n=2, best_of=2)))


# Priority


def test_a_priority_is_taken_only_where_the_router_allows_it():
    allowing = Validator({MODEL: TOKENIZER}, lambda _: Limits(), allow_priority=True)
    refused = refusal_of(CompletionRequest, completion(priority=3))

    assert refused.param == "priority"
    for priority in (0, 3, -3, 2**31 - 2, -(2**31)):
        (generation,) = allowing.generations(parsed(completion(priority=priority)), "id", ANONYMOUS)
        assert generation.priority == priority
    for priority in (2**31 - 1, -(2**31) - 1):  # the largest is for batches
        with pytest.raises(QuireError, match="priority must be between"):
            allowing.generations(parsed(completion(priority=priority)), "id", ANONYMOUS)


# Lists of prompts


@pytest.mark.parametrize("prompts", [["a", "b c"], ["a"] * 9, [[1, 2], [3]], [[5]] * 128])
def test_each_prompt_of_a_list_is_a_generation_of_its_own(prompts):
    generations = VALIDATOR.generations(parsed(completion(prompts)), "id", ANONYMOUS)

    wanted = [prompt if isinstance(prompt, list) else TOKENIZER.encode(prompt) for prompt in prompts]
    assert [list(generation.prompt_token_ids) for generation in generations] == wanted
    ids = [generation.request_id for generation in generations]
    assert ids[0] == "id"
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", each) for each in ids)


def test_prompts_draw_differently_unless_a_seed_is_given():
    def seeds(**fields):
        return {
            each.params.seed for each in VALIDATOR.generations(parsed(completion(["a"] * 4, **fields)), "id", ANONYMOUS)
        }

    assert len(seeds()) == 4
    assert seeds(seed=7) == {7}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt[1]"),
        ({"prompt": ["a", "hello " * MAX_MODEL_LEN]}, "prompt[1]"),
        ({"prompt": ["a", "a long story " * 4000]}, "prompt[1]"),
        ({"prompt": [[1], [1] * 60], "max_tokens": 5}, "max_tokens"),
    ],
)
def test_the_prompt_at_fault_is_named(fields, param):
    text = ModelTokenizer(without_begin(), None)
    validator = Validator({MODEL: text}, lambda _: Limits())
    with pytest.raises(QuireError) as refusal:
        validator.generations(parsed(completion() | fields), "id", ANONYMOUS)

    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


def without_begin() -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.ByteLevel()
    return tokenizer


# The size of an answer


def size_refusal(
    prompts: int, prompt_tokens: int, *, echo: bool = False, shows_prompts: bool = False, **params: int
) -> QuireError | None:
    generation = GenerationRequest("id", MODEL, [1] * prompt_tokens, SamplingParams(**params), echo=echo)
    try:
        check_response_size([generation] * prompts, shows_prompts=shows_prompts)
    except QuireError as error:
        return error
    return None


@given(
    st.integers(1, 200),
    st.integers(1, 70_000),
    st.booleans(),
    st.booleans(),
    st.fixed_dictionaries(
        {"n": st.integers(1, 64), "max_tokens": st.integers(1, 70_000)},
        optional={"logprobs": st.integers(0, 20), "prompt_logprobs": st.integers(0, 20)},
    ),
)
def test_the_possible_size_of_a_response_is_bounded(prompts, prompt_tokens, echo, shows_prompts, params):
    params |= {"max_tokens": max(1, min(params["max_tokens"], 2**23 // (prompts * params["n"])))}
    positions = prompts * params["n"] * (params["max_tokens"] + (prompt_tokens if echo else 0))
    shown = positions * (1 + params["logprobs"]) if "logprobs" in params else 0
    of_prompts = prompts * params["n"] * prompt_tokens * (1 + params.get("prompt_logprobs", -1))
    tokens = prompts * params["n"] * prompt_tokens if shows_prompts and not echo else 0
    refusal = size_refusal(prompts, prompt_tokens, echo=echo, shows_prompts=shows_prompts, **params)

    values = positions + shown + of_prompts + tokens
    assert (refusal is not None) == (prompts * params["n"] > MAX_OUTPUTS or values > MAX_VALUES)


def test_the_parameter_that_multiplies_is_named():
    assert size_refusal(2, 1, n=64) is None
    assert size_refusal(3, 1, n=64).param == "prompt"
    assert size_refusal(1, 1, n=2, max_tokens=131_072, logprobs=20).param == "n"
    assert size_refusal(1, 1, max_tokens=131_072, logprobs=20) is None
    assert size_refusal(1, 1, max_tokens=262_144, logprobs=20).param == "max_tokens"


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
@given(
    st.sampled_from([(chat, ChatRequest), (completion, CompletionRequest)]),
    st.dictionaries(
        st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})),
        JSON_VALUES
        | st.integers(-1, 5)
        | st.sampled_from([{"1": 1}, ["x"], "x", {"type": "json_object"}, {"regex": "x"}]),
        max_size=4,
    ),
)
def test_strange_values_in_known_fields_are_refused_or_understood_but_never_break_anything(api, fields):
    build, schema = api
    body = json.dumps(build() | fields).encode()
    with suppress(QuireError):
        request = schema.from_json(body)
        check_stream(request)
        for generation in VALIDATOR.generations(request, "id", ANONYMOUS):
            assert len(generation.prompt_token_ids) + generation.params.max_tokens <= MAX_MODEL_LEN


class Numbers(StrictModel):
    numbers: dict[str, int]


@pytest.mark.parametrize(("problems", "words"), [(1, "numbers.0: "), (5000, "5000 values in the body")])
def test_thousands_of_problems_are_counted_and_not_written_out(problems, words):
    body = json.dumps({"numbers": {str(number): "x" for number in range(problems)}})
    with pytest.raises(QuireError, match=words) as refusal:
        Numbers.from_json(body.encode())
    assert refusal.value.code == ErrorCode.INVALID
