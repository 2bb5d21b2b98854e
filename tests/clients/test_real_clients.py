"""Clients that others wrote see what Quire says: whole, streamed, in a second turn, with tools, with an error.

Each runs as its users run it, in an environment of its own that ``make clients`` makes. What it saw is held against
what Quire answers to the same request without a library between.
"""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.browser.conftest import needs_chromium
from tests.clients import coding_agents
from tests.clients.open_webui import open_webui
from tests.clients.suite import (
    AGENTS,
    AIPERF,
    ANTHROPIC,
    ANTHROPIC_JS,
    CLIENTS,
    CODING_AGENTS,
    COHERE,
    DEMO,
    GO,
    GRPCURL,
    GUIDELLM,
    LANGCHAIN_JS,
    LITELLM,
    LLM,
    LM_EVAL,
    MODEL,
    NODE,
    OPEN_WEBUI,
    PROGRAMS,
    PROXY,
    TIMEOUT,
    VERCEL,
    VLLM,
    Server,
    needs,
    run,
)
from tests.support.processes import Router, eventually
from tests.support.scripted_api import Limits, open_stage, script_of
from tests.support.tool_models import THINKING_TEMPLATE

USUAL = "streamed, second turn, tools, error"
client = pytest.mark.client
GIVEN = json.loads((PROGRAMS / "scenarios.json").read_text())
FIRST, PARAMETERS = GIVEN["first"], GIVEN["parameters"]


@pytest.fixture(scope="session")
def expected(server: Server) -> dict[str, Any]:
    """What each scenario gives when asked by hand."""
    first = server.ask(messages=FIRST, **PARAMETERS)
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = server.ask(messages=[*FIRST, said, GIVEN["second"]], **PARAMETERS)
    usage = first["usage"]
    return {
        "streamed": {"text": said["content"], "usage": [usage["prompt_tokens"], usage["completion_tokens"]]},
        "second_turn": {"text": second["choices"][0]["message"]["content"]},
        "streamed_error": server.stream_error(messages=FIRST, **{**PARAMETERS, **GIVEN["endless"]}),
    }


def after_the_tool(server: Server, arguments: str) -> str:
    """The text that follows the tool's result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked = [
        *GIVEN["cities"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": GIVEN["result"]},
    ]
    text: str = server.ask(messages=asked, tools=[GIVEN["tool"]], **PARAMETERS)["choices"][0]["message"]["content"]
    return text


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each scenario of each client gave what Quire said."""
    assert found
    for client, seen in found.items():
        assert seen["streamed"] == expected["streamed"], (client, seen["streamed"])
        assert seen["second_turn"] == expected["second_turn"], (client, seen["second_turn"])
        assert "error" not in seen["tool_loop"], (client, seen["tool_loop"])
        arguments = seen["tool_loop"]["arguments"]
        assert json.loads(arguments)["city"] in ("Rome", "Oslo"), (client, arguments)
        assert seen["tool_loop"]["text"], client
        assert expected["streamed_error"] in seen["streamed_error"].get("error", ""), (client, seen["streamed_error"])


@client("openai (Python)", "streamed, second turn, parsed answers, tools, error", "openai==")
@needs(AGENTS)
def test_the_openai_package_of_python(server: Server, expected: dict[str, Any]) -> None:
    found = run([AGENTS, PROGRAMS / "openai_client.py", server.url, server.slow_url])
    check(found, expected)
    assert json.loads(found["openai"]["parsed_turn"]["text"])["total"] in (12, 7)
    loop = found["openai"]["tool_loop"]
    assert loop["text"] == after_the_tool(server, loop["arguments"])


@client("openai (Python), on Responses", f"{USUAL}, parsed answers, stored responses", "openai==")
@client("openai-agents (Python), on Responses", f"{USUAL}, with the API that it speaks by default", "openai-agents==")
@needs(AGENTS)
def test_openais_packages_of_python_on_responses(server: Server, expected: dict[str, Any]) -> None:
    found = run([AGENTS, PROGRAMS / "responses_client.py", server.url, server.slow_url])
    check(found, expected)
    seen = found["openai"]
    assert seen["parsed_turn"]["total"] in (12, 7), seen["parsed_turn"]
    assert seen["stored"] == {"text": expected["streamed"]["text"]}
    for loop in (each["tool_loop"] for each in found.values()):
        assert loop["text"] == after_the_tool(server, loop["arguments"])


