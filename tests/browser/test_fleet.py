"""The view of the fleet in a real browser: engines that run, die and come back while an answer goes on."""

import re
import time
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import PHONE, Browser, Stack, serving
from tests.browser.test_chat import KEY, STORY, expected, low_contrast
from tests.browser.test_conversations import press

LONGER = "[a-z ]{1500}"


def conditions(browser: Browser) -> list[str]:
    return browser.text(".condition").split("\n")


def show(browser: Browser, tab: str) -> None:
    browser.find(f"#tab-{tab}").click()


def test_a_killed_engine_is_seen_while_the_answer_goes_on(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=1, seed=9, format="regex")
    browser.set(shape=LONGER)
    show(browser, "fleet")
    browser.wait(lambda: conditions(browser) == ["ready", "ready"])
    # Without leaving the view: where a request went is recorded for those who look.
    script = "document.getElementById('message').value = arguments[0]; arguments[1].requestSubmit()"
    browser.driver.execute_script(script, STORY, browser.find("#composer"))
    browser.wait(lambda: "placed on" in browser.text(".events"))
    busy = re.findall(r"placed on (\S+):", browser.text(".events"))[0]
    [victim] = [engine for engine in stack.engines if engine.address == busy]
    victim.kill()
    browser.wait(lambda: f"{busy} lost" in browser.text(".events"))
    browser.wait(lambda: "continued on" in browser.text(".events"))
    [other] = [engine.address for engine in stack.engines if engine.address != busy]
    browser.wait(lambda: f"1 answer continued on {other}" in browser.text(".incidents"))
    assert re.search(rf"{busy} lost \d\d:\d\d:\d\d \(.+\)", browser.text(".incidents"))
    assert "not back yet" in browser.text(".incidents")
    assert sorted(conditions(browser))[-1] == "ready"
    assert re.search(r"Lost \d\d:\d\d:\d\d, .* ago: .+\. The router reconnects", browser.text(".problem"))
    press(browser, "Path of request", of=".attempt_lost")
    path = browser.text(".steps")
    assert re.search(
        rf"placed on {busy}.*\n?.*left {busy}: .*\n?.*continued on {other}.*after a pause of \d+ m?s", path
    )
    assert re.search(rf"{busy} \(chosen\)\d+ m?s", path)
    browser.find(".path button").click()
    stack.revive()
    browser.wait(lambda: f"{busy} ready" in browser.text(".events"))
    browser.wait(lambda: conditions(browser) == ["ready", "ready"])
    browser.wait(lambda: re.search(r"back \d\d:\d\d:\d\d, after", browser.text(".incidents")))
    show(browser, "chat")
    whole = expected(stack, temperature=1, seed=9, structured_outputs={"regex": LONGER})["content"]
    assert browser.answer() == whole
    assert re.search(rf"Engine {busy} lost \(.+\), continued on {other} after \d+\.\d s\.", browser.text(".notes"))


def test_blocks_are_shown_one_by_one_and_in_words(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url + "#fleet")
    browser.wait(lambda: "cached" in browser.text(".pool .note"))
    label = browser.find("canvas").get_attribute("aria-label")
    assert "KV memory: " in label
    colours = """
        const colours = (canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
          return seen.size;
        };
        return Math.max(...[...document.querySelectorAll("canvas")].map(colours));
    """
    assert browser.driver.execute_script(colours) >= 2, "free blocks, and those that the chats before left cached"


ONE = [
    "1 request · 1 waiting · 1 tokens/s · 1 preemption",
    "0 of 1 block in use",
    "0 of 1 prompt token cached",
    "preempted 1 sequence",
]
TWO = [
    "2 requests · 2 waiting · 2 tokens/s · 2 preemptions",
    "0 of 2 blocks in use",
    "0 of 2 prompt tokens cached",
    "preempted 2 sequences",
]


