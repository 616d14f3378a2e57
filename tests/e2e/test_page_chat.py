"""What can be done with answers and conversations on the page, in a real browser before scripted engines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloister.types.config import ServerConfig
from cloister.types.errors import QueueFullError
from cloister.types.request import FinishReason, Request, SequenceOutput, TokenLogprobs
from tests.browser import Browser, Keys
from tests.pdf_factory import make_pdf
from tests.server.running_server import INFO, RunningServer, ScriptedEngine, output, says, serving_script, write_model

DONE = "li:last-child > .turn.assistant[aria-busy=false]"
Script = Callable[[Request], list[SequenceOutput | float | Exception]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("page_model"))


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RunningServer]:
    """A server with two names, whose engine each test gives a script."""
    engine = ScriptedEngine(says("x"), model=replace(INFO, max_model_len=4096))
    config = ServerConfig(port=0, drain_timeout_s=1.0, served_model_name="small,large")
    with serving_script(model_path, engine, config=config) as server:
        yield server


@pytest.fixture
def answered_by(browser: Browser, server: RunningServer) -> Iterator[Callable[[Script], ScriptedEngine]]:
    """Opens the page before an engine that plays a script; nothing is complained about."""
    engine = server.engine
    assert isinstance(engine, ScriptedEngine)

    def open_page(script: Script) -> ScriptedEngine:
        engine.script = script
        engine.taken.clear()
        browser.open(server.url)
        return engine

    yield open_page
    browser.run("localStorage.clear()")
    complaints, _ = browser.read_logs()
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    browser.driver.get("about:blank")


def ask(browser: Browser, text: str = "hello") -> None:
    browser.find("#message").send_keys(text, Keys.ENTER)
    browser.find(f"{DONE} .turn-buttons")


def prompt_of(request: Request) -> str:
    """What the engine was given; the tests' tokenizer has a token for each byte."""
    return bytes(request.token_ids).decode()


def act(browser: Browser, menu: str, action: str) -> None:
    """Opens the menu of that name and does one of its actions."""
    browser.click(f"[aria-label='{menu}']")
    browser.click_text(".menu-row", action)


def choose(browser: Browser, css: str, value: str) -> None:
    browser.find(css).find_element("css selector", f"option[value='{value}']").click()


def type_into(browser: Browser, css: str, text: str) -> None:
    browser.find(css).clear()
    browser.find(css).send_keys(text)


def cut_after(text: str) -> Script:
    return lambda request: [*(output(request, letter) for letter in text), output(request, end=FinishReason.LENGTH)]


def then(*scripts: Script) -> Script:
    """A script for the first request, one for the second, and so on; the last one stays."""
    left = list(scripts)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0])(request)


def test_the_line_about_privacy_can_be_hidden_and_comes_back(answered_by, browser):
    answered_by(says("x"))
    assert browser.text("#privacy").startswith("Profile open.")
    assert browser.find("#privacy").size["height"] < 40
    browser.click("#hide-privacy")
    assert not browser.all("#privacy")
    shield = browser.find("#show-privacy")
    assert shield.get_attribute("aria-label") == "Privacy: profile open"
    assert browser.run("return localStorage.length") == 0
    shield.click()
    assert browser.find("#privacy")


def test_a_line_that_was_hidden_under_one_profile_is_shown_under_another(answered_by, browser):
    answered_by(says("x"))
    for profile, is_shown in (("open", False), ("private", True)):
        kept = {"version": 1, "settings": {"keep": True, "hidden_profile": profile}, "conversations": [], "current": ""}
        browser.run("localStorage.setItem('cloister', arguments[0])", json.dumps(kept))
        browser.open(browser.url)
        assert bool(browser.all("#privacy")) is is_shown


def test_a_model_is_chosen_in_the_bar_where_several_are_served(answered_by, browser):
    answered_by(says("x"))
    assert browser.find("#choose-model").get_attribute("value") == "small"
    choose(browser, "#choose-model", "large")
    ask(browser)
    act(browser, "More", "Request and response as JSON")
    request = json.loads(browser.run("return document.querySelector('#exchange .code-box code').textContent"))
    assert request["model"] == "large"


