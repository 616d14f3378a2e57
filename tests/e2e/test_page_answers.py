"""What the page makes of answers that the embedded model would not give: scripted ones, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloister.policy import Credentials, Gate
from cloister.types.config import ServerConfig
from cloister.types.errors import EngineError, QueueFullError
from cloister.types.request import FinishReason, Request, SequenceOutput
from tests.browser import Browser, Keys
from tests.server.running_server import INFO, ScriptedEngine, make_gate, output, says, serving_script, write_model

DONE = "li:last-child > .turn.assistant[aria-busy=false]"
Script = Callable[[Request], Sequence[SequenceOutput | float | threading.Event | Exception]]

HOSTILE = """<script>window.caught = 1</script><img src=x onerror="window.caught = 2"><svg onload="window.caught = 3">

[one](javascript:window.caught=4) [two](JaVaScRiPt:window.caught=5) [three](data:text/html,<script>window.caught=6</script>)
[four](vbscript:x) <javascript:window.caught=7> [five]( javascript:window.caught=8) [six](//evil.example/x) [seven](/v1/models)

![pixel](https://evil.example/pixel.png) <iframe src="https://evil.example"></iframe>
<a href="javascript:window.caught=9">eight</a>

[fine](https://good.example/path "title") and https://good.example/bare.

```html
<script>window.caught = 10</script>
```

| <b>cell</b> | `<i>code</i>` |
|---|---|
| <img src=y onerror="window.caught = 11"> | x |
"""

RICH = """# Title

A paragraph with **bold**, *italic*, `code` and ~~struck~~.

1. first
2. second
   - inner

> quoted

| name | size |
|---|--:|
| a | 1 |

```python
def f(x):  # a comment
    return "text" + str(12)
```
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("page_model"))


@pytest.fixture
def answered_by(browser: Browser, model_path: Path) -> Iterator[Callable[..., object]]:
    """Opens the page before a server whose engine plays a script; nobody else may be asked for anything."""

    @contextmanager
    def open_page(script: Script, *, gate: Gate | None = None, **settings: object) -> Iterator[ScriptedEngine]:
        engine = ScriptedEngine(script, model=replace(INFO, max_model_len=4096))
        config = ServerConfig(port=0, drain_timeout_s=1.0, **settings)
        with serving_script(model_path, engine, gate=gate or make_gate(), config=config) as server:
            browser.open(server.url)
            yield engine
            complaints, asked = browser.read_logs()
            assert [text for text in complaints if "Failed to load resource" not in text] == []
            assert {address.startswith(f"{server.url}/") for address in asked} == {True}
            browser.driver.get("about:blank")

    return open_page


def ask(browser: Browser, text: str = "hello") -> None:
    browser.find("#message").send_keys(text, Keys.ENTER)


def then(*scripts: Script) -> Script:
    """A script for the first request, one for the second, and so on; the last one stays."""
    left = list(scripts)
    return lambda request: (left.pop(0) if len(left) > 1 else left[0])(request)


def raises(error: Exception) -> Script:
    return lambda _: [error]


def test_nothing_that_a_model_writes_runs_or_loads(answered_by, browser):
    with answered_by(says(HOSTILE)):
        ask(browser)
        answer = browser.find(f"{DONE} .prose")
        assert "<script>window.caught = 1</script>" in answer.text
        assert browser.run("return window.caught") is None
        names = set(browser.run("return [...document.querySelectorAll('.prose *')].map((e) => e.localName)"))
        assert not names & {"script", "img", "iframe", "object", "style", "form", "input"}
        links = browser.run("return [...document.querySelectorAll('.prose a')].map((a) => [a.href, a.rel, a.target])")
        assert {href for href, _, _ in links} == {
            "https://evil.example/",  # the address in what would have been a frame
            "https://evil.example/pixel.png",
            "https://good.example/path",
            "https://good.example/bare",
        }
        assert {(rel, target) for _, rel, target in links} == {("noopener noreferrer nofollow", "_blank")}


def test_what_a_user_or_a_tool_says_is_text(answered_by, browser):
    with answered_by(says("yes")):
        ask(browser, "<img src=x onerror='window.caught=1'> **not bold**")
        browser.find(f"{DONE} .prose")
        assert browser.text(".said") == "<img src=x onerror='window.caught=1'> **not bold**"
        assert browser.run("return window.caught") is None


def test_markdown_and_code_are_drawn(answered_by, browser):
    with answered_by(says(RICH)):
        ask(browser)
        browser.find(f"{DONE} .prose pre")
        for css, text in (
            ("h2", "Title"),
            ("strong", "bold"),
            ("em", "italic"),
            ("p code", "code"),
            ("del", "struck"),
            ("ol > li > ul > li", "inner"),
            ("blockquote p", "quoted"),
            ("td.align-end", "1"),
            (".code-head span", "python"),
            (".code-comment", "# a comment"),
            (".code-string", '"text"'),
            (".code-number", "12"),
        ):
            assert browser.texts(f".prose {css}")[0] == text
        assert browser.texts(".code-keyword") == ["def", "return"]


def test_formulas_are_drawn_and_those_not_understood_are_shown_as_written(answered_by, browser):
    with answered_by(says(r"So \(x^2\) and $\nonsense{y}$:" + "\n\n$$\\frac{1}{2}$$\n")):
        ask(browser)
        browser.find(f"{DONE} .prose")
        drawn = browser.run(
            "return [...document.querySelectorAll('.prose math')].map((e) => [e.namespaceURI, e.children[0].localName])"
        )
        assert drawn == [["http://www.w3.org/1998/Math/MathML", name] for name in ("msup", "mfrac")]
        assert browser.texts(".prose code.tex") == [r"\nonsense{y}"]
        assert browser.find("math[display=block] mfrac").size["height"] > 25


def test_code_can_be_copied(answered_by, browser):
    with answered_by(says(RICH)):
        browser.run("navigator.clipboard.writeText = (text) => ((window.copied = text), Promise.resolve())")
        ask(browser)
        browser.find(f"{DONE} .prose pre")
        browser.click(".code-box .text-button")
        assert browser.run("return copied") == 'def f(x):  # a comment\n    return "text" + str(12)'
        browser.wait(lambda: browser.text(".code-box .text-button") == "Copied")


def test_blocks_that_are_written_stay_as_they_are(answered_by, browser):
    def script(request: Request) -> list[SequenceOutput | float | Exception]:
        words = (f"word{i} " for i in range(60))
        end = output(request, end=FinishReason.STOP)
        return [output(request, "first paragraph\n\n"), 0.2, *(x for word in words for x in (output(request, word), 0.01)), end]

    with answered_by(script):
        ask(browser)
        browser.find(".prose p")
        browser.run("window.first = document.querySelector('.prose p'); getSelection().selectAllChildren(first)")
        assert "word59" in browser.text(f"{DONE} .prose")
        assert browser.run("return first.isConnected && getSelection().toString()") == "first paragraph"


def test_a_reader_who_scrolled_up_is_left_there(answered_by, browser):
    def script(request: Request) -> list[SequenceOutput | float | Exception]:
        lines = [item for i in range(80) for item in (output(request, f"line {i}\n\n"), 0.01)]
        return [*lines, output(request, end=FinishReason.STOP)]

    with answered_by(then(says("\n\n".join("many lines " * 3 for _ in range(60))), script)):
        ask(browser)
        browser.find(f"{DONE} .turn-foot")
        ask(browser)
        browser.wait(lambda: browser.run("return document.querySelectorAll('.prose p').length") > 65)
        browser.run("document.getElementById('scroller').scrollTop = 0")
        browser.find(f"{DONE} .turn-foot")
        assert browser.run("return document.getElementById('scroller').scrollTop") == 0
        browser.click("#latest")
        assert (
            browser.run("const s = document.getElementById('scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight")
            < 2
        )


def test_reasoning_is_folded_away(answered_by, browser):
    with answered_by(says("<think>first this, then that</think>\n\nforty-two"), reasoning_parser="think"):
        ask(browser)
        assert browser.text(f"{DONE} .prose") == "forty-two"
        assert browser.text(".reasoning summary") == "Thoughts"
        assert not browser.all(".reasoning div")
        browser.click(".reasoning summary")
        assert browser.text(".reasoning div").strip() == "first this, then that"


def test_an_answer_after_reasoning_is_continued_as_an_answer(answered_by, browser):
    def cut(request: Request) -> list[SequenceOutput | float | Exception]:
        return [output(request, "<think>hm</think>\n\nforty"), output(request, end=FinishReason.LENGTH)]

    with answered_by(then(cut, says("-two")), reasoning_parser="think"):
        ask(browser)
        browser.click(f"{DONE} .ending button")
        browser.wait(lambda: browser.texts(f"{DONE} .prose") == ["forty-two"])
        browser.click("[aria-label=More]")
        browser.click_text(".menu-row", "Request and response as JSON")
        request = json.loads(browser.run("return document.querySelector('#exchange .code-box code').textContent"))
        assert request["messages"][-1] == {"role": "assistant", "content": "forty", "reasoning_content": "hm"}
        browser.press(Keys.ESCAPE)
        browser.click(".reasoning summary")
        assert browser.text(".reasoning div").strip() == "hm"


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}\n</tool_call>'


def test_a_tool_call_is_shown_and_answered_by_hand(answered_by, browser):
    with answered_by(then(says(CALL), says("Sunny.")), tool_parser="hermes") as engine:
        browser.click("#open-settings")
        browser.find("#set-tools").send_keys("[oops")
        assert "not valid JSON" in browser.text("#set-tools-fault")
        browser.find("#set-tools").clear()
        browser.find("#set-tools").send_keys(json.dumps([TOOL]))
        browser.press(Keys.ESCAPE)
        ask(browser, "Weather in Ulm?")
        assert browser.text(f"{DONE} .call .call-name") == "Calls weather waits for its result"
        assert browser.texts(".call .json-key") == ["city", "days", "0", "1"]
        assert browser.texts(".call .code-string") == ['"Ulm"']
        browser.find(".call-result textarea").send_keys('{"sky": "clear"}', Keys.ENTER)
        assert browser.text(f"{DONE} .prose") == "Sunny."
        assert not browser.all(".call-result")
        assert len(engine.taken) == 2
        browser.click("li:last-child [aria-label=More]")
        browser.click_text(".menu-row", "Request and response as JSON")
        request = json.loads(browser.run("return document.querySelector('#exchange .code-box code').textContent"))
        call, result = request["messages"][1:]
        assert call["tool_calls"][0]["function"]["name"] == "weather"
        assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": '{"sky": "clear"}'}
        assert request["tools"] == [TOOL]


def test_an_answer_that_is_json_is_a_tree(answered_by, browser):
    with answered_by(says('{"name": "Ann", "ages": [1, null]}')):
        ask(browser)
        assert browser.find(f"{DONE} .json-answer")
        assert browser.texts(".json-key") == ["name", "ages", "0", "1"]


def test_a_server_with_keys_is_given_one_and_goes_on(answered_by, browser):
    credentials, key = Credentials.empty().add("ann")
    with answered_by(says("hello Ann"), gate=make_gate("team", credentials)):
        ask(browser)
        assert browser.text(".fault strong") == "This server asks for an API key"
        browser.find(".key-form input").send_keys("wrong", Keys.ENTER)
        browser.wait(lambda: "not known here" in browser.text(".fault"))
        browser.find(".key-form input").send_keys(key, Keys.ENTER)
        assert browser.text(f"{DONE} .prose") == "hello Ann"
        assert browser.run("return localStorage.length") == 0
        assert browser.texts(".turn.user .said") == ["hello"]
        browser.wait(lambda: browser.text("#model-name") == "history")


def test_the_board_of_a_server_with_keys_asks_for_one(answered_by, browser):
    credentials, _ = Credentials.empty().add("ann")
    with answered_by(says("x"), gate=make_gate("team", credentials)):
        browser.click("#go-board")
        browser.wait(lambda: "asks for an API key" in browser.text(".board-status"))
        asked = browser.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
        assert "/v1/policy" in asked
        assert not {"/metrics", "/v1/models"} & set(asked)


NOTE_BUTTON = """window.shown = [];
new MutationObserver(() => {
    const button = document.querySelector(".fault button");
    const [text, isOff] = shown.at(-1) ?? [];
    if (button && (text !== button.textContent || isOff !== button.disabled)) shown.push([button.textContent, button.disabled]);
}).observe(document.body, { childList: true, characterData: true, subtree: true, attributes: true });"""


def test_a_full_server_says_when_to_come_back(answered_by, browser):
    full = raises(QueueFullError("Too many requests wait already.", retry_after_s=2.0))
    with answered_by(then(full, says("now"))):
        browser.run(NOTE_BUTTON)  # a busy machine may look at the page only when the two seconds are over
        ask(browser)
        assert "Too many requests wait already." in browser.text(".fault")
        browser.wait(browser.find(".fault button").is_enabled)
        shown = browser.run("return window.shown")
        assert [is_off for _, is_off in shown] == [True] * (len(shown) - 1) + [False]
        assert all(text.startswith("Try again in ") for text, is_off in shown if is_off)
        browser.click(".fault button")
        assert browser.text(f"{DONE} .prose") == "now"


def test_a_server_that_is_not_ready_is_asked_again(answered_by, browser):
    with answered_by(then(raises(EngineError("The engine restarts.")), says("back"))):
        ask(browser)
        assert browser.text(".fault strong") == "The server is not ready"
        browser.wait(browser.find(".fault button").is_enabled)
        browser.click(".fault button")
        assert browser.text(f"{DONE} .prose") == "back"


def test_an_answer_that_breaks_keeps_what_was_said(answered_by, browser):
    def script(request: Request) -> list[SequenceOutput | float | Exception]:
        return [output(request, "half an ans"), output(request, end=FinishReason.ERROR, error="The engine failed.")]

    with answered_by(script):
        ask(browser)
        assert browser.text(f"{DONE} .prose") == "half an ans"
        assert "The engine failed." in browser.text(".fault")


def test_a_request_that_cannot_be_taken_is_explained_in_the_servers_words(answered_by, browser):
    with answered_by(says("x")):
        browser.run("document.getElementById('message').value = 'a long story '.repeat(400)")
        ask(browser, "end")
        assert browser.text(".fault strong") == "The conversation is too long for the model"
        assert "context window" in browser.text(".fault p")


def test_a_server_that_is_gone_is_missed(answered_by, browser):
    with answered_by(says("x")):
        browser.run("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
        ask(browser)
        assert browser.text(".fault strong") == "The server cannot be reached"


def test_a_profile_without_streams_is_answered_whole(answered_by, browser):
    with answered_by(says("all at once"), gate=make_gate("paranoid")):
        assert "Profile paranoid. Nothing that you send is reused" in browser.text("#privacy")
        ask(browser)
        assert browser.text(f"{DONE} .prose") == "all at once"
        assert any(text.startswith("answered in ") for text in browser.texts(f"{DONE} .figures span"))


def test_the_board_of_a_strict_profile_says_why_it_shows_little(answered_by, browser):
    with answered_by(says("x"), gate=make_gate("private")):
        browser.click("#go-board")
        card = browser.find(".card")
        assert "shows sums only" in card.text
        assert "No sums are available yet." in card.text
        assert len(browser.all(".card")) == 1


def keep_secretly(browser: Browser) -> None:
    """Puts a conversation where another profile let the page keep one, and comes back."""
    turn = {"id": "1", "role": "user", "content": "a kept question", "toolCalls": [], "reasoning": "", "state": "done"}
    conversations = [{"id": "0", "turns": [turn]}]
    kept = {"version": 1, "settings": {"keep": True, "system": "kept"}, "conversations": conversations, "current": "0"}
    browser.run("localStorage.setItem('cloister', arguments[0])", json.dumps(kept))
    browser.open(browser.url)


def test_a_profile_that_keeps_nothing_neither_reads_nor_writes_what_another_one_kept(answered_by, browser):
    with answered_by(says("x"), gate=make_gate("paranoid")):
        keep_secretly(browser)
        assert "a kept question" not in browser.run("return document.body.textContent")
        before = browser.run("return localStorage.getItem('cloister')")
        ask(browser, "a secret")
        browser.find(f"{DONE} .prose")
        assert browser.run("return localStorage.getItem('cloister')") == before
        assert "Nothing is kept" in browser.text("#keep-note")
        browser.click("#open-settings")
        assert not browser.find("#set-keep").is_enabled()
        assert browser.find("#set-system").get_attribute("value") == ""
        browser.press(Keys.ESCAPE)


def test_a_profile_that_keeps_nothing_offers_to_delete_what_another_one_kept(answered_by, browser):
    with answered_by(says("x"), gate=make_gate("paranoid")):
        assert not browser.all("#kept-before")
        keep_secretly(browser)
        assert "does not read" in browser.text("#kept-before")
        browser.click_text("#kept-before button", "Delete it")
        assert browser.run("return localStorage.length") == 0
        assert not browser.all("#kept-before")
        assert "deleted" in browser.text("#toast")


def test_what_was_kept_is_read_where_the_profile_lets_it_be(answered_by, browser):
    with answered_by(says("x")):
        keep_secretly(browser)
        assert browser.texts(".turn.user .said") == ["a kept question"]
        assert not browser.all("#kept-before")
        browser.run("localStorage.clear()")


def test_two_conversations_are_answered_at_once(answered_by, browser):
    def slow(request: Request) -> list[SequenceOutput | float | Exception]:
        words = [item for i in range(40) for item in (output(request, f"slow{i} "), 0.02)]
        return [*words, output(request, end=FinishReason.STOP)]

    with answered_by(then(slow, says("quick"))):
        ask(browser, "first")
        browser.find(".prose")
        browser.click("#new-conversation")
        ask(browser, "second")
        assert browser.text(f"{DONE} .prose") == "quick"
        browser.click("#conversations .open", 1)
        assert "slow39" in browser.text(f"{DONE} .prose")


@pytest.mark.parametrize(("wish", "animation"), [("no-preference", "breathe"), ("reduce", "none")])
def test_waiting_moves_unless_that_is_unwanted(answered_by, browser, wish, animation):
    browser.prefer(prefers_reduced_motion=wish)
    was_seen = threading.Event()
    with answered_by(lambda request: [was_seen, *says("x")(request)]):
        ask(browser)
        browser.find(".waiting")
        assert browser.run("return getComputedStyle(document.querySelector('.waiting i')).animationName") == animation
        was_seen.set()
        browser.find(f"{DONE} .prose")


def test_nothing_that_is_typed_is_shown_to_helpers_of_the_browser(answered_by, browser):
    with answered_by(says("x")):
        ask(browser)
        browser.find(f"{DONE} .prose")
        browser.click("[aria-label='Edit: You']")
        browser.click("#open-settings")
        watched = browser.run(
            "return [...document.querySelectorAll('textarea, input:not([type=checkbox], [type=file])')]"
            ".filter((e) => e.spellcheck || e.autocomplete !== 'off' || e.getAttribute('writingsuggestions') !== 'false')"
            ".map((e) => e.outerHTML)"
        )
        assert watched == []


def test_one_answer_is_shown_when_several_are_asked_for(answered_by, browser):
    with answered_by(says("abc")):
        browser.click("#open-settings")
        browser.find("#set-more").send_keys('{"n": 2}')
        browser.press(Keys.ESCAPE)
        ask(browser)
        assert browser.text(f"{DONE} .prose") == "abc"


def test_an_exported_conversation_is_opened_from_its_file(answered_by, browser, tmp_path):
    turns = [{"role": "user", "content": "then"}, {"role": "assistant", "content": "**said**"}]
    exported = tmp_path / "then.json"
    exported.write_text(json.dumps({"format": "cloister-conversation", "version": 1, "turns": turns}))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with answered_by(says("now")):
        browser.driver.find_element("id", "exported").send_keys(str(exported))
        assert browser.text(".prose strong") == "said"
        ask(browser, "and now?")
        assert browser.text(f"{DONE} .prose") == "now"
        browser.driver.find_element("id", "exported").send_keys(str(broken))
        assert "no conversation" in browser.text("#toast span")
