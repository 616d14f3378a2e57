"""A PDF file that captures its parser: what the parser can reach then, and what the server believes of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tracemalloc
from pathlib import Path

import pytest

from cloister.server.errors import OverloadedError
from cloister.server.pdf import reading
from cloister.server.pdf.child import PdfAnswer, PdfLimits
from cloister.server.pdf.reading import PdfReader
from cloister.types.errors import InvalidRequestError, NotFoundError

CAPTURED = Path(__file__).with_name("captured_parser.py")


@pytest.fixture(autouse=True)
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the captured parser where the process looks for pypdf; returns the place."""
    place = tmp_path / "library" / "pypdf.py"
    place.parent.mkdir()
    shutil.copy(CAPTURED, place)
    monkeypatch.setenv("PYTHONPATH", str(place.parent))
    monkeypatch.setattr(reading, "find_spec", lambda _: True)
    return place


def read(file: object, limits: PdfLimits = PdfLimits(), *, is_strict: bool = True) -> PdfAnswer:  # noqa: B008 (it is frozen)
    return asyncio.run(PdfReader(limits, is_strict=is_strict).read(json.dumps(file).encode()))


def test_a_captured_parser_reaches_nothing_but_its_two_pipes(tmp_path: Path) -> None:
    secret, other = tmp_path / "secrets" / "keys", tmp_path / "secrets" / "other"
    secret.parent.mkdir()
    secret.write_text("zanzibar")
    other.write_text("pemba")
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = {"secret": str(secret), "port": server.getsockname()[1], "parent": os.getpid()}
        answer = read({"try": wanted})
    became = json.loads(answer.text)
    assert {name: what for name, what in became.items() if what.startswith("done")} == {}
    assert secret.read_text() == "zanzibar"
    assert {path.name for path in secret.parent.iterdir()} == {"keys", "other"}
    assert secret.stat().st_mode & 0o077 != 0o066


@pytest.mark.parametrize(
    "said",
    ["", "nonsense", '{"fault":"zanzibar"}', '{"num_pages":1,"text":7}', '{"num_pages":99999,"text":"a"}', "[]"],
)
def test_what_a_captured_parser_says_is_an_answer_or_none(said: str) -> None:
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        read({"say": said, "times": 1})


def test_a_captured_parser_that_says_more_than_an_answer_takes_no_memory_of_the_server() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match="too much time or memory"):
            read({"say": "a" * 2**20, "times": 64}, PdfLimits(num_chars=1000))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_text_that_nobody_sees_is_left_out() -> None:
    hidden = "\x00\x07\x1b[2J\x85\u202e\u2066\u061c\U000e0041\ufffe"
    assert read({"text": f"{hidden}seen\tand\nnext\u200d \u05d0"}).text == "[2Jseen\tand\nnext\u200d \u05d0"


def test_a_strict_profile_reads_nothing_where_the_parser_cannot_be_confined(parser: Path) -> None:
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"  # Landlock does not hold for its like
    parser.write_text(f"{parser.read_text()}\nimport threading\n{thread}\n")
    with pytest.raises(NotFoundError, match="cannot be confined"):
        read({"text": "seen"})
    assert read({"text": "seen"}, is_strict=False).text == "seen"


def test_one_owner_does_not_keep_the_others_from_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def live() -> None:
        reader, go = PdfReader(), asyncio.Event()

        async def wait(_: bytes) -> PdfAnswer:
            await go.wait()
            return PdfAnswer(1, "x")

        monkeypatch.setattr(reader, "_run", wait)
        first = asyncio.create_task(reader.read(b"", b"ann"))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="one file at a time"):
            await reader.read(b"", b"ann")
        second = asyncio.create_task(reader.read(b"", b"bob"))
        await asyncio.sleep(0)
        go.set()
        assert (await first, await second) == (PdfAnswer(1, "x"), PdfAnswer(1, "x"))
        assert (await reader.read(b"", b"ann")).text == "x"

    asyncio.run(live())


def test_a_process_that_is_ended_in_the_middle_of_its_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = reading._exchange

    async def exchange_and_pause(*arguments: object, **options: object) -> bytes:
        said = await exchange(*arguments, **options)
        await asyncio.sleep(0.5)  # the pipe fills up until nobody reads it any more
        return said

    async def run() -> None:
        reader = PdfReader(PdfLimits(num_chars=1000), is_strict=True)
        await asyncio.wait_for(reader.read(json.dumps({"say": "a" * 2**20, "times": 64}).encode()), 60)

    monkeypatch.setattr(reading, "_exchange", exchange_and_pause)
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        asyncio.run(run())
