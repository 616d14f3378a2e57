"""Has a PDF file read by a process of its own, which ends with it: the parser never meets a stranger's bytes in the server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import msgspec

from cloister.server.errors import OverloadedError, invalid
from cloister.server.pdf.limits import PdfAnswer, PdfLimits
from cloister.types.errors import NotFoundError

SIDE_BY_SIDE: Final = 2
"""Files that are read at once."""
_INHERITED: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Of the environment; the rest, which may hold secrets, stays away from what reads a stranger's file."""
FAULTS: Final[Mapping[str, str]] = {
    "damaged": "The file is no PDF, or a damaged one.",
    "encrypted": "The PDF asks for a password; save it without one.",
    "pages": "The PDF has more than {num_pages} pages; send the part that matters.",
    "long": "The PDF has more than {num_chars} characters of text; send the part that matters.",
    "costly": "Reading the PDF takes too much time or memory; turn it into text first, for example with pdftotext.",
    "no_text": "The PDF has no text layer, as scans have none; recognise its text first (OCR).",
}


class PdfReader:
    """Reads PDF files, `SIDE_BY_SIDE` at once. Used from one event loop."""

    def __init__(self, limits: PdfLimits = PdfLimits()) -> None:  # noqa: B008 (it is frozen)
        self._limits = limits
        self._num_open = 0

    async def read(self, data: bytes) -> PdfAnswer:
        """Returns the text layer of a file.

        Raises:
            NotFoundError: pypdf is not installed.
            OverloadedError: others are being read.
            InvalidRequestError: there is no text to be had; the message says why.
        """
        if find_spec("pypdf") is None:
            raise NotFoundError(
                "This server reads no PDF: its operator can install 'cloister[pdf]'. Or turn it into text first, for example "
                "with pdftotext.",
                code="no_pdf_reader",
            )
        if self._num_open >= SIDE_BY_SIDE:
            raise OverloadedError("Other PDF files are being read; try again in a moment.")
        self._num_open += 1
        try:
            answer = await self._run(data)
        finally:
            self._num_open -= 1
        if answer.fault:
            bounds = msgspec.structs.asdict(self._limits)
            raise invalid(FAULTS[answer.fault].format(**bounds), "file", f"pdf_{answer.fault}")
        return answer

    async def _run(self, data: bytes) -> PdfAnswer:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "cloister.server.pdf.child", msgspec.json.encode(self._limits).decode()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        )
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                said, _ = await process.communicate(data)
        except TimeoutError:
            return PdfAnswer(fault="costly")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return msgspec.json.decode(said, type=PdfAnswer)
        except msgspec.DecodeError:  # a limit ended it
            return PdfAnswer(fault="costly")
