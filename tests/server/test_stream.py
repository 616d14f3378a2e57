"""Server-sent events that are filled in are the events that are encoded whole."""

from __future__ import annotations

import json
import socket

import pytest

from cloister.server.answers import ChatChunk, ChatChunkChoice, ChatDelta
from cloister.server.stream import EventTemplate, events
from tests.server.running_server import MODEL


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


def stream_raw(url: str, version: str, method: str = "POST") -> bytes:
    """Returns all bytes of a reply to a streamed request, whose connection closes behind it."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    head = (
        f"{method} /v1/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    said = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while part := connection.recv(65536):
            said += part
    return said
