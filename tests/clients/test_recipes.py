"""The snippets of docs/recipes.md run as they stand: each calls its tool and prints the answer that follows."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from quire_router.core.generation import Delta, GenerationRequest

from tests.clients.suite import CLIENTS, TIMEOUT, VERCEL, needs
from tests.clients.table import PAGE
from tests.support.scripted_api import Limits, ScriptedRunner, open_stage, script_of
from tests.support.tool_models import HERMES_TEMPLATE

STATED_URL, STATED_MODEL = "http://127.0.0.1:8000", "qwen3"
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'city': 'Rome'}})}\n</tool_call>"
TEXT = "Take a hat."
LANGCHAIN, LLAMAINDEX = (CLIENTS / name / "bin" / "python" for name in ("langchain", "llamaindex"))


class CallsOnce(ScriptedRunner):
    """A model that calls the tool in its first answer, and says ``TEXT`` in every other one."""

    async def _play(self, generation: GenerationRequest) -> AsyncIterator[Delta]:
        self.script = script_of(CALL if len(self.generations) == 1 else TEXT)
        async for delta in super()._play(generation):
            yield delta


def snippet(heading: str, language: str) -> str:
    """The block of code under a heading of the page."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    found = re.search(rf"^```{language}\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def run(program: str, command: Sequence[object], file: Path) -> subprocess.CompletedProcess[str]:
    """Writes the program into the file, and runs it by the command."""
    file.write_text(program)
    words = [str(word) for word in (*command, file)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=TIMEOUT)


async def check(program: str, command: Sequence[object], file: Path) -> None:
    """The program calls the tool, gives its result back, and prints what the model then says."""
    runner = CallsOnce()
    async with open_stage(template=HERMES_TEMPLATE, runner=runner, models=(STATED_MODEL,)) as stage:
        stage.fleet.model_limits = Limits(32_768)
        assert STATED_URL in program
        done = await asyncio.to_thread(run, program.replace(STATED_URL, stage.url), command, file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == TEXT
    assert len(runner.generations) == 2


@pytest.mark.parametrize(
    ("heading", "python"),
    [
        pytest.param("LangChain", LANGCHAIN, marks=needs(LANGCHAIN)),
        pytest.param("LlamaIndex", LLAMAINDEX, marks=needs(LLAMAINDEX)),
    ],
)
async def test_the_snippets_in_python_call_their_tool(heading: str, python: Path, tmp_path: Path) -> None:
    await check(snippet(heading, "python"), [python], tmp_path / "snippet.py")


@needs(VERCEL)
async def test_the_snippet_of_the_ai_sdk_calls_its_tool(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(VERCEL.parent)
    await check(snippet("AI SDK", "js"), ["node"], tmp_path / "snippet.mjs")