@client("openai (JavaScript), on Responses", USUAL, "openai@")
@client(
    "openai-agents (JavaScript), on Responses", f"{USUAL}, with the API that it speaks by default", "@openai/agents@"
)
@client("Vercel AI SDK, on Responses", f"{USUAL}, with the API that `openai(…)` speaks", "ai@", "@ai-sdk/openai@")
@needs(VERCEL)
def test_packages_of_node_on_responses(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "responses_client.mjs", server.url, server.slow_url, NODE.parent])
    check(found, expected)
    for loop in (each["tool_loop"] for each in found.values()):
        assert loop["text"] == after_the_tool(server, loop["arguments"])


ENDPOINTS = "responses in the background, cancelled, in a conversation; embeddings in both encodings"
QUERY, DOCUMENTS = "foxes", ["the fox runs", "paris is the capital of france", "a dog"]


@client("openai (JavaScript), other endpoints", f"{ENDPOINTS}; input items, token counts, a key twice", "openai@")
@needs(NODE / "openai")
def test_other_endpoints_of_the_openai_package_of_node(
    server: Server, expected: dict[str, Any], pooling: Router
) -> None:
    program = PROGRAMS / "endpoints_client.mjs"
    (seen,) = run(["node", program, server.url, server.slow_url, NODE.parent, pooling.url]).values()
    check_endpoints(seen, expected, pooling)
    assert seen["background_stream"] == {"text": expected["streamed"]["text"]}
    assert seen["cancelled"] == {"status": "cancelled", "again": "cancelled"}
    assert seen["input_items"] == {
        "texts": [FIRST[0]["content"], "12", GIVEN["second"]["content"]],
        "tokens": expected["streamed"]["usage"][0],
    }
    assert seen["refused"] == {"class": "ConflictError", "status": 409, "param": "idempotency-key"}


@client("openai (Python), other endpoints", ENDPOINTS, "openai==")
@client("cohere (Python)", "`rerank` of both of its clients", "cohere==")
@needs(COHERE)
def test_other_endpoints_of_packages_of_python(server: Server, expected: dict[str, Any], pooling: Router) -> None:
    found = run([COHERE, PROGRAMS / "endpoints_client.py", server.url, pooling.url])
    check_endpoints(found["openai"], expected, pooling)
    assert found["openai"]["cancelled"] == {"status": "cancelled"}
    ranked = pooling_answer(pooling, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    scores = [[each["index"], pytest.approx(each["relevance_score"])] for each in ranked]
    assert found["cohere"]["reranked"]["results"] == scores[:2]
    assert found["cohere"]["with_documents"]["results"] == [[index, DOCUMENTS[index]] for index, _ in scores]


def check_endpoints(seen: dict[str, Any], expected: dict[str, Any], pooling: Router) -> None:
    """A response in the background, a conversation and embeddings are what is said by hand."""
    text = expected["streamed"]["text"]
    assert seen["background"] == {"text": text, "status": "completed"}
    talk = seen["conversation"]
    assert (talk["first"], talk["text"], talk["deleted"]) == (text, expected["second_turn"]["text"], True)
    assert talk["texts"] == [FIRST[0]["content"], text, GIVEN["second"]["content"], talk["text"]]
    data = pooling_answer(pooling, "/v1/embeddings", input=DOCUMENTS[:2])["data"]
    for encoding in ("base64", "float"):
        found = seen["embeddings"][encoding]
        assert [pytest.approx(each["embedding"], abs=1e-6) for each in data] == found


def pooling_answer(pooling: Router, path: str, **fields: object) -> dict[str, Any]:
    answer = httpx.post(f"{pooling.url}{path}", json={"model": MODEL, **fields}, timeout=60)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_scores_by_plain_http_are_those_of_a_ranking(pooling: Router) -> None:
    scores = pooling_answer(pooling, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    ranked = pooling_answer(pooling, "/v2/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked} == {
        each["index"]: pytest.approx(each["score"]) for each in scores
    }


@client("openai (JavaScript), on files and batches", "upload, batch, lists page by page, content", "openai@")
@needs(NODE / "openai")
def test_openais_package_of_node_on_batches(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "batches_client.mjs", server.url, NODE.parent])
    text = expected["streamed"]["text"]
    assert found == {
        "status": "completed",
        "texts": [text, text],
        "files": [True, True],
        "batches": True,
        "same": True,
        "deleted": True,
    }


@client("anthropic (Python)", f"{USUAL}, parsed answers, token counts", "anthropic==")
@needs(ANTHROPIC)
def test_anthropics_package_of_python(server: Server, expected: dict[str, Any]) -> None:
    found = run([ANTHROPIC, PROGRAMS / "anthropic_client.py", server.url, server.slow_url])
    check_messages(server, found, expected)
    seen = found["anthropic"]
    assert seen["parsed_turn"]["total"] in (12, 7), seen["parsed_turn"]
    assert seen["streamed_error"]["type"] == "timeout_error"
    assert seen["refused"]["code"] == "model_not_found"
    assert seen["counted"]["beta"] == seen["counted"]["tokens"]


@client("anthropic (Node)", f"{USUAL}, token counts", "@anthropic-ai/sdk@")
@needs(ANTHROPIC_JS)
def test_anthropics_package_of_node(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "anthropic_client.mjs", server.url, server.slow_url, NODE])
    check_messages(server, found, expected)


