"""The offline API with real models: what transformers generates, in text and in tokens."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from quire_engine import LLM, SamplingParams, StructuredOutputsParams
from quire_proto.errors import ErrorCode, QuireError
from quire_proto.text.tokenizer import ModelTokenizer
from quire_router.api.schemas.conversation import to_template_messages
from quire_router.api.schemas.openai import ChatRequest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model.models import OUTPUT_TOKENS, VOCAB_SIZE, SmallModels
from tests.support.model_folders import write_model_folder

DEMO = Path(__file__).parents[2] / "demo" / "model"
POOLS = {"kv_cache_memory": 32 << 20, "swap_space": 0.0}
GREEDY = SamplingParams(temperature=0, max_tokens=120)
CONVERSATIONS = [
    [{"role": "user", "content": "What is 7 plus 5?"}],
    [
        {"role": "system", "content": "You are Quire."},
        {"role": "user", "content": "My name is Mira."},
        {"role": "assistant", "content": "Nice to meet you, Mira."},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Tell me a short story about a small owl."}],
]
TEXTS = ["Once upon a time", "The small owl", "7 plus", "My name is"]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(DEMO, dtype="float32", **POOLS) as llm:
        yield llm


def bytes_only() -> Tokenizer:
    """A tokenizer of exactly the small models' size: one token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral"])
def test_greedy_tokens_and_texts_are_those_of_transformers(
    small_models: SmallModels, name: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_models.folder(name), tmp_path / name))
    tokenizer = bytes_only()
    write_model_folder(folder, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    with LLM(folder, dtype="float32", max_num_seqs=4, max_num_batched_tokens=48, **POOLS) as llm:
        results = llm.generate(small_models.prompts, params, use_tqdm=False)

    assert [result.outputs[0].token_ids for result in results] == small_models.outputs(name)
    for result in results:
        context = tokenizer.decode(result.prompt_token_ids)
        whole = tokenizer.decode(result.prompt_token_ids + result.outputs[0].token_ids)
        if "\ufffd" not in context[-4:]:
            assert context + result.outputs[0].text == whole


def test_conversations_are_answered_as_by_transformers(demo: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    for conversation, result in zip(CONVERSATIONS, demo.chat(CONVERSATIONS, GREEDY, use_tqdm=False), strict=True):
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False)
        assert result.prompt_token_ids == prompt
        assert result.prompt == tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        assert result.outputs[0].text == tokenizer.decode(answer[0, len(prompt) :], skip_special_tokens=True)


def test_prompts_are_those_of_the_router(demo: LLM) -> None:
    text = ModelTokenizer.load(DEMO)

    for conversation, result in zip(CONVERSATIONS, demo.chat(CONVERSATIONS, use_tqdm=False), strict=True):
        assert result.prompt_token_ids == text.encode_chat(conversation)
    for prompt, result in zip(TEXTS, demo.generate(TEXTS, use_tqdm=False), strict=True):
        assert result.prompt_token_ids == text.encode(prompt)


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
CALLED = [
    {"role": "user", "content": "What is 7 plus 5?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":7,"b":5}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12"},
]


def test_tools_and_variables_reach_the_template_as_in_a_chat_over_http(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text((DEMO.parent / "templates" / "hermes.jinja").read_text() + "{{ mood }}")
    text, params = ModelTokenizer.load(folder), SamplingParams(temperature=0, max_tokens=1)
    request = ChatRequest.from_json(json.dumps({"model": "demo", "messages": CALLED, "tools": [TOOL]}).encode())
    tools, messages = [tool.to_template() for tool in request.tools or ()], to_template_messages(request.messages)
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"tools": [TOOL]}, {"tools": tools}),
        ({"chat_template_kwargs": {"mood": "glad"}}, {"options": {"mood": "glad"}}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ]
    prompts = []
    with LLM(folder, dtype="float32", **POOLS) as llm:
        for given, rendered in variants:
            (result,) = llm.chat(CALLED, params, use_tqdm=False, **given)
            assert result.prompt_token_ids == text.encode_chat(messages, **rendered)
            assert result.prompt == text.render_chat_text(messages, **rendered)
            prompts.append(result.prompt)
    assert len(set(prompts)) == len(variants)


