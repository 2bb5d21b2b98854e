"""The commands of the pages that a reader starts with, as they stand there: which are run, and why others are not."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README, ONE_GPU, RECIPES = Path("README.md"), Path("docs/one-gpu.md"), Path("docs/recipes.md")
BY_CLIENTS = "tests/clients runs it with the client that it is for"

NOT_RUN: Mapping[Path, Mapping[str, str]] = {
    README: {"from openai import OpenAI": "tests/service/test_examples.py runs it"},
    ONE_GPU: {
        "sudo apt install git g++ python3-dev python3-venv": "takes 6 GB and a GPU; the README's line runs the script",
        "flashinfer install-jit-cache-wheel --mode minimal": "needs an NVIDIA GPU",
        "quire    | 1 of 1 engines ready after … s": "what is printed: tests/first_hour compares it",
        '{"id": "chatcmpl-92966307…", "object": "chat.completion", "model": "quire-demo",': "what is printed",
        "export QUIRE_ROUTER_API_KEY=$(openssl rand -hex 16)": "opens the machine; tests/service/test_serve.py does",
        "export QUIRE_API_KEY=…": "the same",
        "import os": "the README's program with another address",
        'echo "QUIRE_ROUTER_API_KEY=$QUIRE_ROUTER_API_KEY" | sudo install -m 600 /dev/stdin /etc/quire.env': "a unit",
    },
    RECIPES: {
        ".venv/bin/python -m venv ../langchain": "needs PyPI",
        "import os": BY_CLIENTS,
        "from langchain.agents import create_agent": BY_CLIENTS,
        "from langchain.agents.middleware import wrap_model_call": BY_CLIENTS,
        'message = model.bind_tools([weather]).invoke("What is the weather in Rome?")': BY_CLIENTS,
        "from pydantic import BaseModel": BY_CLIENTS,
        'question = {"messages": [{"role": "user", "content": "What is the weather in Rome?"}]}': BY_CLIENTS,
        "quire serve Qwen/Qwen3-Coder-30B-A3B-Instruct --served-model-name qwen3 --max-model-len 65536": "needs a GPU",
        "import asyncio": BY_CLIENTS,
        'import { createOpenAICompatible } from "@ai-sdk/openai-compatible";': BY_CLIENTS,
        "{": BY_CLIENTS,
        'model = "qwen3"': BY_CLIENTS,
        "export OPENAI_API_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none ENABLE_OLLAMA_API=False": BY_CLIENTS,
    },
}
"""Blocks that ``make first-hour`` does not run, by their first line."""

ELSEWHERE: Mapping[Path, str] = {
    Path("docs/cloud.md"): "needs an account; tests/kube/test_chart_pages.py renders its values and manifests",
}
"""Pages of which it runs nothing."""


class Block(NamedTuple):
    """A block of code. ``language`` is empty for commands."""

    language: str
    text: str

    @property
    def first_line(self) -> str:
        """Its first command or line."""
        return code_lines(self.text)[0]


def blocks(text: str) -> list[Block]:
    """The blocks of code of a page."""
    return [Block(*found) for found in re.findall(r"^```(\w*).*?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def code_lines(text: str) -> list[str]:
    """The lines of a block, without comments, continued ones joined."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in re.sub(r"\\\n\s*", "", text).splitlines())
    return [line for line in lines if line]


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no section {title}")
    return found[1]


def start_pages() -> list[Path]:
    """The pages that the documentation's index has under «Start»."""
    table = section((ROOT / "docs" / "README.md").read_text(), "Start")
    return [
        (ROOT / "docs" / link).resolve().relative_to(ROOT) for link in re.findall(r"^\| \[.*?\]\((.*?)\)", table, re.M)
    ]


def commands_of(page: Path) -> Iterator[str]:
    """Those of a page that are run, in their order."""
    for block in blocks((ROOT / page).read_text()):
        if page not in ELSEWHERE and block.first_line not in NOT_RUN.get(page, {}):
            yield from code_lines(block.text)


def shown_by(page: Path) -> list[str]:
    """The lines that a page says ``quire serve`` prints; … stands for what varies."""
    return [
        line.strip()
        for block in blocks((ROOT / page).read_text())
        if block.language == "text"
        for line in block.text.splitlines()
        if line.strip() not in ("", "…")
    ]


def wheels_commands() -> list[str]:
    """The lines of docs/contributing.md that install torch's build for CPUs and then the wheels of ``dist/``."""
    found = blocks((ROOT / "docs" / "contributing.md").read_text())
    lines = [line for block in found if not block.language for line in code_lines(block.text)]
    return [line for line in lines if line.startswith("pip install")]