@needs(ANTHROPIC_JS)
async def test_anthropics_package_of_node_reads_thinking() -> None:
    """Of a scripted engine, as the demo model does not think."""
    async with open_stage(script_of("<think>hm</think>yes"), template=THINKING_TEMPLATE) as stage:
        stage.fleet.model_limits = Limits(4096)
        program = ["node", PROGRAMS / "anthropic_thinking.mjs", f"http://127.0.0.1:{stage.port}", "-", NODE]
        (seen,) = (await asyncio.to_thread(run, program)).values()
        prompts = [generation.prompt_token_ids for generation in stage.runner.generations]
    thinking = seen["thinking"]
    assert (thinking["thinking"], thinking["text"], thinking["details"]) == ("hm", "yes", None)
    assert (thinking["block"]["type"], thinking["block"]["thinking"]) == ("thinking", "hm")
    assert thinking["types"] == seen["beta"]["types"] == ["thinking", "text"]
    assert seen["beta"]["reason"] == "end_turn"
    assert len(prompts[1]) > len(prompts[0]) == len(prompts[2])


def check_messages(server: Server, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """As ``check``; what the Messages API answers is what a chat does."""
    check(found, expected)
    (seen,) = found.values()
    assert seen["tool_loop"]["text"] == after_the_tool(server, seen["tool_loop"]["arguments"])
    assert seen["counted"]["tokens"] == expected["streamed"]["usage"][0]
    refusal = seen["refused"]
    assert (refusal["class"], refusal["type"]) == ("NotFoundError", "not_found_error")
    assert len(refusal["id"]) == 32


@client("openai-agents (Python)", f"{USUAL}, with chat completions as its API", "openai-agents==")
@needs(AGENTS)
def test_openai_agents_of_python(server: Server, expected: dict[str, Any]) -> None:
    check(run([AGENTS, PROGRAMS / "agents_client.py", server.url, server.slow_url]), expected)


@client("LiteLLM as a library", f"{USUAL}, over its providers `openai` and `hosted_vllm`", "litellm[proxy]==")
@needs(LITELLM)
def test_litellm_as_a_library(server: Server, expected: dict[str, Any]) -> None:
    check(run([LITELLM, PROGRAMS / "litellm_client.py", server.url, server.slow_url]), expected)


@client("LiteLLM as a proxy", "the same, through its proxy", "litellm[proxy]==")
@needs(PROXY)
def test_litellm_as_a_proxy(server: Server, litellm_proxy: str, expected: dict[str, Any]) -> None:
    program = [LITELLM, PROGRAMS / "litellm_client.py"]
    check(run([*program, server.url, server.slow_url, litellm_proxy]), expected)


LANGCHAIN = client(
    "LangChain, with langchain-openai", f"{USUAL}, structured output", "langchain==", "langchain-openai=="
)
LLAMAINDEX = client("LlamaIndex, with OpenAILike", USUAL, "llama-index-core==")
PYDANTIC_AI = client("pydantic-ai", f"{USUAL}, `NativeOutput`", "pydantic-ai-slim[openai]==")
HAYSTACK = client("haystack", USUAL, "haystack-ai==")
AUTOGEN = client("AutoGen", USUAL, "autogen-agentchat==")
SEMANTIC_KERNEL = client("Semantic Kernel", USUAL, "semantic-kernel==")
PARSING = ("langchain", "pydantic-ai")  # that are asked for an answer of a schema too


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("langchain", marks=LANGCHAIN),
        pytest.param("llamaindex", marks=LLAMAINDEX),
        pytest.param("pydantic-ai", marks=PYDANTIC_AI),
        pytest.param("haystack", marks=HAYSTACK),
        pytest.param("autogen", marks=AUTOGEN),
        pytest.param("semantic-kernel", marks=SEMANTIC_KERNEL),
    ],
)
def test_frameworks_chat_stream_and_call_tools(server: Server, expected: dict[str, Any], name: str) -> None:
    """Their own messages go back to Quire."""
    seen = run_framework(name, server.url, server.slow_url)
    check({name: seen}, expected)
    if name in PARSING:
        assert seen["parsed_turn"]["total"] in (12, 7)


