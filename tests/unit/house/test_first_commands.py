"""The commands of the pages that a reader starts with are run by ``tests/first_hour``, or there is a reason why not."""

import shlex
import zipfile

from tests.first_hour.commands import (
    ELSEWHERE,
    NOT_RUN,
    ONE_GPU,
    README,
    RECIPES,
    ROOT,
    blocks,
    code_lines,
    commands_of,
    section,
    shown_by,
    start_pages,
    wheels_commands,
)
from tests.first_hour.needs import requirements_of


def test_the_readme_installs_and_then_serves_talks_and_measures():
    install, activate, *rest = map(shlex.split, commands_of(README))
    assert (ROOT / install[0]).stat().st_mode & 0o111
    assert activate == [".", ".venv/bin/activate"]
    commands = [words for words in rest if words != activate]  # that of a second terminal
    assert {words[0] for words in commands} == {"quire"}
    assert {"serve", "chat", "bench"} <= {words[1] for words in commands}
    served = [words[2] for words in commands if words[1] == "serve"]
    assert "demo/model" in served
    assert [name for name in served if not (ROOT / name).exists()], "no model of the Hub"


def test_the_page_of_releases_installs_torch_from_the_same_index_and_then_wheels_by_their_files():
    torch, wheels = wheels_commands()
    _, _, index = torch.partition("--index-url ")
    assert f"TORCH_CPU_INDEX:-{index.split()[0]}}}" in (ROOT / "scripts" / "install.sh").read_text()
    assert wheels == "pip install dist/*.whl"


def test_every_block_of_the_first_pages_is_run_or_has_a_reason_why_not():
    assert {*NOT_RUN, *ELSEWHERE} <= set(start_pages())
    for page in start_pages():
        found = blocks((ROOT / page).read_text())
        assert NOT_RUN.get(page, {}).keys() <= {block.first_line for block in found}, "a block has changed"
        if page not in NOT_RUN:
            assert page in ELSEWHERE or not found, f"{page}: nobody runs its commands"
        else:
            run = [block for block in found if block.first_line not in NOT_RUN[page]]
            assert [block.language for block in run] == [""] * len(run), f"{page}: what is no command has no reason"


def test_the_page_of_one_gpu_serves_asks_measures_and_says_what_is_printed():
    first, *others = (shlex.split(line) for line in commands_of(ONE_GPU))
    assert first[:2] == ["quire", "serve"]
    assert [words[0] for words in others] == ["curl", "quire"]
    assert [line.partition("|")[0].strip() for line in shown_by(ONE_GPU)] == [*["quire"] * 9, "quire chat"]


def test_the_recipes_serve_the_model_that_they_ask_for():
    (serve,) = map(shlex.split, commands_of(RECIPES))
    assert serve[:2] == ["quire", "serve"]
    assert serve[-1] == "qwen3"


def test_commands_are_the_lines_of_blocks_without_comments():
    before, after = "## A\n```\nno\n```\n## Start\n```sh\nnot\n```\n\n", "```python\nnot\n```\n## End\n"
    text = f"{before}```\nquire serve m    # a comment\n\n# another\ncurl a \\\n  -d b\n```\n{after}"
    plain = [block for block in blocks(section(text, "Start")) if not block.language]
    assert [code_lines(block.text) for block in plain] == [["quire serve m", "curl a -d b"]]


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
