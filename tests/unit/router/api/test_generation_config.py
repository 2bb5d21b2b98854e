"""What a model's ``generation_config.json`` recommends counts where a request is silent, and only there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_proto.sampling import SamplingParams
from quire_proto.text.model_folder import recommended_sampling
from quire_router.api.auth import ANONYMOUS
from quire_router.api.schemas.openai import ChatRequest, CompletionRequest
from quire_router.api.validation import Validator
from quire_router.components import sampling_defaults
from quire_router.config import Settings

from tests.support.scripted_api import MODEL, Limits
from tests.support.tool_models import HERMES_TEMPLATE, tokenizer_with

TOKENIZER = tokenizer_with(HERMES_TEMPLATE)
MESSAGES = [{"role": "user", "content": "hi"}]
LENGTH = 4096
FIELDS = {
    "temperature": st.floats(0, 2, width=16),
    "top_p": st.floats(0.125, 1, width=16),
    "top_k": st.integers(0, 50),
    "min_p": st.floats(0, 1, width=16),
    "repetition_penalty": st.floats(0.5, 2, width=16),
}


def params_of(body, defaults):
    validator = Validator(
        {MODEL: TOKENIZER}, lambda _: Limits(LENGTH, TOKENIZER.vocab_size), sampling_defaults={MODEL: defaults}
    )
    kind = ChatRequest if "messages" in body else CompletionRequest
    (generation,) = validator.generations(kind.from_json(json.dumps({"model": MODEL} | body).encode()), "id", ANONYMOUS)
    return generation.params


@given(st.fixed_dictionaries({}, optional=FIELDS), st.fixed_dictionaries({}, optional=FIELDS))
def test_a_request_comes_before_its_model_and_the_model_before_the_api(recommended, asked):
    params = params_of({"prompt": "hi"} | asked, recommended)
    for name in FIELDS:
        assert getattr(params, name) == {**recommended, **asked}.get(name, getattr(SamplingParams(), name))


def test_a_request_for_all_tokens_has_them_whatever_the_model_recommends():
    assert params_of({"prompt": "hi", "top_k": -1}, {"top_k": 20}).top_k == 0


def test_the_usual_length_is_that_of_conversations_that_do_not_say():
    recommended = {"max_tokens": 7}
    assert params_of({"messages": MESSAGES}, recommended).max_tokens == 7
    assert params_of({"messages": MESSAGES, "max_tokens": 9}, recommended).max_tokens == 9
    assert params_of({"messages": MESSAGES}, {"max_tokens": 10 * LENGTH}).max_tokens < LENGTH
    assert params_of({"prompt": "hi"}, recommended).max_tokens == 16


def test_a_beam_search_draws_nothing_and_takes_no_recommendation():
    params = params_of({"prompt": "hi", "beam_width": 2}, {"temperature": 0.6, "top_p": 0.5, "top_k": 20})
    assert (params.temperature, params.top_p, params.top_k) == (1, 1, 0)


def test_the_file_is_read_as_vllm_reads_it(tmp_path):
    assert recommended_sampling(tmp_path) == {}
    config = {"temperature": 0.6, "top_k": -1, "top_p": None, "max_new_tokens": 5, "eos_token_id": 3, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 0, "max_tokens": 5}


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("top_p", 0.0),
        ("top_p", 3),
        ("temperature", "0.7"),
        ("temperature", 30),
        ("temperature", float("nan")),
        ("top_k", "50"),
        ("top_k", 50.5),
        ("top_k", True),
        ("top_k", [50]),
        ("min_p", {"a": 1}),
        ("repetition_penalty", 0),
        ("max_new_tokens", 1e300),
        ("max_new_tokens", -5),
    ],
)
def test_a_hint_that_cannot_be_used_is_left_out_and_logged(tmp_path, caplog, key, hint):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"min_p": 0.05, key: hint} if key != "min_p" else {key: hint}))
    assert recommended_sampling(tmp_path) == ({"min_p": 0.05} if key != "min_p" else {})
    (line,) = caplog.messages
    assert line.startswith(f"{path}: {key} is ")


def test_whole_numbers_may_be_written_with_a_point(tmp_path, caplog):
    config = {"top_k": 50.0, "max_new_tokens": 7.0, "temperature": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling(tmp_path) == {"top_k": 50, "max_tokens": 7, "temperature": 1}
    assert not caplog.messages


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
def test_a_file_that_cannot_be_used_is_named_at_the_start_unless_it_is_not_read(tmp_path, content):
    path = tmp_path / "generation_config.json"
    path.write_text(content, encoding="latin-1")
    settings = {"model": [f"{MODEL}={tmp_path}"], "engine": ["127.0.0.1:1"]}
    with pytest.raises(ValueError, match=rf"{path} cannot be used: .*--generation-config none"):
        sampling_defaults(Settings(**settings))
    assert sampling_defaults(Settings(**settings, generation_config="none")) == {}
