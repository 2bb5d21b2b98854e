"""The offline API over an executor whose right outputs are known: what callers get, and what is left behind."""

import gc
import inspect
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from time import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine import (
    LLM,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    destroy_model_parallel,
)
from quire_engine import EngineArgs as EngineArgsOfVllm
from quire_engine.config import EngineArgs, EngineConfig
from quire_engine.core.executor import CopyError
from quire_engine.core.lora import DUMMY_LORA
from quire_engine.core.request import Request, Sequence
from quire_engine.core.step import SchedulerOutput
from quire_engine.errors import ModelError
from quire_engine.llm import offline_engine
from quire_engine.llm.llm import OfflineRun
from quire_engine.llm.offline_engine import LLM_SETTINGS, OPEN, engine_config
from quire_engine.llm.processor import PreparedRequest
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.sampling import SamplingParams as EngineParams
from quire_proto.sampling import choice_seed
from quire_proto.structured_output import Structured, StructuredKind
from tokenizers import Tokenizer

from tests.support.model_folders import byte_level, write_model_folder
from tests.support.offline import EOS, MAX_MODEL_LEN, Offline
from tests.support.paged_executor import digest, expected_beams, expected_output, logprob, prefix_digests

STOPS = frozenset({EOS})
PROMPTS = st.lists(st.lists(st.integers(3, 49), min_size=1, max_size=20), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    return Offline(tmp_path_factory.mktemp("offline"), max_num_seqs=8, max_num_batched_tokens=32)


def quiet(llm: LLM, prompts: object, params: object = None, **more: object) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **more)


def seeded(seed: int, **params: object) -> SamplingParams:
    return SamplingParams(seed=seed, **params)


def expected(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    return expected_output(prompt, choice_seed(params.seed, index), params.max_tokens, STOPS)


def text_of(token_ids: list[int], *, skip: bool = True) -> str:
    return byte_level().decode(token_ids, skip_special_tokens=skip)


def cut(token_ids: list[int], stop: str) -> list[int]:
    """The tokens up to the one that completes ``stop``: every token is one character here, or none."""
    return next((token_ids[:n] for n in range(len(token_ids)) if stop in text_of(token_ids[:n])), token_ids)


# What callers get


@settings(deadline=None)
@given(PROMPTS, st.integers(0, 2**64 - 1), st.integers(1, 20), st.integers(1, 4))
def test_each_prompt_gets_its_own_outputs_in_order(offline, prompts, seed, max_tokens, n):
    params = [seeded((seed + number) % 2**64, max_tokens=max_tokens, n=n) for number in range(len(prompts))]

    results = quiet(offline.llm, prompts, params)

    assert [result.prompt_token_ids for result in results] == prompts
    for prompt, wanted, result in zip(prompts, params, results, strict=True):
        assert [output.index for output in result.outputs] == list(range(n))
        for output in result.outputs:
            tokens = expected(prompt, wanted, output.index)
            assert (output.token_ids, output.text) == (tokens, text_of(tokens))
            assert output.finish_reason == ("length" if len(tokens) == max_tokens else "stop")
            assert output.stop_reason is None
    offline.assert_idle()


@settings(deadline=None)
@given(
    PROMPTS,
    st.integers(0, 2**60),
    st.integers(1, 4),
    st.text("ABCDEFGH()*+,-./01234", min_size=1, max_size=2),
    st.booleans(),
)
def test_a_stop_string_ends_the_output_that_has_it_and_no_other(offline, prompts, seed, n, stop, include):
    params = seeded(seed, max_tokens=40, n=n, stop=[stop], include_stop_str_in_output=include)

    for prompt, result in zip(prompts, quiet(offline.llm, prompts, params), strict=True):
        for output in result.outputs:
            whole = expected(prompt, params, output.index)
            before, found, _ = text_of(whole).partition(stop)
            assert output.text == before + (found if include else "")
            assert output.stop_reason == (found or None)
            assert output.token_ids == (cut(whole, stop) if found else whole)
            assert output.finish_reason == ("stop" if found or len(whole) < 40 else "length")
    offline.assert_idle()


def test_a_stop_string_counts_only_behind_the_least_tokens(offline):
    prompt, plain = [5, 6, 7], seeded(3, max_tokens=40, ignore_eos=True)
    whole = expected_output(prompt, plain.seed, 40)
    stop = text_of(whole[:9]).strip()[-1]
    params = seeded(3, max_tokens=40, ignore_eos=True, min_tokens=20, stop=[stop])

    (result,) = quiet(offline.llm, prompt, params)

    output, early = result.outputs[0], text_of(whole[:20])
    before, found, _ = text_of(whole)[len(early) :].partition(stop)
    assert (output.text, output.stop_reason) == (early + before, found or None)
    assert len(output.token_ids) > 20


def test_nothing_is_computed_for_an_output_after_its_stop_string(offline):
    prompt, params = [5, 6, 7], seeded(3, max_tokens=200, ignore_eos=True, n=3)
    stop = text_of(expected_output(prompt, params.seed, 200)[:9]).strip()[-1]
    before = offline.scheduler.stats.generated_tokens

    (result,) = quiet(offline.llm, prompt, SamplingParams(**fields(params), stop=stop))

    made = offline.scheduler.stats.generated_tokens - before
    kept = sum(len(output.token_ids) for output in result.outputs)
    assert kept <= made <= kept + len(result.outputs)


def fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in ("seed", "max_tokens", "ignore_eos", "n")}


