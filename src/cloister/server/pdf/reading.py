"""Reads each PDF file in a separate process: the parser never handles untrusted bytes in the server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Final

import msgspec

from cloister.server.errors import OverloadedError, invalid
from cloister.server.pdf.child import PdfAnswer, PdfLimits
from cloister.types.errors import NotFoundError

SIDE_BY_SIDE: Final = 2
"""Files that are read concurrently."""
INHERITED: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Environment variables that are passed on; others may be secrets and are withheld from the reading process."""
FAULTS: Final[Mapping[str, str]] = {
    "damaged": "The file is not a PDF, or it is damaged.",
    "encrypted": "The PDF asks for a password; save it without one.",
    "pages": "The PDF has more than {num_pages} pages; send the part that matters.",
    "long": "The PDF has more than {num_chars} characters of text; send the part that matters.",
    "costly": "Reading the PDF takes too much time or memory; turn it into text first, for example with pdftotext.",
    "no_text": "The PDF has no text layer, as scans have none; recognise its text first (OCR).",
}


class PdfReader:
    """Reads PDF files, `SIDE_BY_SIDE` concurrently, and one for each owner. Used from one event loop.

    Args:
        is_strict: read files only if every measure of `confinement.MEASURES` is available.
    """

    def __init__(self, limits: PdfLimits = PdfLimits(), *, is_strict: bool = False) -> None:  # noqa: B008 (it is frozen)
        self._limits = limits
        self._strictness = "strict" if is_strict else "lenient"
        self._open: list[bytes | None] = []

    async def read(self, data: bytes, owner: bytes | None = None) -> PdfAnswer:
        """Returns the text layer of a file.

        Args:
            owner: owner of the file; None if callers cannot be distinguished.

        Raises:
            NotFoundError: pypdf is not installed, or cannot be confined.
            OverloadedError: too many files are being read.
            InvalidRequestError: no text can be extracted; the message says why.
        """
        if find_spec("pypdf") is None:
            raise NotFoundError(
                "This server cannot read PDF files: its operator can install 'cloister[pdf]'. Or turn it into text "
                "first, for example with pdftotext.",
                code="no_pdf_reader",
            )
        if owner is not None and owner in self._open:
            raise OverloadedError("Another PDF file of yours is being read, one file at a time; try again in a moment.")
        if len(self._open) >= SIDE_BY_SIDE:
            raise OverloadedError("Other PDF files are being read; try again in a moment.")
        self._open.append(owner)
        try:
            answer = await self._run(data)
        finally:
            self._open.remove(owner)
        if answer.fault == "unconfined":
            raise NotFoundError(
                "This server cannot read PDF files: the process that would read them cannot be confined here, as the "
                "profile demands; `cloister doctor` says what is missing. Or turn it into text first, for example with "
                "pdftotext.",
                code="no_pdf_reader",
            )
        if answer.fault:
            bounds = msgspec.structs.asdict(self._limits)
            raise invalid(FAULTS[answer.fault].format(**bounds), "file", f"pdf_{answer.fault}")
        return answer

    async def _run(self, data: bytes) -> PdfAnswer:
        limits = msgspec.json.encode(self._limits).decode()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cloister.server.pdf.child", limits, str(os.getpid()), self._strictness),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in INHERITED if name in os.environ},
        )
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                said = await _exchange(process, data, most=6 * self._limits.num_chars + 1024)
        except TimeoutError:
            return PdfAnswer(fault="costly")
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                # drain the pipe: otherwise asyncio does not notice that the process ended
                await process.communicate()
        return self._check(said)

    def _check(self, said: bytes) -> PdfAnswer:
        """Returns the validated answer: a process killed by a limit has none, and one exploited by a file may send anything."""
        costly = PdfAnswer(fault="costly")
        try:
            answer = msgspec.json.decode(said, type=PdfAnswer)
        except msgspec.DecodeError:
            return costly
        most_chars = self._limits.num_chars + 2 * self._limits.num_pages  # an empty line between pages
        is_known = answer.fault in ("", "unconfined", *FAULTS)
        is_sized = 0 <= answer.num_pages <= self._limits.num_pages and len(answer.text) <= most_chars
        return answer if is_known and is_sized else costly


async def _exchange(process: asyncio.subprocess.Process, data: bytes, most: int) -> bytes:
    """Returns the process's output for a file; empty if longer than `most` bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    feeding = asyncio.create_task(_feed(process.stdin, data))
    try:
        await process.stdout.readexactly(most + 1)
    except asyncio.IncompleteReadError as whole:
        await process.wait()  # do not kill a process that has exited: asyncio would lose its status
        return whole.partial
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])
    return b""


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it ended before it had read all input
        pipe.write(data)
        await pipe.drain()
        pipe.close()
