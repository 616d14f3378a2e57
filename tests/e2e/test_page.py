"""The page in a real browser, before `cloister serve` with the embedded model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.browser import Browser, Keys
from tests.serving import MODEL, ServeProcess
from tests.slow_engine import SLOW

QUESTION = "What does the PostgreSQL command VACUUM do?"
ANSWER = "garbage-collect and optionally analyze a database"
LAST_ANSWER = "li:last-child > .turn.assistant"
DONE = f"{LAST_ANSWER}[aria-busy=false]"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Where `cloister serve` listens."""
    with ServeProcess("--num-threads", "1", module=SLOW) as running:  # what is stopped or looked at lasts until it is
        yield running.url
        assert running.stop()[0] == 0


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Browser]:
    """The page, freshly opened; whatever a test does there, nothing is complained about and nobody else is asked."""
    browser.open(url)
    yield browser
    browser.run("localStorage.clear()")
    complaints, asked = browser.read_logs()
    assert not complaints
    assert {address.startswith(f"{url}/") for address in asked} == {True}


def ask(page: Browser, text: str) -> None:
    page.find("#message").send_keys(text, Keys.ENTER)


def answer_of(page: Browser) -> str:
    """Waits for the last answer to end, and returns its text."""
    return page.text(f"{DONE} .prose")


def request_of(page: Browser) -> dict[str, object]:
    """What the page sent for the last answer."""
    page.find(f"{DONE} .turn-foot")
    page.click(f"{LAST_ANSWER} [aria-label=More]")
    page.click_text(f"{LAST_ANSWER} .menu-row", "Request and response as JSON")
    request = json.loads(page.run("return document.querySelector('#exchange .code-box code').textContent"))
    page.click("#exchange [aria-label=Close]")
    return request


def set_field(page: Browser, **values: str) -> None:
    """Types into fields of the settings."""
    page.click("#open-settings")
    for name, value in values.items():
        field = page.find(f"#set-{name}")
        if field.tag_name == "select":
            field.find_element("css selector", f"option[value='{value}']").click()
        else:
            field.clear()
            field.send_keys(value)
    page.press(Keys.ESCAPE)


def test_a_question_is_answered_as_a_stream(page):
    ask(page, QUESTION)
    assert answer_of(page) == ANSWER
    figures = page.texts(f"{LAST_ANSWER} .figures span")
    assert any(re.fullmatch(r"\d+ tokens", text) for text in figures)
    assert any("tokens/s" in text for text in figures)
    assert request_of(page)["stream"] is True


def test_an_answer_can_be_seen_while_it_is_written_and_be_stopped(page):
    set_field(page, max_tokens="6000", more='{"ignore_eos": true}')
    ask(page, QUESTION)
    page.wait(lambda: len(page.run("return document.querySelector('.turn.assistant .prose')?.textContent ?? ''")) > 20)
    assert page.find(".turn.assistant").get_attribute("aria-busy") == "true"
    page.press(Keys.ESCAPE)
    assert "Stopped." in page.find(DONE).text
    assert page.find("#send")
    page.wait(lambda: "cloister_num_requests_running 0.0" in page.run("return fetch('/metrics').then((r) => r.text())"))