@client(
    "pydantic-ai, on Responses", f"{USUAL}, `NativeOutput`, with the API of `openai:`", "pydantic-ai-slim[openai]=="
)
def test_pydantic_ai_on_responses(server: Server, expected: dict[str, Any]) -> None:
    seen = run_framework("pydantic-ai", server.url, server.slow_url, api="-responses")
    check({"pydantic-ai": seen}, expected)
    assert seen["parsed_turn"]["total"] in (12, 7)


@client("smolagents", "streamed, second turn, error", "smolagents==")
def test_smolagents_chats_and_streams(server: Server, expected: dict[str, Any]) -> None:
    seen = run_framework("smolagents", server.url, server.slow_url)
    for scenario in ("streamed", "second_turn"):
        assert seen[scenario] == expected[scenario]
    assert expected["streamed_error"] in seen["streamed_error"]["error"]


@client("instructor", "modes `TOOLS` and `JSON_SCHEMA`, partial objects", "instructor==")
def test_instructor_gets_an_object_in_each_mode_that_has_a_schema(server: Server) -> None:
    seen = run_framework("instructor", server.url)
    assert not [found for found in seen.values() if "error" in found], seen
    assert {mode: found["total"] for mode, found in seen.items()} == dict.fromkeys(seen, seen["tools"]["total"])
    assert seen["tools"]["total"] in (12, 7)


@client("DSPy", "its `LM`; its adapters need a model that follows their format", "dspy==")
def test_dspy_chats(server: Server, expected: dict[str, Any]) -> None:
    seen = run_framework("dspy", server.url)
    assert seen["whole"]["text"] == expected["streamed"]["text"]
    assert seen["second_turn"] == expected["second_turn"]


def run_framework(name: str, *urls: str, api: str = "") -> dict[str, Any]:
    """What the program of one client saw on an ``api``; it has an environment of its name. Skips where it is not
    installed.
    """
    python = CLIENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip("make clients installs the clients and runs these tests")
    found: dict[str, Any] = run([python, PROGRAMS / f"{name.replace('-', '_')}_client.py", *urls])[name + api]
    return found


