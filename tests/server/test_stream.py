"""Server-sent events that are filled in are the events that are encoded whole."""

from __future__ import annotations

import json
import socket

import h11
import httpx
import pytest

from cloister.server.answers import ChatChunk, ChatChunkChoice, ChatDelta
from cloister.server.stream import EventTemplate, events
from tests.server.running_server import MODEL, ScriptedEngine, says, serving_script


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


def test_pieces_of_a_stream_are_framed_without_h11_and_mean_the_same(model_path, monkeypatch):
    framed: list[bytes] = []
    send = h11.Connection.send

    def note(connection: h11.Connection, event: h11.Event) -> bytes | None:
        if isinstance(event, h11.Data) and connection.our_role is h11.SERVER:
            framed.append(bytes(event.data))
        return send(connection, event)

    monkeypatch.setattr(h11.Connection, "send", note)
    texts = "aü" + "b" * 30
    with serving_script(model_path, ScriptedEngine(says(texts))) as server:
        reply = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
        assert framed == [b"data: [DONE]\n\n"]
        head, _, chunks = stream_raw(server.url, "1.1").partition(b"\r\n\r\n")
        whole = stream_raw(server.url, "1.0").partition(b"\r\n\r\n")[2]  # an HTTP/1.0 client knows no chunks
    assert reply.headers["transfer-encoding"] == "chunked"
    told = [json.loads(line[6:])["choices"] for line in reply.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(choice["text"] for choices in told for choice in choices) == texts
    assert b"transfer-encoding: chunked" in head.lower()
    plain = b""
    while size := int(chunks.partition(b"\r\n")[0], 16):
        chunks = chunks.partition(b"\r\n")[2]
        plain, chunks = plain + chunks[:size], chunks[size:].removeprefix(b"\r\n")
    assert chunks == b"0\r\n\r\n"
    assert whole.startswith(b"data: {")
    for read in (plain, whole):
        assert [line[:6] for line in read.split(b"\n\n")] == [b"data: "] * (len(told) + 1) + [b""]
