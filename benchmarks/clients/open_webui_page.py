"""Drives open-webui's page in headless Chromium: it lists our model, and a question typed there is answered as a stream.

Start open-webui first (README.md has the command); needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from checks import QUESTION, run_checks
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
SHOT = Path(sys.argv[2]) if len(sys.argv) > 2 else None
EXPECTED = "garbage-collect"
"""A word of the embedded model's answer."""

options = webdriver.ChromeOptions()
for argument in ("--headless=new", "--no-sandbox", "--window-size=1200,900", "--disable-dev-shm-usage"):
    options.add_argument(argument)
browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
wait = WebDriverWait(browser, 60)


def open_page() -> str:
    browser.get(URL)
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, "#chat-input"))
    for button in browser.find_elements(By.XPATH, "//button[contains(., 'Okay')]"):  # what is new in this version
        button.click()
    return browser.title


def pick_model() -> str:
    shown = wait.until(lambda page: page.find_element(By.CSS_SELECTOR, "button[id^='model-selector']"))
    wait.until(lambda _: shown.text.strip())
    return f"the page shows {shown.text.strip()!r}"


def ask() -> str:
    field: WebElement = browser.find_element(By.CSS_SELECTOR, "#chat-input")
    field.click()
    field.send_keys(QUESTION[0]["content"], Keys.ENTER)
    for _ in range(600):
        text = browser.execute_script("return [...document.querySelectorAll('.chat-assistant')].map(e => e.innerText).join()")
        if EXPECTED in text:
            break
        time.sleep(0.05)
    assert EXPECTED in text, "no answer"
    if SHOT is not None:
        browser.save_screenshot(str(SHOT))
    return f"answered on the page: {' '.join(text.split())[:60]!r}"


try:
    run_checks("open-webui", {"page": open_page, "model": pick_model, "chat": ask})
finally:
    browser.quit()
