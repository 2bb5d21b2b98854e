"""The completion scripts, in the shells themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest
from quire_cli.completion.shells import SHELLS
from quire_cli.completion.words import typed_commands

CASES = {
    "": {"serve", "chat", "ps", "bench", "simulate", "help"},
    "se": {"serve"},
    "bench ": {"serve", "offline"},
    "help simulate f": {"fleet"},
    "serve --dtyp": {"--dtype"},
    "serve --dtype flo": {"float16", "float32"},
    "serve demo/model --served-model": {"--served-model-name"},
    "bench serve --ur": {"--url"},
    "completion f": {"fish"},
    "simulate fleet --engines 2 --scheduling-policy f": {"fcfs"},
    "serve mod": {"model"},
    "chat --url ": set[str](),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, and a folder to be completed."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell, make in SHELLS.items():
        (folder / shell).write_text(make())
    (folder / "model").mkdir()
    return folder


def in_bash(folder: Path) -> dict[str, set[str]]:
    """What is offered for each case; files where the script leaves it to them."""
    lines = ["source ./bash", 'compopt() { COMPREPLY+=($(compgen -f -- "$cur")); }']
    for line in CASES:
        words = f"quire {line}".split() + [""] * line.endswith(" ") + ([""] if not line else [])
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _quire; echo "${{COMPREPLY[*]}}"')
    done = subprocess.run(
        ["bash", "--norc"], cwd=folder, input="\n".join(lines), capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    return dict(zip(CASES, (set(line.split()) for line in done.stdout.splitlines()), strict=True))


def in_fish(folder: Path) -> dict[str, set[str]]:
    lines = ["source ./fish", *(f"complete -C 'quire {line}'; echo ---" for line in CASES)]
    done = subprocess.run(
        ["fish", "--no-config", "-c", "\n".join(lines)],
        cwd=folder, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    blocks = done.stdout.split("---\n")[:-1]
    offered = ({line.split("\t")[0].rstrip("/") for line in block.splitlines()} for block in blocks)
    return dict(zip(CASES, offered, strict=True))


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_offers_commands_flags_and_values(shell: str, scripts: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    offered = {"bash": in_bash, "fish": in_fish}[shell](scripts)
    for line, expected in CASES.items():
        assert offered[line] >= expected, line
        if line and expected:
            assert offered[line] == expected, line
    assert not [word for word in offered["chat --url "] if word.startswith("-")]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("quire se", "quire serve"),
        ("quire serve --dtyp", "quire serve --dtype"),
        ("quire bench se", "quire bench serve"),
        ("quire bench serve --save-d", "--save-detailed"),
        ("quire serve mod", "quire serve model"),
    ],
)
def test_zsh_completes_what_is_typed(typed: str, expected: str, scripts: Path) -> None:
    code = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D; source ./zsh; echo RE''ADY"
zpty -r -m shell line '*READY*'
zpty -w -n shell "$1"$'\\t'
zpty -r -m shell line "*$2*" && print found
zpty -d shell
"""
    command = ["zsh", "-f", "-c", code, "zsh", typed, expected]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "found\n", done.stderr


def test_every_flag_is_in_every_script(scripts: Path) -> None:
    for typed in typed_commands():
        for flag in typed.flags:
            for name in flag.names:
                assert name in (scripts / "bash").read_text()
                assert f"*{name}[" in (scripts / "zsh").read_text()
                assert f"-l {name[2:]} " in (scripts / "fish").read_text() or not name.startswith("--")
