"""The page's files over HTTP: who gets them, and with which headers."""

import re

import httpx
import pytest
from quire_router.api.rest.page import Page

from tests.support.scripted_api import open_stage

KEY = "a-key-of-enough-characters"
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def get(stage, path, **headers):
    async with httpx.AsyncClient(base_url=stage.url, timeout=60) as http:
        return await http.get(path, headers=headers)


async def test_browsers_get_the_page_and_other_clients_where_the_api_is():
    async with open_stage(page=Page()) as stage:
        page = await get(stage, "/", **HTML)
        links = await get(stage, "/", accept="application/json")

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text.startswith("<!doctype html>")
    assert links.json()["chat"] == "/v1/chat/completions"


async def test_all_that_the_page_names_is_served_without_a_key_and_nothing_else_is():
    async with open_stage(page=Page(), keys=[KEY]) as stage:
        pages = [await get(stage, path, **HTML) for path in ("/", "/docs")]
        names = {name for page in pages for name in re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)}
        assert names
        seen = set()
        while names:
            name = names.pop()
            seen.add(name)
            file = await get(stage, "/" + name)
            assert file.status_code == 200, name
            names |= {f"page/{each}" for each in re.findall(r'from "\./([^"]+)"', file.text)} - seen
        others = [(await get(stage, path)).status_code for path in ("/page/", "/page/__init__.py", "/v1/models")]

    assert seen == {f"page/{path.rpartition('/')[2]}" for path in Page().paths if path.startswith("/page/")} - {
        "page/index.html",
        "page/docs.html",
    }
    assert others == [401, 401, 401]


async def test_a_file_is_sent_once_and_then_only_confirmed():
    async with open_stage(page=Page()) as stage:
        first = await get(stage, "/page/main.js")
        again = await get(stage, "/page/main.js", **{"if-none-match": first.headers["etag"]})
        other = await get(stage, "/page/main.js", **{"if-none-match": '"another"'})

    assert (first.status_code, again.status_code, other.status_code) == (200, 304, 200)
    assert again.content == b""
    assert first.headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize("path", ["/", "/docs", "/page/main.js", "/page/base.css", "/page/swagger-ui-bundle.js"])
async def test_a_browser_may_load_nothing_from_elsewhere_and_run_nothing_inline(path):
    async with open_stage(page=Page()) as stage:
        headers = (await get(stage, path, **HTML)).headers

    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert not any("unsafe" in value or "*" in value for value in policy.values())
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert ("require-trusted-types-for" in policy) == (path != "/docs")


async def test_without_the_page_there_is_nothing_at_its_paths():
    async with open_stage() as stage:
        statuses = [(await get(stage, path, **HTML)).status_code for path in ("/", "/docs", "/page/main.js")]

    assert statuses == [404, 404, 404]