def test_special_tokens_are_text_only_where_they_are_not_skipped(offline):
    params = {"seed": 1, "max_tokens": 200, "ignore_eos": True}
    tokens = expected_output([9], 1, 200)
    assert {0, 1, 2} & set(tokens)
    for skip in (True, False):
        (result,) = quiet(offline.llm, [9], SamplingParams(**params, skip_special_tokens=skip))
        assert result.outputs[0].text == text_of(tokens, skip=skip)


@settings(deadline=None, max_examples=30)
@given(PROMPTS, st.integers(0, 2**60), st.integers(1, 3), st.integers(0, 3))
def test_best_of_gives_the_outputs_whose_tokens_are_most_probable_on_average(offline, prompts, seed, n, more):
    params = seeded(seed, max_tokens=8, n=n, best_of=n + more)

    for prompt, result in zip(prompts, quiet(offline.llm, prompts, params), strict=True):
        drawn = [expected(prompt, params, index) for index in range(n + more)]
        if more:
            drawn.sort(key=lambda tokens: mean(logprobs_of(prompt, tokens)), reverse=True)
        assert [output.token_ids for output in result.outputs] == drawn[:n]
        assert [output.index for output in result.outputs] == list(range(n))
        assert all(output.logprobs is None for output in result.outputs)


def logprobs_of(prompt: list[int], tokens: list[int]) -> list[float]:
    prefix, values = prefix_digests(prompt)[-1], []
    for token_id in tokens:
        values.append(logprob(prefix, token_id))
        prefix = digest(prefix, token_id)
    return values


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("-inf")


def test_beams_come_best_first_with_their_scores(offline):
    params = SamplingParams(temperature=0, beam_width=4, n=3, max_tokens=10)
    (result,) = quiet(offline.llm, [7, 8, 9], params)

    hypotheses = expected_beams([7, 8, 9], EngineParams(temperature=0, beam_width=4, n=3, max_tokens=10), STOPS)
    assert [(each.token_ids, each.score) for each in result.outputs] == [(h.token_ids, h.score) for h in hypotheses]
    assert [each.text for each in result.outputs] == [text_of(h.token_ids) for h in hypotheses]
    offline.assert_idle()


def test_log_probabilities_have_each_tokens_text_and_rank(offline):
    params = seeded(5, max_tokens=6, logprobs=1, prompt_logprobs=1)
    (result,) = quiet(offline.llm, [7, 8, 9, 10], params)

    (output,) = result.outputs
    entries = [position[token_id] for position, token_id in zip(output.logprobs, output.token_ids, strict=True)]
    assert [each.logprob for each in entries] == logprobs_of([7, 8, 9, 10], output.token_ids)
    assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in entries))
    assert [each.decoded_token for each in entries] == [
        byte_level().decode([token]) or "<|" for token in output.token_ids
    ]
    assert [None if each is None else list(each) for each in result.prompt_logprobs] == [None, [8], [9], [10]]
    assert result.prompt_logprobs[1][8].rank == 1


