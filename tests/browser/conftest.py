"""Real browsers, and a real Quire for them to look at: engines on the demo model behind a router.

``make test`` runs the tests in Chromium, and ``make soak`` in Firefox.
"""

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import decompress as gunzip
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.firefox.options import Options as FirefoxOptions
from selenium.webdriver.firefox.service import Service as FirefoxService
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select
from typing_extensions import override

from tests.support.forked_engines import ForkedEngine, ForkedRouter
from tests.support.processes import Router, eventually

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "model"
IMAGES = ROOT / "docs" / "images"
SMALL = ("--kv-cache-memory", str(64 << 20), "--swap-space", "0.0625", "--dtype", "float32")
DESKTOP, WIDE, PHONE = (1280, 800), (1920, 1080), (390, 800)
PATIENCE = 30.0  # seconds
REFUSED = ("Refused to", "Content Security Policy", "TrustedHTML", "Uncaught")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver, which scripts/chromium.sh installs"
)
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
GECKODRIVER = shutil.which("geckodriver", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
needs_firefox = pytest.mark.skipif(
    not (FIREFOX and GECKODRIVER), reason="needs Firefox and geckodriver, which scripts/firefox.sh installs"
)
# What a page's policy forbids, Firefox reports to the page alone, which says it where errors are read.
REPORT = """() => addEventListener("securitypolicyviolation", (event) => {
  console.error(`Content Security Policy: ${event.effectiveDirective} forbids ${event.blockedURI} ${event.sample}`);
})"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="write the pictures in docs/images anew")


@dataclass
class Stack:
    """A router and its engines. Engines that a test kills are started again by ``revive``."""

    folder: Path
    router: Router
    engines: list[ForkedEngine]

    def signal(self, number: int) -> None:
        """Sends a signal to all engines."""
        for engine in self.engines:
            engine.signal(number)

    def revive(self) -> None:
        """Starts each engine that is dead again, at its address."""
        for index, engine in enumerate(self.engines):
            if engine.popen.poll() is not None:
                self.engines[index] = ForkedEngine(DEMO, self.folder, *SMALL, port=engine.port)
                self.engines[index].wait_ready()


@contextmanager
def serving(
    folder: Path, *flags: str, model: Path = DEMO, engines: int = 0, addresses: Sequence[str] = ()
) -> Iterator[Stack]:
    """A stack of so many engines, and others at ``addresses``, whose router has these flags and the tokenizer and the
    template of ``model``, until the block ends.
    """
    started = [ForkedEngine(DEMO, folder, *SMALL) for _ in range(engines)]
    router = ForkedRouter(model, [*addresses, *(engine.address for engine in started)], folder, *flags)
    stack = Stack(folder, router, started)
    try:
        for process in (*started, router):
            process.wait_ready()
        yield stack
    finally:
        for process in (router, *stack.engines):
            process.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serving(tmp_path_factory.mktemp("page"), engines=2) as stack:
        yield stack


@dataclass
class Browser(ABC):
    """A tab of a browser, and all that it asked for and complained about."""

    driver: Any
    screenshots: bool = False
    requests: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)
    is_new: bool = True

    @abstractmethod
    def emulate(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        """Makes this tab a screen of this size, whose user likes it dark or light."""

    @abstractmethod
    def download_to(self, folder: Path) -> None:
        """Saves downloads in this folder from now on."""

    @abstractmethod
    def read_logs(self) -> None:
        """Adds to ``requests`` and ``complaints`` what they lack."""

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of all that match, as the document has it."""
        script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent).join('\\n')"
        return str(self.driver.execute_script(script, selector))

    def wait(self, condition: Callable[[], object], message: str = "the page never showed it") -> None:
        eventually(condition, PATIENCE, f"{message}:\n{self.text('body')[:2000]}")

    def settled(self, selector: str) -> str:
        """The text of all that match, once nothing more comes: it has been the same for half a second."""
        texts = [self.text(selector)]
        while len(texts) < 6 or len(set(texts[-6:])) > 1:
            time.sleep(0.1)
            texts.append(self.text(selector))
        return texts[-1]

    def open(self, url: str, *, ready: bool = True) -> None:
        """Opens a page; ``ready`` waits until it knows the models. A test's first one finds nothing stored."""
        if self.is_new:
            self.driver.get(urljoin(url, "/page/base.css"))  # stores nothing
            self.driver.execute_script("localStorage.clear()")
            self.is_new = False
        self.driver.get(url)
        if ready:
            self.wait(lambda: self.all("#model option"))

    def set(self, **fields: object) -> None:
        """Fills in parameters by their names."""
        for name, value in fields.items():
            element = self.find(f"#settings [name={name}]")
            if element.tag_name == "select":
                Select(element).select_by_value(str(value))
            elif isinstance(value, bool):
                if element.is_selected() != value:
                    element.click()
            else:
                element.clear()
                element.send_keys(str(value))

    def say(self, text: str) -> None:
        """Sends a message."""
        self.find("#message").send_keys(text, Keys.ENTER)

    @property
    def answering(self) -> bool:
        return self.find("#stop").is_displayed()

    def answer(self) -> str:
        """The text of the last answer, once it is complete."""
        self.wait(lambda: self.all(".message.assistant") and not self.answering)
        script = "return [...document.querySelectorAll('.message.assistant .text')].at(-1).textContent"
        return str(self.driver.execute_script(script))

    def ground(self) -> str:
        """The colour behind everything."""
        return str(self.driver.execute_script("return getComputedStyle(document.body).backgroundColor"))

    def axe(self) -> list[str]:
        """What axe-core (4.14.1, MPL-2.0) finds that keeps people from using the page: rule, and the first element."""
        self.driver.execute_script(gunzip((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode())
        script = """
            const done = arguments[0];
            axe.run({ resultTypes: ["violations"] }).then(({ violations }) => done(violations.map(({ id, nodes }) =>
              `${id}: ${nodes[0].html.slice(0, 200)} ${nodes[0].failureSummary}`)));
        """
        found: list[str] = self.driver.execute_async_script(script)
        return found

    def violations(self) -> list[str]:
        """What the page asked of another origin, what its own policy forbade, and its uncaught errors."""
        self.read_logs()
        origin = "/".join(self.driver.current_url.split("/")[:3])
        foreign = [url for url in self.requests if not url.startswith((origin + "/", "data:", "chrome:", "about:"))]
        return foreign + self.complaints

    def picture(self, name: str) -> None:
        """Writes a screenshot into the documents, if the tests were started with ``--screenshots``."""
        if self.screenshots:
            IMAGES.mkdir(exist_ok=True)
            with Image.open(BytesIO(self.driver.get_screenshot_as_png())) as image:  # a palette takes a third
                image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)

    def pictures(self, name: str) -> None:
        """As ``picture``, at three widths, light and dark."""
        if self.screenshots:
            ActionChains(self.driver).move_to_element(self.find("h1")).perform()  # where nothing changes its colour
            for dark in (False, True):
                for size in (PHONE, DESKTOP, WIDE):
                    self.emulate(size, dark=dark)
                    time.sleep(1)
                    self.picture(f"{name}-{size[0]}-{'dark' if dark else 'light'}")
            self.emulate()


class Chromium(Browser):
    """Reads the console, where Chromium reports what a policy forbids and errors that nobody caught."""

    @override
    def emulate(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        # The width of a window has a least value; that of a device has none.
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    @override
    def download_to(self, folder: Path) -> None:
        behaviour = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)

    @override
    def read_logs(self) -> None:
        for entry in self.driver.get_log("performance"):
            message: dict[str, Any] = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requests.add(message["params"]["request"]["url"])
        found = [entry["message"] for entry in self.driver.get_log("browser")]
        self.complaints += [text for text in found if any(word in text for word in REFUSED)]


class Firefox(Browser):
    """Hears of requests, messages and errors through WebDriver BiDi."""

    def listen(self) -> None:
        self.driver.network.add_event_handler("before_request_sent", self.on_request)
        self.driver.script.add_preload_script(REPORT)
        self.driver.script.add_console_message_handler(self.on_message)
        self.driver.script.add_javascript_error_handler(self.on_error)

    def on_request(self, event: Any) -> None:
        self.requests.add(event["request"]["url"])

    def on_message(self, entry: Any) -> None:
        if any(word in entry.text for word in REFUSED):
            self.complaints.append(entry.text)

    def on_error(self, entry: Any) -> None:
        self.complaints.append(entry.text)

    @override
    def emulate(self, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        viewport = {"width": size[0], "height": size[1]}
        self.driver.browsing_context.set_viewport(self.driver.current_window_handle, viewport)
        with self.driver.context(self.driver.CONTEXT_CHROME):  # WebDriver BiDi can do this from Firefox 159 on
            setting = "layout.css.prefers-color-scheme.content-override"
            self.driver.execute_script("Services.prefs.setIntPref(...arguments)", setting, 0 if dark else 1)
        script = "return matchMedia('(prefers-color-scheme: dark)').matches"
        self.wait(
            lambda: self.driver.execute_script(script) == dark
        )  # the tab is another process, which hears of it later

    @override
    def download_to(self, folder: Path) -> None:
        self.driver.browser.set_download_behavior(allowed=True, destination_folder=str(folder))

    @override
    def read_logs(self) -> None:
        pass  # all has been heard


@contextmanager
def chromium(*, screenshots: bool = False) -> Iterator[Browser]:
    """A Chromium without anything stored, until the block ends."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # it has none for root
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Chromium(driver, screenshots)
    finally:
        driver.quit()


@contextmanager
def firefox(*, screenshots: bool = False) -> Iterator[Browser]:
    """A Firefox without anything stored, until the block ends. It takes no pictures: the docs have Chromium's."""
    options = FirefoxOptions()
    options.binary_location = str(FIREFOX)
    options.add_argument("-headless")
    options.enable_bidi = True
    service = FirefoxService(GECKODRIVER, service_args=["--allow-system-access"])  # to settings that a test changes
    driver = webdriver.Firefox(options=options, service=service)
    try:
        browser = Firefox(driver)
        browser.listen()
        yield browser
    finally:
        driver.quit()


BROWSERS = [
    pytest.param(chromium, marks=needs_chromium, id="chromium"),
    pytest.param(firefox, marks=[needs_firefox, pytest.mark.soak], id="firefox"),
]


@pytest.fixture(scope="session", params=BROWSERS)
def _browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with request.param(screenshots=request.config.getoption("--screenshots")) as browser:
        yield browser


@pytest.fixture
def browser(_browser: Browser) -> Iterator[Browser]:
    """A browser that has stored nothing; afterwards nothing must have been forbidden, and no other origin asked."""
    _browser.driver.switch_to.new_window("tab")
    _browser.requests.clear()
    _browser.complaints.clear()
    _browser.is_new = True
    _browser.emulate()
    yield _browser
    assert _browser.violations() == []
    _browser.driver.close()
    _browser.driver.switch_to.window(_browser.driver.window_handles[0])
