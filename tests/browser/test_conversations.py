"""Conversations that the browser keeps: their list, versions of their messages, what failed, and what is said of an
answer beside its text.
"""

import json
import re
import shutil
import time
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import DEMO, DESKTOP, PHONE, Browser, Stack, serving
from tests.browser.test_chat import DARK, LIGHT, STORY

ANSWERS = "return [...document.querySelectorAll('.message.assistant .text')].map((node) => node.textContent)"
WITHOUT_TOOLS = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' }}"""
SENT = """
    window.sent = [];
    const real = window.fetch;
    window.fetch = (url, options) => {
      if (options?.body) window.sent.push(JSON.parse(options.body).messages.map((message) => message.content));
      return real(url, options);
    };
"""


def ask(browser: Browser, text: str, *, answers: int = 1) -> str:
    browser.say(text)
    browser.wait(lambda: len(browser.all(".message.assistant")) == answers and not browser.answering)
    return browser.answer()


def press(browser: Browser, label: str, *, of: str = "body", last: bool = False) -> None:
    """Clicks the button with that label."""
    found = browser.all(f"{of} [aria-label^='{label}']")
    browser.driver.execute_script("arguments[0].click()", found[-1 if last else 0])


def names(browser: Browser) -> list[str]:
    return browser.text(".conversation-row .open").split("\n")


def test_conversations_are_kept_renamed_deleted_and_come_back(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    assert browser.text("#welcome-model") == "quire-demo"
    assert "2,048 tokens" in browser.text("#welcome-facts")
    browser.set(temperature=0, max_tokens=5)
    browser.find("#welcome li button").click()
    browser.answer()
    browser.find("#clear").click()
    ask(browser, "What is 7 plus 5?")
    assert names(browser) == ["What is 7 plus 5?", "Tell me a story about a fox."]

    press(browser, "Rename What")
    browser.find(".conversation-row input").send_keys("Sums", Keys.ENTER)
    browser.driver.refresh()
    browser.wait(lambda: browser.all("#model option"))
    assert names(browser) == ["Sums", "Tell me a story about a fox."]
    assert browser.find("[aria-current]").text == "Sums"
    assert len(browser.all(".message")) == 2
    assert "of 2,048" in browser.text(".end")

    press(browser, "Delete Sums")
    assert names(browser) == ["Tell me a story about a fox."]
    assert not browser.all(".message")
    browser.find("#status button").click()  # Undo
    assert names(browser)[0] == "Sums"
    assert len(browser.all(".message")) == 2


def test_conversations_are_exported_and_imported(stack: Stack, browser: Browser, tmp_path: Path) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=5)
    answer = ask(browser, STORY)
    browser.download_to(tmp_path)
    browser.find("#export").click()
    browser.wait(lambda: list(tmp_path.glob("*.json")))
    [file] = tmp_path.glob("quire-conversations-*.json")
    press(browser, "Delete")
    browser.find("#import-file").send_keys(str(file))
    browser.wait(lambda: browser.all(".message"))
    assert browser.answer() == answer
    assert "Imported 1 conversation." in browser.text("#status")

    file.write_text(json.dumps({"conversations": [{"messages": [{"id": 1, "parent": 7, "role": "user"}]}]}))
    browser.find("#import-file").send_keys(str(file))
    browser.wait(lambda: "no conversations" in browser.text("#status"))
    assert len(names(browser)) == 1


def test_conversations_are_searched_by_their_text(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=12)
    for question in ("What is 7 plus 5?", STORY):
        browser.find("#clear").click()
        ask(browser, question)
    search = browser.find("#search")
    search.send_keys("PLUS")
    assert names(browser) == ["What is 7 plus 5?"]
    search.clear()
    search.send_keys("once upon")
    assert names(browser) == [STORY], "its answer says so"
    search.send_keys(" no time")
    assert "No conversation has this text" in browser.text("#conversations")
    search.send_keys(Keys.ESCAPE)
    assert len(names(browser)) == 2


def test_a_button_leads_to_the_end_of_a_long_conversation(stack: Stack, browser: Browser) -> None:
    browser.emulate((1280, 400))
    browser.open(stack.router.url)
    assert browser.driver.switch_to.active_element.get_attribute("id") == "message"
    browser.set(temperature=0, max_tokens=200)
    ask(browser, STORY)
    latest = browser.find("#latest")
    browser.emulate((390, 400))  # what a phone's keyboard leaves
    time.sleep(0.5)
    assert not latest.is_displayed(), "the end stays in sight"
    browser.driver.execute_script("document.getElementById('log').scrollTop = 0")
    browser.wait(latest.is_displayed)
    latest.click()
    browser.wait(lambda: not latest.is_displayed())


def test_a_message_is_edited_an_answer_made_again_and_a_branch_begun(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=12)
    first = ask(browser, "What is 7 plus 5?")
    press(browser, "Regenerate")
    browser.wait(lambda: browser.text(".assistant .versions") == "2/2")
    assert browser.answer() == first

    press(browser, "Edit", of=".message.user")
    box = browser.find(".message.user textarea")
    box.clear()
    box.send_keys("What is 2 plus 2?", Keys.ENTER)
    browser.wait(lambda: browser.text(".user .versions") == "2/2")
    second = browser.answer()
    assert second != first
    press(browser, "Previous version", of=".message.user")
    assert browser.driver.execute_script(ANSWERS) == [first]

    press(browser, "Branch", of=".message.user")
    assert len(browser.all(".message")) == 1
    assert names(browser)[0] == "What is 7 plus 5? (branch)"
    ask(browser, "And?")
    assert len(names(browser)) == 2


