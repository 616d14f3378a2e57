"""Server-sent events that are filled in are the events that are encoded whole."""

from __future__ import annotations

import json

import pytest

from cloister.server.answers import ChatChunk, ChatChunkChoice, ChatDelta
from cloister.server.stream import EventTemplate, events


def chunk(text: str) -> ChatChunk:
    choice = ChatChunkChoice(0, ChatDelta(content=text))
    return ChatChunk(id="chatcmpl-1", created=1, model='a "model"\n', system_fingerprint="fp", choices=[choice])


@pytest.mark.parametrize("text", ["", "word", 'a "quote" and \\', "\n\r\t\0", "Größe 日本 🙂", "%s {0} data: [DONE]"])
def test_a_filled_template_is_the_encoded_chunk(text):
    filled = EventTemplate(chunk).fill(text)
    assert filled == events([chunk(text)])
    assert json.loads(filled.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


def test_a_template_needs_exactly_one_place_for_its_text():
    with pytest.raises(ValueError, match="unpack"):
        EventTemplate(lambda text: {"text": [text, text]})