def test_an_answer_that_was_cut_is_continued_where_it_ended(answered_by, browser):
    engine = answered_by(then(cut_after("One, two,"), says(" three.")))
    ask(browser, "Count.")
    assert "Stopped at the length limit." in browser.text(f"{DONE} .ending")
    browser.click(f"{DONE} .ending button")
    browser.wait(lambda: browser.texts(f"{DONE} .prose") == ["One, two, three."])
    assert prompt_of(engine.taken[1]).endswith("assistant: One, two,")
    assert not browser.all(".ending")
    assert browser.texts(f"{DONE} .figures span")[0] == "7 more tokens"
    ask(browser, "Again.")
    assert "assistant: One, two, three.\nuser: Again." in prompt_of(engine.taken[2])


def test_an_answer_that_was_stopped_is_continued(answered_by, browser):
    def slow(request: Request) -> list[SequenceOutput | float | Exception]:
        return [output(request, "half"), 30.0]

    answered_by(then(slow, says(" and half")))
    browser.find("#message").send_keys("hello", Keys.ENTER)
    browser.wait(lambda: browser.texts(".turn.assistant .prose") == ["half"])
    browser.press(Keys.ESCAPE)
    assert browser.text(f"{DONE} .ending").startswith("Stopped.")
    browser.click(f"{DONE} .ending button")
    browser.wait(lambda: browser.texts(f"{DONE} .prose") == ["half and half"])


def test_another_answer_with_other_settings_stands_beside_the_first(answered_by, browser):
    engine = answered_by(then(says("first"), says("second"), says("third")))
    ask(browser)
    act(browser, "More", "Answer with other settings")
    type_into(browser, "#vary-temperature", "1.5")
    browser.click("#exchange [type=submit]")
    browser.wait(lambda: browser.texts(".compared .prose") == ["first", "second"])
    assert browser.texts(".compared .turn-head span") == ["In the conversation", "temperature 1.5"]
    assert [request.sampling.temperature for request in engine.taken] == [0.25, 1.5]
    assert prompt_of(engine.taken[0]) == prompt_of(engine.taken[1])
    browser.click(".compared .turn:nth-child(2) .turn-head button")
    assert browser.texts(".turn.assistant .prose") == ["second"]
    browser.click("#toast button")
    assert browser.texts(".compared .prose") == ["first", "second"]
    browser.click(".compared .turn:nth-child(2) .turn-head button")
    ask(browser, "why?")
    assert "assistant: second\nuser: why?" in prompt_of(engine.taken[2])
    assert engine.taken[2].sampling.temperature == 0.25


def test_an_answer_beside_another_that_fails_is_asked_for_again_alone(answered_by, browser):
    def full(request: Request) -> list[SequenceOutput | float | Exception]:
        return [QueueFullError("Too many requests wait already.", retry_after_s=0.1)]

    engine = answered_by(then(says("first"), full, says("second")))
    ask(browser)
    act(browser, "More", "Answer with other settings")
    type_into(browser, "#vary-seed", "7")
    browser.click("#exchange [type=submit]")
    browser.wait(browser.find(".compared .fault button").is_enabled)
    browser.click(".compared .fault button")
    browser.wait(lambda: browser.texts(".compared .prose") == ["first", "second"])
    assert [request.sampling.seed for request in engine.taken[1:]] == [7, 7]