def test_without_detokenize_there_are_tokens_and_no_text(offline):
    prompt, more = [5, 6, 7], {"n": 2, "max_tokens": 9, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    (whole,) = quiet(offline.llm, [prompt], seeded(3, **more))
    (result,) = quiet(offline.llm, [prompt], seeded(3, **more, detokenize=False))
    for told, output in zip(whole.outputs, result.outputs, strict=True):
        assert (output.token_ids, output.text) == (told.token_ids, "")
        assert output.finish_reason == "length"
        assert [entry.keys() for entry in output.logprobs] == [entry.keys() for entry in told.logprobs]
    entries = [*result.outputs[0].logprobs, *result.prompt_logprobs[1:]]
    assert {each.decoded_token for entry in entries for each in entry.values()} == {None}


def test_a_text_is_tokenized_and_decoded(offline):
    (result,) = quiet(offline.llm, "hello world", seeded(1))

    assert result.prompt == "hello world"
    assert result.prompt_token_ids == byte_level().encode("hello world").ids
    assert result.outputs[0].token_ids == expected(result.prompt_token_ids, seeded(1))


def test_texts_and_tokens_may_be_mixed_and_no_prompts_have_no_outputs(offline):
    results = quiet(offline.llm, ["hello", [3, 4, 5]])

    assert [result.prompt for result in results] == ["hello", None]
    assert results[1].prompt_token_ids == [3, 4, 5]
    assert quiet(offline.llm, []) == []


def test_conversations_are_rendered_by_the_template(offline):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}]
    (alone,) = offline.llm.chat(messages, seeded(1), use_tqdm=False)
    both = offline.llm.chat([messages, messages], seeded(1), use_tqdm=False)

    assert alone.prompt == "<|start|>user\nhello world<|end|>\n<|start|>assistant\n"
    assert alone.prompt_token_ids == byte_level().encode(alone.prompt, add_special_tokens=False).ids
    assert [each.outputs for each in both] == [alone.outputs] * 2


def test_without_a_limit_an_output_may_fill_the_model(offline):
    (result,) = quiet(offline.llm, [3] * 200, seeded(1, max_tokens=None, ignore_eos=True))

    assert len(result.outputs[0].token_ids) == MAX_MODEL_LEN - 200


def test_prompts_may_be_dictionaries_as_vllm_has_them(offline):
    params = seeded(1, max_tokens=3)
    plain = quiet(offline.llm, ["a b", [5, 6]], params)
    told = quiet(offline.llm, [{"prompt": "a b"}, {"prompt_token_ids": [5, 6]}], params)
    assert [each.outputs[0].token_ids for each in told] == [each.outputs[0].token_ids for each in plain]
    assert quiet(offline.llm, {"prompt": "a b"}, params)[0].prompt == "a b"
    for wrong in ({"prompt": 5}, {"text": "a"}, {"prompt": "a", "multi_modal_data": {}}, {}):
        with pytest.raises(QuireError, match="or a dictionary with either"):
            quiet(offline.llm, wrong, params)
    with pytest.raises(QuireError, match="lora_request cannot be a text"):
        quiet(offline.llm, "a b", params, lora_request="sql")


def test_cached_tokens_of_a_repeated_prompt_are_counted(offline):
    prompt = [11] * 41
    quiet(offline.llm, prompt)

    assert quiet(offline.llm, prompt)[0].num_cached_tokens == 40


RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7, "min_p": None, "eos_token_id": 2}


def with_generation_config(folder: Path, config: object) -> Offline:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return Offline(folder, seed=11)


def test_the_default_parameters_are_those_that_the_model_recommends(tmp_path):
    offline = with_generation_config(tmp_path, RECOMMENDED)
    params = offline.llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    (unset,) = quiet(offline.llm, [[5, 6]])
    assert len(unset.outputs[0].token_ids) in range(8)
    params.max_tokens, params.seed, params.ignore_eos = 12, 5, True
    (result,) = quiet(offline.llm, [[5, 6]], params)
    assert len(result.outputs[0].token_ids) == 12
    assert offline.llm.get_default_sampling_params().max_tokens == 7


def test_recommended_parameters_that_are_none_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be used: "):
        with_generation_config(tmp_path, [])


def test_a_recommended_parameter_that_cannot_be_used_is_left_out(tmp_path):
    params = with_generation_config(tmp_path, {"temperature": "warm", "top_p": 7, "top_k": 20.0}).llm
    assert params.get_default_sampling_params() == SamplingParams(top_k=20)


