"""The README's first commands are of the kinds that ``tests/first_hour`` runs, and cover the command."""

import shlex
import zipfile

from tests.first_hour.commands import ROOT, code_lines, readme_commands, section, wheels_commands
from tests.first_hour.needs import requirements_of


def test_the_readme_installs_and_then_serves_talks_and_measures():
    install, activate, *rest = map(shlex.split, readme_commands())
    assert (ROOT / install[0]).stat().st_mode & 0o111
    assert activate == [".", ".venv/bin/activate"]
    assert {words[0] for words in rest} == {"quire"}
    assert {"serve", "chat", "bench"} <= {words[1] for words in rest}
    served = [words[2] for words in rest if words[1] == "serve"]
    assert "demo/model" in served
    assert [name for name in served if not (ROOT / name).exists()], "no model of the Hub"


def test_the_page_of_releases_installs_torch_from_the_same_index_and_then_wheels_by_their_files():
    torch, wheels = wheels_commands()
    _, _, index = torch.partition("--index-url ")
    assert f"TORCH_CPU_INDEX:-{index.split()[0]}}}" in (ROOT / "scripts" / "install.sh").read_text()
    assert wheels == "pip install dist/*.whl"


def test_commands_are_the_lines_of_plain_blocks_without_comments():
    before, after = "## A\n```\nno\n```\n## Start\n```sh\nnot\n```\n\n", "```sh\nnot\n```\n## End\n"
    text = f"{before}```\nquire serve m    # a comment\n\n# another\n```\n{after}"
    assert code_lines(section(text, "Start")) == ["quire serve m"]


def test_what_a_wheel_needs_is_followed_through_markers_and_extras(tmp_path):
    about = (
        "Metadata-Version: 2.4\nName: own\nVersion: 1\n"
        "Requires-Dist: other-own==1\nRequires-Dist: redis[hiredis]>=6\nRequires-Dist: redis>=6\n"
        'Requires-Dist: pytest; extra == "test"\nRequires-Dist: numpy; python_version < "3"\n'
    )
    for name, text in {"own": about, "other_own": "Metadata-Version: 2.4\nName: other-own\nVersion: 1\n"}.items():
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-1.dist-info/METADATA", text)
    found = requirements_of(tmp_path.glob("*.whl"))
    assert {"redis", "hiredis"} <= set(found)
    assert not {"own", "other-own", "pytest", "numpy"} & set(found)
