"""Open WebUI, which a browser drives as its user does."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import Browser, chromium
from tests.clients.suite import OPEN_WEBUI
from tests.support.ports import free_port
from tests.support.processes import Engine, Process, wait_healthy

ALONE = {
    "WEBUI_AUTH": "False", "ENABLE_OLLAMA_API": "False", "OPENAI_API_KEY": "none", "WEBUI_SECRET_KEY": "a-secret",
    "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "ANONYMIZED_TELEMETRY": "False",
    "RAG_EMBEDDING_ENGINE": "openai",  # any but its own, which loads a model with torch when it starts
}  # fmt: skip
"""With no accounts, and with nothing but Quire to talk to."""
ANSWERS, MESSAGE, MODELS = ".chat-assistant #response-content-container", "#chat-input", "button[id^=model-selector]"
STOP = "button[aria-label=Stop]"
NEWS = "Okay, Let's Go!"
"""The button of what is new in this version, which is shown once."""
PULSE = 0.02
"""Seconds that a held engine goes on for at a time."""


@dataclass
class OpenWebUI:
    """Its page in a browser. Texts are words with one space between, as the page shows Markdown."""

    browser: Browser
    url: str

    def open(self) -> None:
        """Opens the page anew, and puts away the news."""
        self.browser.driver.get(self.url)
        self.browser.wait(lambda: NEWS in self.browser.text("button"))
        script = (
            "[...document.querySelectorAll('button')].find((node) => node.textContent.includes(arguments[0])).click()"
        )
        self.browser.driver.execute_script(script, NEWS)
        self.browser.wait(lambda: NEWS not in self.browser.text("button") and self.browser.all(MESSAGE))

    def models(self) -> list[str]:
        """The names in the list of models."""
        self.browser.find(MODELS).click()
        self.browser.wait(lambda: self.browser.all("[id^=model-option-]"))
        names = self.browser.text("[id^=model-option-]").split()
        self.browser.find("body").send_keys(Keys.ESCAPE)
        self.browser.wait(lambda: not self.browser.all("[id^=model-option-]"))
        return names

    def say(self, text: str) -> None:
        """Types a message and sends it; returns once its answer is awaited."""
        before = len(self.browser.all(ANSWERS))
        self.browser.find(MESSAGE).send_keys(text, Keys.ENTER)
        self.browser.wait(lambda: len(self.browser.all(ANSWERS)) == before + 1)

    def texts(self, selector: str = ANSWERS) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        return [" ".join(text.split()) for text in self.browser.driver.execute_script(script, selector)]

    def answer(self) -> str:
        """The text of the last answer, once it has ended."""
        self.browser.wait(lambda: self.texts()[-1] and not self.browser.all(STOP))
        return self.texts()[-1]

    def see_a_part(self, engine: Engine) -> str:
        """The first words of the answer that comes from a held engine, which goes on until they are seen."""

        def seen() -> str:
            engine.signal(signal.SIGCONT)
            time.sleep(PULSE)
            engine.signal(signal.SIGSTOP)
            time.sleep(0.3)  # the page shows what has come
            return self.texts()[-1]

        self.browser.wait(seen)
        return self.texts()[-1]

    def stop(self) -> None:
        """Presses Stop."""
        self.browser.find(STOP).click()
        self.browser.wait(lambda: not self.browser.all(STOP))


def settings(api: str) -> dict[str, str]:
    """Returns the environment variables that connect it to the router at ``api``."""
    return {**ALONE, "OPENAI_API_BASE_URL": f"{api}/v1"}


@contextmanager
def open_webui(folder: Path, api: str) -> Iterator[OpenWebUI]:
    """Open WebUI with this API, keeping its chats in ``folder``, in a browser of its own, until the block ends."""
    port = free_port()
    environment = {**settings(api), "DATA_DIR": str(folder), "PYTHONPATH": ""}
    command = [str(OPEN_WEBUI), "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = Process(command, folder / "open-webui.log", environment)
    try:
        wait_healthy(process, port)
        with chromium() as browser:
            browser.emulate()
            yield OpenWebUI(browser, f"http://127.0.0.1:{port}")
    finally:
        process.stop()