def test_a_parameter_that_is_assigned_is_checked_with_the_request(offline):
    params = SamplingParams(seed=1, max_tokens=3)
    params.temperature = -1.0
    with pytest.raises(QuireError) as refused:
        quiet(offline.llm, [[5, 6]], params)
    assert refused.value.param == "temperature"


def test_arguments_may_come_as_one_object(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_ENGINE_BLOCK_SIZE", "8")
    arguments = asdict(EngineArgsOfVllm("demo", max_num_seqs=3, enable_prefix_caching=False))
    assert arguments.pop("model") == "demo"
    assert arguments.keys() == {"tokenizer", "seed", "allow_download", *LLM_SETTINGS}
    settings = {name: value for name, value in arguments.items() if name in LLM_SETTINGS}
    assert engine_config(tmp_path, settings) == engine_config(
        tmp_path, {"max_num_seqs": 3, "enable_prefix_caching": False}
    )
    assert engine_config(tmp_path, settings).block_size == 8


def test_a_seed_of_the_engine_makes_runs_repeatable_and_prompts_different(tmp_path):
    def run(seed: int | None) -> list[list[int]]:
        results = quiet(Offline(tmp_path, seed=seed).llm, [[5, 6]] * 3, SamplingParams(max_tokens=20, ignore_eos=True))
        return [result.outputs[0].token_ids for result in results]

    assert run(4) == run(4)
    assert run(4) != run(5)
    assert run(None) != run(None)
    assert len({tuple(tokens) for tokens in run(4)}) == 3


# Wrong input


@pytest.mark.parametrize(
    ("prompts", "params", "param", "words"),
    [
        ([[3], []], {}, "prompt", "Prompt 1: The prompt is empty"),
        ([[3], [3, 340]], {}, "prompt", "between 0 and"),
        ([[3], [2**40]], {}, "prompt", "between 0 and"),
        ([[3], [3] * MAX_MODEL_LEN], {}, "prompt", str(MAX_MODEL_LEN)),
        (["x" * 100_000], {}, "prompt", "context length is 256 tokens. However, your prompt resulted in at least"),
        ([3.5], {}, "prompts", "list of token ids"),
        ([[3, "4"]], {}, "prompts", "list of token ids"),
        ([[3]], {"max_tokens": 300}, "max_tokens", "context length is 256 tokens"),
        ([[3]], {"stop_token_ids": [340]}, "stop_token_ids", "between 0 and"),
        ([[3]], {"logit_bias": {400: 1}}, "logit_bias", "between 0 and"),
        ([[3]], {"bad_words": [" "]}, "bad_words", "characters"),
        ([[3]], {"n": 9}, "n", "limit is 8"),
    ],
)
def test_all_prompts_are_checked_before_any_is_run(offline, prompts, params, param, words):
    before = offline.executor.steps

    with pytest.raises(QuireError, match=words) as refusal:
        quiet(offline.llm, prompts, SamplingParams(**params))

    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)
    assert offline.executor.steps == before
    offline.assert_idle()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [7]}, "stop"),
        ({"stop": "x", "beam_width": 4}, "stop"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"output_kind": 1}, "output_kind"),
        ({"bad_words": "word"}, "bad_words"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"top_k": 2.0}, "top_k"),
        ({"logprobs": 1.5}, "logprobs"),
        ({"logit_bias": {"1": 5.0}}, "logit_bias"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"temperature": "1"}, "temperature"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_parameters_out_of_range_are_refused_where_they_are_written(params, param):
    with pytest.raises(QuireError) as refusal:
        SamplingParams(**params)
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"json_object": True, "json": {}},
        {"choice": []},
        {"choice": [1]},
        {"regex": ""},
    ],
)
def test_structured_outputs_need_exactly_one_kind_of_constraint(given):
    with pytest.raises(QuireError) as refusal:
        StructuredOutputsParams(**given)
    assert refusal.value.code == ErrorCode.INVALID


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"type": "string", "const": "é"}}, "json_schema", '{"type": "string", "const": "é"}'),
        ({"json": "{}"}, "json_schema", "{}"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"grammar": "start: A"}, "grammar", "start: A"),
    ],
)
def test_structured_outputs_reach_the_engine_as_requested(given, kind, text):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))

    assert params.resolve(seed=1, max_output=9, bad_words=()).structured == Structured(StructuredKind(kind), text)


