"""A real browser for tests: Debian's Chromium without a window, and what it says of a page."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

TIMEOUT_S = 300.0
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,800",
    # One process draws every page: a new one for each page that is opened takes a third more processor time.
    "--renderer-process-limit=1", "--disable-site-isolation-trials",
    "--disable-features=IsolateOrigins,site-per-process,SpareRendererForSitePerProcess,BackForwardCache",
    "--force-prefers-reduced-motion",  # what moves is drawn by the processor, picture after picture
)  # fmt: skip
_SEEN = """return [...document.querySelectorAll(arguments[0])].filter((element) => element.getClientRects().length
    && element.checkVisibility({ opacityProperty: true, visibilityProperty: true }));"""
"""One command, where Selenium's `is_displayed` takes one for each element, and a script of 50 kB in each."""


class Browser:
    """One window.

    Attributes:
        driver: Selenium's.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.url = ""

    def open(self, url: str, fragment: str = "") -> None:
        """Loads the page of a server, as a new visitor, and waits until it is ready."""
        if self.driver.current_url != "about:blank":
            self.driver.get("about:blank")
        self.read_logs()
        self.url = url
        self.driver.get(f"{url}/{fragment}")
        self.wait(lambda: self.run("return document.documentElement.dataset.ready === ''"))

    def run(self, script: str, *arguments: object) -> Any:
        """Runs JavaScript in the page and returns what it returns."""
        return self.driver.execute_script(script, *arguments)

    def call(self, module: str, expression: str, *arguments: object) -> Any:
        """Imports a module of the page as `m` and returns what an expression of it and `a`, the arguments, is."""
        script = """const [path, expression, a, done] = arguments;
        const folder = document.querySelector('script[src]').src.replace(/[^/]*$/, '');
        import(folder + path).then((m) => done({ value: (%s) }), (error) => done({ error: String(error) }));"""
        answer = self.driver.execute_async_script(script % expression, module, expression, arguments)
        assert "error" not in answer, answer
        return answer.get("value")

    def find(self, css: str) -> WebElement:
        """Waits for an element that can be seen, and returns it."""
        found: WebElement = self.wait(lambda: next(iter(self.all(css)), None))
        return found

    def text(self, css: str) -> str:
        """The text of an element that can be seen, once there is one."""
        texts: list[str] = self.wait(lambda: [element.text for element in self.all(css)[:1]])
        return texts[0]

    def all(self, css: str) -> list[WebElement]:
        """Every element that can be seen."""
        seen: list[WebElement] = self.run(_SEEN, css)
        return seen

    def texts(self, css: str) -> list[str]:
        """Their texts."""
        return [element.text for element in self.all(css)]

    def click(self, css: str, index: int = 0) -> None:
        """Clicks the first element that can be seen, or a later one; again if it was drawn anew in between."""
        self.wait(lambda: [_click(element) for element in self.all(css)[index : index + 1]])

    def click_text(self, css: str, text: str) -> None:
        """Clicks the element that says exactly this."""
        self.wait(lambda: [_click(element) for element in self.all(css) if element.text == text][:1])

    def press(self, *keys: str) -> None:
        """Presses keys wherever the focus is, once that takes keys: not in a dialog that is just closed."""

        def send() -> bool:
            with contextlib.suppress(ElementNotInteractableException):
                self.driver.switch_to.active_element.send_keys(*keys)
                return True
            return False

        self.wait(send)

    def wait(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        """Returns what a condition gives when it gives anything."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(StaleElementReferenceException):  # it was drawn anew in between
                if value := condition():
                    return value
            assert time.monotonic() < deadline, f"the page did not get there within {timeout_s:g} s; {self._describe()}"
            time.sleep(0.02)

    def _describe(self) -> str:
        """What it shows, for those who have the log of a failed test and nothing else."""
        try:
            return f"it shows: {self.run('return document.body.innerText')[-500:]!r}"
        except WebDriverException as error:
            return f"the browser says: {error.msg}"

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """Sets what the device prefers, such as prefers_color_scheme="dark"."""
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def read_logs(self) -> tuple[list[str], list[str]]:
        """Returns what the console complained about and every address that was asked for, since it was read last."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        said = [entry["message"] for entry in self._log("browser") if entry["level"] in ("WARNING", "SEVERE")]
        return said, [url for url in asked if urlsplit(url).scheme not in ("about", "data", "blob")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries


def _click(element: WebElement) -> bool:
    element.click()
    return True


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser while the block runs; skips where none is installed."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("there is no Chromium with its driver here; on Debian: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("perfLoggingPrefs", {"enableNetwork": True, "enablePage": False})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_script_timeout(TIMEOUT_S)
    driver.set_page_load_timeout(TIMEOUT_S)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


__all__ = ["Browser", "Keys", "browsing"]
