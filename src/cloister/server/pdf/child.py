"""The process that reads one PDF file: standard input to standard output, no files, no output on standard error."""

from __future__ import annotations

import io
import logging
import re
import sys
from typing import Final

import msgspec

from cloister.server.confinement import bound_resources, confine


class PdfLimits(msgspec.Struct, frozen=True):
    """Limits for one file.

    Attributes:
        cpu_s: processor time, whole seconds.
        deadline_s: time limit until the answer.
        memory_bytes: address space of the process that reads.
        num_chars: maximum length of the text.
    """

    cpu_s: int = 20
    deadline_s: float = 30.0
    memory_bytes: int = 1 << 30
    num_pages: int = 500
    num_chars: int = 1 << 20


class PdfAnswer(msgspec.Struct, frozen=True):
    """The result of the process.

    Attributes:
        fault: why there is no text, as one of `pdf.reading.FAULTS`, or `unconfined`; empty if there is.
    """

    num_pages: int = 0
    text: str = ""
    fault: str = ""


UNSEEN: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tabs and new lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # that turn the direction of text (Trojan Source, CVE-2021-42574)
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"  # annotation characters, and tags, which can spell invisible text
)


def main() -> None:
    """Reads a file under the limits of the first argument, as JSON, and writes a `PdfAnswer`.

    The second argument is the process that started this one, the third is `strict` if it needs every `confinement.MEASURES`.
    """
    limits = msgspec.json.decode(sys.argv[1], type=PdfLimits)
    logging.disable()  # pypdf's warnings may contain content
    bound_resources(limits.cpu_s, limits.memory_bytes)
    import pypdf  # noqa: F401 (of an extra: a sealed node imports every module of the package and has no PDF reader)

    is_confined = confine(int(sys.argv[2]))
    answer = (
        PdfAnswer(fault="unconfined") if sys.argv[3] == "strict" and not is_confined else read(sys.stdin.buffer.read(), limits)
    )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def read(data: bytes, limits: PdfLimits) -> PdfAnswer:
    """Returns the text layer of a file, with an empty line between pages."""
    import pypdf

    try:
        document = pypdf.PdfReader(io.BytesIO(data))
        if document.is_encrypted and not document.decrypt(""):
            return PdfAnswer(fault="encrypted")
        num_pages = len(document.pages)
        if num_pages > limits.num_pages:
            return PdfAnswer(fault="pages")
        texts: list[str] = []
        for page in document.pages:
            texts.append(UNSEEN.sub("", page.extract_text()).strip())
            if sum(map(len, texts)) > limits.num_chars:
                return PdfAnswer(fault="long")
    except MemoryError:
        return PdfAnswer(fault="costly")
    except Exception:  # of many types; its message may contain content
        return PdfAnswer(fault="damaged")
    text = "\n\n".join(filter(None, texts)).encode(errors="replace").decode()
    return PdfAnswer(num_pages, text, "" if text.strip() else "no_text")


if __name__ == "__main__":
    main()
