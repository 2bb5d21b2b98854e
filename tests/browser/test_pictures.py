"""The pictures of the page in docs/images, which ``--screenshots`` writes anew: a chat whose engine is killed while it
answers, and the fleet at that moment, at three widths, light and dark.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import httpx
import pytest

from tests.browser.conftest import Browser, Stack

QUESTION = "Tell me a long story about a fox."
LENGTH = "return [...document.querySelectorAll('.message.assistant .text')].at(-1)?.textContent.length ?? 0"
ENDED = "return document.getElementById('stop').hidden"
SEND = """
    document.getElementById("clear").click();
    document.getElementById("message").value = arguments[0];
    document.getElementById("composer").requestSubmit();
"""


def test_the_pictures_show_an_answer_that_survives_its_engine(stack: Stack, browser: Browser) -> None:
    if not browser.screenshots:
        pytest.skip("--screenshots writes the pictures, which are Chromium's")
    browser.open(stack.router.url)
    browser.say("What is 7 plus 5?")
    browser.answer()
    browser.find("#clear").click()
    browser.find("#tab-fleet").click()
    with traffic(stack):
        time.sleep(60)  # the curves are those of a minute
        for number in range(8):
            browser.driver.execute_script(SEND, QUESTION)
            browser.wait(lambda: int(browser.driver.execute_script(LENGTH)) > 40)
            stack.engines[number % 2].kill()
            browser.wait(lambda: browser.driver.execute_script(ENDED))
            if "continued on" in browser.text(".notes"):
                break
            stack.revive()  # the answer was the other one's
            browser.wait(lambda: "2 of 2 engines ready" in browser.text(".summary"))
        time.sleep(4)
        browser.pictures("page-fleet")
    stack.revive()
    browser.find("#tab-chat").click()
    browser.answer()
    assert "continued on" in browser.text(".notes")
    browser.pictures("page-chat")
    browser.open(f"{stack.router.url}/docs", ready=False)
    browser.wait(lambda: browser.all(".opblock"))
    browser.picture("page-docs")


@contextmanager
def traffic(stack: Stack) -> Iterator[None]:
    """Two clients that chat, until the block ends."""
    ended = Event()

    def chat(client: int) -> None:
        with httpx.Client(base_url=stack.router.url, timeout=60) as http:
            for turn in range(1000):
                content = f"Client {client} asks for story {turn // 4}. " * (turn % 4 + 1)
                body = {"model": "quire-demo", "messages": [{"role": "user", "content": content}], "max_tokens": 100}
                http.post("/v1/chat/completions", json=body)
                if ended.wait(0.2):
                    return

    clients = [Thread(target=chat, args=(number,)) for number in range(2)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join()
