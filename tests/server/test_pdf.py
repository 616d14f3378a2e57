"""The text layer of PDF files: taken out in a process of its own, and refused with words where there is none."""

from __future__ import annotations

import asyncio
import io
import os
import zlib
from pathlib import Path

import httpx
import pytest

from cloister.server.pdf import reading
from cloister.server.pdf.child import PdfAnswer, PdfLimits
from cloister.server.pdf.reading import PdfReader
from cloister.types.config import ServerConfig
from cloister.types.errors import CloisterError, InvalidRequestError
from tests.pdf_factory import make_pdf
from tests.server.running_server import ScriptedEngine, make_gate, says, serving_script
from tests.server.test_bad_input import check_error

PATH = "/v1/pdf/text"
needs_pypdf = pytest.mark.skipif(reading.find_spec("pypdf") is None, reason="pip install 'cloister[pdf]'")


def send(url: str, data: bytes) -> httpx.Response:
    return httpx.post(url + PATH, files={"file": ("paper.pdf", data)}, timeout=300)


def read(data: bytes, limits: PdfLimits) -> PdfAnswer:
    return asyncio.run(PdfReader(limits).read(data))


@pytest.fixture(scope="module")
def url(model_path: Path):
    with serving_script(model_path, ScriptedEngine(says("ok"))) as server:
        yield server.url


@needs_pypdf
def test_the_text_of_every_page_comes_back(url: str) -> None:
    reply = send(url, make_pdf(["First page", "", "Third page"]))
    assert (reply.status_code, reply.json()) == (200, {"pages": 3, "text": "First page\n\nThird page", "object": "pdf.text"})


@needs_pypdf
@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (make_pdf(["", ""]), "pdf_no_text", "no text layer"),
        (b"%PDF-1.4 zanzibar", "pdf_damaged", "damaged"),
        (b"", "pdf_damaged", "damaged"),
        (make_pdf(["x"])[:200], "pdf_damaged", "damaged"),
    ],
)
def test_a_file_without_text_is_refused_and_nothing_of_it_repeated(url: str, data: bytes, code: str, words: str) -> None:
    reply = send(url, data)
    error = check_error(reply, 400)
    assert (error["code"], error["param"]) == (code, "file")
    assert words in error["message"]
    assert "zanzibar" not in reply.text


@needs_pypdf
def test_a_file_with_a_password_is_refused() -> None:
    import pypdf

    writer, locked = pypdf.PdfWriter(clone_from=io.BytesIO(make_pdf(["secret"]))), io.BytesIO()
    writer.encrypt("hunter2", algorithm="AES-256")
    writer.write(locked)
    with pytest.raises(InvalidRequestError, match="password"):
        read(locked.getvalue(), PdfLimits())


@needs_pypdf
@pytest.mark.parametrize(
    ("texts", "limits", "words"),
    [
        (["a"] * 4, PdfLimits(num_pages=3), "more than 3 pages"),
        (["a" * 30] * 4, PdfLimits(num_chars=100), "more than 100 characters"),
    ],
)
def test_a_file_that_is_too_long_is_refused_with_the_bound(texts: list[str], limits: PdfLimits, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        read(make_pdf(texts), limits)


MANY_WORDS = b"BT /F1 12 Tf (a) Tj ET\n" * 200_000
"""Seconds of work for a parser, in a file of 15 KB."""
WIDE = b" " * (60 << 20)


@needs_pypdf
@pytest.mark.parametrize(
    ("content", "limits"),
    [
        (MANY_WORDS, PdfLimits(cpu_s=1)),
        (MANY_WORDS, PdfLimits(deadline_s=1.0)),
        (WIDE, PdfLimits(memory_bytes=100 << 20)),
    ],
    ids=["processor", "deadline", "memory"],
)
def test_a_file_that_costs_too_much_ends_with_its_process(content: bytes, limits: PdfLimits) -> None:
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        read(make_pdf(["x"], zlib.compress(content)), limits)
    assert not any(b"server.pdf.child" in command for command in commands_of_children())


def commands_of_children() -> list[bytes]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"\nPPid:\t{os.getpid()}\n" in (place / "status").read_text():
                found.append((place / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def test_files_that_come_at_once_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "find_spec", lambda _: True)

    async def live() -> None:
        reader, go = PdfReader(), asyncio.Event()

        async def wait(_: bytes) -> PdfAnswer:
            await go.wait()
            return PdfAnswer(1, "x")

        monkeypatch.setattr(reader, "_run", wait)
        first = [asyncio.create_task(reader.read(b"")) for _ in range(reading.SIDE_BY_SIDE)]
        await asyncio.sleep(0)
        with pytest.raises(CloisterError, match="try again in a moment"):
            await reader.read(b"")
        go.set()
        assert [answer.text for answer in await asyncio.gather(*first)] == ["x", "x"]
        assert (await reader.read(b"")).text == "x"

    asyncio.run(live())


def test_a_server_without_pypdf_says_what_to_install(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "find_spec", lambda _: None)
    error = check_error(send(url, b"%PDF"), 404)
    assert error["code"] == "no_pdf_reader"
    assert "'cloister[pdf]'" in error["message"]


def test_a_sealed_node_refuses_with_words(model_path: Path) -> None:
    config = ServerConfig(port=0, sealed=True, drain_timeout_s=1.0)
    with serving_script(model_path, ScriptedEngine(says("ok")), gate=make_gate("private"), config=config) as server:
        error = check_error(send(server.url, b"%PDF"), 404)
        assert "sealed node" in error["message"]
        assert "pdftotext" in error["message"]


def test_a_form_without_a_file_and_a_page_elsewhere_are_refused(url: str) -> None:
    assert check_error(httpx.post(url + PATH, files={"other": ("a", b"x")}), 400)["param"] == "file"
    reply = httpx.post(url + PATH, files={"file": ("a", b"x")}, headers={"origin": "https://evil.example"})
    assert check_error(reply, 403)["code"] == "origin_not_allowed"
