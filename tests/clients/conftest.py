"""One engine with a model that knows tools behind two routers: one that answers, and one whose requests time out."""

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import table
from tests.support.ports import free_port
from tests.support.processes import Engine, Process, Router, wait_healthy

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = ROOT / ".clients"
"""Where ``make clients`` puts the environments of the clients."""
AGENTS, LITELLM, PROXY = (CLIENTS / path for path in ("agents/bin/python", "litellm/bin/python", "litellm/bin/litellm"))
NODE, GO = CLIENTS / "node" / "node_modules", CLIENTS / "go" / "clients"
VERCEL, LANGCHAIN_JS = NODE / "ai", NODE / "@langchain" / "openai"
AIPERF, GUIDELLM = CLIENTS / "aiperf" / "bin" / "aiperf", CLIENTS / "guidellm" / "bin" / "guidellm"
CODING_AGENTS = CLIENTS / "coding" / "node_modules" / ".bin"
OPEN_WEBUI = CLIENTS / "open-webui" / "bin" / "open-webui"
LLM = CLIENTS / "llm" / "bin" / "llm"
LM_EVAL, GRPCURL = CLIENTS / "lm-eval" / "bin" / "lm_eval", CLIENTS / "go" / "grpcurl"
VLLM = ROOT / ".peers" / "vllm" / "bin" / "vllm"
MODEL = "tools"
OUTCOMES: defaultdict[str, list[str]] = defaultdict(list)
"""Of all tests of each client, by its name in the table."""
SMALL = ("--kv-cache-memory", str(64 << 20), "--swap-space", "0.0625", "--dtype", "float32")
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write the table in docs/clients.md anew")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for mark in item.iter_markers("client"):
            OUTCOMES[mark.args[0]].append(report.outcome)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-table", default=False):
        from tests.clients import test_real_clients

        try:
            table.write(table.marks_of(test_real_clients), OUTCOMES)
        except LookupError as error:
            sys.stderr.write(f"\nThe table of clients stays as it is: {error}.\n")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("clients") / DEMO.name))
    shutil.copy(DEMO.parent / "templates" / "hermes.jinja", folder / "chat_template.jinja")
    engine = Engine(folder, folder.parent, *SMALL, name=MODEL)
    routers = [
        Router(folder, [engine.address], folder.parent, *flags, name=MODEL)
        for flags in ((), ("--request-timeout", "0.4"))
    ]
    try:
        for process in (engine, *routers):
            process.wait_ready()
        yield Server(folder, engine, routers[0].grpc_address, *(router.url for router in routers))
    finally:
        for process in (*routers, engine):
            process.stop()


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router of the demo model with room for what agents tell it before a question, up to 34,000 tokens: it says
    nothing of sense behind so many.
    """
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("agents") / DEMO.name))
    shutil.copy(DEMO.parent / "templates" / "hermes.jinja", folder / "chat_template.jinja")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 49_152}))
    engine = Engine(folder, folder.parent, "--kv-cache-memory", str(512 << 20), "--swap-space", "0.0625", name=MODEL)
    router = Router(folder, [engine.address], folder.parent, name=MODEL)
    try:
        engine.wait_ready()
        router.wait_ready()
        yield router
    finally:
        router.stop()
        engine.stop()


@pytest.fixture(scope="session")
def litellm_proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """LiteLLM's proxy before both routers, over two of its providers."""
    folder, port = tmp_path_factory.mktemp("proxy"), free_port()
    models = [
        {
            "model_name": f"{kind}{provider}-{MODEL}",
            "litellm_params": {"model": f"{provider}/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for kind, url in (("", server.url), ("slow-", server.slow_url))
        for provider in ("openai", "hosted_vllm")
    ]
    settings = {"num_retries": 0, "allowed_fails": 1000}
    config = folder / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "model_list": models,
                "router_settings": {**settings, "disable_cooldowns": True},
                "general_settings": {"master_key": "sk-proxy"},
            }
        )
    )
    command = [str(PROXY), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    process = Process(command, folder / "proxy.log", {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True"})
    try:
        wait_healthy(process, port, "/health/liveliness")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


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