def test_a_question_that_failed_can_be_tried_again_and_is_not_sent_with_the_next(
    stack: Stack, browser: Browser
) -> None:
    browser.open(stack.router.url)
    browser.driver.execute_script(SENT)
    browser.set(temperature=0, max_tokens=5, format="regex")
    browser.set(shape="(")
    browser.say("One")
    browser.wait(lambda: browser.all(".message > .error"))
    assert "not sent again" in browser.text(".message > .error")

    browser.set(format="text")
    ask(browser, "Two", answers=2)
    assert browser.driver.execute_script("return sent") == [["One"], ["Two"]]
    browser.find("#clear").click()
    browser.set(format="regex")
    browser.say("Three")
    browser.wait(lambda: browser.all(".message > .error"))
    browser.set(format="text")
    browser.find(".message > .error button").click()
    assert browser.answer()
    assert not browser.all(".message > .error")
    assert browser.driver.execute_script("return sent.at(-1)") == ["Three"]


def test_an_answer_says_how_fast_it_was_and_what_the_server_ignored(
    stack: Stack, browser: Browser, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(DEMO, tmp_path / DEMO.name))
    (model / "chat_template.jinja").write_text(WITHOUT_TOOLS)
    with serving(tmp_path, model=model, addresses=[engine.address for engine in stack.engines]) as plain:
        browser.open(plain.router.url)
        browser.set(temperature=0, max_tokens=20, tools='[{"name": "weather", "parameters": {"type": "object"}}]')
        ask(browser, STORY)
        speed = r"\d tokens/s · first token [\d.]+ m?s · 20 tokens · context \d+ of 2,048"
        assert re.search(speed, browser.text(".end"))
        ignored = "The server ignored .*tools.*: this model's chat template knows no tools"
        assert re.search(ignored, browser.text(".notes"))


def test_panels_never_cover_the_conversation_when_the_window_narrows(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    panels = [browser.find("#library"), browser.find("#settings")]
    assert all(panel.is_displayed() for panel in panels)
    browser.emulate((800, 700))
    browser.wait(lambda: not any(panel.is_displayed() for panel in panels))
    browser.find("#toggle-settings").click()
    assert panels[1].is_displayed()
    browser.find("#toggle-library").click()
    assert [panel.is_displayed() for panel in panels] == [True, False]
    browser.find("#toggle-library").send_keys("\ue00c")  # Escape
    assert not panels[0].is_displayed()
    browser.emulate(DESKTOP)
    browser.wait(lambda: all(panel.is_displayed() for panel in panels))


def test_the_theme_is_chosen_and_kept(stack: Stack, browser: Browser) -> None:
    browser.emulate(dark=True)
    browser.open(stack.router.url)
    assert browser.ground() == DARK
    browser.find("#theme").click()
    assert browser.ground() == LIGHT
    browser.driver.refresh()
    assert browser.ground() == LIGHT
    browser.find("#theme").click()
    browser.find("#theme").click()
    assert "as the system" in browser.find("#theme").get_attribute("aria-label")


def test_code_has_colours_and_stays_what_it_is(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    code = 'def add(a, b):  # sum\n    return f"{a}" + str(1.5)\n'
    script = """
        const [code, done] = arguments;
        import("/page/markdown.js").then(({ render }) => {
          const node = document.createElement("div");
          render(node, "```python\\n" + code + "```");
          const kinds = [...node.querySelectorAll("code span")].map((each) => [each.className, each.textContent]);
          done([node.querySelector("code").textContent, kinds]);
        });
    """
    text, kinds = browser.driver.execute_async_script(script, code)
    assert text == code.rstrip("\n")
    assert ["hl-keyword", "def"] in kinds
    assert ["hl-comment", "# sum"] in kinds
    assert ["hl-string", '"{a}"'] in kinds
    assert ["hl-number", "1.5"] in kinds


def test_code_is_coloured_in_time_proportional_to_its_length(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    script = """
        const [text, language, done] = arguments;
        import("/page/highlight.js").then(({ highlight }) => {
          const began = performance.now();
          highlight(text, language);
          done((performance.now() - began) / 1000);
        });
    """
    for language, mark in (("python", '"'), ("python", "'''"), ("c", "/*"), ("html", "<!--")):
        seconds = browser.driver.execute_async_script(script, mark * (200_000 // len(mark)), language)
        assert seconds < 20, "0.2 s is usual; in time that grows with the square it would be minutes"


def test_the_axe_finds_nothing_to_criticise(stack: Stack, browser: Browser) -> None:
    browser.open(stack.router.url)
    browser.set(temperature=0, max_tokens=20, logprobs=True)
    ask(browser, STORY)
    for dark in (False, True):
        browser.emulate(dark=dark)
        assert browser.axe() == []
    browser.find("#tab-fleet").click()
    browser.wait(lambda: "ready" in browser.text(".condition"))
    time.sleep(1)
    for dark in (False, True):
        browser.emulate(dark=dark)
        assert browser.axe() == []
    browser.emulate(PHONE)
    assert browser.axe() == []


def test_the_reference_of_the_api_is_read_offline_under_its_own_policy(stack: Stack, browser: Browser) -> None:
    browser.open(f"{stack.router.url}/docs", ready=False)
    browser.wait(lambda: browser.all(".opblock"))
    assert "/v1/chat/completions" in browser.text(".opblock-summary-path")
    assert not browser.all(".errors-wrapper")