ENGINES = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.3, "frequency_penalty": -0.2,
    "repetition_penalty": 1.3, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "n": 2, "best_of": 3, "seed": 5,
    "logprobs": 4, "prompt_logprobs": 0, "length_penalty": 0.5, "early_stopping": True,
}  # fmt: skip


def test_shared_parameters_reach_the_engine_unchanged():
    params = SamplingParams(**ENGINES, logit_bias={9: 1.5, 4: -2.0}, stop_token_ids=[8])

    resolved = params.resolve(seed=99, max_output=100, bad_words=((3, 4),))

    assert resolved == EngineParams(
        **ENGINES, logit_bias=((4, -2.0), (9, 1.5)), stop_token_ids=(8,), bad_words=((3, 4),)
    )


def test_numbers_of_numpy_reach_the_engine_as_pythons():
    resolved = SamplingParams(seed=np.int64(5), top_p=np.float32(0.5)).resolve(seed=9, max_output=100, bad_words=())

    assert (resolved.seed, type(resolved.seed)) == (5, int)
    assert (resolved.top_p, type(resolved.top_p)) == (0.5, float)


def test_unset_parameters_get_defaults():
    resolved = SamplingParams(max_tokens=None, top_k=-1).resolve(seed=99, max_output=100, bad_words=())

    assert (resolved.seed, resolved.max_tokens, resolved.top_k) == (99, 100, 0)


def test_every_parameter_of_the_engine_can_be_set_here():
    known = {name for name in inspect.signature(EngineParams).parameters if name != "structured"}

    assert known <= set(inspect.signature(SamplingParams).parameters)


@pytest.mark.parametrize("priority", ["high", 1.5, math.nan, [[1]], 1 << 31])
def test_a_priority_that_is_none_is_refused(offline, priority):
    with pytest.raises(QuireError) as refusal:
        quiet(offline.llm, [[3]], seeded(1), priority=priority)
    assert refusal.value.param == "priority"


@pytest.mark.parametrize(
    "lora",
    [LoRARequest(5, 1, "x"), LoRARequest("a", "1", "x"), LoRARequest("a", 0, "x"), LoRARequest("a", 1 << 63, "x")],
)
def test_an_adapter_that_cannot_be_named_is_refused(offline, lora):
    with pytest.raises(QuireError) as refusal:
        quiet(offline.llm, [[3]], seeded(1), lora_request=lora)
    assert (refusal.value.param, "serves no" in refusal.value.message) == ("lora_request", False)


def test_the_adapter_that_memory_is_measured_with_cannot_be_asked_for(offline):
    """It has no weights, and would answer as the model does without one."""
    with pytest.raises(QuireError) as refusal:
        quiet(offline.llm, [[3]], seeded(1), lora_request=DUMMY_LORA)
    assert (refusal.value.param, "serves no" in refusal.value.message) == ("lora_request", False)
    assert set(inspect.signature(LoRARequest).parameters) == {"lora_name", "lora_int_id", "lora_path", "digest"}


def test_parameters_of_another_kind_are_refused(offline):
    with pytest.raises(QuireError) as refusal:
        quiet(offline.llm, [[3]], {"temperature": 0})
    assert refusal.value.param == "sampling_params"


@pytest.mark.parametrize(
    "messages",
    [
        [[]],
        [{"role": "user"}],
        [{"role": 1, "content": "x"}],
        ["hello"],
        [[{"role": "user", "content": [{"type": "image"}]}]],
        [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": [{"id": ["1"], "function": {"name": "add"}}]}],
        [{"role": "tool", "content": "3", "tool_call_id": ["1"]}],
    ],
)
def test_messages_that_are_none_are_refused(offline, messages):
    with pytest.raises(QuireError) as refusal:
        offline.llm.chat(messages, use_tqdm=False)
    assert refusal.value.param == "messages"


def test_what_a_template_may_not_be_given_is_refused(offline):
    message = [{"role": "user", "content": "x"}]
    with pytest.raises(QuireError, match="must be a list of dictionaries"):
        offline.llm.chat(message, use_tqdm=False, tools=["add"])
    with pytest.raises(QuireError, match="messages is not a variable of chat_template_kwargs"):
        offline.llm.chat(message, use_tqdm=False, chat_template_kwargs={"messages": []})


def test_as_many_parameters_as_prompts_are_needed(offline):
    with pytest.raises(QuireError, match="2 entries for 3 prompts"):
        quiet(offline.llm, [[3]] * 3, [SamplingParams()] * 2)


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"max_num_seqs": 0}, "max_num_seqs"), ({"port": 9000}, "port"), ({"dtype": "int4"}, "dtype")],
)
def test_wrong_settings_are_named(tmp_path, settings, param):
    with pytest.raises(QuireError) as refusal:
        LLM(write_model_folder(tmp_path), **settings)
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