def test_text_files_go_with_a_message_and_others_are_refused_in_words(answered_by, browser, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("first line\n```\nlast line\n")
    paper, picture = tmp_path / "paper.pdf", tmp_path / "picture.png"
    paper.write_bytes(b"%PDF-1.7")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    data = tmp_path / "data"
    data.write_bytes(b"\xff\xfe\x00\x01")
    engine = answered_by(says("x"))
    chooser = browser.driver.find_element("id", "files")
    for file, fault in ((paper, "cannot be attached"), (picture, "is an image"), (data, "is not text")):
        chooser.send_keys(str(file))
        browser.wait(lambda fault=fault: fault in "".join(browser.texts("#toast span")))
    assert not browser.all("#attached li")
    assert paste(browser, "table", "a picture of it") is False
    assert paste(browser, "", "pasted") is True
    browser.click("[aria-label='Take away: pasted.txt']")
    chooser.send_keys(str(notes))
    browser.wait(lambda: browser.texts("#attached li") == ["notes.txt"])
    ask(browser, "Sum up.")
    assert not browser.all("#attached li")
    assert "user: Sum up.\n\nFile: notes.txt\n````\nfirst line\n```\nlast line\n````\n" in prompt_of(engine.taken[0])
    assert browser.texts(".said") == ["Sum up."]
    browser.click(".file summary")
    assert browser.text(".file pre") == "first line\n```\nlast line"


def test_a_pdf_is_attached_with_its_text(answered_by, browser, tmp_path):
    pytest.importorskip("pypdf")
    engine = answered_by(says("x"))
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(make_pdf(["All about hashes", "The end"]))
    browser.driver.find_element("id", "files").send_keys(str(paper))
    browser.wait(lambda: browser.texts("#attached li") == ["paper.pdf"])
    ask(browser, "Sum up.")
    assert "user: Sum up.\n\nFile: paper.pdf\n```\nAll about hashes\n\nThe end\n```\n" in prompt_of(engine.taken[0])


def paste(browser: Browser, text: str, content: str) -> bool:
    """Pastes a text and a file; returns whether the page took the file, and the browser not the text."""
    return browser.run(
        """const data = new DataTransfer();
        if (arguments[0]) data.setData("text/plain", arguments[0]);
        data.items.add(new File([arguments[1]], "pasted.txt"));
        const event = new ClipboardEvent("paste", { clipboardData: data, cancelable: true });
        document.getElementById("message").dispatchEvent(event);
        return event.defaultPrevented;""",
        text,
        content,
    )


def test_what_an_earlier_page_kept_is_read(answered_by, browser):
    engine = answered_by(says("x"))
    turns = [{"id": "t", "role": "user", "content": "old", "reasoning": "", "toolCalls": [], "state": "done", "error": None}]
    conversations = [{"id": "c", "title": "", "turns": [{**turns[0], "exchange": None, "figures": None}]}]
    kept = {"version": 1, "settings": {"keep": True}, "conversations": conversations, "current": "c"}
    browser.run("localStorage.setItem('cloister', arguments[0])", json.dumps(kept))
    browser.open(browser.url)
    assert browser.texts(".said") == ["old"]
    ask(browser, "new")
    assert prompt_of(engine.taken[0]) == "user: old\nuser: new\nassistant:"


def test_a_long_message_is_folded(answered_by, browser):
    answered_by(says("x"))
    browser.run("document.getElementById('message').value = 'line\\n'.repeat(40)")
    ask(browser, "end")
    folded = browser.find(".said").size["height"]
    browser.click_text(".turn.user .turn-body button", "Show all 41 lines")
    assert browser.find(".said").size["height"] > 3 * folded


def test_conversations_are_searched_renamed_and_put_into_folders(answered_by, browser):
    answered_by(says("about bread"))
    for question in ("a week in Ulm", "sourdough"):
        browser.click("#new-conversation")
        ask(browser, question)
    act(browser, "More: sourdough", "Rename")
    type_into(browser, "#asked", "Baking\n")
    act(browser, "More: Baking", "Move to a folder")
    type_into(browser, "#asked", "Kitchen\n")
    assert browser.texts(".folder summary") == ["Kitchen"]
    assert browser.texts(".folder .open") == ["Baking"]
    browser.find("#search").send_keys("ULM")
    assert browser.texts("#conversations .open") == ["a week in Ulm"]
    type_into(browser, "#search", "bread kitchen")
    assert browser.texts("#conversations .open") == ["Baking"]
    type_into(browser, "#search", "nowhere")
    assert browser.text("#found-none") == "Nothing found."
    assert browser.run("return localStorage.length") == 0


def test_names_and_folders_are_kept_only_with_the_conversations(answered_by, browser):
    answered_by(says("x"))
    ask(browser, "sourdough")
    act(browser, "More: sourdough", "Move to a folder")
    type_into(browser, "#asked", "Kitchen\n")
    assert browser.run("return localStorage.length") == 0
    browser.click("#open-settings")
    browser.click("#set-keep")
    browser.press(Keys.ESCAPE)
    browser.open(browser.url)
    assert browser.texts(".folder summary") == ["Kitchen"]
    browser.click("#open-settings")
    browser.click("#set-keep")
    assert browser.run("return localStorage.length") == 0


def test_what_else_the_model_could_have_said_is_shown(answered_by, browser):
    def script(request: Request) -> list[SequenceOutput | float | Exception]:
        top = ((ord("a"), math.log(0.75)), (ord("b"), math.log(0.2)))
        entry = TokenLogprobs(ord("b"), math.log(0.2), top, text=b"b", top_texts=(b"a", b"b"))
        return [output(request, "b", logprobs=[entry]), output(request, end=FinishReason.STOP)]

    engine = answered_by(script)
    browser.click("#open-settings")
    browser.click("#set-likelihoods")
    browser.press(Keys.ESCAPE)
    ask(browser)
    assert engine.taken[0].sampling.logprobs == 5
    act(browser, "More", "What else it could have said")
    assert [row.split() for row in browser.texts("#exchange tr")] == [['"a"', "75%"], ['"b"', "(said)", "20%"]]


def test_a_preset_sets_how_answers_are_drawn_and_ones_own_can_be_saved(answered_by, browser):
    engine = answered_by(says("x"))
    browser.click("#open-settings")
    choose(browser, "#set-preset", "Precise")
    assert browser.find("#set-temperature").get_attribute("value") == "0"
    browser.find("#set-system").send_keys("Be brief.")
    browser.click_text("#settings .text-button", "Save as preset")
    type_into(browser, "#asked", "Short\n")
    choose(browser, "#set-preset", "Balanced")
    choose(browser, "#set-preset", "Short")
    browser.press(Keys.ESCAPE)
    ask(browser)
    assert engine.taken[0].sampling.temperature == 0
    assert prompt_of(engine.taken[0]).startswith("system: Be brief.\n")
    assert browser.run("return localStorage.length") == 0


def test_a_form_writes_the_schema_of_an_answer(answered_by, browser):
    answered_by(says("{}"))
    browser.click("#open-settings")
    choose(browser, "#set-format", "json_schema")
    browser.click_text("#settings .text-button", "Add a field")
    browser.press("city")
    browser.click_text("#settings .text-button", "Add a field")
    browser.press("sky")
    choose(browser, "#schema-kind-2", "choice")
    browser.find(".choices-input").send_keys("clear, cloudy")
    schema = json.loads(browser.find("#set-schema").get_attribute("value"))
    assert schema == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "sky": {"type": "string", "enum": ["clear", "cloudy"]}},
        "required": ["city", "sky"],
        "additionalProperties": False,
    }
    browser.press(Keys.ESCAPE)
    browser.click("#open-settings")
    assert [field.get_attribute("value") for field in browser.all(".schema-rows input")] == ["city", "sky", "clear, cloudy"]


def test_a_menu_is_used_with_the_keyboard_and_closed_with_escape(answered_by, browser):
    answered_by(says("x"))
    ask(browser)
    browser.run("document.querySelector('.turn.assistant [aria-label=More]').focus()")
    browser.press(Keys.ENTER)
    assert browser.run("return document.activeElement.textContent") == "Answer with other settings"
    browser.press(Keys.ARROW_DOWN)
    assert browser.run("return document.activeElement.textContent") == "Request and response as JSON"
    browser.press(Keys.ESCAPE)
    assert not browser.all(".menu")
    assert browser.run("return document.activeElement.ariaLabel") == "More"
