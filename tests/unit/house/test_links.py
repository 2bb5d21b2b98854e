"""Every link in the documents leads somewhere: to a file that is there, and to a heading that it has."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "demo", "docker", "k8s", "charts/quire", "tests/kube", "tests/cluster", "examples")
PAGES = [*sorted(ROOT.glob("*.md")), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
LINK = re.compile(r"\]\(([^()\s]+)\)")
CODE = re.compile(r"`[^`]*`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    dead = []
    for link in links(page.read_text()):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            dead.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target):
            dead.append(f"{link}: there is no such heading")
    assert not dead


def test_a_dead_link_is_found() -> None:
    page = "# One\n[a](#two) `[b](#three)`\n```\n[c](#four)\n# Five\n```\n## One\n## `--x`: *why*, [so](y)?\n"
    assert list(links(page)) == ["#two", "y"]
    assert list(headings(page)) == ["one", "one-1", "--x-why-so"]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, fresh = set[Path](), {ROOT / "README.md"}
    while fresh:
        page = fresh.pop()
        reached.add(page)
        leads = ((page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text()))
        fresh |= {target for target in leads if target.suffix == ".md"} - reached
    assert {page for page in PAGES if "tests" not in page.relative_to(ROOT).parts} - reached == set()


def test_values_of_the_chart_that_pages_name_exist() -> None:
    values = yaml.safe_load((ROOT / "charts/quire/values.yaml").read_text())
    del values["models"], values["tests"]  # entries of the reader's own; and a package is called so, too
    name = re.compile(rf"`((?:{'|'.join(values)})(?:\.[a-zA-Z]+)+)(?=[`:])")
    for page in PAGES:
        files = {path.name for path in page.parent.iterdir()} | {"engine.proto"}
        named = set(name.findall(page.read_text())) - files
        assert not {value for value in named if not has(values, value.split("."))}, page.name


def has(values: object, path: list[str]) -> bool:
    """Whether there is a value at the path."""
    for part in path:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def links(text: str) -> Iterator[str]:
    """Where the links of a page lead, without those in code, which are none."""
    for line in prose(text):
        without_code = CODE.sub(lambda code: "" if "](" in code[0] else code[0], line)
        yield from LINK.findall(without_code)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page, as links name them."""
    return frozenset(headings(page.read_text()))


def headings(text: str) -> Iterator[str]:
    """Each heading as what follows ``#`` in a link: a second one of a name has a number."""
    seen = set[str]()
    for line in prose(text):
        if match := re.match(r"#{1,6} (.*)", line):
            words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "").replace("*", "").strip().lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            names = (name if number == 0 else f"{name}-{number}" for number in count())
            free = next(name for name in names if name not in seen)
            seen.add(free)
            yield free


def prose(text: str) -> Iterator[str]:
    """The lines that are not in a block of code."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line