@pytest.mark.parametrize(("count", "said"), [(1, ONE), (2, TWO)])
def test_what_there_is_one_of_is_in_the_singular(stack: Stack, browser: Browser, count: int, said: list[str]) -> None:
    browser.open(stack.router.url)
    pool = {"cells": None, "used": 0, "total": count, "cached": None, "blocks_per_cell": 1}
    engine = {
        "id": "e", "condition": "ready", "requests": count, "waiting": count, "swapped": 0, "hit_rate": None,
        "tokens_per_second": count, "preemptions": count, "device": pool, "host": pool, "models": [], "dtype": "",
        "device_name": "", "max_model_len": 0, "started": 0, "problem": "",
    }  # fmt: skip
    events = [
        {"time": 0, "kind": "placed", "request": "r", "engine": "e", "attempt": 1, "scores": [], "cached_tokens": 0,
         "prompt_tokens": count},
        {"time": 0, "kind": "preempted", "engine": "e", "count": count},
    ]  # fmt: skip
    script = """
        const [snapshot, done] = arguments;
        import(new URL("fleet.js", document.querySelector("script[type=module]").src)).then(({ Fleet }) => {
            const root = document.createElement("div");
            new Fleet(root, {}).apply("snapshot", snapshot);
            done([...root.querySelectorAll("p, li")].map((node) => node.textContent).join("\\n"));
        }, (error) => done(String(error)));
    """
    snapshot = {
        "time": 0, "engines": [engine], "models": [], "requests": [], "omitted_requests": 0, "events": events,
        "incidents": [], "router": {"version": "1", "started": 0, "policy": "cost", "metrics_port": 1},
    }  # fmt: skip
    text = browser.driver.execute_async_script(script, snapshot)
    assert [each for each in said if not re.search(rf"{each}\b", text)] == [], text


def test_figures_have_curves_and_the_router_its_version_and_links(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url + "#fleet")
    expected(stack, max_tokens=30)
    browser.wait(lambda: not re.search("–", browser.text(".chart:nth-child(-n + 3)")))
    assert re.search(r"Time to first token.*p50 \d+ m?s.*p95 \d+ m?s.*p99 \d+ m?s", browser.text(".chart:nth-child(2)"))
    label = browser.find(".chart:nth-child(4) svg").get_attribute("aria-label")
    assert re.fullmatch(r"Requests over 60 seconds: running \d+, waiting \d+, at most \d+\.", label)
    assert browser.find(".chart .line").get_attribute("d").count("L") > 0
    assert re.match(r"2 of 2 engines ready · Quire \S+ · up \d+ (m?s|min)", browser.text(".summary"))
    assert re.search(r"quire-demo · cpu · float32 · context 2,048 · up \d+", browser.text(".engine .note"))
    links = [link.get_attribute("href") for link in browser.all(".links a")]
    assert [httpx.get(link).status_code for link in links] == [200, 200, 200]


def test_nobody_looks_while_another_view_is_shown(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url + "#fleet")
    browser.wait(lambda: "ready" in conditions(browser))
    numbers = "return document.querySelector('.numbers .line').getAttribute('d')"
    before = browser.driver.execute_script(numbers)
    browser.wait(lambda: browser.driver.execute_script(numbers) != before)
    show(browser, "chat")
    time.sleep(0.3)
    before = browser.driver.execute_script(numbers)
    time.sleep(1.5)  # three samples, if any came
    assert browser.driver.execute_script(numbers) == before


def test_a_key_that_may_not_see_the_fleet_is_told_so(stack: Stack, browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path, "--api-key", KEY, addresses=[stack.engines[0].address]) as keyed:
        browser.open(keyed.router.url + "#fleet", ready=False)
        browser.wait(lambda: browser.find("#key-form").is_displayed())
        browser.find("#key").send_keys(KEY, Keys.ENTER)
        browser.wait(lambda: "allow_fleet" in browser.text("#fleet .note"))


def test_a_router_that_is_gone_leaves_figures_that_say_of_when_they_are(
    stack: Stack, browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path, addresses=[stack.engines[0].address]) as own:
        browser.open(own.router.url + "#fleet")
        browser.wait(lambda: "ready" in conditions(browser))
        own.router.stop()
        said = r"The router cannot be reached \(attempt \d+\)\. What is shown is of \d\d:\d\d:\d\d\."
        browser.wait(lambda: re.fullmatch(said, browser.text("#fleet > .note")))
        assert browser.all("#fleet.stale")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(stack: Stack, browser: Browser, dark: bool) -> None:
    browser.emulate(dark=dark)
    browser.open(stack.router.url + "#fleet")
    browser.wait(lambda: "ready" in conditions(browser))
    assert low_contrast(browser) == []


def test_it_fits_a_phone(stack: Stack, browser: Browser) -> None:
    browser.emulate(PHONE)
    browser.open(stack.router.url + "#fleet")
    browser.wait(lambda: browser.all(".engine canvas"))
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
