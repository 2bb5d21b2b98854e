"""Clients that others wrote see what Quire says: whole, streamed, in a second turn, with tools, with an error.

Each runs as its users run it, in an environment of its own that ``make clients`` makes. What it saw is held against
what Quire answers to the same request without a library between.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import (
    AGENTS,
    GO,
    LITELLM,
    MODEL,
    NODE,
    PROGRAMS,
    PROXY,
    TIMEOUT,
    VERCEL,
    VLLM,
    Server,
    needs,
    run,
)

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


@needs(AGENTS)
def test_the_openai_package_of_python(server: Server, expected: dict[str, Any]) -> None:
    found = run([AGENTS, PROGRAMS / "openai_client.py", server.url, server.slow_url])
    check(found, expected)
    assert json.loads(found["openai"]["parsed_turn"]["text"])["total"] in (12, 7)
    loop = found["openai"]["tool_loop"]
    assert loop["text"] == after_the_tool(server, loop["arguments"])


@needs(AGENTS)
def test_openai_agents_of_python(server: Server, expected: dict[str, Any]) -> None:
    check(run([AGENTS, PROGRAMS / "agents_client.py", server.url, server.slow_url]), expected)


@needs(LITELLM)
def test_litellm_as_a_library(server: Server, expected: dict[str, Any]) -> None:
    check(run([LITELLM, PROGRAMS / "litellm_client.py", server.url, server.slow_url]), expected)


@needs(PROXY)
def test_litellm_as_a_proxy(server: Server, litellm_proxy: str, expected: dict[str, Any]) -> None:
    program = [LITELLM, PROGRAMS / "litellm_client.py"]
    check(run([*program, server.url, server.slow_url, litellm_proxy]), expected)


@needs(NODE)
def test_the_openai_package_and_openai_agents_of_node(server: Server, expected: dict[str, Any]) -> None:
    check(run(["node", PROGRAMS / "node_clients.mjs", server.url, server.slow_url, NODE.parent]), expected)


@needs(VERCEL)
def test_the_ai_sdk_of_vercel_calls_tools_and_then_answers_in_a_form(server: Server, expected: dict[str, Any]) -> None:
    found = run(["node", PROGRAMS / "vercel_client.mjs", server.url, server.slow_url, NODE.parent])
    check(found, expected)
    assert all(seen["tool_loop"]["total"] in (12, 7) for seen in found.values())


@needs(GO)
def test_go_openai(server: Server, expected: dict[str, Any]) -> None:
    check(run([GO, server.url, server.slow_url, PROGRAMS / "scenarios.json"]), expected)


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