def test_settings_reach_the_request(page):
    set_field(
        page,
        system="Be brief.",
        temperature="0.5",
        top_p="0.9",
        max_tokens="7",
        seed="42",
        stop="END\nSTOP",
        format="json_object",
        more='{"top_k": 3}',
    )
    ask(page, QUESTION)
    request = request_of(page)
    assert request["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 42, "stop": ["END", "STOP"], "top_k": 3}
    wanted["response_format"] = {"type": "json_object"}
    assert {name: request[name] for name in wanted} == wanted


def test_a_setting_that_is_wrong_is_said_and_not_sent(page):
    page.click("#open-settings")
    page.find("#set-temperature").send_keys("9")
    assert "from 0 to 2" in page.text("#set-temperature-fault")
    page.press(Keys.ESCAPE)
    ask(page, QUESTION)
    assert "temperature" not in request_of(page)


def test_a_question_can_be_edited_and_is_asked_again(page):
    ask(page, "What does the PostgreSQL command EXPLAIN do?")
    assert answer_of(page) == "show the execution plan of a statement"
    page.click(".turn.user [aria-label='Edit: You']")
    page.press(Keys.CONTROL, "a")
    page.find(".edit textarea").clear()
    page.find(".edit textarea").send_keys(QUESTION, Keys.ENTER)
    page.wait(lambda: page.texts(f"{DONE} .prose") == [ANSWER])
    assert page.texts(".turn.user .said") == [QUESTION]
    assert len(page.all(".turn")) == 2


def test_an_answer_can_be_asked_for_again_and_later_turns_brought_back(page):
    ask(page, QUESTION)
    answer_of(page)
    ask(page, "What is the Python module json?")
    page.wait(lambda: len(page.all(".turn.assistant .figures")) == 2)
    page.click("li:nth-child(2) [aria-label='Answer again']")
    page.wait(lambda: len(page.all(".turn")) == 2 and page.texts(f"{DONE} .prose") == [ANSWER])
    page.click("#toast button")
    assert len(page.all(".turn")) == 4


def test_an_answer_can_be_edited_and_is_what_the_model_is_told(page):
    ask(page, QUESTION)
    answer_of(page)
    page.click("[aria-label='Edit: Answer']")
    page.find(".edit textarea").clear()
    page.find(".edit textarea").send_keys("It cleans.", Keys.ENTER)
    assert page.texts(".turn.assistant .prose") == ["It cleans."]
    ask(page, "Why?")
    page.wait(lambda: len(page.all(".turn.assistant .figures")) == 2)
    assert request_of(page)["messages"][1] == {"role": "assistant", "content": "It cleans."}


def test_conversations_stand_side_by_side_and_one_can_be_forgotten(page):
    ask(page, QUESTION)
    answer_of(page)
    page.click("#new-conversation")
    assert page.find("#welcome")
    ask(page, "What is the Python module json?")
    answer_of(page)
    assert page.texts("#conversations .open") == ["What is the Python module json?", QUESTION]
    page.click("#conversations .open", 1)
    assert page.texts(".turn.user .said") == [QUESTION]
    page.click(f"[aria-label='More: {QUESTION}']")
    page.click_text(".menu-row", "Forget")
    assert page.texts("#conversations .open") == ["What is the Python module json?"]
    page.click("#toast button")
    assert page.texts("#conversations .open") == ["What is the Python module json?", QUESTION]


def test_nothing_is_kept_unless_the_user_wants_it(page, url):
    set_field(page, system="Be brief.")
    ask(page, QUESTION)
    answer_of(page)
    assert page.run("return localStorage.length + sessionStorage.length + document.cookie.length") == 0
    page.click("#open-settings")
    page.find("#set-key").send_keys("a-secret-key")
    page.click("#set-keep")
    page.press(Keys.ESCAPE)
    kept = page.run("return JSON.stringify(localStorage)")
    assert "VACUUM" in kept
    assert "Be brief." in kept
    assert "a-secret-key" not in kept
    page.open(url)
    assert page.texts(".turn.user .said") == [QUESTION]
    page.click("#open-settings")
    page.click("#set-keep")
    assert page.run("return localStorage.length") == 0


def test_the_keyboard_alone_is_enough(page):
    page.press(Keys.TAB)
    assert page.run("return document.activeElement.className") == "skip"
    page.press(Keys.ENTER)
    assert page.run("return document.activeElement.id") == "message"
    page.press("one", Keys.SHIFT + Keys.ENTER, Keys.NULL, "two")
    assert page.run("return document.activeElement.value") == "one\ntwo"
    page.press(Keys.CONTROL + "a", Keys.NULL, QUESTION, Keys.ENTER)
    assert answer_of(page) == ANSWER
    page.press(Keys.ALT + "b", Keys.NULL)
    assert page.find(".card")
    page.press(Keys.ALT + "c", Keys.NULL)
    page.run("document.activeElement.blur()")
    page.press("/")
    assert page.run("return document.activeElement.id") == "message"
    page.press(Keys.ALT + "n", Keys.NULL)
    assert page.find("#welcome")
    page.run("document.activeElement.blur()")
    page.press("?")
    assert "Stop the answer" in page.text("#shortcuts")
    page.press(Keys.ESCAPE)
    assert not page.all("#shortcuts")
    page.press(Keys.ALT + "s", Keys.NULL)
    assert page.run("return document.querySelector('#settings').contains(document.activeElement)")
    page.press(Keys.ESCAPE)


def test_focus_can_be_seen(page):
    page.press(Keys.TAB, Keys.TAB)
    outline = page.run("const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]")
    assert outline == ["solid", "2px"]


def paper(page: Browser) -> int:
    """How light the page's background is, of 255."""
    return int(re.findall(r"\d+", page.run("return getComputedStyle(document.body).backgroundColor"))[0])


def test_colours_can_be_chosen_in_the_settings(page):
    set_field(page, theme="dark")
    assert paper(page) < 60


def test_colours_follow_the_device_and_the_switch(page):
    assert paper(page) > 200
    page.prefer(prefers_color_scheme="dark")
    assert paper(page) < 60
    page.click("#switch-theme")
    assert paper(page) > 200
    page.click("#switch-theme")
    assert paper(page) < 60


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(page, scheme):
    page.prefer(prefers_color_scheme=scheme)
    for ink, ground in (
        ("ink", "paper"),
        ("soft", "paper"),
        ("soft", "side"),
        ("soft", "card"),
        ("soft", "hover"),
        ("ink", "tint"),
        ("accent", "paper"),
        ("accent", "card"),
        ("on-accent", "accent"),
        ("bad", "bad-tint"),
        ("bad", "paper"),
    ):
        assert contrast(rgb(page, ink), rgb(page, ground)) >= 4.5, (ink, ground)
    assert contrast(rgb(page, "edge"), rgb(page, "card")) >= 3


def rgb(page: Browser, name: str) -> list[int]:
    """A colour of the theme as it is drawn."""
    script = """const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = `var(--${arguments[0]})`;
    const color = getComputedStyle(probe).color;
    probe.remove();
    return color;"""
    return [int(part) for part in re.findall(r"\d+", page.run(script, name))[:3]]


def contrast(one: list[int], other: list[int]) -> float:
    """Contrast ratio of two colours (WCAG 2.2, 1.4.3)."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: list[int]) -> float:
    parts = [part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_a_phone_scrolls_in_one_direction_only(page):
    page.resize(360, 740, phone=True)
    ask(page, QUESTION)
    answer_of(page)
    for fragment in ("#chat", "#board"):
        page.run("location.hash = arguments[0]", fragment)
        page.find(".card" if fragment == "#board" else ".turn")
        assert page.run("return document.documentElement.scrollWidth") <= 360
        wide = page.run(
            "return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility({ visibilityProperty: true })"
            " && !e.closest('pre, .table-box, .visually-hidden') && e.getBoundingClientRect().right > 361)"
            ".map((e) => e.className)"
        )
        assert wide == []


def test_what_a_finger_presses_is_large_enough(page):
    page.resize(360, 740, phone=True)
    sizes = page.run(
        "return [...document.querySelectorAll('.bar button, .bar a, .composer button')].filter((e) => e.checkVisibility())"
        ".map((e) => Math.min(e.offsetWidth, e.offsetHeight))"
    )
    assert sizes
    assert min(sizes) >= 24  # WCAG 2.2, 2.5.8


def test_the_list_of_a_phone_opens_and_closes(page):
    page.resize(360, 740, phone=True)
    page.wait(lambda: not page.all("#new-conversation"))
    page.click("#open-list")
    assert page.find("#new-conversation")
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.all("#new-conversation"))


def test_everything_that_can_be_pressed_has_a_name(page):
    ask(page, QUESTION)
    answer_of(page)
    page.click("#open-settings")
    nameless = page.run(
        "return [...document.querySelectorAll('button, a, input, select, textarea, summary')].filter((e) => !(e.ariaLabel"
        " || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert nameless == []
    ids = page.run("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_an_answer_is_read_out_in_sentences_and_not_by_token(page):
    page.run(
        "window.spoken = []; new MutationObserver(() => spoken.push(document.getElementById('spoken').textContent))"
        ".observe(document.getElementById('spoken'), { childList: true, characterData: true, subtree: true });"
    )
    ask(page, QUESTION)
    answer_of(page)
    assert page.wait(lambda: page.run("return spoken.length > 1 && spoken")) == ["Answering.", ANSWER]
    assert not page.all("#turns[aria-live], #turns [aria-live]:not(.text-button span)")


def number_of(page: Browser, card: str) -> str:
    return page.text(f".card[aria-label='{card}'] .number")


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Has the server answer one request after another while the block runs, however fast it is."""
    ended = threading.Event()

    def ask_again_and_again() -> None:
        body = {"model": MODEL, "prompt": QUESTION, "max_tokens": 7000, "ignore_eos": True, "stream": True}
        while not ended.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
                for _ in reply.iter_lines():
                    if ended.is_set():
                        break

    asking = threading.Thread(target=ask_again_and_again)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join(300)


def test_the_board_shows_what_the_server_does(page, url):
    page.click("#go-board")
    with busy(url):
        page.wait(lambda: number_of(page, "Requests") == "1")
        page.wait(lambda: number_of(page, "KV cache in use") not in ("–", "0%"))
        page.wait(lambda: number_of(page, "Tokens per second") not in ("–", "0"))
        page.wait(lambda: number_of(page, "Time between tokens").endswith("ms"))
    label = page.find(".card[aria-label='Tokens per second'] svg").get_attribute("aria-label")
    assert re.fullmatch(r"Tokens per second, last 2 minutes: output [\d,.]+, at most [\d,.]+", label)
    assert page.text(".card[aria-label='Memory budget'] .legend").count("MiB") >= 3
    page.wait(lambda: number_of(page, "Requests") == "0")


def num_readings(page: Browser) -> int:
    return page.run("return performance.getEntriesByName(new URL('/metrics', location)).length")


def test_the_board_reads_only_while_somebody_looks(page):
    page.click("#go-board")
    page.wait(lambda: num_readings(page) >= 2)
    page.click(".board-head .pause")
    paused = num_readings(page)
    page.click("#go-chat")
    assert page.run("return new Promise((done) => setTimeout(done, 1500))") is None
    assert num_readings(page) - paused <= 1
    page.click("#go-board")
    page.click(".board-head .pause")
    page.wait(lambda: num_readings(page) >= paused + 2)


def test_a_conversation_leaves_as_json_and_as_markdown(page):
    ask(page, QUESTION)
    answer_of(page)
    page.run(
        "window.saved = []; const make = URL.createObjectURL; URL.createObjectURL = (blob) => (blob.text().then((text) =>"
        " saved.push(text)), make(blob));"
    )
    for button in (1, 2):
        page.click(f"[aria-label='More: {QUESTION}']")
        page.click_text(".menu-row", "Export")
        page.click(f"#exchange .choices button:nth-child({button})")
    markdown, data = page.wait(lambda: page.run("return saved.length === 2 && saved"))
    assert f"## You\n\n{QUESTION}\n\n## Answer\n\n{ANSWER}" in markdown
    assert json.loads(data)["messages"] == [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


def test_the_profile_in_force_is_said_at_the_top(page):
    assert page.text("#privacy").startswith("Profile open. Everybody on this machine may share")