def test_every_setting_of_the_engine_is_one_of_the_llm():
    defaults = {name: EngineConfig.model_fields[name].default for name in LLM_SETTINGS}

    assert engine_config("m", defaults) == EngineConfig(model=Path("m"))
    assert set(LLM_SETTINGS) == EngineArgs.model_fields.keys() - {"model", "served_model_name", "lora_modules"}


@pytest.mark.parametrize("name", sorted(EngineConfig.model_fields.keys() - set(LLM_SETTINGS)))
def test_a_setting_of_the_server_is_none_of_the_llm(name):
    with pytest.raises(QuireError, match=f"LLM has no setting named {name}.") as refusal:
        engine_config("m", {name: EngineConfig.model_fields[name].default})
    assert refusal.value.param == name


def test_the_llms_signature_shows_every_setting_with_its_default():
    model, *own = inspect.signature(LLM).parameters.values()
    own, others = own[:3], own[3:]

    assert (model.name, model.kind) == ("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert [each.name for each in own] == ["tokenizer", "seed", "allow_download"]
    assert {other.name: other.default for other in others} == {
        name: EngineConfig.model_fields[name].default for name in LLM_SETTINGS
    }


# When something goes wrong while it runs


def test_a_request_that_fails_is_returned_with_its_error_and_the_others_are_right(offline, caplog):
    def fail(scheduler_output: SchedulerOutput) -> None:
        if any(new.token_ids[0] == 13 for new in scheduler_output.new):
            raise RuntimeError("this one")

    offline.executor.before = fail
    try:
        results = quiet(offline.llm, [[3, 4], [13, 4], [4, 4]], seeded(1, n=2))
    finally:
        offline.executor.before = lambda scheduler_output: None

    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].error.code == ErrorCode.INTERNAL
    assert [output.finish_reason for output in results[1].outputs] == ["error", "error"]
    assert results[2].outputs[1].token_ids == expected([4, 4], seeded(1, max_tokens=16), 1)
    assert "1 of 3 prompts failed" in caplog.text
    offline.assert_idle()


