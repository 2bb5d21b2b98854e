"""Lays out the documentation for a site generator: ``python scripts/site.py FOLDER`` writes pages and ``mkdocs.yml``.

The pages of docs/ keep their names; README files of other folders become pages of their own. Links between them are
rewritten. Links to other files of the repository lead to REPOSITORY_URL where that variable is set, and are plain text
elsewhere. ``make docs`` builds the site.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath, relpath

ROOT = Path(__file__).parents[1]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contribute.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "docs/README.md": "pages.md",
    "charts/quire/README.md": "chart.md",
    "k8s/README.md": "kubernetes.md",
    "docker/README.md": "images.md",
    "demo/README.md": "demo-model.md",
    "examples/README.md": "examples.md",
    "examples/graph_embeddings/README.md": "graph-embeddings.md",
    "tests/kube/README.md": "chart-tests.md",
    "tests/cluster/README.md": "cluster-tests.md",
}
"""Pages outside of docs/, by their path in the repository, and the index of docs/."""
SETTINGS = """site_name: Quire
site_description: Quire serves large language models, and its answers survive failures.
docs_dir: pages
site_dir: site
use_directory_urls: false
theme:
  name: material
  font: false
  features: [navigation.sections, navigation.top, search.suggest, search.highlight, content.code.copy, toc.follow]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      primary: indigo
      toggle: {icon: material/weather-night, name: Dark}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      primary: indigo
      toggle: {icon: material/weather-sunny, name: Light}
plugins: [search]
markdown_extensions:
  - admonition
  - tables
  - toc:
      permalink: true
      slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}
  - pymdownx.superfences
  - pymdownx.highlight
validation:
  anchors: warn
nav:
"""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
_GROUP = re.compile(r"^## (.+)$")
_ENTRY = re.compile(r"\[[^\]]+\]\(([^()\s]+\.md)\)")


def places() -> dict[str, str]:
    """Returns the page of the site for each page of the repository."""
    docs = {str(page.relative_to(ROOT)): str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    return docs | MOVED


def rewritten(text: str, path: str, pages: Mapping[str, str], repository: str) -> str:
    """Returns the text of the page at ``path`` with the links that the site needs."""

    def link(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        file, hash_, anchor = target.partition("#")
        found = normpath(f"{Path(path).parent}/{file}")
        if found in pages:
            return f"{image}[{words}]({relpath(pages[found], str(Path(pages[path]).parent) or '.')}{hash_}{anchor})"
        if found.startswith("docs/images/"):
            return f"{image}[{words}]({relpath(found.removeprefix('docs/'), str(Path(pages[path]).parent) or '.')})"
        return f"[{words}]({repository}/blob/main/{found})" if repository else words

    parts = _CODE.split(text)
    return "".join(part if number % 2 else _LINK.sub(link, part) for number, part in enumerate(parts))


def navigation(pages: Mapping[str, str]) -> list[str]:
    """Returns the menu: the groups of docs/README.md and their pages, each once, by the title of the page."""
    lines, seen = ["  - index.md"], {"index.md"}
    for line in (ROOT / "docs" / "README.md").read_text().splitlines():
        if group := _GROUP.match(line):
            lines.append(f"  - {group[1]}:")
        elif line.startswith("|"):
            for target in _ENTRY.findall(line.split("|")[1]):
                page = pages[normpath(f"docs/{target}")]
                if page not in seen:
                    seen.add(page)
                    lines.append(f"      - {page}")
    return [*lines, "  - More:", *(f"      - {page}" for page in sorted(set(pages.values()) - seen))]


def main() -> None:
    """Writes the folder anew."""
    folder, pages = Path(sys.argv[1]), places()
    repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
    shutil.rmtree(folder, ignore_errors=True)
    for path, page in pages.items():
        file = folder / "pages" / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(rewritten((ROOT / path).read_text(), path, pages, repository))
    shutil.copytree(ROOT / "docs" / "images", folder / "pages" / "images")
    (folder / "mkdocs.yml").write_text(SETTINGS + "\n".join(navigation(pages)) + "\n")


if __name__ == "__main__":
    main()
