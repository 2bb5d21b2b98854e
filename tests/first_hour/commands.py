"""The commands of the README's section «Start», as they stand there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code_lines(text: str) -> list[str]:
    """The lines of all blocks of code that name no language, without comments."""
    blocks = re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    plain = (block for language, block in blocks if not language)
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for block in plain for line in block.splitlines())
    return [line for line in lines if line]


def section(text: str, title: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no section {title}")
    return found[1]


def readme_commands() -> list[str]:
    """All of them, in their order."""
    return code_lines(section((ROOT / "README.md").read_text(), "Start"))


def wheels_commands() -> list[str]:
    """The lines of docs/contributing.md that install torch's build for CPUs and then the wheels of ``dist/``."""
    lines = code_lines((ROOT / "docs" / "contributing.md").read_text())
    return [line for line in lines if line.startswith("pip install")]