@contextmanager
def handling_sigint(handler: object = signal.default_int_handler) -> Iterator[None]:
    """SIGINT with this handler, whatever the test run was started with: a background job is started with SIGINT
    ignored.
    """
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    with handling_sigint():
        yield


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("at", [1, 2, 5, 11])
def test_an_interrupt_ends_everything_between_two_steps_and_the_llm_goes_on(tmp_path, at):
    offline = Offline(tmp_path, max_num_seqs=4)
    finished: list[int] = []

    def interrupt(scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.step == at:
            signal.raise_signal(signal.SIGINT)
            finished.append(scheduler_output.step)

    offline.executor.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        quiet(offline.llm, [[3, number] for number in range(3, 20)], seeded(1, max_tokens=30, ignore_eos=True))

    assert finished == [at], "the step was not left to end"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    offline.assert_idle()
    (result,) = quiet(offline.llm, [3, 4], seeded(1))
    assert result.outputs[0].token_ids == expected([3, 4], seeded(1))


@pytest.mark.usefixtures("_interruptible")
def test_a_second_interrupt_does_not_wait_for_a_step_that_hangs(tmp_path):
    offline = Offline(tmp_path)

    def hang(scheduler_output: SchedulerOutput) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")

    offline.executor.before = hang
    with pytest.raises(KeyboardInterrupt):
        quiet(offline.llm, [3, 4])
    with pytest.raises(QuireError, match="in the middle of a step"):
        quiet(offline.llm, [3, 4])


def test_an_interrupt_goes_to_the_handler_that_the_process_has(tmp_path):
    heard: list[int] = []
    with handling_sigint(lambda number, frame: heard.append(number)):
        offline = Offline(tmp_path)
        offline.executor.before = lambda scheduler_output: (
            signal.raise_signal(signal.SIGINT) if scheduler_output.step == 2 else None
        )
        (result,) = quiet(offline.llm, [3, 4], seeded(1, ignore_eos=True))

    assert heard == [signal.SIGINT]
    assert result.outputs[0].token_ids == expected_output([3, 4], 1, 16)


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them(tmp_path):
    with handling_sigint(signal.SIG_IGN):
        offline = Offline(tmp_path)
        offline.executor.before = lambda scheduler_output: signal.raise_signal(signal.SIGINT)
        (result,) = quiet(offline.llm, [3, 4], seeded(1, ignore_eos=True))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    assert result.outputs[0].token_ids == expected_output([3, 4], 1, 16)


def test_a_failed_block_copy_ends_the_llm(tmp_path):
    offline = Offline(tmp_path)

    def fail(scheduler_output: SchedulerOutput) -> None:
        raise CopyError("lost")

    offline.executor.before = fail
    with pytest.raises(CopyError):
        quiet(offline.llm, [3, 4])
    with pytest.raises(QuireError) as refusal:
        quiet(offline.llm, [3, 4])
    assert refusal.value.code == ErrorCode.UNAVAILABLE


def test_a_closed_llm_frees_its_memory_and_refuses_requests(tmp_path):
    offline = Offline(tmp_path)
    with offline.llm as llm:
        quiet(llm, [3, 4])

    assert offline.executor.closed
    with pytest.raises(QuireError, match="closed"):
        quiet(offline.llm, [3, 4])


# Many prompts


def test_a_tokenizer_of_another_folder_is_used_if_its_tokens_are_the_models(offline, tmp_path):
    other = Tokenizer.from_str(byte_level().to_str())  # a copy: that one is all tests'
    upper = Offline(tmp_path / "a", tokenizer=write_model_folder(tmp_path / "other", other))
    (result,) = quiet(upper.llm, "HELLO", seeded(1))
    assert result.prompt_token_ids == other.encode("HELLO").ids

    other.add_tokens(["one more"])
    with pytest.raises(ModelError, match="is not a tokenizer of this model: it has "):
        Offline(tmp_path / "b", tokenizer=write_model_folder(tmp_path / "large", other))


def test_an_llm_that_cannot_be_made_leaves_no_executor(tmp_path, monkeypatch):
    made = []

    def fail(config, executor):
        made.append(executor)
        raise MemoryError

    monkeypatch.setattr(offline_engine, "make_scheduler", fail)
    with pytest.raises(MemoryError):
        Offline(tmp_path)
    assert [executor.closed for executor in made] == [True]


def test_what_programs_for_vllm_call_closes_every_llm(tmp_path, monkeypatch):
    monkeypatch.setattr(OPEN, "data", set())  # not the other tests'
    first, second = Offline(tmp_path / "a"), Offline(tmp_path / "b")
    second.llm.close()

    destroy_model_parallel()

    assert first.executor.closed
    with pytest.raises(QuireError, match="closed"):
        quiet(first.llm, [3, 4])
    destroy_model_parallel()


def test_however_many_prompts_there_are_only_a_few_wait_in_the_engine(tmp_path):
    offline = Offline(tmp_path, max_num_seqs=4)
    most = 0

    def watch(scheduler_output: SchedulerOutput) -> None:
        nonlocal most
        most = max(most, len(offline.llm._current_run._live))

    offline.executor.before = watch
    prompts = [[3 + number % 40, 3 + number // 40] for number in range(500)]
    results = quiet(offline.llm, prompts, seeded(1, max_tokens=4))

    assert [result.outputs[0].token_ids for result in results] == [
        expected(prompt, seeded(1, max_tokens=4)) for prompt in prompts
    ]
    assert most <= 4 + 4 * 4


def test_with_priorities_all_prompts_are_in_order_however_many_there_are(tmp_path):
    offline = Offline(tmp_path, max_num_seqs=1, scheduling_policy="priority")
    started: list[int] = []

    def watch(scheduler_output: SchedulerOutput) -> None:
        started.extend(new.token_ids[0] for new in scheduler_output.new)

    offline.executor.before = watch
    prompts = list(range(3, 43))
    results = quiet(offline.llm, [[first, 3] for first in prompts], seeded(1), priority=[-first for first in prompts])

    assert started == sorted(prompts, reverse=True)
    assert [result.prompt_token_ids[0] for result in results] == prompts


def test_nothing_of_a_call_is_kept_after_it(offline):
    def alive() -> int:
        gc.collect()
        return sum(type(each) in {OfflineRun, PreparedRequest, Request, Sequence} for each in gc.get_objects())

    before = alive()
    results = quiet(offline.llm, [[3, 4, 5]] * 9, seeded(1, n=2, stop="A"))

    assert len(results) == 9
    assert alive() <= before


def test_the_engine_never_gets_more_waiting_requests_than_it_allows(tmp_path):
    offline = Offline(tmp_path, max_num_seqs=8, max_waiting=1, blocks=40)

    prompts, params = [[number] * 20 for number in range(3, 23)], seeded(1, max_tokens=30, n=3, ignore_eos=True)

    for prompt, result in zip(prompts, quiet(offline.llm, prompts, params), strict=True):
        assert [each.token_ids for each in result.outputs] == [
            expected_output(prompt, choice_seed(1, index), 30) for index in range(3)
        ]
    assert offline.scheduler.stats.preemptions_by_recompute > 0
    offline.assert_idle()


def test_calls_from_several_threads_wait_for_each_other(offline):
    results: dict[int, list[int]] = {}

    def call(number: int) -> None:
        results[number] = quiet(offline.llm, [number, 5], seeded(number))[0].outputs[0].token_ids

    threads = [Thread(target=call, args=(number,)) for number in range(3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert results == {number: expected([number, 5], seeded(number)) for number in range(3, 9)}


# What it shows and costs


def test_the_progress_bar_counts_prompts_and_tokens_a_second(offline, capsys):
    offline.llm.generate([[3]] * 7, seeded(1, max_tokens=2))
    shown = capsys.readouterr().err

    assert "7/7" in shown
    assert "prompt " in shown
    assert shown.count("tok/s") >= 2


def test_no_progress_bar_is_shown_when_it_is_disabled(offline, capfd):
    quiet(offline.llm, [3])

    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("script", "unwanted"),
    [
        ("import quire_engine", {"torch", "grpc", "google", "transformers", "numpy", "tokenizers", "pydantic", "tqdm"}),
        (
            "import quire_engine.core.engine_core",
            {"torch", "grpc", "google", "transformers", "numpy", "tokenizers", "pydantic"},
        ),
        ("from quire_engine import LLM, SamplingParams; SamplingParams()", {"torch", "grpc", "transformers"}),
    ],
)
def test_importing_loads_no_library_before_it_is_needed(script, unwanted):
    code = f"{script}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert not set(names) & unwanted


def test_unknown_names_of_the_package_are_attribute_errors():
    import quire_engine

    with pytest.raises(AttributeError, match="nothing"):
        _ = quire_engine.nothing


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_output_says_when_it_went_through_its_stages_and_how_long_it_was_away(tmp_path: Path, mode: str) -> None:
    tight = Offline(tmp_path, blocks=20, host_blocks=60, preemption_mode=mode)
    params = [seeded(number, max_tokens=24, ignore_eos=True) for number in range(6)]
    began = time()
    results = quiet(tight.llm, [[5] * 12] * 6, params)
    ended = time()
    for result in results:
        metrics = result.metrics
        assert metrics is not None
        stages = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time)
        assert [began, *stages, ended] == sorted([began, *stages, ended])
        assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time
        assert (metrics.num_preemptions > 0) == (metrics.away_seconds > 0)
        assert metrics.away_seconds <= metrics.finished_time - metrics.first_scheduled_time
    assert any(result.metrics.num_preemptions for result in results)
    stats = tight.scheduler.stats
    assert (stats.preemptions_by_swap > 0, stats.preemptions_by_recompute > 0) == (mode == "swap", mode != "swap")
    tight.llm.close()


def test_an_output_that_a_stop_string_ends_has_its_times_but_the_engines_end(offline: Offline) -> None:
    prompt, params = [7, 8, 9], seeded(1, max_tokens=20, ignore_eos=True)
    (whole,) = quiet(offline.llm, [prompt], [params])
    text = whole.outputs[0].text
    (stopped,) = quiet(offline.llm, [prompt], [seeded(1, max_tokens=20, ignore_eos=True, stop=text[1:3])])
    assert stopped.outputs[0].finish_reason == "stop"
    assert whole.metrics.finished_time is not None
    assert stopped.metrics.finished_time is None
    assert stopped.metrics.first_token_time >= stopped.metrics.first_scheduled_time
