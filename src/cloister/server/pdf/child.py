"""The process that reads one PDF file: standard input to standard output, no files, no words on standard error."""

from __future__ import annotations

import io
import logging
import os
import re
import resource
import sys
from typing import Final

import msgspec

from cloister.server.pdf.confinement import confine
from cloister.server.pdf.limits import PdfAnswer, PdfLimits

UNSEEN: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but for tabs and new lines
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # that turn the direction of text (Trojan Source, CVE-2021-42574)
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"  # annotations, no characters, and tags, which spell text that nobody sees
)


def main() -> None:
    """Reads a file under the limits of the first argument, as JSON, and writes a `PdfAnswer`.

    The second argument is the process that started this one, the third is `strict` if a file is only read with every measure
    of `confinement`.
    """
    limits = msgspec.json.decode(sys.argv[1], type=PdfLimits)
    logging.disable()  # what pypdf warns of may be content
    os.nice(10)  # answers go first
    for kind, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
    ):
        resource.setrlimit(kind, (bound, bound))
    import pypdf  # noqa: F401 (of an extra: a sealed node imports every module of the package and has no PDF reader)

    is_confined = confine(int(sys.argv[2]))
    answer = (
        PdfAnswer(fault="unconfined") if sys.argv[3] == "strict" and not is_confined else read(sys.stdin.buffer.read(), limits)
    )
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def read(data: bytes, limits: PdfLimits) -> PdfAnswer:
    """Returns the text layer of a file, page by page with an empty line between."""
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
    except Exception:  # of many kinds; what it says may be content
        return PdfAnswer(fault="damaged")
    text = "\n\n".join(filter(None, texts)).encode(errors="replace").decode()
    return PdfAnswer(num_pages, text, "" if text.strip() else "no_text")


if __name__ == "__main__":
    main()
