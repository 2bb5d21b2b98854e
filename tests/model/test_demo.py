"""The demo model through the engine: it fits its size, answers, ends by itself, and equals transformers' own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from quire_proto.sampling import SamplingParams
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model.engine import run
from tests.support.executors import load_executor

DEMO = Path(__file__).parents[2] / "demo" / "model"
CONVERSATIONS = {
    "7 + 5 = 12.": ["What is 7 plus 5?"],
    "20 - 8 = 12.": ["What is 20 minus 8?"],
    "Your name is Mira.": ["My name is Mira.", "Nice to meet you, Mira.", "What is my name?"],
    "You said: blue tree.": ["Repeat after me: blue tree"],
}
STORY = ["Tell me a short story about a small owl."]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(DEMO)


def prompts_of(tokenizer: object) -> list[list[int]]:
    roles = ("user", "assistant")
    conversations = [
        [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
        for turns in [*CONVERSATIONS.values(), STORY]
    ]
    return [
        list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
        for turns in conversations
    ]


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 8_000_000


def test_its_answers_are_right_and_end_by_themselves(tokenizer: object) -> None:
    executor = load_executor(DEMO, kv_cache_memory=32 << 20, swap_bytes=0)
    prompts = prompts_of(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=400)
    made = run(executor, prompts, [params] * len(prompts))
    texts = [tokenizer.decode(output) for output in made.outputs]
    assert texts[:-1] == list(CONVERSATIONS)
    assert texts[-1].startswith("Once upon a time")
    assert all(len(output) < 400 for output in made.outputs), "an answer did not end"


def test_answers_end_at_the_token_that_only_the_tokenizer_names(tmp_path: Path, tokenizer: object) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "fine-tune", copy_function=shutil.copyfile))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": 0}))
    prompts = prompts_of(tokenizer)[:2]
    made = run(
        load_executor(folder, kv_cache_memory=32 << 20, swap_bytes=0),
        prompts,
        [SamplingParams(temperature=0, max_tokens=40)] * 2,
    )
    assert [tokenizer.decode(output) for output in made.outputs] == list(CONVERSATIONS)[:2]


def test_bfloat16_in_a_batch_equals_transformers_one_by_one(tokenizer: object) -> None:
    executor = load_executor(DEMO, kv_cache_memory=32 << 20, swap_bytes=0)
    prompts = prompts_of(tokenizer)
    ours = run(executor, prompts, [SamplingParams(temperature=0, max_tokens=200)] * len(prompts)).outputs
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    for prompt, output in zip(prompts, ours, strict=True):
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0, len(prompt) :].tolist()
        assert answer[: len(output)] == output
        assert answer[len(output) :] in ([], [tokenizer.eos_token_id])
