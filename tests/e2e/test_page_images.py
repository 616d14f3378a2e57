"""Images on the page, in a real browser before a scripted engine of a model that sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cloister.types.config import ServerConfig
from tests.browser import Browser, Keys
from tests.server.running_server import INFO, RunningServer, ScriptedEngine, says, serving_script
from tests.vision_factory import VOCAB, encode_picture, make_picture, make_vision_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    engine = ScriptedEngine(says("a cat"), model=replace(INFO, path=str(path), max_model_len=4096, vocab_size=VOCAB))
    with serving_script(path, engine, config=ServerConfig(port=0, drain_timeout_s=1.0)) as server:
        yield server


def test_an_image_is_attached_shown_sent_and_goes_with_the_conversation(
    server: RunningServer, browser: Browser, tmp_path: Path
) -> None:
    engine = server.engine
    assert isinstance(engine, ScriptedEngine)
    picture, other = tmp_path / "cat.png", tmp_path / "cat.bmp"
    picture.write_bytes(encode_picture(make_picture(70, 40)))
    other.write_bytes(encode_picture(make_picture(9, 9), "BMP"))
    browser.open(server.url)
    chooser = browser.driver.find_element("id", "files")
    chooser.send_keys(str(other))
    browser.wait(lambda: "another kind" in "".join(browser.texts("#toast span")))
    chooser.send_keys(str(picture))
    browser.wait(lambda: browser.texts("#attached li") == ["cat.png"])
    browser.find("#message").send_keys("what is that?", Keys.ENTER)
    browser.wait(lambda: browser.texts(".turn.assistant .prose") == ["a cat"])
    assert len(engine.taken[0].images) == 5
    assert browser.run("const image = document.querySelector('.turn.user img'); return [image.naturalWidth, image.alt]") == [
        70,
        "cat.png",
    ]
    browser.find("#message").send_keys("sure?", Keys.ENTER)
    browser.wait(lambda: browser.texts(".turn.assistant .prose") == ["a cat", "a cat"])
    assert engine.taken[1].images[0].pixels == engine.taken[0].images[0].pixels
    complaints, _ = browser.read_logs()
    assert complaints == []
    browser.driver.get("about:blank")


def test_a_conversation_with_an_image_is_exported_and_imported(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    image = "data:image/png;base64,aGk="
    turn = {"role": "user", "content": "hi", "files": [{"name": "a.png", "image": image}]}
    expression = """(() => {
        const conversation = { ...m.newConversation(), turns: [m.newTurn('user', a[0])] };
        const back = m.importJson(m.exportJson(conversation, { system: '' }, new Date()));
        return [back.turns[0].files, m.messagesOf(back.turns, ''), m.exportMarkdown(back, { system: '' })];
    })()"""
    files, messages, markdown = browser.call("conversation.js", expression, turn)
    assert files == turn["files"]
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "hi"}]
    assert messages == [{"role": "user", "content": parts}]
    assert "Image: a.png" in markdown
    bad = {**turn, "files": [{"name": "a.png", "image": "https://elsewhere.example/a.png"}]}
    assert (
        browser.call(
            "conversation.js",
            expression.replace("back.turns[0]", "(back ?? {turns: [{}]}).turns[0]")
            .replace("m.messagesOf(back.turns, '')", "back")
            .replace("m.exportMarkdown(back, { system: '' })", "null"),
            bad,
        )[1]
        is None
    )