def test_get_tokenizer_returns_that_of_transformers(demo: LLM) -> None:
    tokenizer = demo.get_tokenizer()
    prompt = tokenizer.apply_chat_template(CONVERSATIONS[0], tokenize=False, add_generation_prompt=True)
    (result,) = demo.chat(CONVERSATIONS[0], SamplingParams(max_tokens=1), use_tqdm=False)

    assert result.prompt == prompt
    assert tokenizer.encode(TEXTS[0]) == AutoTokenizer.from_pretrained(DEMO).encode(TEXTS[0])


def test_an_output_does_not_depend_on_what_runs_beside_it(demo: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=24, n=3)
    together = demo.generate(TEXTS, params, use_tqdm=False)
    alone = [demo.generate(text, params, use_tqdm=False)[0] for text in TEXTS]

    assert [each.outputs for each in together] == [each.outputs for each in alone]
    (first,) = demo.generate(TEXTS[0], SamplingParams(seed=7, max_tokens=24), use_tqdm=False)
    assert together[0].outputs[0] == first.outputs[0]
    assert len({output.text for output in together[0].outputs}) > 1


def test_bad_words_are_not_written(demo: LLM) -> None:
    plain = demo.chat(CONVERSATIONS[2], GREEDY, use_tqdm=False)[0].outputs[0].text
    word = max(plain.split(), key=plain.count)
    held = SamplingParams(temperature=0, max_tokens=120, bad_words=[word])

    assert f" {word} " in plain
    assert f" {word} " not in demo.chat(CONVERSATIONS[2], held, use_tqdm=False)[0].outputs[0].text


def test_log_probabilities_are_those_of_the_models_own_distribution(demo: LLM) -> None:
    params = SamplingParams(seed=3, temperature=0.5, max_tokens=12, logprobs=3, prompt_logprobs=2)
    (result,) = demo.generate(TEXTS[0], params, use_tqdm=False)
    (output,) = result.outputs

    tokens = result.prompt_token_ids + output.token_ids
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    told = [*result.prompt_logprobs[1:], *output.logprobs]
    for position, (token_id, logprobs) in enumerate(zip(tokens[1:], told, strict=True)):
        best = exact[position].topk(2 if position < len(result.prompt_token_ids) - 1 else 3)
        assert logprobs[token_id].logprob == pytest.approx(exact[position, token_id].item(), abs=1e-4)
        assert [each for each in logprobs if logprobs[each].rank is not None] == best.indices.tolist()
    assert output.cumulative_logprob == pytest.approx(
        sum(each[t].logprob for each, t in zip(output.logprobs, output.token_ids, strict=True))
    )


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_outputs_obey_each_its_own_constraint(demo: LLM) -> None:
    wanted = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex="[0-9]{3}-[a-z]{2}"),
        StructuredOutputsParams(choice=["green forest", "blue tree"]),
        StructuredOutputsParams(grammar='start: "yes" | "no" ", " start'),
        None,
    ]
    params = [SamplingParams(seed=4, n=3, max_tokens=60, structured_outputs=each) for each in wanted]
    made = [[o.text for o in result.outputs] for result in demo.generate(TEXTS[:1] * 5, params, use_tqdm=False)]

    for text in made[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch("[0-9]{3}-[a-z]{2}", text) for text in made[1])
    assert set(made[2]) <= {"green forest", "blue tree"}
    assert all(re.fullmatch("(no, )*yes|(no, ){9,}.*", text) for text in made[3])
    assert made[4] == [o.text for o in demo.generate(TEXTS[0], params[4], use_tqdm=False)[0].outputs]


@pytest.mark.parametrize(("kind", "text", "param"), [("regex", "(", "regex"), ("json", "{", "response_format")])
def test_an_invalid_grammar_is_refused_before_any_prompt_runs(demo: LLM, kind: str, text: str, param: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: text}))

    with pytest.raises(QuireError, match="Prompt 1") as refusal:
        demo.generate(TEXTS[:2], [SamplingParams(), params], use_tqdm=False)
    assert (refusal.value.code, refusal.value.param) == (ErrorCode.INVALID, param)


def test_beams_are_at_least_as_probable_as_the_greedy_output(demo: LLM) -> None:
    params = SamplingParams(temperature=0, beam_width=4, n=4, max_tokens=16, length_penalty=0.0)
    (search,) = demo.generate(TEXTS[0], params, use_tqdm=False)
    (greedy,) = demo.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=16, logprobs=0), use_tqdm=False)

    scores = [output.score for output in search.outputs]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] >= greedy.outputs[0].cumulative_logprob - 1e-3
    assert len({output.text for output in search.outputs}) == 4
