"""One engine with a model that knows tools behind two routers: one that answers, and one whose requests time out."""

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.clients import table
from tests.clients.suite import DEMO, MODEL, PROXY, Server
from tests.support.ports import free_port
from tests.support.processes import Engine, Process, Router, wait_healthy
from tests.support.sentence_folders import decoder_folder

OUTCOMES: defaultdict[str, list[str]] = defaultdict(list)
"""Of all tests of each client, by its name in the table."""
SMALL = ("--kv-cache-memory", str(64 << 20), "--swap-space", "0.0625", "--dtype", "float32")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write the table in docs/recipes.md anew")


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
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router of a small model that makes embeddings, and scores by their cosine."""
    folder = decoder_folder(tmp_path_factory.mktemp("pooling"))
    engine = Engine(folder, folder.parent, *SMALL, name=MODEL)
    router = Router(folder, [engine.address], folder.parent, name=MODEL)
    try:
        engine.wait_ready()
        router.wait_ready()
        yield router
    finally:
        router.stop()
        engine.stop()


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router of the demo model with room for what agents tell it before a question, thousands of tokens: it says
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
