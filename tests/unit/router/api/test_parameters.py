"""The table of other servers' parameters: each name has its column, and requests are read by it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from quire_proto.errors import QuireError
from quire_router.api.auth import ANONYMOUS
from quire_router.api.schemas.base import ignored_parameters
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.schemas.parameters import Column
from quire_router.api.validation import Validator

from scripts import parameters_page
from scripts.parameters_page import PLACES, column
from tests.support.scripted_api import MODEL, Limits
from tests.support.tool_models import HERMES_TEMPLATE, tokenizer_with

LISTS = sorted((Path(__file__).parents[4] / "tests" / "peers" / "parameters").glob("*.json"))
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"name": "get", "type": "function"}
WHOLE = {
    "chat": {"model": MODEL, "messages": MESSAGES},
    "completions": {"model": MODEL, "prompt": "hello"},
    "responses": {"model": MODEL, "input": "hello"},
    "input_tokens": {"model": MODEL, "input": "hello"},
    "messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8},
    "count_tokens": {"model": MODEL, "messages": MESSAGES},
    "embeddings": {"model": MODEL, "input": "hello"},
    "score": {"model": MODEL, "text_1": "hello", "text_2": "you"},
    "rerank": {"model": MODEL, "query": "hello", "documents": ["you"]},
    "tokenize": {"model": MODEL, "prompt": "hello"},
    "detokenize": {"model": MODEL, "tokens": []},
    "stream_options": {},
    "structured_outputs": {"regex": "x"},
    "response_format": {"type": "text"},
    "chat.tools": {"type": "function", "function": {"name": "get"}},
    "chat.tools.function": {"name": "get"},
    "responses.tools": TOOL,
    "responses.text": {},
    "responses.reasoning": {},
    "messages.tools": {"name": "get", "input_schema": {}},
    "messages.thinking": {"type": "enabled"},
    "messages.output_config": {},
}
"""A request, or an object in one, of each place that has a table."""
ROUTES = {
    **{place: place.partition(".")[0] for place in WHOLE},
    **dict.fromkeys(("stream_options", "structured_outputs", "response_format"), "chat"),
    "input_tokens": "responses",
    "count_tokens": "messages",
}
"""The request that an object stands in, or that is counted."""
STRANGE = {"a": ["value", {"of": "no type"}]}
ALIKE = {
    "max_tokens": 5,
    "min_tokens": 2,
    "n": 2,
    "seed": 7,
    "stop": ["x"],
    "include_stop_str_in_output": True,
    "guided_json": {"type": "object"},
    "guided_grammar": 'root ::= "a"',
    "logprobs": 3,
}
"""A value for each field of a generation that has other names elsewhere with values of the same form."""


def names_in(path):
    """The names of a list by their places: by peers too, where people wrote the list."""
    for place, names in json.loads(path.read_text(encoding="utf-8"))["places"].items():
        yield place, names if isinstance(names, list) else [name for each in names.values() for name in each]


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_each_parameter_of_another_server_has_its_column(path):
    listed = [(place, name) for place, names in names_in(path) for name in names]

    assert listed
    assert [each for each in listed if column(*each) is Column.UNKNOWN] == []


def foreign(kind):
    """Each place with each of its names in a column, but for those that are fields there."""
    for place, model in PLACES.items():
        fields = {field.alias or own for own, field in model.model_fields.items()}
        yield from ((place, name) for name in model.foreign if name not in fields and column(place, name) is kind)


def test_every_place_with_a_table_is_tested():
    assert {place for place, kind in PLACES.items() if kind.foreign} == set(WHOLE)


def test_a_refused_parameter_is_a_400_that_names_it_and_what_to_use():
    for place, name in foreign(Column.REFUSED):
        kind = PLACES[place]
        with pytest.raises(QuireError) as refusal:
            kind.from_fields(WHOLE[place] | {name: STRANGE})
        assert refusal.value.param == name
        assert refusal.value.message == f"{name} is not supported here: {kind.foreign[name].instead}."


def test_what_has_no_effect_is_named_and_values_that_mean_nothing_are_not():
    for place, name in foreign(Column.WITHOUT_EFFECT):
        kind = PLACES[place]
        assert (name, True) in ignored_parameters(kind.from_fields(WHOLE[place] | {name: STRANGE})), (place, name)
    for place, kind in PLACES.items():
        for name, known in kind.foreign.items():
            for value in (None, *known.neutral):
                if name not in kind.model_fields:
                    assert [*ignored_parameters(kind.from_fields(WHOLE[place] | {name: value}))] == [], (place, name)


def generations(kind, fields):
    tokenizer = tokenizer_with(HERMES_TEMPLATE)
    validator = Validator({MODEL: tokenizer}, lambda _: Limits(2**20, tokenizer.vocab_size))
    request, ignored = validator.drop_ignored(kind.from_fields(fields), MODEL)
    assert ignored == ()
    return [replace(each, created=0.0) for each in validator.generations(request, "id", ANONYMOUS)]


@pytest.mark.parametrize("place", ["chat", "completions"])
def test_another_name_of_a_field_makes_the_same_request(place):
    kind = PLACES[place]
    for name, known in kind.foreign.items():
        if known.same_as in ALIKE and known.convert is None:
            whole, value = WHOLE[place] | {"seed": 7}, ALIKE[known.same_as]
            if known.same_as == "seed":
                del whole["seed"]
            honoured = generations(kind, whole | {name: value})
            assert honoured == generations(kind, whole | {known.same_as: value}), name
            assert known.same_as == "seed" or honoured != generations(kind, whole), name


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": True}, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_other_switches_of_thinking_are_those_of_the_template(fields, same):
    request = ChatRequest.from_fields(WHOLE["chat"] | fields)

    assert request.chat_template_kwargs.model_dump() == same


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"n_predict": 0}, "n_predict"),
        (ChatRequest, {"n_predict": "all"}, "n_predict"),
        (ChatRequest, {"n_predict": 5, "max_tokens": 6}, "n_predict"),
        (ChatRequest, {"max_new_tokens": 5, "max_completion_tokens": 6}, "max_new_tokens"),
        (ChatRequest, {"n_cmpl": 129}, "n_cmpl"),
        (ChatRequest, {"thinking": {"type": "enabled", "budget_tokens": 4}}, "thinking"),
        (ChatRequest, {"think": "high"}, "think"),
        (ChatRequest, {"reasoning": {"max_tokens": 4}}, "reasoning"),
        (ChatRequest, {"reasoning": {"effort": 4}}, "reasoning"),
        (ChatRequest, {"json_schema": 5}, "json_schema"),
        (ChatRequest, {"json_schema": "{"}, "json_schema"),
        (ChatRequest, {"stop_sequences": [""]}, "stop_sequences"),
        (CompletionRequest, {"n_probs": 21}, "n_probs"),
        (CompletionRequest, {"max_completion_tokens": -3}, "max_completion_tokens"),
    ],
)
def test_an_error_names_the_parameter_that_was_sent(kind, fields, param):
    place = "chat" if kind is ChatRequest else "completions"
    with pytest.raises(QuireError) as refusal:
        generations(kind, WHOLE[place] | fields)
    assert refusal.value.param == param
    assert re.search(rf"\b{param}\b", refusal.value.message)


@pytest.mark.parametrize("name", ["prefix", "partial"])
def test_a_message_that_the_answer_should_continue_is_refused_and_false_is_not(name):
    begun = {"role": "assistant", "content": "Once"}
    with pytest.raises(QuireError) as refusal:
        ChatRequest.from_fields(WHOLE["chat"] | {"messages": [*MESSAGES, begun | {name: True}]})
    assert refusal.value.param == f"messages[1].{name}"
    assert ChatRequest.from_fields(WHOLE["chat"] | {"messages": [*MESSAGES, begun | {name: False}, *MESSAGES]})


def test_a_schema_beside_the_type_of_an_object_is_that_of_the_output():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ]

    one, other = (generations(ChatRequest, WHOLE["chat"] | {"seed": 1, "response_format": form}) for form in forms)
    assert one[0].params.structured == other[0].params.structured is not None


def test_two_names_of_one_field_may_agree():
    (one,) = generations(ChatRequest, WHOLE["chat"] | {"n_predict": 5, "max_tokens": 5, "max_new_tokens": 5, "seed": 1})

    assert one.params.max_tokens == 5


@pytest.mark.parametrize(
    ("place", "fields", "own"),
    [
        ("score", {"queries": "a", "documents": ["b", "c"]}, {"text_1": "a", "text_2": ["b", "c"]}),
        ("score", {"data_1": "a", "data_2": "b"}, {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "texts": ["b"], "return_text": True}, {"query": "a", "documents": ["b"]}),
        ("embeddings", {"inputs": ["a"], "truncate": True}, {"input": ["a"], "truncate_prompt_tokens": -1}),
        ("tokenize", {"content": "a"}, {"prompt": "a"}),
    ],
)
def test_required_fields_have_other_names_too(place, fields, own):
    request = PLACES[place].from_fields({"model": MODEL, **fields})

    assert {name: getattr(request, name) for name in own} == {
        name: getattr(PLACES[place].from_fields({"model": MODEL, **own}), name) for name in own
    }
    assert [*ignored_parameters(request)] == []


def is_honoured(place, path):
    """Whether a request takes a parameter, whose path is as in a refusal at ``place``."""
    above, _, name = path.rpartition(".")
    route = ROUTES[place]
    places = [each for each in ((above, f"{route}.{above}") if above else (place, route)) if each in PLACES]
    return any(column(each, name) is Column.HONOURED for each in places)


def test_no_refusal_sends_to_a_parameter_that_is_not_honoured():
    for place, name in foreign(Column.REFUSED):
        for sentence in re.findall(r"\buse ([^;]*)", PLACES[place].foreign[name].instead):
            named = re.sub(r"/v1/\S+( with .*)?|/tokenize( with .*)?|the header .*", "", sentence)
            for path in re.findall(r"\b(?:[a-z_]+\.)*[a-z]+(?:_[a-z]+)+\b|\b[a-z_]+\.[a-z]+\b", named):
                assert is_honoured(place, path), (place, name, path)


def test_the_page_of_parameters_is_that_of_the_table():
    assert parameters_page.PAGE.read_text(encoding="utf-8") == parameters_page.page(), (
        "run .venv/bin/python scripts/parameters_page.py"
    )