@client("lm-eval, `local-completions`", "a multiple choice: each log-likelihood is the model's", "lm-eval[api]==")
@needs(LM_EVAL)
def test_lm_eval_reads_log_likelihoods_of_prompts(server: Server, tmp_path: Path) -> None:
    """A task of its own: of two endings the one that the model finds more probable counts as its choice. Behind some of
    them the model stops at once.
    """
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CHOICES))
    (tmp_path / "sums.yaml").write_text(json.dumps(TASK | {"dataset_kwargs": {"data_files": {"test": "data.jsonl"}}}))
    flags = {
        "model": "local-completions", "tasks": "sums", "include_path": tmp_path, "output_path": tmp_path / "out",
        "model_args": f"model={MODEL},base_url={server.url}/v1/completions,tokenizer={server.folder},num_concurrent=4",
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "OPENAI_API_KEY": "none"}
    command = [LM_EVAL, *words, "--log_samples"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(CHOICES)
    for sample in samples:
        doc = sample["doc"]
        for ending, ((found, _),) in zip(doc["endings"], sample["resps"], strict=True):
            assert float(found) == pytest.approx(log_likelihood(server.folder, doc["question"], f" {ending}"), abs=1e-3)


def log_likelihood(folder: Path, prompt: str, ending: str) -> float:
    """The log-probability of ``ending`` behind ``prompt`` in transformers: the sum of its tokens'."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = len(tokenizer(prompt).input_ids)
    token_ids = tokenizer(prompt + ending, return_tensors="pt").input_ids[0]
    with torch.no_grad():
        rows = model(token_ids[None]).logits[0].log_softmax(-1)
    return float(sum(rows[at - 1, token_ids[at]] for at in range(before, len(token_ids))))


CHOICES = [
    {"question": "The answer is", "endings": ["12.", "girl"], "right": 0},
    {"question": "What is 7", "endings": ["plus 5", "girl"], "right": 0},
    {"question": "Once upon a time there was a", "endings": ["little girl", "7 plus"], "right": 0},
]
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{endings}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}],
}


@client("grpcurl", "list, describe and call by reflection", "github.com/fullstorydev/grpcurl/cmd/grpcurl@v")
@needs(GRPCURL)
def test_grpcurl_finds_and_calls_the_service_by_reflection(server: Server) -> None:
    def call(*words: str) -> str:
        done = subprocess.run(
            [GRPCURL, "-plaintext", *words], check=False, capture_output=True, text=True, timeout=TIMEOUT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "quire.v1.Inference" in call(server.grpc_address, "list").split()
    assert "rpc Generate (" in call(server.grpc_address, "describe", "quire.v1.Inference")
    assert json.loads(call(server.grpc_address, "quire.v1.Inference/ListModels"))["models"][0]["name"] == MODEL
    body = json.dumps({"model": MODEL, "text": "Once upon a time", "sampling": {"max_tokens": 4, "temperature": 0}})
    pieces = json_values(call("-d", body, server.grpc_address, "quire.v1.Inference/Generate"))
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "logprobs": 0}
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).raise_for_status().json()["choices"]
    assert "".join(piece.get("text", "") for piece in pieces) == choice["text"], pieces
    token_ids = [token_id for piece in pieces for token_id in piece.get("token_ids", ())]
    tokenizer = AutoTokenizer.from_pretrained(server.folder)
    assert [tokenizer.decode([token_id]) for token_id in token_ids] == choice["logprobs"]["tokens"], pieces
    assert len(token_ids) == 4


def json_values(text: str) -> list[dict[str, Any]]:
    """The values that are written one after the other."""
    found, decoder = [], json.JSONDecoder()
    while text := text.lstrip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return found


@client("llm", "streamed, second turn, error, at the command line", "llm==")
@needs(LLM)
def test_llm_at_the_command_line(server: Server, expected: dict[str, Any], tmp_path: Path) -> None:
    models = [
        {"model_id": name, "model_name": MODEL, "api_base": f"{url}/v1"}
        for name, url in (("quire", server.url), ("slow", server.slow_url))
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def prompt(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
        given = [word for name, value in options.items() for word in ("-o", name, str(value))]
        command = [LLM, *words, *given]
        return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT)

    asked, again = FIRST[0]["content"], GIVEN["second"]["content"]
    assert prompt("prompt", "-m", "quire", asked, **PARAMETERS).stdout == expected["streamed"]["text"] + "\n"
    (logged,) = json.loads(prompt("logs", "list", "--json").stdout)
    assert [logged["input_tokens"], logged["output_tokens"]] == expected["streamed"]["usage"]
    assert prompt("prompt", "--continue", again, **PARAMETERS).stdout == expected["second_turn"]["text"] + "\n"
    endless = {name: json.dumps(value) for name, value in GIVEN["endless"].items()}
    failed = prompt("prompt", "-m", "slow", asked, temperature=0, **endless)
    assert failed.returncode == 1
    assert expected["streamed_error"] in failed.stderr


@client("curl", "a stream", version="the system's")
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_prints_a_stream_as_it_comes(server: Server, expected: dict[str, Any]) -> None:
    body = json.dumps({"model": MODEL, "messages": FIRST, "stream": True, **PARAMETERS})
    command = ["curl", "-sN", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    *events, last = [line.removeprefix("data: ") for line in done.stdout.split("\n\n") if line]
    assert last == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == expected["streamed"]["text"]


@client("openai (Node), with zod", "streamed, second turn, parsed answers, tools, error", "openai@", "zod@")
@client("openai-agents (JavaScript)", f"{USUAL}, with chat completions as its API", "@openai/agents@")
@needs(NODE)
def test_the_openai_package_and_openai_agents_of_node(server: Server, expected: dict[str, Any]) -> None:
    check(run(["node", PROGRAMS / "node_clients.mjs", server.url, server.slow_url, NODE.parent]), expected)


@client(
    "Vercel AI SDK, with `@ai-sdk/openai` and `openai-compatible`",
    "streamed, second turn, tools and then an object, error",
    "ai@",
    "@ai-sdk/openai@",
    "@ai-sdk/openai-compatible@",
)
@needs(VERCEL)
def test_the_ai_sdk_of_vercel_calls_tools_and_then_answers_in_a_form(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "vercel_client.mjs", server.url, server.slow_url, NODE.parent])
    check(found, expected)
    assert all(seen["tool_loop"]["total"] in (12, 7) for seen in found.values())


@client(
    "LangChain (JavaScript), with `@langchain/openai`",
    f"{USUAL}, structured output",
    "langchain@",
    "@langchain/openai@",
)
@needs(LANGCHAIN_JS)
def test_langchain_of_javascript(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "langchain_client.mjs", server.url, server.slow_url, NODE.parent])
    check(found, expected)
    (seen,) = found.values()
    assert seen["parsed_turn"]["total"] in (12, 7)


@client("go-openai", USUAL, "github.com/sashabaranov/go-openai v")
@needs(GO)
def test_go_openai(server: Server, expected: dict[str, Any]) -> None:
    check(run([GO, server.url, server.slow_url, PROGRAMS / "scenarios.json"]), expected)


@client("`vllm bench serve`", "completions and chats, each token counted", version="of `make peers`")
@needs(VLLM)
@pytest.mark.parametrize(("backend", "path"), [("openai", "completions"), ("openai-chat", "chat/completions")])
def test_the_benchmark_of_vllm_counts_each_token(server: Server, tmp_path: Path, backend: str, path: str) -> None:
    flags = {
        "backend": backend, "base-url": server.url, "endpoint": f"/v1/{path}", "model": MODEL,
        "tokenizer": server.folder, "dataset-name": "random", "random-input-len": 32, "random-output-len": 16,
        "num-prompts": 24, "max-concurrency": 8, "seed": 1, "result-dir": tmp_path, "result-filename": "result.json",
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [VLLM, "bench", "serve", *words, "--ignore-eos", "--save-result"]
    done = subprocess.run(
        command, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (24, 0), done.stdout
    assert result["total_output_tokens"] == 24 * 16


@client("guidellm", "completions and chats, each token counted", "guidellm==")
@needs(GUIDELLM)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_guidellm_counts_each_token(server: Server, tmp_path: Path, path: str) -> None:
    report = tmp_path / "report.json"
    flags = {
        "backend": f"kind=openai_http,target={server.url},model={MODEL},request_format=/v1/{path}",
        "tokenizer": f"kind=hf_auto,model={server.folder}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=24",
        "output": f"kind=json,path={report}",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    command, environment = [GUIDELLM, "run", *words, "--disable-console"], {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(report.read_text())["benchmarks"]
    seen = run["metrics"]
    assert seen["request_totals"] == {"successful": 24, "errored": 0, "incomplete": 0, "total": 24}
    assert seen["output_token_count"]["successful"]["total_sum"] == 24 * 16


@client("aiperf", "chats with usage in each event, completions, each token counted", "aiperf==")
@needs(AIPERF)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_counts_each_token(server: Server, tmp_path: Path, endpoint: str) -> None:
    flags = {
        "model": MODEL, "url": server.url, "endpoint-type": endpoint, "tokenizer": server.folder, "request-count": 24,
        "concurrency": 8, "prompt-input-tokens-mean": 32, "prompt-output-tokens-mean": 16,
        "extra-inputs": "ignore_eos:true", "ui": "none", "workers-max": 2, "output-artifact-dir": tmp_path,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    switches = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry"]
    if endpoint == "chat":
        switches.append("--per-chunk-usage")  # which aiperf itself refuses for any other
    # Told that it is offline it looks for a folder's name among downloaded models, and nowhere else.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [AIPERF, "profile", *words, *switches]
    done = subprocess.run(
        command, cwd=tmp_path, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (seen["request_count"]["avg"], seen["error_summary"]) == (24, [])
    assert seen["total_usage_completion_tokens"]["avg"] == 24 * 16


@pytest.fixture
def without_tools(server: Server, tmp_path: Path) -> Iterator[tuple[Server, Router]]:
    """The server with a router whose template leaves tools out, and that router: Open WebUI's own tools, which it
    sends with each message, take more than the 2,048 tokens that the demo model has room for.
    """
    router = Router(DEMO, [server.engine.address], tmp_path, name=MODEL)
    try:
        router.wait_ready()
        yield dataclasses.replace(server, folder=DEMO, url=router.url, grpc_address=router.grpc_address), router
    finally:
        router.stop()


@client("Open WebUI", "in Chromium: its list of models, two turns, Stop, a reload", "open-webui==")
@needs(OPEN_WEBUI, "make clients OPEN_WEBUI=1 (1.7 GB)")
@needs_chromium
def test_open_webui_chats_stops_and_keeps_its_chats(without_tools: tuple[Server, Router], tmp_path: Path) -> None:
    """As its user sees it. Stop is pressed in the middle of an answer, while the engine is held."""
    server, router = without_tools
    story, sums = "Tell me a story", "What is 7 plus 5?"

    def whole(*said: str) -> str:
        roles = [("user", "assistant")[at % 2] for at in range(len(said))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        text: str = server.ask(messages=messages)["choices"][0]["message"]["content"]
        return text

    def cancelled() -> float:
        return router.metric("quire_requests_total", model=MODEL, finish_reason="abort")

    with open_webui(tmp_path, server.url) as page:
        page.open()
        assert page.models() == [MODEL]
        page.say(story)
        first = whole(story)
        assert page.answer() == " ".join(first.split())
        page.say(sums)
        assert page.answer() == " ".join(whole(story, first, sums).split())
        before = cancelled()
        server.engine.signal(signal.SIGSTOP)
        try:
            page.say(story)
            part = page.see_a_part(server.engine)
            page.stop()
            eventually(lambda: cancelled() == before + 1, message="the router never saw that the answer was stopped")
        finally:
            server.engine.signal(signal.SIGCONT)
        kept = page.texts()
        assert len(kept) == 3
        assert kept[-1].startswith(part)
        page.browser.driver.refresh()
        page.browser.wait(lambda: len(page.texts()) == 3 and all(page.texts()))
        assert page.texts() == kept
        page.say(sums)
        assert page.answer()


ASKED = "at the command line: its own requests with their tools, each stream to its end"


@needs(CODING_AGENTS)
@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(coding_agents.OPENCODE, marks=client("opencode", ASKED, "opencode-ai@"), id="opencode"),
        pytest.param(coding_agents.QWEN_CODE, marks=client("Qwen Code", ASKED, "@qwen-code/qwen-code@"), id="qwen"),
        pytest.param(coding_agents.CONTINUE, marks=client("Continue", ASKED, "@continuedev/cli@"), id="continue"),
        pytest.param(coding_agents.CLINE, marks=client("Cline", ASKED, "cline@"), id="cline"),
        pytest.param(
            coding_agents.CLAUDE_CODE,
            marks=client("Claude Code", f"{ASKED}, over `/v1/messages`", "@anthropic-ai/claude-code@"),
            id="claude",
        ),
        pytest.param(
            coding_agents.CODEX,
            marks=client("Codex CLI", f"{ASKED}, over `/v1/responses`", "@openai/codex@"),
            id="codex",
        ),
        pytest.param(
            coding_agents.AIDER,
            marks=client("aider", ASKED.replace(" with their tools", ""), "aider-chat=="),
            id="aider",
        ),
    ],
)
def test_coding_agents_print_what_they_are_told(roomy: Router, tmp_path: Path, agent: coding_agents.Agent) -> None:
    with coding_agents.recorder(roomy.url) as (url, exchanges):
        printed = agent.ask("What is 7 plus 5?", tmp_path, url)
    assert exchanges
    for exchange in exchanges:
        assert exchange.status == 200, exchange.request
        assert exchange.ended, exchange.events[-3:]
    assert any(exchange.text and exchange.text in printed for exchange in exchanges), (printed, exchanges)
    assert agent.has_tools == any(exchange.request.get("tools") for exchange in exchanges)
