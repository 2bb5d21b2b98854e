"""The offline API and the REST API say the same: text by text, for the same requests with the same seeds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from quire_engine import LLM, SamplingParams

from tests.service.conftest import DEMO, FLOAT32, MODEL, SMALL_POOLS
from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.hub_server import HubServer, hub_server

PROMPTS = ["Once upon a time", "The small owl said", "What is 7 plus 5?"]
CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11},
    "narrow": {"seed": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    "stop": {"seed": 2, "stop": [".", "and"]},
    "stop kept": {"seed": 2, "stop": [".", "and"], "include_stop_str_in_output": True},
    "choices": {"seed": 3, "n": 3},
    "choices with a stop": {"seed": 3, "n": 3, "stop": ","},
    "best of": {"seed": 4, "n": 2, "best_of": 5},
    "penalties": {"seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "bad words": {"seed": 7, "bad_words": ["the", "owl"]},
    "special tokens": {"seed": 8, "ignore_eos": True, "skip_special_tokens": False},
    "min tokens": {"seed": 9, "min_tokens": 30},
}
OPENAI = {"temperature", "seed", "top_p", "n", "best_of", "stop", "presence_penalty", "frequency_penalty"}
LENGTH = 40


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("llm")
    engine = ForkedEngine(DEMO, folder, *SMALL_POOLS, *FLOAT32)
    router = ForkedRouter(DEMO, [engine.address], folder)
    try:
        engine.wait_ready()
        router.wait_ready()
        yield OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        router.stop()
        engine.stop()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(Path(DEMO), dtype="float32", kv_cache_memory=64 << 20, swap_space=0.0625) as llm:
        yield llm


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_completions_are_the_same(client: OpenAI, llm: LLM, case: dict[str, object]) -> None:
    offline = llm.generate(PROMPTS, SamplingParams(max_tokens=LENGTH, **case), use_tqdm=False)

    known = {name: value for name, value in case.items() if name in OPENAI}
    extra = {name: value for name, value in case.items() if name not in OPENAI}
    for prompt, result in zip(PROMPTS, offline, strict=True):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=LENGTH, **known, extra_body=extra)
        served = [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]
        assert [(each.index, each.text, each.finish_reason) for each in result.outputs] == served
        assert answer.usage.prompt_tokens == len(result.prompt_token_ids)


def test_answers_to_conversations_are_the_same(client: OpenAI, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a short story."}]
    (offline,) = llm.chat(messages, SamplingParams(seed=1, max_tokens=LENGTH, n=2, logprobs=2), use_tqdm=False)
    served = client.chat.completions.create(
        model=MODEL, messages=messages, seed=1, max_tokens=LENGTH, n=2, logprobs=True, top_logprobs=2
    )

    assert [each.text for each in offline.outputs] == [choice.message.content for choice in served.choices]
    for output, choice in zip(offline.outputs, served.choices, strict=True):
        told = [position[token].logprob for position, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert told == pytest.approx([each.logprob for each in choice.logprobs.content], abs=1e-4)


SNIPPET = """
import os
from vllm import LLM, SamplingParams, destroy_model_parallel

model = LLM(model=os.environ["MODEL"], tokenizer=os.environ["MODEL"], dtype="float16")
sampling_params = SamplingParams(temperature=0.5, top_p=0.95, top_k=50)
outputs = model.generate(["Once upon a time", "The small owl said"], sampling_params=sampling_params)
for output in outputs:
    print(output.prompt, "->", output.outputs[0].text)
destroy_model_parallel()
"""
FIND = """
import os, sys
from quire_engine.errors import ModelError
from quire_engine.llm.model_folder import find_model_folder
try:
    print(find_model_folder(os.environ["MODEL"], allow_download=os.environ["ALLOWED"] == "yes"))
except ModelError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with hub_server() as hub:
        files = {each.name: each.read_bytes() for each in Path(DEMO).iterdir() if each.is_file()}
        hub.add("org/demo", {**files, "run.py": b"raise SystemExit", "original/model.safetensors": b"for others"})
        yield hub


def run_program(text: str, hub: HubServer, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "QUIRE_ENGINE_KV_CACHE_MEMORY": str(64 << 20), **variables}
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False, timeout=120)


def test_the_usual_program_for_vllm_runs_with_only_its_import_changed(hub: HubServer, tmp_path: Path) -> None:
    program = SNIPPET.replace("from vllm", "from quire_engine")
    done = run_program(program, hub, tmp_path, MODEL=str(DEMO))
    assert done.returncode == 0, done.stderr
    assert [line.partition(" -> ")[0] for line in done.stdout.splitlines() if " -> " in line] == [
        "Once upon a time",
        "The small owl said",
    ]


def test_a_model_of_the_hub_is_downloaded_only_when_that_is_allowed(hub: HubServer, tmp_path: Path) -> None:
    refused = run_program(FIND, hub, tmp_path, MODEL="org/demo", ALLOWED="no")
    assert "let LLM do so with allow_download=True" in refused.stderr
    found = Path(run_program(FIND, hub, tmp_path, MODEL="org/demo", ALLOWED="yes").stdout.strip())
    assert {each.name for each in found.rglob("*")} == {each.name for each in Path(DEMO).iterdir() if each.is_file()}
    again = run_program(FIND, hub, tmp_path, MODEL="org/demo", ALLOWED="no", HF_ENDPOINT="http://127.0.0.1:9")
    assert Path(again.stdout.strip()) == found

    commit = found.name
    pinned = run_program(
        FIND, hub, tmp_path, MODEL=f"org/demo@{commit}", ALLOWED="no", HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert Path(pinned.stdout.strip()) == found
    for name in ("org/other", "org/demo@other"):
        unknown = run_program(FIND, hub, tmp_path, MODEL=name, ALLOWED="yes")
        assert unknown.returncode == 1
        assert unknown.stderr.startswith(f"{name} cannot be downloaded: ")
        assert unknown.stderr.count("\n") == 1
