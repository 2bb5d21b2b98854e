"""What the tests of clients share: where the clients are, the server that they talk to, and how one is run."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Engine

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = ROOT / ".clients"
"""Where ``make clients`` puts the environments of the clients."""
AGENTS, LITELLM, PROXY = (CLIENTS / path for path in ("agents/bin/python", "litellm/bin/python", "litellm/bin/litellm"))
NODE, GO = CLIENTS / "node" / "node_modules", CLIENTS / "go" / "clients"
VERCEL, LANGCHAIN_JS = NODE / "ai", NODE / "@langchain" / "openai"
ANTHROPIC, ANTHROPIC_JS = CLIENTS / "anthropic" / "bin" / "python", NODE / "@anthropic-ai" / "sdk"
COHERE = CLIENTS / "cohere" / "bin" / "python"
AIPERF, GUIDELLM = CLIENTS / "aiperf" / "bin" / "aiperf", CLIENTS / "guidellm" / "bin" / "guidellm"
CODING_AGENTS = CLIENTS / "coding" / "node_modules" / ".bin"
OPEN_WEBUI = CLIENTS / "open-webui" / "bin" / "open-webui"
LLM = CLIENTS / "llm" / "bin" / "llm"
LM_EVAL, GRPCURL = CLIENTS / "lm-eval" / "bin" / "lm_eval", CLIENTS / "go" / "grpcurl"
VLLM = ROOT / ".peers" / "vllm" / "bin" / "vllm"
MODEL = "tools"
TIMEOUT = 240
"""Seconds that a client's program may take for all of its scenarios."""


@dataclass(frozen=True)
class Server:
    """Where the two routers are, and the folder of their model. ``slow_url`` ends each request after 0.4 s."""

    folder: Path
    engine: Engine
    grpc_address: str
    url: str
    slow_url: str

    def ask(self, **fields: object) -> dict[str, Any]:
        """The answer to a chat request, asked for without any client's library."""
        answer = httpx.post(f"{self.url}/v1/chat/completions", json={"model": MODEL, **fields}, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def stream_error(self, **fields: object) -> str:
        """The sentence of the error that ends a stream of the slow router."""
        body = {"model": MODEL, "stream": True, **fields}
        answer = httpx.post(f"{self.slow_url}/v1/chat/completions", json=body, timeout=60)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        message: str = events[-1]["error"]["message"]
        assert message, events[-1]
        return message


def needs(path: Path, how: str = "make clients") -> pytest.MarkDecorator:
    """Skips a test where the client that it drives is not installed."""
    return pytest.mark.skipif(not path.exists(), reason=f"{how} installs the clients and runs these tests")


def run(command: Sequence[object]) -> dict[str, Any]:
    """What a client's program says that it saw, for each client and scenario."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": str(PROGRAMS)}
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
