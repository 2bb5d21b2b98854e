"""The examples of the pages, and the programs in ``examples/``, run as they stand on the demo model as the README
serves it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import MODEL, ROOT, Stack

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("api", "resuming", "tools"))]
SERVE = f"quire serve demo/model --served-model-name {MODEL}"


def examples(page: Path, language: str) -> list[str]:
    """The blocks of code in one language, or without one, that ask the served model."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for found, text in blocks if found == language and MODEL in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_says_how_the_model_of_its_examples_is_served(page: Path) -> None:
    assert SERVE in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_in_its_order(page: Path, stack: Stack) -> None:
    program = "\n".join(examples(page, "python"))
    assert MODEL in program
    for stated, real in (("127.0.0.1:8000", stack.router.url[7:]), ("127.0.0.1:8001", stack.router.grpc_address)):
        program = program.replace(stated, real)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_example_of_tools_prints_what_its_page_says(stack: Stack) -> None:
    page = ROOT / "docs" / "tools.md"
    program = examples(page, "python")[0].replace("127.0.0.1:8000", stack.router.url[7:])
    (printed,) = re.findall(r"^It prints:\n\n```\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_curl_of_a_page_is_answered(page: Path, stack: Stack) -> None:
    commands = [text for text in examples(page, "sh") if text.startswith("curl")]
    assert commands
    script = re.sub(r"(127\.0\.0\.1|localhost):8000", stack.router.url[7:], "\n".join(commands))
    script = script.replace("curl ", "curl --fail ")
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert '{"' in done.stdout


PROGRAMS = {
    "chat.py": "Once upon a time",
    "structured_output.py": "kind=",
    "resume.py": "[the connection is cut here]",
    "batch.py": "sum-2 ",
    "grpc_client.py": "there was",
}
"""With words of what each of them prints."""
BY_CLIENTS = {"langchain_agent.py"}
"""Those that tests/clients runs, with the clients that they need."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_is(name: str, stack: Stack) -> None:
    own = {"OPENAI_BASE_URL": f"{stack.router.url}/v1", "QUIRE_GRPC": stack.router.grpc_address, "MODEL": MODEL}
    command = [sys.executable, ROOT / "examples" / name]
    environment = {**os.environ, **own}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert PROGRAMS[name] in done.stdout


def test_every_program_is_run_and_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    assert {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"} == PROGRAMS.keys() | BY_CLIENTS
    assert all(f"[{name}]({name})" in listed for name in PROGRAMS.keys() | BY_CLIENTS)
