"""The site of the documentation has every page, and its links lead to pages and pictures that it has."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.site import ROOT, main, places


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["site.py", str(folder)])
        patch.delenv("REPOSITORY_URL", raising=False)
        main()
    return folder


def test_links_lead_to_what_the_site_has(site: Path) -> None:
    dead = []
    for page in (site / "pages").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)", re.sub(r"`[^`\n]*`", "", text))
        local = [target for target in targets if not re.match(r"[a-z]+:", target)]
        dead += [f"{page.name}: {target}" for target in local if not (page.parent / target).exists()]
    assert not dead


def test_the_menu_has_every_page_once(site: Path) -> None:
    text = re.sub(r"!!python/\S+ ", "", (site / "mkdocs.yml").read_text())
    menu = yaml.safe_load(text)["nav"]
    entries = [each for group in menu for each in ([group] if isinstance(group, str) else next(iter(group.values())))]
    assert sorted(entries) == sorted(places().values())


def test_a_link_to_code_leads_to_the_repository_where_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["site.py", str(tmp_path)])
    monkeypatch.setenv("REPOSITORY_URL", "https://code.example/quire/")
    main()
    assert (ROOT / "LICENSE").exists()
    assert "](https://code.example/quire/blob/main/LICENSE)" in (tmp_path / "pages" / "index.md").read_text()
