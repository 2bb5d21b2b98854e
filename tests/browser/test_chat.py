"""The playground in a real browser, before a real router and real engines."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import PHONE, Browser, Stack, serving

DARK, LIGHT = "rgb(20, 24, 28)", "rgb(253, 253, 251)"
KEY = "a-key-of-enough-characters"
STORY = "Tell me a story"
LONG = "[a-z ]{2000}"
HOSTILE = (
    """<img src=x onerror=alert(1)> **bold** and `a < b`

- one [link](https://example.org/?a=1&b=2) and [trap](javascript:alert(1))
- ![picture](https://example.org/x.png)

```html
<script>alert(1)</script>
```
| a | b |
|---|---|
| <b>1</b> | 2 |

"""
    + "> " * 3000
    + "deep"
)


def expected(stack: Stack, text: str = STORY, **fields: Any) -> dict[str, Any]:
    """The message with which the API answers the same request when it is not streamed."""
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": text}], **fields}
    answer = httpx.post(f"{stack.router.url}/v1/chat/completions", json=body, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
    return found


@pytest.mark.parametrize(("max_tokens", "said"), [(60, "60 tokens"), (1, "1 token")])
def test_an_answer_is_streamed_onto_the_page(stack: Stack, browser: Browser, max_tokens: int, said: str) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=max_tokens)
    browser.say(STORY)
    assert browser.answer() == expected(stack, temperature=0, max_tokens=max_tokens)["content"]
    assert re.search(rf"\b{said}\b", browser.text(".end"))


def test_an_answer_goes_on_after_a_reload_in_its_middle(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=1, seed=7, format="regex")
    browser.set(shape=LONG)
    stack.signal(signal.SIGSTOP)  # so that the answer cannot end before the page is there again
    try:
        browser.say(STORY)
        before = ""
        while len(before) < 20:
            stack.signal(signal.SIGCONT)
            time.sleep(0.1)
            stack.signal(signal.SIGSTOP)
            before = browser.settled(".assistant .text")
        browser.driver.refresh()
        browser.wait(lambda: browser.answering)
        assert browser.settled(".assistant .text") == before
    finally:
        stack.signal(signal.SIGCONT)
    whole = expected(stack, temperature=1, seed=7, structured_outputs={"regex": LONG})["content"]
    assert len(before) < len(whole)
    assert browser.answer() == whole


def test_an_answer_can_be_stopped_and_the_conversation_goes_on(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(format="regex")
    browser.set(shape=2 * LONG)  # as long as the context allows: it is to be stopped before its end
    stack.signal(signal.SIGSTOP)  # so that the answer cannot end before a slow browser stops it
    try:
        browser.say(STORY)
        while len(browser.text(".assistant .text")) <= 20:
            stack.signal(signal.SIGCONT)
            time.sleep(0.1)
            stack.signal(signal.SIGSTOP)
        assert re.search(r"\d tokens · context \d+ of 2,048", browser.text(".end")), "figures come with the answer"
        browser.find("#stop").click()
    finally:
        stack.signal(signal.SIGCONT)
    assert 20 < len(browser.answer()) < 4000
    assert "Stopped" in browser.text(".end")
    browser.set(format="text", temperature=0, max_tokens=5)
    browser.say("And then?")
    browser.wait(lambda: len(browser.all(".message.assistant")) == 2)
    assert browser.answer()


def test_probabilities_are_colours_and_can_be_read_with_the_keyboard(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=20, logprobs=True)
    browser.say(STORY)
    text = browser.answer()
    tokens = browser.all(".tokens span")
    assert len(tokens) == 20
    assert "".join(token.get_attribute("textContent") for token in tokens) in text
    browser.find(".tokens").send_keys("\ue014")  # arrow right
    assert "The most probable:" in browser.text(".chosen")


@pytest.mark.parametrize("logprobs", [False, True])
def test_control_tokens_are_never_shown(stack: Stack, browser: Browser, logprobs: bool) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=60, logprobs=logprobs)
    browser.say("What is 7 plus 5?")
    answer = browser.answer()
    assert "12" in answer
    assert "<|" not in browser.text("main")
    if logprobs:
        shown = "".join(token.get_attribute("textContent") for token in browser.all(".tokens span"))
        assert shown
        assert shown in answer
        for _ in range(len(browser.all(".tokens span"))):
            browser.find(".tokens").send_keys("\ue014")  # arrow right
            assert "<|" not in browser.text(".chosen")


def test_a_conversation_continues_while_the_browsers_storage_is_full(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=40, logprobs=True)
    fill_storage(browser, spare=4_000)  # the texts of a few answers, and the log-probabilities of none
    for turn in range(2):
        browser.say(STORY)
        browser.wait(lambda shown=turn + 1: len(browser.all(".message.assistant")) == shown)
        browser.answer()
    first, second = browser.all(".message.assistant")
    assert len(second.find_elements("css selector", ".tokens span")) == 40
    first.find_element("css selector", ".tokens span").click()
    assert "The most probable:" in browser.text(".chosen")
    assert "no room" not in browser.text("#status")
    shown = browser.text(".message.user .text, .message.assistant .tokens")
    browser.driver.refresh()
    browser.wait(lambda: browser.all("#model option"))
    assert browser.text(".message .text") == shown, "what needs the most room is not kept, and all else is"

    fill_storage(browser, spare=0)
    browser.set(max_tokens=41)
    browser.say(STORY)
    browser.wait(lambda: len(browser.all(".message.assistant")) == 3)
    browser.answer()
    assert len(browser.all(".tokens span")) == 41
    assert "no room in this browser" in browser.text("#status")


def test_an_answer_whose_tokens_were_not_kept_goes_on_as_text_after_a_reload(stack: Stack, browser: Browser) -> None:
    # A site of its own, as tests before have filled the storage of the other.
    browser.open(stack.router.url.replace("127.0.0.1", "localhost"))
    browser.set(temperature=1, seed=7, format="regex", logprobs=True)
    browser.set(shape=LONG)
    fill_storage(browser, spare=5_000)
    stack.signal(signal.SIGSTOP)  # so that the answer cannot end before the page is there again
    try:
        browser.say(STORY)
        while browser.driver.execute_script("return !document.querySelector('.tokens')?.children[40]"):
            stack.signal(signal.SIGCONT)
            time.sleep(0.1)
            stack.signal(signal.SIGSTOP)
        browser.settled(".assistant .tokens")
        browser.driver.refresh()
        browser.wait(lambda: browser.answering)
    finally:
        stack.signal(signal.SIGCONT)
    assert browser.answer() == expected(stack, temperature=1, seed=7, structured_outputs={"regex": LONG})["content"]


def fill_storage(browser: Browser, *, spare: int) -> None:
    """Leaves so many characters of the browser's ``localStorage``."""
    kept = """
        try {
          localStorage.setItem("spare", "x".repeat(arguments[0]));
          return true;
        } catch {
          return false;
        }
    """
    # Firefox gives back the room of what was removed some time later.
    browser.wait(lambda: browser.driver.execute_script(kept, spare))
    script = """
        for (let more = 1 << 23; more >= 1; more >>= 1) {
          try {
            localStorage.setItem(`other ${more} ${Math.random()}`, "x".repeat(more));
          } catch {}
        }
        localStorage.removeItem("spare");
    """
    browser.driver.execute_script(script)


def test_an_answer_has_the_structure_that_was_asked_for(stack: Stack, browser: Browser) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    browser.open(stack.router.url)
    browser.set(format="json_schema")
    browser.set(shape=json.dumps(schema))
    browser.say("Answer")
    assert isinstance(json.loads(browser.answer())["n"], bool)


def test_a_call_of_a_tool_gets_its_result_and_the_conversation_goes_on(stack: Stack, browser: Browser) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=150, tools=json.dumps([{"name": "get_weather", "parameters": city}]))
    browser.say("What is the weather in Rome?")
    browser.answer()
    (called,) = browser.all(".call code")
    assert json.loads(called.text.removeprefix("get_weather(")[:-1]) == {"city": "Rome"}
    assert "Calls tools" in browser.text(".end")

    send = browser.find(".call ~ button")
    send.click()
    assert len(browser.all(".message.assistant")) == 1, "nothing is sent without a result"
    browser.find(".call textarea").send_keys("light rain")
    send.click()
    browser.wait(lambda: len(browser.all(".message.assistant")) == 2)
    assert browser.answer() == "The weather in Rome: light rain."
    assert not browser.all(".error")


def test_a_parameter_that_is_not_json_is_shown_before_anything_is_sent(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(tools="[nothing")
    browser.say(STORY)
    assert "This is not JSON" in browser.text("#status")
    assert browser.driver.switch_to.active_element.get_attribute("name") == "tools"
    assert not browser.all(".message")


def test_any_field_of_the_api_can_be_sent(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(max_tokens=40, other='["min_tokens"]')
    browser.say(STORY)
    assert "JSON object" in browser.text("#status")
    browser.set(other='{"stop": ["fox"], "include_stop_str_in_output": true, "stream": false}')
    browser.find("#message").send_keys(Keys.ENTER)
    assert browser.answer().endswith("fox")


def test_what_a_model_writes_never_becomes_html(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    script = """
        const [text, done] = arguments;
        import("/page/markdown.js").then(({ render }) => {
          const node = document.createElement("div");
          for (let end = 1; end < 200; end += 7) render(node, text.slice(0, end));
          render(node, text);
          const whole = document.createElement("div");
          render(whole, text);
          const names = [...new Set([...node.querySelectorAll("*")].map((each) => each.nodeName))].sort();
          const links = [...node.querySelectorAll("a")].map((each) => each.href);
          done([names, links, node.textContent, node.isEqualNode(whole)]);
        });
    """
    names, links, text, same = browser.driver.execute_async_script(script, HOSTILE)
    allowed = {"P", "STRONG", "CODE", "UL", "LI", "A", "DIV", "SPAN", "BUTTON", "PRE", "TABLE", "THEAD", "TBODY", "TR"}
    assert set(names) <= allowed | {"TH", "TD", "BLOCKQUOTE", "svg", "path"}
    assert links == ["https://example.org/?a=1&b=2", "https://example.org/x.png"]
    for part in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "<b>1</b>",
        "javascript:alert(1)",
        "deep",
    ):
        assert part in text
    assert same, "an answer that grew looks like one that came at once"


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(
    stack: Stack, browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path, "--api-key", KEY, addresses=[stack.engines[0].address]) as keyed:
        browser.open(keyed.router.url, ready=False)
        browser.wait(lambda: browser.find("#key-form").is_displayed())
        browser.find("#key").send_keys("a wrong key of some length", Keys.ENTER)
        browser.wait(lambda: "key" in browser.text("#key-error"))
        browser.find("#key").clear()
        browser.find("#key").send_keys(KEY, Keys.ENTER)
        browser.wait(lambda: browser.all("#model option"))
        browser.driver.refresh()
        browser.wait(lambda: browser.all("#model option"))
        browser.set(temperature=0, max_tokens=5)
        browser.say(STORY)
        assert browser.answer()
        assert KEY not in browser.driver.page_source


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_has_enough_contrast(stack: Stack, browser: Browser, dark: bool) -> None:
    browser.emulate(dark=dark)
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=40)
    browser.say(STORY)
    browser.answer()
    assert browser.ground() == (DARK if dark else LIGHT)
    assert low_contrast(browser) == []


def test_it_fits_a_phone(stack: Stack, browser: Browser) -> None:
    browser.emulate(PHONE)
    browser.open(stack.router.url)
    browser.say(STORY)
    browser.answer()
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.find("#message").is_displayed()
    assert not browser.find("[name=temperature]").is_displayed(), "the parameters are folded away"


def test_what_the_page_may_not_do_is_noticed_here(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    script = """
        document.body.append(Object.assign(new Image(), { src: "https://example.org/x.png" }));
        document.body.append(Object.assign(document.createElement("a"), { id: "wrong", textContent: "wrong" }));
        document.getElementById("wrong").addEventListener("click", () => { throw new Error("nobody catches this"); });
        document.getElementById("wrong").click();
    """
    browser.driver.execute_script(script)
    for said in ("Content Security Policy", "nobody catches this"):
        browser.wait(lambda said=said: any(said in each for each in browser.violations()))
    browser.complaints.clear()
    browser.requests.clear()


def test_words_in_tables_are_never_broken(stack: Stack, browser: Browser) -> None:
    browser.emulate(PHONE)
    browser.open(stack.router.url)
    script = """
        const done = arguments[0];
        import("/page/markdown.js").then(({ render }) => {
          const message = document.createElement("article");
          message.className = "message";
          document.getElementById("log").hidden = false;
          document.getElementById("log").append(message);
          render(message, "| a | b | c |\\n|---|---|---|\\n" + "| `reversed(items_of_a_list)` ".repeat(3) + "|");
          done([...message.querySelectorAll("td code")].map((each) => each.getClientRects().length));
        });
    """
    assert browser.driver.execute_async_script(script) == [1, 1, 1], "each stands on one line"
    assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]


def low_contrast(browser: Browser) -> list[str]:
    """Texts whose contrast with what is behind them is below 4.5, as WCAG computes it."""
    script = """
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
          .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
          .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
        const ground = (node) => {
          for (let each = node; each; each = each.parentElement) {
            const found = numbers(getComputedStyle(each).backgroundColor);
            if (found.length === 3) return found;
          }
          return [255, 255, 255];
        };
        const low = [];
        for (const node of document.querySelectorAll("body *")) {
          const texts = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
          if (!texts || !node.checkVisibility() || node.disabled) continue;
          const [one, two] = [light(numbers(getComputedStyle(node).color)), light(ground(node))];
          const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
          if (ratio < 4.5) low.push(`${node.nodeName} ${ratio.toFixed(1)} ${node.textContent.slice(0, 40)}`);
        }
        return low;
    """
    found: list[str] = browser.driver.execute_script(script)
    return found
